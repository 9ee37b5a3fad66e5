"""The text of a file of the model: its tree, places as byte offsets, and insertions at them.

Text is inserted, never printed anew: line numbers stay, comments stay, and the diff is what was changed.
"""

from __future__ import annotations
import __future__

import ast
import linecache
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import CodeType

__all__ = ["Insert", "NoSource", "Source", "inserted", "source_of"]

Insert = tuple[int, int, str]  # byte offset, order among those at one offset, text

_FUTURE: int = sum(
    {getattr(__future__, name).compiler_flag for name in __future__.all_feature_names} - {0, 0x10}
)


class NoSource(Exception):
    """A function whose text cannot be edited; the message says why and what a person can do."""


class Source:
    """A file's text, once read. `text` is what the interpreter's tracebacks would show."""

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.raw = text.encode()
        self.tree = ast.parse(self.raw)
        self.starts = [0]
        for line in self.raw.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self._ends: dict[tuple[int, int], list[ast.AST]] = {}
        self._parents: dict[ast.AST, ast.AST] = {}
        self._definitions: dict[tuple[str, int], ast.FunctionDef | ast.AsyncFunctionDef] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                self._definitions.setdefault((node.name, first), node)
            if isinstance(node, (ast.expr, ast.stmt)) and node.end_lineno and node.end_col_offset is not None:
                self._ends.setdefault((node.end_lineno, node.end_col_offset), []).append(node)
            for child in ast.iter_child_nodes(node):
                self._parents[child] = node
        self._codes: dict[tuple[str, int], list[CodeType]] = {}

    def offset(self, line: int, column: int) -> int:
        """The byte offset of a 1-based line and a column in bytes."""
        return self.starts[line - 1] + column

    def span(self, node: ast.AST) -> tuple[int, int]:
        """The byte offsets of a node."""
        start = self.offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]
        return start, self.offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def text(self, node: ast.AST) -> str:
        """The text of a node."""
        start, stop = self.span(node)
        return self.raw[start:stop].decode()

    def ending(self, line: int, column: int) -> list[ast.AST]:
        """The nodes that end at a place."""
        return self._ends.get((line, column), [])

    def parents(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around a node, from the inside out."""
        found = self._parents.get(node)
        while found is not None:
            yield found
            found = self._parents.get(found)

    def definition(self, code: CodeType) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None:
        """The node that a function's code was compiled from."""
        if code.co_name == "<lambda>":
            return self._lambda(code)
        return self._definitions.get((code.co_name, code.co_firstlineno))

    def _lambda(self, code: CodeType) -> ast.Lambda | None:
        """The smallest lambda around all that the code does."""
        twin = self.twin(code) or code
        places = [p for p in twin.co_positions() if None not in p and (p[0], p[2]) != (p[1], p[3])]
        offsets = [self.offset(p[0], p[2]) for p in places]  # type: ignore[arg-type]
        around = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Lambda)
            and offsets
            and self.span(node.body)[0] <= min(offsets)
            and max(offsets) < self.span(node.body)[1]
        ]
        return min(around, key=lambda n: self.span(n)[1] - self.span(n)[0], default=None)

    def twin(self, code: CodeType) -> CodeType | None:
        """The same function compiled from this text; None where the text is another than the running one."""
        if not self._codes:
            for each in _codes(compile(self.raw, self.file, "exec", dont_inherit=True)):
                self._codes.setdefault((each.co_qualname, each.co_firstlineno), []).append(each)
        alike = [c for c in self._codes.get((code.co_qualname, code.co_firstlineno), ()) if _same(c, code)]
        if len(alike) > 1:  # lambdas of one line
            alike = [each for each in alike if [*each.co_positions()] == [*code.co_positions()]]
        return alike[0] if len(alike) == 1 else None


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _same(one: CodeType, other: CodeType) -> bool:
    """Equal bytecode, names and constants. Not `==`: it leaves the file out, but keeps the line table, which
    `-X no_debug_ranges` thins."""
    if (one.co_code, one.co_names, one.co_varnames, one.co_freevars) != (
        other.co_code,
        other.co_names,
        other.co_varnames,
        other.co_freevars,
    ) or len(one.co_consts) != len(other.co_consts):
        return False
    return all(
        _same(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else type(a) is type(b) and a == b
        for a, b in zip(one.co_consts, other.co_consts, strict=True)
    )


@lru_cache(maxsize=256)
def _source(file: str, text: str) -> Source:
    return Source(file, text)


def source_of(code: CodeType, names: dict[str, object] | None = None) -> Source:
    """The text that `code` was compiled from. `names` are the globals of its function.

    Raises NoSource when there is none, or when it is another than what runs.
    """
    file = code.co_filename
    text = "".join(linecache.getlines(file, names))
    where = f"{file}:{code.co_firstlineno}: {code.co_qualname}"
    if not text:
        raise NoSource(
            f"{where} has no source text (made by exec, or compiled): write it in a file that Python imports"
        )
    try:
        source = _source(file, text)
    except SyntaxError as error:
        raise NoSource(f"{where}: the file no longer parses ({error.msg})") from error
    twin = source.twin(code)
    if twin is None:
        raise NoSource(
            f"{where}: the text on disk is not the code that runs: it changed since it was imported, or a "
            "tool rewrote it on import (pytest does so with `assert`); import the model again, or from a "
            "module that is not rewritten"
        )
    if all(column is None for *_, column in twin.co_positions()):
        raise NoSource(
            f"{where}: Python keeps no columns of the code, since it was started with -X no_debug_ranges (or "
            "PYTHONNODEBUGRANGES): start it without"
        )
    return source


def inserted(raw: bytes, inserts: Iterable[Insert], start: int = 0) -> bytes:
    """`raw`, whose first byte stands at `start` of the file, with texts inserted.

    >>> inserted(b"view(b, self.h)", [(8, 0, "local("), (14, 0, ")")])
    b'view(b, local(self.h))'
    """
    for offset, _, text in sorted(inserts, reverse=True):
        place = offset - start
        raw = raw[:place] + text.encode() + raw[place:]
    return raw


def flags_of(code: CodeType) -> int:
    """The `from __future__` imports that a function was compiled under."""
    return code.co_flags & _FUTURE
