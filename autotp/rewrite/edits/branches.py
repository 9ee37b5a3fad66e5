"""The branches of a function, of which some may be taken that no trace took.

Such a branch holds constants that were never compared. It matters where it makes shapes, or calls code of
the model; one that raises, warns or only computes needs nothing.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

from torch import nn

from autotp.rewrite.edits.text import Source

__all__ = ["branches"]

Span = tuple[int, int]

# Calls whose arguments are sizes.
_SHAPING = frozenset(
    [
        "as_strided", "broadcast_to", "chunk", "empty", "expand", "fold", "full", "group_norm", "narrow",
        "new_empty", "new_full", "new_ones", "new_zeros", "ones", "rearrange", "reduce", "repeat",
        "repeat_interleave", "reshape", "split", "split_with_sizes", "tensor_split", "tile", "unflatten",
        "unfold", "view", "zeros",
    ]
)  # fmt: skip
_LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Pass)


def branches(source: Source, function: FunctionType, owner: object = None) -> Iterator[Span]:
    """The places of the branches that matter: where the start of one is marked. An empty span stands before
    a statement, another one is that of an expression. `owner` is the function's first argument, if known."""
    node = source.definition(function.__code__)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        names = _names(node, function, owner)
        yield from _in_list(source, node.body, names)


def _names(
    node: ast.FunctionDef | ast.AsyncFunctionDef, function: FunctionType, owner: object
) -> Mapping[str, Any]:
    """What the function's names stand for before it runs: globals, free variables, its first argument."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    names = {**vars(builtins), **function.__globals__}
    for name, cell in cells:
        try:
            names[name] = cell.cell_contents
        except ValueError:
            continue
    for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
        names.pop(argument.arg, None)
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            names.pop(inner.id, None)
    first = [*node.args.posonlyargs, *node.args.args][:1]
    if owner is not None and first:
        names[first[0].arg] = owner
    return names


def _in_list(source: Source, statements: Sequence[ast.stmt], names: Mapping[str, Any]) -> Iterator[Span]:
    """The branches inside of these statements, and what follows where one of them may leave early."""
    for place, statement in enumerate(statements):
        for body in _bodies(statement):
            if _matters(body, names):
                yield from _mark(source, body)
            yield from _in_list(source, body, names)
        yield from _arms(source, statement, names)
        rest = statements[place + 1 :]
        if rest and _bodies(statement) and _leaves(statement) and _matters(rest, names):
            yield from _mark(source, rest)


def _bodies(statement: ast.stmt) -> list[list[ast.stmt]]:
    found: list[list[ast.stmt]] = []
    if isinstance(statement, (ast.If, ast.For, ast.AsyncFor, ast.While)):
        found = [statement.body, statement.orelse]
    elif isinstance(statement, ast.Try):
        found = [*(h.body for h in statement.handlers), statement.orelse]
    elif isinstance(statement, ast.Match):
        found = [case.body for case in statement.cases]
    return [body for body in found if body]


def _held(statement: ast.stmt) -> list[ast.stmt]:
    """The statements that always run with a compound one."""
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        return statement.body
    return [*statement.body, *statement.finalbody] if isinstance(statement, ast.Try) else []


def _leaves(statement: ast.stmt) -> bool:
    return any(isinstance(n, _LEAVING) for n in ast.walk(statement))


def _mark(source: Source, statements: Sequence[ast.stmt]) -> Iterator[Span]:
    """Where the start of these statements is marked: `;` cannot stand before a compound statement."""
    for first in statements:
        if isinstance(first, _DEFINITIONS):
            continue
        if isinstance(first, (ast.If, ast.While)):
            yield source.span(first.test)
        elif isinstance(first, (ast.For, ast.AsyncFor)):
            yield source.span(first.iter)
        elif isinstance(first, (ast.With, ast.AsyncWith)):
            yield source.span(first.items[0].context_expr)
        elif isinstance(first, ast.Match):
            yield source.span(first.subject)
        elif isinstance(first, ast.Try):
            yield from _mark(source, first.body)
        else:
            start, _ = source.span(first)
            yield start, start
        return


def _arms(source: Source, statement: ast.stmt, names: Mapping[str, Any]) -> Iterator[Span]:
    """The two values of `a if test else b`."""
    for held in _held(statement):
        yield from _in_list(source, [held], names)
    for node in _own(statement):
        if isinstance(node, ast.IfExp):
            for arm in (node.body, node.orelse):
                if any(_shapes_or_calls(n, names) for n in ast.walk(arm)):
                    yield source.span(arm)


def _own(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement that run whenever it does: not the bodies of its branches."""
    inside = {id(s) for body in _bodies(statement) for s in body} | {id(s) for s in _held(statement)}
    todo: list[ast.AST] = [statement]
    while todo:
        node = todo.pop()
        if id(node) in inside or (node is not statement and isinstance(node, (*_DEFINITIONS, ast.Lambda))):
            continue
        yield node
        todo += ast.iter_child_nodes(node)


def _matters(statements: Sequence[ast.stmt], names: Mapping[str, Any]) -> bool:
    """Whether sizes are used, or the model's own code is called, when these statements run. What leaves by
    an exception does not go on with anything."""
    for statement in statements:
        if isinstance(statement, ast.Raise):
            return False
        if isinstance(statement, _DEFINITIONS):
            continue
        held = _held(statement)
        if held and _matters(held, names):
            return True
        if any(_shapes_or_calls(node, names) for node in _own(statement)):
            return True
        if isinstance(statement, (ast.Return, ast.Continue, ast.Break)):
            return False
    return False


def _shapes_or_calls(node: ast.AST, names: Mapping[str, Any]) -> bool:
    if isinstance(node, ast.Slice):
        bounds = [b for b in (node.lower, node.upper) if b is not None]
        return any(isinstance(n, ast.Attribute) for b in bounds for n in ast.walk(b))
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in _SHAPING:
        return True
    called = _resolved(node.func, names)
    return called is not None and not _harmless(called)


def _resolved(expression: ast.expr, names: Mapping[str, Any]) -> Any:
    """What an expression of names and attributes stands for; None where that is not known before it runs."""
    if isinstance(expression, ast.Name):
        return names.get(expression.id)
    if isinstance(expression, ast.Attribute):
        held = _resolved(expression.value, names)
        if held is None or isinstance(getattr(type(held), expression.attr, None), property):
            return None
        return getattr(held, expression.attr, None)
    return None


def _harmless(called: Callable[..., Any]) -> bool:
    """Not code of the model: classes, Python's and torch's functions, torch's modules."""
    if isinstance(called, type):
        return not issubclass(called, nn.Module)
    where = type(called).__module__ if isinstance(called, nn.Module) else getattr(called, "__module__", None)
    package = (where or "torch").partition(".")[0]
    return package in ("torch", "autotp") or (package in sys.stdlib_module_names and package != "__main__")
