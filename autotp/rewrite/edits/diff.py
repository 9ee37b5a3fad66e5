"""The edits as a unified diff, as people read changes of code."""

from __future__ import annotations

import difflib

from autotp.rewrite.edits.bind import texts
from autotp.rewrite.edits.edit import Edits, Function
from autotp.rewrite.edits.text import Insert, inserted, source_of
from autotp.trace.source import shown

__all__ = ["diff"]

CONTEXT = 1  # lines around a change


def diff(edits: Edits) -> str:
    """A unified diff of every function that is edited, files in order; a function of which some callers get
    another copy stands in it once for each copy. "" without edits."""
    found: list[str] = []
    for file, copies in sorted(texts(edits).items()):
        for function, inserts in sorted(copies, key=lambda c: (c[0].line, c[1])):
            found += _of_one(file, function, inserts)
    return "".join(f"{line}\n" for line in found)


def _of_one(file: str, function: Function, inserts: tuple[Insert, ...]) -> list[str]:
    code = function.live.__code__
    raw = source_of(code, function.live.__globals__).raw
    before = raw.decode().splitlines()
    after = inserted(raw, inserts).decode().splitlines()
    name = shown(file)
    edited = f"{name} ({function.name})"
    return list(difflib.unified_diff(before, after, name, edited, n=CONTEXT, lineterm=""))
