"""From a running frame to the expression that it is in the middle of, and to what its parts are worth.

The interpreter knows the end of every call (its start is moved by CPython for chains over several lines), and
no two calls end at one place; of operators the start is known, too. What runs may be an edited copy already:
places are those of the model's text.
"""

from __future__ import annotations

import ast
import copy
import dis
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any

from autotp.rewrite.edits.compile import holds, made_of
from autotp.rewrite.edits.text import Insert, Source, source_of
from autotp.trace.source import is_library

__all__ = ["NOTHING", "Site", "located", "method_of", "number", "outer"]

NOTHING = object()
"""What an expression is worth that cannot be evaluated without side effects."""

_PURE = (
    ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Tuple, ast.List,
    ast.Slice, ast.Starred, ast.Call, ast.keyword, ast.Compare, ast.BoolOp, ast.operator, ast.unaryop,
    ast.cmpop, ast.boolop, ast.expr_context,
)  # fmt: skip
_CALLED = frozenset(
    ["size", "dim", "len", "int", "list", "tuple", "max", "min"]
)  # calls without side effects
_KINDS: tuple[tuple[str, tuple[type[ast.AST], ...]], ...] = (
    ("CALL", (ast.Call,)),
    ("PRECALL", (ast.Call,)),
    ("BINARY_SUBSCR", (ast.Subscript,)),
    ("STORE_SUBSCR", (ast.Subscript,)),
    ("BINARY_SLICE", (ast.Subscript,)),
    ("BINARY_OP", (ast.BinOp, ast.AugAssign, ast.Subscript)),
    ("COMPARE_OP", (ast.Compare,)),
    ("LOAD_ATTR", (ast.Attribute,)),
    ("RAISE_VARARGS", (ast.Raise, ast.Assert)),
)


@dataclass(frozen=True)
class Site:
    """An expression in the model's text, in the middle of its evaluation in `frame`."""

    frame: FrameType
    source: Source
    node: ast.AST

    def value(self, expression: ast.expr) -> Any:
        """What a part of it is worth now, or NOTHING."""
        found = self.plain(expression)
        wrapper = _wrappers(self.frame.f_code).get(self.source.span(expression))
        if wrapper is None or found is NOTHING:
            return found
        try:
            return wrapper(found)
        except Exception:
            return NOTHING

    def plain(self, expression: ast.expr) -> Any:
        """The same by the model's own text, without the edits that are there already."""
        if isinstance(expression, ast.NamedExpr):
            expression = ast.copy_location(ast.Name(expression.target.id, ast.Load()), expression)
        if not _is_pure(expression):
            return NOTHING
        names = self.frame.f_locals
        wrapped = ast.fix_missing_locations(ast.Expression(_mangled(expression, self.frame.f_code)))
        try:
            return eval(compile(wrapped, "<expression>", "eval"), self.frame.f_globals, dict(names))
        except Exception:
            return NOTHING


# (start, stop) -> the wrapper that an edited function already has there
Wrappers = dict[tuple[int, int], Callable[[Any], Any]]
WRAPPED: dict[int, Wrappers] = {}


def _wrappers(code: CodeType) -> Wrappers:
    made = made_of(code)
    return WRAPPED.get(id(made.function.__code__), {}) if made is not None else {}


def number(value: object) -> bool:
    """Whether a value is a number that counts elements: True is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_pure(expression: ast.expr) -> bool:
    for node in ast.walk(expression):
        if not isinstance(node, _PURE):
            return False
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called not in _CALLED:
                return False
    return True


def _mangled(expression: ast.expr, code: CodeType) -> ast.expr:
    """Private names (`self.__heads`) as the class has them."""
    owner = next((p for p in reversed(code.co_qualname.split(".")[:-1]) if p != "<locals>"), "").lstrip("_")
    private = [
        n
        for n in ast.walk(expression)
        if isinstance(n, ast.Attribute) and n.attr.startswith("__") and not n.attr.endswith("__")
    ]
    if not private or not owner:
        return expression
    expression = copy.deepcopy(expression)
    for node in ast.walk(expression):
        if isinstance(node, ast.Attribute) and node.attr.startswith("__") and not node.attr.endswith("__"):
            node.attr = f"_{owner}{node.attr}"
    return expression


def located(frame: FrameType, *kinds: type[ast.AST]) -> Site | None:
    """The expression (of `kinds`, or of the kind that the instruction is of) that a frame is at.

    Raises NoSource where the text of the frame's function cannot be had.
    """
    code, index = frame.f_code, frame.f_lasti // 2
    made = made_of(code)
    if made is None:
        source = source_of(code, frame.f_globals)
        # Positions may have been left out of the running code (`-X no_debug_ranges`).
        place = _position(code, index) or _position(source.twin(code), index)
        inserts: tuple[Insert, ...] = ()
    else:
        source, inserts, place = made.source, made.inserts, _position(code, index)
    if place is None:
        return None
    line, column = place[1], place[3]
    if inserts:
        line, column = _before_edits(source, inserts, line, column)
    wanted = kinds or _kinds(code, index)
    found = [n for n in source.ending(line, column) if isinstance(n, wanted)]
    if len(found) > 1:  # `a + b * c`: operators may end at one place
        begin = _before_edits(source, inserts, place[0], place[2])
        found = [n for n in found if _start(n) == begin] or found
    return Site(frame, source, found[0]) if found else None


def _start(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _before_edits(source: Source, inserts: tuple[Insert, ...], line: int, column: int) -> tuple[int, int]:
    """A place in the edited text as it was in the model's: insertions never add a line."""
    first = source.starts[line - 1]
    end = source.starts[line] if line < len(source.starts) else len(source.raw)
    for offset, _, text in sorted(inserts):
        if first <= offset < end and column >= offset - first + len(text.encode()):
            column -= len(text.encode())
    return line, column


def _position(code: CodeType | None, index: int) -> tuple[int, int, int, int] | None:
    if code is None:
        return None
    for number_, place in enumerate(code.co_positions()):
        if number_ == index:
            return None if None in place else place  # type: ignore[return-value]
    return None


def _kinds(code: CodeType, index: int) -> tuple[type[ast.AST], ...]:
    while index > 0 and dis.opname[code.co_code[2 * index]] == "CACHE":
        index -= 1
    name = dis.opname[code.co_code[2 * index]]
    return next((kinds for prefix, kinds in _KINDS if name.startswith(prefix)), (ast.expr,))


# -- which function


def method_of(frame: FrameType) -> tuple[Any, str, FunctionType, Any] | None:
    """(object, name, function, attribute) where the frame runs a method of its first argument. The name is
    "" where the object's class has another method of that name (`super().forward(x)`)."""
    code = frame.f_code
    if not code.co_argcount:
        return None
    first = frame.f_locals.get(code.co_varnames[0])
    kinds = type(first).__mro__
    taken: set[str] = set()
    for names in (getattr(first, "__dict__", {}), *map(vars, kinds)):
        for name, value in list(names.items()):
            got = value.fget if isinstance(value, property) else value
            found = holds(got, code)
            if found is not None:
                return first, "" if name in taken else name, found, value
        taken |= {name for name, value in names.items() if not _ours(value)}
    return None


def _ours(value: object) -> bool:
    """A forward that autotp has put in front of the model's own."""
    return isinstance(value, FunctionType) and is_library(value.__code__.co_filename)


def outer(frames: list[FrameType], level: int) -> int:
    """The level of the function in whose text the code of frames[level] stands: a comprehension, a nested
    function, a lambda belongs to the function around it, if that runs."""
    code = frames[level].f_code
    for above in range(len(frames) - 1, level, -1):
        if any(inside is code for inside in _every(frames[above].f_code)):
            return above
    return level


def _every(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _every(constant)
