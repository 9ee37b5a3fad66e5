"""A function again, from its edited text: the same globals, closure cells, defaults, name and line numbers.

The text of the function alone is compiled, on the lines where it stands, inside a factory whose parameters
are the original's free variables and the names of the wrappers; the nested code is taken out of it, so that
nothing of the factory runs and nothing is put into the module's globals. A class around it keeps private
names and `super()`. The decorators of a method do not run again: their functions are copied, with the edited
function in the place of the old one.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from autotp.rewrite.edits.text import Insert, NoSource, Source, flags_of, inserted, source_of

__all__ = ["Made", "found_again", "holds", "made_from", "made_of", "named", "rebuilt", "remade"]

_FACTORY = "__autotp_factory"
_DEPTH = 8  # decorators around one function


@dataclass(frozen=True)
class Made:
    """An edited function: what it was made of."""

    function: FunctionType
    original: FunctionType
    inserts: tuple[Insert, ...]
    source: Source


# Codes of equal functions in different files compare equal, so they are known by identity. The function
# keeps its code, and so the code's id, its own.
_MADE: dict[int, Made] = {}


def made_of(code: CodeType) -> Made | None:
    """The edited function that `code`, or a function around it, is; None for a model's own code."""
    return _MADE.get(id(code))


def made_from(function: FunctionType) -> FunctionType:
    """The function as the model has it."""
    made = _MADE.get(id(function.__code__))
    return made.original if made is not None else function


def named(source: Source, function: FunctionType, *names: str) -> list[str]:
    """Names for wrappers that the function does not use."""
    node = source.definition(function.__code__)
    used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} if node is not None else set()
    used |= {a.arg for a in ast.walk(node) if isinstance(a, ast.arg)} if node is not None else set()
    used.add(function.__name__)
    found: list[str] = []
    for name in names:
        number, free = 1, name
        while free in used or free in found:
            number += 1
            free = f"{name}{number}"
        found.append(free)
    return found


def remade(function: FunctionType, inserts: Sequence[Insert], names: Mapping[str, Any]) -> FunctionType:
    """`function` with `inserts` in its text, where `names` are what its new free variables hold.

    Raises NoSource when its text cannot be had.
    """
    code = function.__code__
    source = source_of(code, function.__globals__)
    node = source.definition(code)
    if node is None:
        raise NoSource(
            f"{code.co_filename}:{code.co_firstlineno}: {code.co_qualname} is not found in its file"
        )
    parsed = _parsed(source, node, inserts)
    compiled = _compiled(source, node, parsed, code, names)
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    closure = tuple(CellType(names[n]) if n in names else cells[n] for n in compiled.co_freevars)
    new = FunctionType(compiled, function.__globals__, function.__name__, function.__defaults__, closure)
    _dressed(new, function)
    for part in (compiled, *_inner(compiled)):
        _MADE[id(part)] = Made(new, function, tuple(inserts), source)
    return new


def _dressed(new: FunctionType, old: FunctionType) -> None:
    new.__kwdefaults__ = old.__kwdefaults__
    new.__annotations__ = dict(old.__annotations__)
    new.__dict__.update(old.__dict__)
    new.__qualname__, new.__module__, new.__doc__ = old.__qualname__, old.__module__, old.__doc__


def _parsed(source: Source, node: ast.AST, inserts: Sequence[Insert]) -> ast.stmt | ast.Lambda:
    """The edited function's tree, on its own lines."""
    start, stop = source.span(node)
    if isinstance(node, ast.Lambda):
        column = node.col_offset
        text = b"(\n" + b" " * column + inserted(source.raw[start:stop], inserts, start) + b")"
        tree: ast.AST = ast.parse(text, mode="eval").body
        ast.increment_lineno(tree, node.lineno - 2)
        assert isinstance(tree, ast.Lambda)
        return tree
    start = source.offset(node.lineno, 0)  # type: ignore[attr-defined]
    header = b"if 1:\n" if node.col_offset else b"\n"  # type: ignore[attr-defined]
    module = ast.parse(header + inserted(source.raw[start:stop], inserts, start))
    first = module.body[0]
    tree = first.body[0] if isinstance(first, ast.If) else first
    ast.increment_lineno(tree, node.lineno - 2)  # type: ignore[attr-defined]
    assert isinstance(tree, ast.stmt)
    return tree


def _compiled(
    source: Source, node: ast.AST, tree: ast.stmt | ast.Lambda, code: CodeType, names: Mapping[str, Any]
) -> CodeType:
    body: list[ast.stmt]
    if isinstance(tree, ast.Lambda):
        _plain_arguments(tree.args)
        body = [ast.Expr(tree)]
    else:
        assert isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef))
        _plain_arguments(tree.args)
        tree.decorator_list, tree.returns = [], None
        body = [tree]
    owner = next((p for p in source.parents(node) if isinstance(p, ast.ClassDef)), None)
    free = [n for n in code.co_freevars if n != "__class__"]
    if owner is not None:
        body = [_class(owner.name, body)]
        if owner.name not in free:  # else the function's use of its own class's name would be the factory's
            body.insert(0, ast.Global([owner.name]))
    elif not isinstance(tree, ast.Lambda) and code.co_name not in free:
        body.insert(0, ast.Global([code.co_name]))  # a function that names itself means the module's
    if owner is None and "__class__" in code.co_freevars:
        free.append("__class__")
    factory = ast.FunctionDef(
        _FACTORY,
        ast.arguments([], [ast.arg(n) for n in dict.fromkeys([*free, *names])], None, [], [], None, []),
        body,
        [],
    )
    if hasattr(factory, "type_params") or "type_params" in factory._fields:  # Python 3.12 and later
        factory.type_params = []  # type: ignore[attr-defined]
    module = ast.Module([factory], [])
    ast.fix_missing_locations(module)
    whole = compile(module, code.co_filename, "exec", flags=flags_of(code), dont_inherit=True)
    return next(c for c in _inner(whole) if c.co_name == code.co_name).replace(co_qualname=code.co_qualname)


def _class(name: str, body: list[ast.stmt]) -> ast.ClassDef:
    made = ast.ClassDef(name, [], [], body, [])
    if "type_params" in made._fields:
        made.type_params = []  # type: ignore[attr-defined]
    return made


def _plain_arguments(arguments: ast.arguments) -> None:
    """Defaults are the live function's; nothing of them is computed again."""
    arguments.defaults = [ast.copy_location(ast.Constant(None), d) for d in arguments.defaults]
    arguments.kw_defaults = [d and ast.copy_location(ast.Constant(None), d) for d in arguments.kw_defaults]
    every = [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]
    for one in every:
        if one is not None:
            one.annotation = None


def _inner(code: CodeType) -> list[CodeType]:
    found: list[CodeType] = []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found += [constant, *_inner(constant)]
    return found


# -- decorators


def holds(value: object, code: CodeType, depth: int = 0) -> FunctionType | None:
    """The function with `code` that `value` is, or that a chain of decorators in `value` ends in."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, MethodType):
        value = value.__func__
    if not isinstance(value, FunctionType) or depth > _DEPTH:
        return None
    if value.__code__ is code:
        return value
    for cell in value.__closure__ or ():
        found = holds(_content(cell), code, depth + 1)
        if found is not None:
            return found
    return None


def found_again(module: str, line: int, name: str) -> FunctionType | None:
    """The function of a qualified name, whose code begins at that line, in a module; None if it is gone."""
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = vars(value).get(part) if hasattr(value, "__dict__") else None
    todo = [value]
    for one in todo:
        one = getattr(one, "fget", None) or getattr(one, "__func__", one)
        if not isinstance(one, FunctionType):
            continue
        if (one.__code__.co_firstlineno, one.__code__.co_qualname) == (line, name):
            return one
        todo += [_content(cell) for cell in one.__closure__ or ()][:_DEPTH]
        if len(todo) > _DEPTH * _DEPTH:
            return None
    return None


def rebuilt(value: Any, old: FunctionType, new: FunctionType, depth: int = 0) -> Any:
    """`value` with `new` in the place of `old`, in a copy of each decorator around it."""
    if value is old:
        return new
    if isinstance(value, (staticmethod, classmethod)):
        return type(value)(rebuilt(value.__func__, old, new))
    if isinstance(value, MethodType):
        return MethodType(rebuilt(value.__func__, old, new), value.__self__)
    if isinstance(value, property):
        return property(rebuilt(value.fget, old, new), value.fset, value.fdel, value.__doc__)
    if not isinstance(value, FunctionType) or depth > _DEPTH:
        return value
    cells = list(value.__closure__ or ())
    for place, cell in enumerate(cells):
        held = _content(cell)
        inner = rebuilt(held, old, new, depth + 1) if isinstance(held, (FunctionType, MethodType)) else held
        if inner is not held:
            cells[place] = CellType(inner)
    if all(a is b for a, b in zip(cells, value.__closure__ or (), strict=True)):
        return value
    copy = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells))
    _dressed(copy, value)
    if hasattr(copy, "__wrapped__"):
        copy.__wrapped__ = rebuilt(copy.__wrapped__, old, new, depth + 1)
    return copy


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
