"""Edits on modules: the methods of each, made anew from edited text, as the body of a subclass.

A function that a method calls is copied for that call alone: the expression that names it is wrapped, and
gives the copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from torch import nn

from autotp.rewrite.edits.compile import holds, named, rebuilt, remade
from autotp.rewrite.edits.edit import Call, Edit, Edits, Function
from autotp.rewrite.edits.locate import WRAPPED
from autotp.rewrite.edits.text import Insert, NoSource, source_of
from autotp.rewrite.edits.wrap import swapped, wrapper_of

__all__ = ["Observed", "bound", "methods", "texts"]


@dataclass
class Observed:
    """What wrappers met while a model was proven and did not know: numbers and functions, by site."""

    met: dict[tuple[object, ...], list[Any]] = field(default_factory=dict)

    def note(self, site: tuple[object, ...]) -> Callable[[Any], None]:
        """What writes down a value that was met at `site`."""

        def write(value: Any) -> None:
            values = self.met.setdefault(site, [])
            if not any(value is v or (isinstance(v, int) and v == value) for v in values):
                values.append(value)

        return write


@dataclass
class _Tree:
    """The edits of one function for one caller: its own, and those of the functions that it calls."""

    function: Function
    edits: list[Edit] = field(default_factory=list)
    calls: dict[tuple[int, int], list[tuple[Call, _Tree]]] = field(default_factory=dict)

    def child(self, call: Call, function: Function) -> _Tree:
        known = self.calls.setdefault((call.start, call.stop), [])
        for _, tree in known:
            if tree.function == function and tree.function.live is function.live:
                return tree
        tree = _Tree(function)
        known.append((call, tree))
        return tree


def _grown(edits: Iterable[Edit]) -> dict[str, _Tree]:
    """The methods of one module that are edited, each with the tree of its edits."""
    found: dict[str, _Tree] = {}
    for edit in edits:
        functions = [*(c.function for c in edit.calls), edit.function]
        tree = found.setdefault(edit.method, _Tree(functions[0]))
        for call, function in zip(edit.calls, functions[1:], strict=True):
            tree = tree.child(call, function)
        tree.edits.append(edit)
    return found


def _copy(tree: _Tree, edits: Edits, rank: int, observed: Observed | None) -> FunctionType:
    """The edited function."""
    function = tree.function.live
    inserts: list[Insert] = []
    names: dict[str, Any] = {}
    wraps = {}
    pieces: list[tuple[int, int, str, Callable[[Any], Any]]] = []
    source = source_of(function.__code__, function.__globals__)
    where = f"{tree.function.file}:{tree.function.line}: {tree.function.name}"
    for edit in tree.edits:
        note = observed.note(edit.site) if observed is not None else None
        wrapper = wrapper_of(edit.wrapper, rank, _where(source, edit), note)
        pieces.append((edit.start, edit.stop, "local", wrapper))
        wraps[edit.start, edit.stop] = wrapper
    for (start, stop), children in tree.calls.items():
        known: list[tuple[Any, Any]] = []
        for call, child in children:
            callee = call.callee
            copy = rebuilt(callee, child.function.live, _copy(child, edits, rank, observed))
            known.append((callee, copy))
        site = (tree.function, start, stop)
        note = observed.note(site) if observed is not None else None
        passed = [callee for *at, callee in edits.passed if tuple(at) == site]
        pieces.append((start, stop, "swap", swapped(known, passed, where, note)))
    free = named(source, function, *(name for _, _, name, _ in pieces))
    for (start, stop, _, wrapper), name in zip(pieces, free, strict=True):
        names[name] = wrapper
        inserts += [(start, start - stop, f"{name}("), (stop, stop - start, ")")]
    made = remade(function, inserts, names)
    WRAPPED[id(made.__code__)] = wraps
    return made


def _where(source: Any, edit: Edit) -> str:
    line = source.raw.count(b"\n", 0, edit.start) + 1
    return f"{edit.function.file}:{line}"


def methods(
    kind: type[nn.Module], edits: Edits, rank: int, observed: Observed | None = None
) -> dict[str, Any]:
    """The attributes of the subclass of `kind` in which `edits`, all of one module, are carried out.

    Raises NoSource when a text is no longer what it was.
    """
    body: dict[str, Any] = {}
    for name, tree in _grown(edits.edits).items():
        kept = next(vars(k)[name] for k in kind.__mro__ if name in vars(k))
        function = holds(kept.fget if isinstance(kept, property) else kept, tree.function.live.__code__)
        if function is None:
            raise NoSource(f"{kind.__name__}.{name} is no longer {tree.function.name}")
        body[name] = rebuilt(kept, function, _copy(tree, edits, rank, observed))
    return body


@contextlib.contextmanager
def bound(root: nn.Module, edits: Edits, rank: int, observed: Observed | None = None) -> Iterator[None]:
    """`root` with the edits in its methods while the context lasts."""
    swapped_: list[tuple[nn.Module, type[nn.Module]]] = []
    try:
        for path in edits.modules():
            module = root.get_submodule(path)
            kind = type(module)
            swapped_.append((module, kind))
            module.__class__ = type(kind.__name__, (kind,), methods(kind, edits.of(path), rank, observed))
        yield
    finally:
        for module, kind in reversed(swapped_):
            module.__class__ = kind


def texts(edits: Edits) -> dict[str, list[tuple[Function, tuple[Insert, ...]]]]:
    """For each file the edited functions, each with what is inserted; equal ones once."""
    found: dict[str, list[tuple[Function, tuple[Insert, ...]]]] = {}

    def visit(tree: _Tree) -> None:
        inserts: list[Insert] = []
        for edit in tree.edits:
            inserts += [
                (edit.start, edit.start - edit.stop, "local("),
                (edit.stop, edit.stop - edit.start, ")"),
            ]
        for (start, stop), children in tree.calls.items():
            inserts += [(start, start - stop, "swap("), (stop, stop - start, ")")]
            for _, child in children:
                visit(child)
        entry = (tree.function, tuple(sorted(inserts)))
        known = found.setdefault(tree.function.file, [])
        if entry not in known:
            known.append(entry)

    for own in edits.modules().values():
        for tree in _grown(own).values():
            visit(tree)
    return found
