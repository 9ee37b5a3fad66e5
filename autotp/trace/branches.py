"""Branches of a model's code that no traced mode took: nothing is proven about them.

While a model is traced, the lines of its own code that run are noted. A branch is a block of statements: the
body of an `if`, `else`, `for`, `while`, `except` or `case`. One that ends in `raise` is left out, since it
computes nothing. What stands on one line (`a if b else c`) and the way past an `if` without `else` are not
told apart.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

from autotp.analysis import Branch
from autotp.diagnostic import Span
from autotp.trace.source import is_library, line_span, shown

__all__ = ["Watched", "unnoted", "unreached", "unwatched", "watching"]


class Watched:
    """Notes, while the context lasts, which lines of people's code run. Another tracer (a debugger, a
    measurement of coverage) is left alone: then nothing is noted, and nothing told.

    >>> watched = Watched()
    >>> with watched:
    ...     pass
    >>> watched.ran
    []
    """

    def __init__(self) -> None:
        self._lines: dict[int, tuple[CodeType, set[int]]] = {}
        self._spaces: dict[int, tuple[CodeType, dict[str, Any]]] = {}
        self._known: dict[int, CodeType | None] = {}  # a code's id -> itself if it is noted, and kept if not
        self._kept: list[CodeType] = []
        self._mine = False

    @property
    def ran(self) -> list[tuple[CodeType, set[int]]]:
        """Each code object that ran, and the lines of it that did."""
        return list(self._lines.values())

    @property
    def spaces(self) -> list[tuple[CodeType, dict[str, Any]]]:
        """Each code object that ran, and its globals."""
        return list(self._spaces.values())

    def __enter__(self) -> Watched:
        self._mine = sys.gettrace() is None
        if self._mine:
            sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        if self._mine:
            sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        noted = self._lines.get(id(code))
        if noted is None:
            if id(code) in self._known:
                return None
            self._known[id(code)] = None
            self._kept.append(code)  # its id stays its own
            if is_library(code.co_filename):
                return None
            noted = self._lines[id(code)] = (code, set())
            self._spaces[id(code)] = (code, frame.f_globals)
        add = noted[1].add

        def line(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "line":
                add(frame.f_lineno)
            return line

        return line


def unnoted() -> Callable[[], None]:
    """What takes back, when it is called, what a `Watched` notes from here on."""
    watched = getattr(sys.gettrace(), "__self__", None)
    if not isinstance(watched, Watched):
        return lambda: None
    before = {key: (code, set(lines)) for key, (code, lines) in watched._lines.items()}

    def take_back() -> None:
        for key in watched._lines.keys() - before.keys():
            del watched._spaces[key], watched._known[key]
        watched._lines = before

    return take_back


@contextlib.contextmanager
def unwatched() -> Iterator[Any]:
    """Note nothing while the context lasts, where a `Watched` does; gives what `watching` goes on with."""
    tracer = sys.gettrace()
    if not isinstance(getattr(tracer, "__self__", None), Watched):
        yield None
        return
    sys.settrace(None)
    try:
        yield tracer
    finally:
        sys.settrace(tracer)


@contextlib.contextmanager
def watching(tracer: Any) -> Iterator[None]:
    """Go on noting, inside of an `unwatched` that gave `tracer`."""
    if tracer is None:
        yield
        return
    sys.settrace(tracer)
    try:
        yield
    finally:
        sys.settrace(None)


def unreached(ran: Iterable[tuple[CodeType, set[int]]], handled: Iterable[Span]) -> tuple[Branch, ...]:
    """The branches that did not run, of the functions that have one of the lines `handled`."""
    lines = {(span.file, span.line) for span in handled}
    found: dict[tuple[str, int], Branch] = {}
    reached: set[tuple[str, int]] = set()
    codes = list(ran)
    for code, seen in codes:
        reached |= {(code.co_filename, line) for line in seen}
    for code, seen in codes:
        if any((shown(code.co_filename), line) in lines for line in seen):
            for line in _unreached(code, reached):
                span = line_span(code.co_filename, line)
                if span is not None:
                    found.setdefault((code.co_filename, line), Branch(code.co_qualname, span))
    return tuple(found[key] for key in sorted(found))


def _unreached(code: CodeType, reached: set[tuple[str, int]]) -> Iterator[int]:
    function = _function(code)
    if function is None:
        return

    def ran(block: list[ast.stmt]) -> bool:
        last = max(getattr(s, "end_lineno", s.lineno) or s.lineno for s in block)
        return any((code.co_filename, line) in reached for line in range(block[0].lineno, last + 1))

    todo = [function.body]
    while todo:
        for statement in todo.pop():
            for block in _blocks(statement):
                if ran(block) or _is_elif(statement, block):
                    todo.append(block)
                elif not isinstance(block[-1], ast.Raise):
                    yield block[0].lineno


def _is_elif(statement: ast.stmt, block: list[ast.stmt]) -> bool:
    """An `elif` is a block of its own in the tree, and none to people."""
    return isinstance(statement, ast.If) and block is statement.orelse and isinstance(block[0], ast.If)


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, None)
        if block:
            yield block
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body


_TREES: dict[str, tuple[tuple[str, ...], dict[int, Any]]] = {}


def _function(code: CodeType) -> Any:
    """The syntax tree of a code object's function; None where there is no source."""
    source = tuple(linecache.getlines(code.co_filename))
    known = _TREES.get(code.co_filename)
    if known is None or known[0] != source:
        try:
            tree = ast.parse("".join(source))
        except SyntaxError:
            return None
        functions = {
            (node.decorator_list[0].lineno if node.decorator_list else node.lineno): node
            for node in ast.walk(tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        }
        known = _TREES[code.co_filename] = (source, functions)
    return known[1].get(code.co_firstlineno)
