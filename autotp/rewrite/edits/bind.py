"""Edits on modules: the methods of each, made anew from edited text, as the body of a subclass.

A function that a method calls is copied for that call alone: the expression that names it is wrapped, and
gives the copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn

from autotp.comm import Group
from autotp.rewrite.edits.branches import Branch, Span, branches
from autotp.rewrite.edits.compile import holds, named, rebuilt, remade
from autotp.rewrite.edits.edit import Call, Edit, Edits, Function, Mapped, Part, Slow, Unproven, Whole
from autotp.rewrite.edits.locate import WRAPPED
from autotp.rewrite.edits.statistics import mapping_of
from autotp.rewrite.edits.text import Insert, NoSource, Source, source_of
from autotp.rewrite.edits.wrap import swapped, wrapper_of

__all__ = ["KnownBranches", "Observed", "bound", "methods", "reopened", "texts", "unreached"]


KnownBranches = dict[tuple[int, int], tuple[FunctionType, object, tuple[Branch, ...]]]
"""By the ids of a function and of its first argument, which stay theirs: both are held."""


@dataclass
class Observed:
    """What wrappers met while a model was proven and did not know, numbers and functions, by site; and the
    branches that were taken: of these alone where it runs `as_it_runs` sharded, so that a wrapper raises for
    what it does not know. `known` are those of each function, for as long as the model stays as it is."""

    as_it_runs: bool = False
    known: KnownBranches = field(default_factory=dict)
    met: dict[tuple[object, ...], list[Any]] = field(default_factory=dict)
    reached: set[tuple[object, ...]] = field(default_factory=set)

    def branches(self, source: Source, function: FunctionType, owner: object) -> tuple[Branch, ...]:
        """The branches of a function; `owner` is its first argument, if known."""
        key = (id(function), id(owner))
        if key not in self.known:
            self.known[key] = function, owner, tuple(branches(source, function, owner))
        return self.known[key][2]

    def note(self, site: tuple[object, ...]) -> Callable[[Any], None] | None:
        """What writes down a value that was met at `site`."""
        if self.as_it_runs:
            return None

        def write(value: Any) -> None:
            values = self.met.setdefault(site, [])
            if not any(value is v or (isinstance(v, int) and v == value) for v in values):
                values.append(value)

        return write


@dataclass
class _Tree:
    """The edits of one function for one caller: its own, and those of the functions that it calls. `place`
    is how an edit in it is written: module, method, calls, function."""

    place: tuple[str, str, tuple[Call, ...], Function]
    edits: list[Edit] = field(default_factory=list)
    calls: dict[tuple[int, int], list[tuple[Call, _Tree]]] = field(default_factory=dict)

    @property
    def function(self) -> Function:
        """The function."""
        return self.place[3]

    def child(self, call: Call, function: Function) -> _Tree:
        """The tree of a function that this one calls."""
        known = self.calls.setdefault((call.start, call.stop), [])
        for _, tree in known:
            if tree.function == function and tree.function.live is function.live:
                return tree
        module, method, calls, _ = self.place
        tree = _Tree((module, method, (*calls, call), function))
        known.append((call, tree))
        return tree

    def every(self) -> Iterator[_Tree]:
        """This tree and those below it."""
        yield self
        for children in self.calls.values():
            for _, child in children:
                yield from child.every()


def grown(edits: Iterable[Edit]) -> dict[str, _Tree]:
    """The methods of one module that are edited, each with the tree of its edits."""
    found: dict[str, _Tree] = {}
    for edit in edits:
        functions = [*(c.function for c in edit.calls), edit.function]
        tree = found.setdefault(edit.method, _Tree((edit.module, edit.method, (), functions[0])))
        for call, function in zip(edit.calls, functions[1:], strict=True):
            tree = tree.child(call, function)
        tree.edits.append(edit)
    return found


@dataclass(frozen=True)
class _How:
    """How edits are carried out: for which rank of which group, and while a model is proven by whom they are
    observed; there is no group then."""

    edits: Edits
    rank: int
    group: Group | None
    observed: Observed | None
    owner: object


def _copy(tree: _Tree, how: _How) -> FunctionType:
    """The edited function."""
    function = tree.function.live
    source = source_of(function.__code__, function.__globals__)
    observed = how.observed
    pieces: list[tuple[Span, str, Callable[..., Any]]] = []
    behind: dict[Span, str] = {}
    for edit in tree.edits:
        span = (edit.start, edit.stop)
        if isinstance(edit.wrapper, Unproven) and observed is not None and observed.as_it_runs:
            continue  # it is told below whether it was reached
        if isinstance(edit.wrapper, Mapped):
            pieces += [(span, step, mapping_of(edit.wrapper, step, how.group)) for step in edit.wrapper.how]
            behind[span] = edit.wrapper.operand
            continue
        note = observed.note(edit.site) if observed is not None else None
        wrapper = wrapper_of(edit.wrapper, how.rank, _where(source, edit), note, recorded=how.group is None)
        (word,) = words(edit)
        pieces.append((span, word, wrapper))
    wraps = {span: wrapper for span, name, wrapper in pieces if name in ("local", "whole")}
    for span, children in tree.calls.items():
        known: list[tuple[Any, Any]] = []
        for call, child in children:
            copy = _copy(child, replace(how, owner=None))
            known.append((call.callee, rebuilt(call.callee, child.function.live, copy)))
        note = observed.note((tree.function, *span)) if observed is not None else None
        passed = [callee for *at, callee in how.edits.passed if tuple(at) == (tree.function, *span)]
        where = f"{tree.function.file}:{tree.function.line}: {tree.function.name}"
        pieces.append((span, "swap", swapped(known, passed, where, note)))
    if observed is not None:
        # Two branches may begin at one place: where one is reached, the other is.
        for span in dict.fromkeys(b.mark for b in observed.branches(source, function, how.owner)):
            pieces.append((span, "unproven", partial(observed.reached.add, (*tree.place, *span))))
    free = named(source, function, *(name for _, name, _ in pieces))
    inserts = [
        insert
        for (span, name, _), given in zip(pieces, free, strict=True)
        for insert in written(span, name, given, behind.get(span, ""))
    ]
    made = remade(function, inserts, {n: wrapper for n, (_, _, wrapper) in zip(free, pieces, strict=True)})
    WRAPPED[id(made.__code__)] = wraps
    return made


def words(edit: Edit) -> tuple[str, ...]:
    """What is written around an edit's expression, the innermost first."""
    if isinstance(edit.wrapper, Mapped):
        return edit.wrapper.how
    return (_WORDS.get(type(edit.wrapper), "local"),)


_WORDS: dict[type, str] = {Unproven: "unproven", Part: "part", Whole: "whole", Slow: "slow"}


def written(span: Span, kind: str, name: str, operand: str = "") -> list[Insert]:
    """The texts around a place; a variance is given its operand as well."""
    start, stop = span
    outer = kind == "copy"  # around another mapping of the same expression
    before, behind = 2 * (start - stop) - outer, 2 * (stop - start) + outer
    if kind in _WITH_OPERAND:
        return [(start, before, f"{name}("), (stop, behind, f", {operand})")]
    if kind == "reduce" and operand:  # behind the statement that writes into it
        return [(stop, behind, f"; {operand} = {name}({operand})")]
    if kind != "unproven":
        return [(start, before, f"{name}("), (stop, behind, ")")]
    if start == stop:
        return [(start, _FIRST, f"{name}(); ")]
    return [(start, before, f"({name}() or ("), (stop, behind, "))")]


_WITH_OPERAND = ("var", "std")


_FIRST = -(2**62)  # before everything else that begins there


def _where(source: Any, edit: Edit) -> str:
    line = source.raw.count(b"\n", 0, edit.start) + 1
    return f"{edit.function.file}:{line}"


def methods(
    kind: type[nn.Module],
    edits: Edits,
    rank: int,
    observed: Observed | None = None,
    owner: object = None,
    group: Group | None = None,
) -> dict[str, Any]:
    """The attributes of the subclass of `kind` in which `edits`, all of one module, are carried out.

    Raises NoSource when a text is no longer what it was.
    """
    body: dict[str, Any] = {}
    for name, tree in grown(edits.edits).items():
        kept = next((vars(k)[name] for k in kind.__mro__ if name in vars(k)), None)
        if kept is None or (owner is not None and name in vars(owner)):
            raise NoSource(f"{name} is a function of one {kind.__name__}, not a method of its class")
        function = holds(kept.fget if isinstance(kept, property) else kept, tree.function.live.__code__)
        if function is None:
            raise NoSource(f"{kind.__name__}.{name} is no longer {tree.function.name}")
        body[name] = rebuilt(kept, function, _copy(tree, _How(edits, rank, group, observed, owner)))
    return body


@contextlib.contextmanager
def bound(root: nn.Module, edits: Edits, rank: int, observed: Observed | None = None) -> Iterator[None]:
    """`root` with the edits in its methods while the context lasts."""
    swapped_: list[tuple[nn.Module, type[nn.Module]]] = []
    try:
        for path, own in edits.modules().items():
            module = root.get_submodule(path)
            kind = type(module)
            body = methods(kind, replace(edits, edits=own), rank, observed, module)
            swapped_.append((module, kind))
            module.__class__ = type(kind.__name__, (kind,), body)
        yield
    finally:
        for module, kind in reversed(swapped_):
            module.__class__ = kind


def unreached(root: nn.Module, edits: Edits, observed: Observed) -> Iterator[Edit]:
    """The branches of edited functions that matter and were not taken, as edits."""
    for tree, branches_ in _branches(root, edits, observed):
        yield from _not_taken(tree, branches_, observed)


def reopened(root: nn.Module, edits: Edits, observed: Observed) -> Edits:
    """The edits without those of branches that were taken now; those inside of them that were not raise."""
    taken = {
        edit for edit in edits.edits if isinstance(edit.wrapper, Unproven) and edit.site in observed.reached
    }
    more: list[Edit] = []
    for tree, found in _branches(root, edits, observed):
        marks = {(edit.start, edit.stop) for edit in tree.edits if edit in taken}
        opened = [branch for branch in found if branch.mark in marks]
        inside = [branch for branch in found if branch not in opened and any(map(branch.is_in, opened))]
        more += _not_taken(tree, inside, observed)
    left = tuple(edit for edit in edits.edits if edit not in taken)
    return replace(edits, edits=left) | more


def _branches(
    root: nn.Module, edits: Edits, observed: Observed
) -> Iterator[tuple[_Tree, tuple[Branch, ...]]]:
    """Every function that is edited, for each of its callers, and its branches."""
    for path, own in edits.modules().items():
        for tree in grown(own).values():
            for each in tree.every():
                function = each.function.live
                source = source_of(function.__code__, function.__globals__)
                owner = root.get_submodule(path) if each is tree else None
                yield each, observed.branches(source, function, owner)


def _not_taken(tree: _Tree, branches_: Iterable[Branch], observed: Observed) -> Iterator[Edit]:
    found: list[Branch] = []
    for branch in branches_:
        if not any(map(branch.is_in, found)) and (*tree.place, *branch.mark) not in observed.reached:
            found.append(branch)
            yield Edit(*tree.place, *branch.mark, Unproven())


def texts(edits: Edits) -> dict[str, list[tuple[Function, tuple[Insert, ...]]]]:
    """For each file the edited functions, each with what is inserted; equal ones once."""
    found: dict[str, list[tuple[Function, tuple[Insert, ...]]]] = {}

    def visit(tree: _Tree) -> None:
        inserts = [
            insert
            for edit in tree.edits
            for word in words(edit)
            for insert in written((edit.start, edit.stop), word, word, getattr(edit.wrapper, "operand", ""))
        ]
        inserts += [i for span in tree.calls for i in written(span, "swap", "swap")]
        entry = (tree.function, tuple(sorted(inserts)))
        known = found.setdefault(tree.function.file, [])
        if entry not in known:
            known.append(entry)

    for own in edits.modules().values():
        for tree in grown(own).values():
            for each in tree.every():
                visit(each)
    return found
