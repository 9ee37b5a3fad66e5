"""Modules that own sharded tensors and use them in their own forward: experts, functional weights.

A layer of the plan has its mappings inside. A module whose raw parameters are cut (3-D expert weights,
`F.linear(x, self.weight)`) has them at its border, where no choice of kernel inside can lose them:

- what goes in and meets a shard inside is copied at the border: its gradient is summed over the ranks
- what comes out as a partial sum is reduced at the border

Both are found from a conflict, like reads. The border is that of the smallest module around the op that
owns every cut tensor the shard comes from, and reads one.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from autotp.placement import INVARIANT, PARTIAL, REPLICATE, Layout, Partial, is_whole
from autotp.propagate.call import with_gradient
from autotp.propagate.given import Guard
from autotp.trace.graph import Trace

__all__ = ["Region", "border", "copied_around", "first_op", "reduced_twice", "regions_around", "regions_for"]

Call = tuple[str, int]


@dataclass(frozen=True)
class Region:
    """A module with mappings at its border: the places of arguments that are copied, of results reduced.

    A place is what `tensors_in` calls a tensor's position: `[0][0]` the first positional argument,
    `[1].mask` a keyword argument, `` the result itself, `[0]` its first item. `guard` says how the traces
    call it: another flag may take another way through its forward, where its border was not looked for.
    """

    path: str
    copied: frozenset[str] = field(default_factory=frozenset)
    reduced: frozenset[str] = field(default_factory=frozenset)
    guard: Guard | None = field(default=None, compare=False)

    def __or__(self, other: Region) -> Region:
        """Both regions' mappings."""
        assert self.path == other.path
        return Region(self.path, self.copied | other.copied, self.reduced | other.reduced)

    def __sub__(self, other: Region) -> Region:
        """The region without the copies of another one."""
        assert self.path == other.path
        return Region(self.path, self.copied - other.copied, self.reduced)


def border(
    trace: Trace,
    regions: Mapping[str, Region],
    value: fx.Node,
    layout: Layout,
    reader: fx.Node | None,
    *,
    until: Call | None = None,
) -> Layout:
    """How `reader` sees a value: copied if it came in through a region's border, reduced if it left one.

    With `until`, how the value comes to the border of that call, which is around the reader.
    """
    if not regions:
        return layout
    layout = left(trace, regions, value, layout, reader)
    if layout == INVARIANT and reader is not None:
        for path, call in reader.meta.get("stack", ()):
            if (path, call) == until:
                break
            region = regions.get(path)
            came_in = region is not None and (path, call) not in value.meta.get("stack", ())
            if region is not None and came_in and _places(trace.entered, path, call, value) & region.copied:
                return REPLICATE
    return layout


def left(
    trace: Trace, regions: Mapping[str, Region], value: fx.Node, layout: Layout, reader: fx.Node | None
) -> Layout:
    """How `reader` sees a value that came out of a region: a partial sum is reduced at its border."""
    around = set(reader.meta.get("stack", ())) if reader is not None else set()
    if layout == PARTIAL:
        for path, call in value.meta.get("stack", ()):
            region = regions.get(path)
            out = region is not None and (path, call) not in around
            if region is not None and out and _places(trace.left, path, call, value) & region.reduced:
                return INVARIANT
    return layout


def _places(
    table: Mapping[str, list[list[tuple[str, fx.Node]]]], path: str, call: int, value: fx.Node
) -> frozenset[str]:
    calls = table.get(path, [])
    return (
        frozenset(place for place, node in calls[call] if node is value) if call < len(calls) else frozenset()
    )


def copied_around(
    trace: Trace,
    regions: Mapping[str, Region],
    layouts: Mapping[fx.Node, list[Layout]],
    needed: Mapping[str, Region],
) -> list[Region]:
    """The places of regions that are given what a region around them has copied, in every call: copied once
    more, its gradient would be summed twice. `needed` are regions that another mode needs as they are."""
    found = []
    for path, region in regions.items():
        others = [
            other for other in regions if other != path and path.startswith(f"{other}." if other else "")
        ]
        places = region.copied - (needed[path].copied if path in needed else frozenset())
        seen: dict[str, set[Layout]] = {}
        for call, entered in enumerate(trace.entered.get(path, ())) if others and places else ():
            reader = first_op(trace, path, call)
            for place, node in entered:
                given = layouts.get(node, [INVARIANT])[0]
                arrives = border(trace, regions, node, given, reader, until=(path, call))
                seen.setdefault(place, set()).add(arrives)
        twice = frozenset(place for place in places if seen.get(place) == {REPLICATE})
        if twice:
            found.append(Region(path, copied=twice))
    return found


def reduced_twice(trace: Trace, regions: Mapping[str, Region], value: fx.Node) -> bool:
    """Whether a value is reduced at the border of a region and at that of one around it."""
    reduced = 0
    for path, call in set(value.meta.get("stack", ())):  # the model itself may stand there twice
        region = regions.get(path)
        reduced += region is not None and bool(_places(trace.left, path, call, value) & region.reduced)
    return reduced > 1


def first_op(trace: Trace, path: str, call: int) -> fx.Node | None:
    """The first op of a module's call."""
    return next((n for n in trace.ops() if (path, call) in n.meta.get("stack", ())), None)


def regions_for(
    node: fx.Node,
    trace: Trace,
    layouts: Mapping[fx.Node, list[Layout]],
    origins: Mapping[fx.Node, frozenset[str]],
    *,
    tensors: Iterable[str],
    known: Mapping[str, Region],
    leaving: bool,
) -> list[Region]:
    """The regions that may resolve a conflict at `node`: a partial sum that is used (`leaving`), or a whole
    value that meets a part of one. `tensors` are the cut tensors of no layer, `known` the regions so far."""
    return _Finder(node, trace, layouts, origins, frozenset(tensors), known, leaving).find()


def regions_around(
    node: fx.Node,
    trace: Trace,
    layouts: Mapping[fx.Node, list[Layout]],
    *,
    known: Mapping[str, Region],
    layers: Container[str],
    meets_part: bool,
) -> list[Region]:
    """Any module around an op whose whole inputs meet parts (`meets_part`), or a copy, where they can be
    copied at its border: all that the module computes of them has a part of its gradient, too, and its
    parameters are copied where they are read. `layers` are the layers of the plan."""
    finder = _Finder(node, trace, layouts, {}, frozenset(), known, False)
    values = [
        v for v in dict.fromkeys(node.all_input_nodes)
        if finder.seen(v) == INVARIANT and v in node.meta.get("grads", ()) and v.op != "get_attr"
    ]  # fmt: skip
    for owner in reversed(node.meta.get("stack", ())):
        if owner[0] in layers or (not meets_part and owner[0] not in known):
            continue
        found = [finder.around(owner, value) for value in values]
        whole = [region for region in found if region is not None]
        if whole and len(whole) == len(values):
            return whole
    return []


class _Finder:
    def __init__(
        self,
        node: fx.Node,
        trace: Trace,
        layouts: Mapping[fx.Node, list[Layout]],
        origins: Mapping[fx.Node, frozenset[str]],
        tensors: frozenset[str],
        known: Mapping[str, Region],
        leaving: bool,
    ) -> None:
        self.known, self.leaving = known, leaving
        self.node, self.trace, self.layouts, self.origins, self.tensors = (
            node,
            trace,
            layouts,
            origins,
            tensors,
        )

    def find(self) -> list[Region]:
        found: dict[str, Region] = {}
        for value in self.node.all_input_nodes:
            layout = self.seen(value)
            if isinstance(layout, Partial) and self.leaving:
                region = self._leaving(value)
            elif layout == INVARIANT and not self.leaving and value in self.node.meta.get("grads", ()):
                region = self._entering(value)
            else:
                region = None
            if region is not None:
                found[region.path] = found[region.path] | region if region.path in found else region
        return list(found.values())

    def seen(self, value: fx.Node) -> Layout:
        """How the op sees a value, past the borders that are known."""
        return border(self.trace, self.known, value, self.layouts.get(value, [INVARIANT])[0], self.node)

    def _owner(self, node: fx.Node, origins: frozenset[str]) -> Call | None:
        """The smallest module around `node` that owns all the raw cut tensors of `origins`, and whose code
        reads one: a module that is given its own weights by the one around it is a part of that one."""
        raw = origins & self.tensors
        if not raw:
            return None
        owners = [
            (path, call)
            for path, call in reversed(node.meta.get("stack", ()))
            if all(name.startswith(f"{path}." if path else "") for name in raw)
        ]
        if len(owners) < 2:
            return owners[0] if owners else None
        reads = {
            around
            for name in raw
            for tensor in self.trace.graph.find_nodes(op="get_attr", target=name)
            for reader in tensor.users
            for around in reader.meta.get("stack", ())
        }
        return next((owner for owner in owners if owner in reads), owners[0])

    def _entering(self, value: fx.Node) -> Region | None:
        cut = [n for n in self.node.all_input_nodes if not is_whole(self.seen(n))]
        origins = frozenset().union(*(self.origins.get(n, frozenset()) for n in cut))
        owner = self._owner(self.node, origins)
        if owner is None:
            return None
        return self.around(owner, value)

    def around(self, owner: Call, value: fx.Node) -> Region | None:
        """The border of `owner` through which came all that `value` has its gradient from."""
        path, call = owner
        places: set[str] = set()
        frontier, seen = [value], set()
        while frontier:
            current = frontier.pop()
            if current in seen:
                continue
            seen.add(current)
            if self.layouts.get(current, [INVARIANT])[0] == REPLICATE:
                continue
            entered = _places(self.trace.entered, path, call, current)
            if entered and owner not in current.meta.get("stack", ()):
                places |= entered
            elif current.op == "get_attr":
                continue  # a parameter inside: copied where it is read, if it must be
            elif current.op != "call_function" or owner not in current.meta.get("stack", ()):
                return None  # it comes from outside, past the border
            else:
                before = with_gradient(current)
                if not all(is_whole(self.layouts.get(n, [INVARIANT])[0]) for n in before):
                    return None  # summed over the ranks inside
                frontier += before
        return Region(path, copied=frozenset(places)) if places else None

    def _leaving(self, value: fx.Node) -> Region | None:
        """The border that a partial sum crossed on its way to the op."""
        frontier, seen = [value], set()
        while frontier:
            current = frontier.pop(0)
            if current in seen or not isinstance(self.layouts.get(current, [INVARIANT])[0], Partial):
                continue
            seen.add(current)
            owner = self._owner(current, self.origins.get(current, frozenset()))
            if owner is not None:
                places = _places(self.trace.left, *owner, current)
                if places and owner not in self.node.meta.get("stack", ()):
                    return Region(owner[0], reduced=places)
            frontier += current.all_input_nodes
        return None
