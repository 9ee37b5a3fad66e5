"""What holds of a layer holds of the layers that repeat it (`Trace.repeats`), if three things are the same.

A repetition's ops are, up to names, those of the layer that was recorded, on values like its own. So they
have the same layouts where the plan says the same of both, where what each reads from outside is laid out
alike, and where no mapping stands around both. If any of it is not so, the whole model has to be traced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from autotp.match import Matches
from autotp.propagate.propagation import Propagation
from autotp.trace.graph import REPEATED, Repeat, Trace

__all__ = ["Unlike", "for_twins", "marks", "same_repeats", "spread", "with_twins"]


class Unlike(Exception):
    """A layer that repeats another in the trace does not in its layouts."""


def marks(matches: Matches) -> dict[str, str]:
    """What the plan says of each module, by its path."""
    return {p.path: f"{p.style} {p.target} {p.rule!r}" for p in matches.placed.values()}


def spread(whole: Propagation, before: Mapping[str, Any]) -> None:
    """Let what was found of each layer hold of those that repeat it; `before` are the cuts before the walk.

    Raises Unlike where it cannot.
    """
    repeats = whole.trace.repeats
    if not repeats:
        return
    _check(whole, before)
    for table in (whole.cuts, whole.reads, whole.regions):
        for names in _twins(repeats, table):
            for name, twin in names:
                table[twin] = _renamed(table[name], twin)
    for paths in (whole.reached, whole.random, whole.random_whole, whole.resting, whole.uncopied):
        paths |= {twin for names in _twins(repeats, paths) for _, twin in names}
    for number, repeat in enumerate(repeats):
        given = dict(repeat.given)
        for path, nodes in whole.copied.items():
            here = repeat.renamed(path)
            if here is not None:
                read = tuple(_name(node, given, number) for node in nodes)
                whole.repeated[here] = (*whole.repeated.get(here, ()), *read)


def _twins(repeats: Iterable[Repeat], names: Iterable[str]) -> list[list[tuple[str, str]]]:
    known = list(names)
    inside = {of: [n for n in known if n == of or n.startswith(f"{of}.")] for of in {r.of for r in repeats}}
    return [[(name, f"{r.path}{name[len(r.of) :]}") for name in inside[r.of]] for r in repeats]


def _renamed(value: Any, twin: str) -> Any:
    for key in ("name", "path"):
        if hasattr(value, key):
            return replace(value, **{key: twin})
    return value


def _name(node: fx.Node, given: Mapping[fx.Node, fx.Node], number: int) -> str:
    """A value's name in the repetition."""
    return given[node].name if node in given else f"{node.name} {number}"


def _check(whole: Propagation, before: Mapping[str, Any]) -> None:
    trace = whole.trace
    said = {p.path: (p.style, p.target, repr(p.rule), p.declared, tuple(p.layouts.values()))
            for p in whole.matches.placed.values()}  # fmt: skip
    layers = _layers(trace.repeats)
    for table in (before, said):
        parts = _parts(table, layers)
        if any(parts.get(r.path, {}) != parts.get(r.of, {}) for r in trace.repeats):
            raise Unlike
    for repeat in trace.repeats:
        if any(repeat.path.startswith(f"{path}." if path else "") for path in whole.regions):
            raise Unlike
        if any(whole.layouts.get(there) != whole.layouts.get(here) for there, here in repeat.given):
            raise Unlike


def _layers(repeats: Iterable[Repeat]) -> set[str]:
    return {path for r in repeats for path in (r.path, r.of)}


def _parts(table: Mapping[str, Any], layers: set[str]) -> dict[str, dict[str, Any]]:
    """What a table says inside of each layer, by the rest of the name."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in table.items():
        place = name
        while place and place not in layers:
            place = place.rpartition(".")[0]
        if place:
            found.setdefault(place, {})[name[len(place) :]] = value
    return found


def same_repeats(
    whole: Trace, local: Trace, ours: Callable[[fx.Node], Any], theirs: Callable[[fx.Node], Any]
) -> bool:
    """Whether the same layers are left out of both, repeating the same on the same values: those of which
    `ours` and `theirs` say the same."""
    return _repeats(whole, ours) == _repeats(local, theirs)


def _repeats(trace: Trace, said: Callable[[fx.Node], Any]) -> list[Any]:
    """The repetitions, and what each is given, in names that both traces have."""
    paths = [r.path for r in trace.repeats]

    def own(repeat: Repeat, there: Any, here: Any) -> bool:
        """A tensor of the layer itself, that a property handed out in an earlier call."""
        if there[:1] != ("tensor",) or here[:2] != (str(REPEATED), there):
            return False
        return repeat.renamed(there[1]) is not None and paths[here[2]] == repeat.path

    given = [(r, [(said(a), said(b)) for a, b in r.given]) for r in trace.repeats]
    return [(r.path, r.of, r.call, [pair for pair in pairs if not own(r, *pair)]) for r, pairs in given]


def for_twins(trace: Trace, counts: Mapping[tuple[str, str], int]) -> Counter[tuple[str, str]]:
    """What was counted of each module, (module, what) -> how often, and of those that repeat it."""
    found = Counter(counts)
    for repeat in trace.repeats:
        twins = (((repeat.renamed(path), what), number) for (path, what), number in counts.items())
        found.update(
            {(path, what): number for (path, what), number in twins if path and (path, what) not in found}
        )
    return found


def with_twins(traces: Iterable[Trace], paths: frozenset[str]) -> frozenset[str]:
    """These modules, and those of the layers that repeat theirs.

    Raises Unlike where a layer has others than the one that it repeats.
    """
    repeats = [repeat for trace in traces for repeat in trace.repeats]
    found = paths | {twin for names in _twins(repeats, paths) for _, twin in names}
    parts = _parts(dict.fromkeys(found), _layers(repeats))
    if any(parts.get(r.path, {}) != parts.get(r.of, {}) for r in repeats):
        raise Unlike
    return found
