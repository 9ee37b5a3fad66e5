"""What costs nothing in forward and is added by itself: tensors that meet shards and parts of sums.

A norm's weight over head_dim, a learned scale, the slopes of ALiBi, a table of relative positions stay
whole, in the model and in its state_dict, and are transformed where they are read:

- `copy`: a parameter that meets a shard; its gradient on each rank is a part, and is summed
- `slice` after `copy`: a parameter or buffer with an element for each head; each rank reads its own
- `share`: a parameter that is added to a part of a sum (a bias); it belongs to rank 0's part alone

What the forward makes itself, and what it expands over a dim, takes the layout that it meets
(`flexible.py`). All are found from the conflict: take the value for copied, sliced or shared, see whether
the op's rule then accepts it, and walk back to where it comes from, with the rules run forward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autotp.match import Matches
from autotp.placement import INVARIANT, PARTIAL, REPLICATE, Layout, Partial, Shard, is_whole
from autotp.propagate.call import Call, Conflict, with_gradient
from autotp.propagate.contract import CONTRACTIONS
from autotp.propagate.flexible import Grant, grantable

__all__ = ["Read", "Unshared", "held_reads", "solve"]

Attempt = Callable[[fx.Node, Mapping[fx.Node, Layout]], list[Layout]]
Bind = Callable[[fx.Node], Call]
Seen = Callable[[fx.Node, fx.Node], Layout]
Overrides = dict[fx.Node, Layout]
_LAYERS = ("linear", "conv1d")  # whose weights take part by a rule of the plan, or not at all
_DEEPEST = 64


@dataclass(frozen=True)
class Read:
    """How a parameter or buffer is read. A whole one: summed in backward when `copied`, only a part when
    `shard`, as a part of a sum when `shared`. One that the plan cuts by itself, and of which several ranks
    hold the same elements: summed in backward over these, as `held` says."""

    name: str
    copied: bool
    shard: Shard | None = None
    shared: bool = False
    held: Shard | None = None


@dataclass(frozen=True)
class Unshared:
    """A parameter that was to be a part of a sum, which is reduced before the parameter is added."""

    name: str


def held_reads(matches: Matches, aliases: Mapping[str, str]) -> dict[str, Read]:
    """The tensors that a plan cuts by themselves, with a number for each kv head, where ranks share heads."""
    found: dict[str, Read] = {}
    for placed in matches.placed.values():
        for name, cut in placed.layouts.items() if placed.target == "tensor" and matches.tp > 1 else ():
            if cut.shared:
                first = aliases.get(name, name)
                found[first] = Read(first, copied=False, held=cut)
    return found


class _Solver:
    def __init__(
        self,
        layouts: Mapping[fx.Node, list[Layout]],
        attempt: Attempt,
        bind: Bind,
        seen: Seen,
        kinds: Mapping[str, str],
    ) -> None:
        self.layouts = layouts
        self.seen = seen
        self.attempt = attempt
        self.bind = bind
        self.kinds = kinds  # tensor name -> the kind of the module that owns it
        self.layers = False
        self.known: dict[tuple[fx.Node, Layout, bool], list[Read | Grant] | None] = {}

    def solve(self, node: fx.Node, *, sums: bool) -> list[Read | Grant]:
        # Where nothing is cut, a layer that is whole may work on a value with a part of its gradient.
        self.layers = all(map(self._whole, node.all_input_nodes))
        copies = self._copies(node, node.all_input_nodes)
        copied: Overrides = dict.fromkeys(copies, REPLICATE)
        if copies and self._fits(node, copied) is not None:
            return [read for reads in copies.values() for read in reads]
        for placed in self._choices(node, sums):
            others = {n: layout for n, layout in copied.items() if n not in placed}
            if self._fits(node, others | placed) is None:
                continue
            found = self._all_back(node, placed)
            if found is not None:
                return found + [r for n in others for r in copies[n]]
        return []

    def _choices(self, node: fx.Node, sums: bool) -> Iterator[Overrides]:
        """Other layouts for the whole inputs of an op: for one of them, then for all that go together."""
        whole = [n for n in dict.fromkeys(node.all_input_nodes) if self._whole(n)]
        for cut in self._cuts(node):
            for value in whole:
                for shard in self._on_each_dim(value, cut):
                    yield {value: shard}
        for met in node.all_input_nodes:
            for layout in self.layouts.get(met, [])[:1]:
                if isinstance(layout, Shard) and not isinstance(met.meta["val"], list):
                    yield from self._side_by_side(whole, layout, len(met.meta["val"].shape))
        if sums:
            for value in whole:
                yield {value: PARTIAL}
            if len(whole) > 1:
                yield dict.fromkeys(whole, PARTIAL)

    def _side_by_side(self, values: Sequence[fx.Node], shard: Shard, rank: int) -> Iterator[Overrides]:
        """Several values cut on the dim where they stand beside a value of `rank` dims that is this shard."""
        placed: Overrides = {}
        for value in values:
            val = value.meta["val"]
            dim = -1 if isinstance(val, list) else shard.dim + len(val.shape) - rank
            if dim >= 0 and val.shape[dim] > 1 and shard.at(dim).fits(val.shape[dim]):
                placed[value] = shard.at(dim)
        if len(placed) > 1:
            yield placed

    def _fits(self, node: fx.Node, overrides: Mapping[fx.Node, Layout]) -> list[Layout] | None:
        try:
            return self.attempt(node, overrides)
        except Conflict:
            return None

    def _whole(self, node: fx.Node) -> bool:
        return all(map(is_whole, self.layouts.get(node, [REPLICATE])))

    def _cuts(self, node: fx.Node) -> Iterator[Shard]:
        seen: list[Shard] = []
        for value in node.all_input_nodes:
            for layout in self.layouts.get(value, []):
                if isinstance(layout, Shard) and layout.at(0) not in seen:
                    seen.append(layout.at(0))
                    yield layout

    def _on_each_dim(self, value: fx.Node, cut: Shard) -> Iterator[Shard]:
        val = value.meta["val"]
        if not isinstance(val, list):
            for dim, size in enumerate(val.shape):
                if size > 1 and cut.at(dim).fits(size):
                    yield cut.at(dim)

    def _copies(self, node: fx.Node, values: list[fx.Node]) -> dict[fx.Node, list[Read]]:
        """The whole values with a gradient that come from parameters alone, with those parameters. One whose
        gradient is a part already, such as a kv head that every rank has, needs no copy."""
        found: dict[fx.Node, list[Read]] = {}
        for value in values:
            if value in node.meta["grads"] and self.seen(value, node) == INVARIANT:
                sources = self._parameters(value)
                if sources:
                    found[value] = [Read(name, copied=True) for name in sources]
        return found

    def _parameters(self, value: fx.Node) -> list[str]:
        """The parameters that a value's gradient flows to; none if it flows to anything else."""
        names: dict[str, None] = {}
        frontier, seen = [value], set()
        while frontier:
            node = frontier.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.op == "get_attr":
                if not self._readable(node, "parameter"):
                    return []
                names[node.meta["name"]] = None
            elif node.op != "call_function" or not node.all_input_nodes or _of_a_layer(node):
                return []
            else:
                frontier += with_gradient(node)
        return list(names)

    def _readable(self, node: fx.Node, *origins: str) -> bool:
        kind = self.kinds.get(node.meta["name"], "other")
        return node.meta["origin"] in origins and (self.layers or kind not in _LAYERS)

    def _all_back(self, reader: fx.Node, placed: Overrides) -> list[Read | Grant] | None:
        found: list[Read | Grant] = []
        for value, layout in placed.items():
            back = self._back(value, layout, value in reader.meta["grads"])
            if back is None:
                return None
            found += back
        return found

    def _back(self, value: fx.Node, layout: Layout, grad: bool, depth: int = 0) -> list[Read | Grant] | None:
        """What gives `value` this layout; None when it does not come from tensors or fresh values alone."""
        key = (value, layout, grad)
        if key not in self.known:
            self.known[key] = None  # no way round in a circle
            self.known[key] = self._found(value, layout, grad, depth)
        return self.known[key]

    def _found(self, value: fx.Node, layout: Layout, grad: bool, depth: int) -> list[Read | Grant] | None:
        if value.op == "get_attr":
            if not self._readable(value, "parameter", "buffer") or not self._whole(value):
                return None  # what the plan cuts is read as it is cut
            if isinstance(layout, Shard):
                return [Read(value.meta["name"], grad, layout)]
            return [Read(value.meta["name"], False, shared=True)]
        if value.op != "call_function" or depth > _DEEPEST:
            return None
        item = 0
        if value.target is operator.getitem:
            value, item = value.args  # type: ignore[assignment]
        if isinstance(layout, Partial) and self.bind(value).name in CONTRACTIONS:
            return None  # a bias is shared where it is read, not the weight of a product
        copies = self._copies(value, value.all_input_nodes)
        if grantable(self.bind(value), layout):
            return [Grant(value, layout), *(r for reads in copies.values() for r in reads)]
        for placed in self._sources(value, layout):
            others: Overrides = {n: REPLICATE for n in copies if n not in placed}
            fits = self._fits(value, others | placed)
            if fits is None or fits[item] != layout:
                continue
            found: list[Read | Grant] | None = [r for n in others for r in copies[n]]
            for source, before in placed.items():
                back = self._back(source, before, source in value.meta["grads"], depth + 1)
                found = None if back is None or found is None else found + back
            if found is not None:
                return found
        return None

    def _sources(self, value: fx.Node, layout: Layout) -> Iterator[Overrides]:
        """Layouts of an op's inputs that may give its result this layout."""
        sources = list(dict.fromkeys(value.all_input_nodes))
        if isinstance(layout, Shard):
            for source in sources:
                for before in self._on_each_dim(source, layout):
                    yield {source: before}
            if not isinstance(value.meta["val"], list):
                yield from self._side_by_side(sources, layout, len(value.meta["val"].shape))
        else:
            for source in sources:
                yield {source: layout}
            if len(sources) > 1:
                yield dict.fromkeys(sources, layout)


def _of_a_layer(node: fx.Node) -> bool:
    return getattr(getattr(node.target, "_schema", None), "name", "") in ("aten::linear", "aten::addmm")


def solve(
    node: fx.Node,
    layouts: Mapping[fx.Node, list[Layout]],
    attempt: Attempt,
    bind: Bind,
    seen: Seen,
    kinds: Mapping[str, str],
    *,
    sums: bool,
) -> list[Read | Grant]:
    """What resolves the conflict of the op at `node`, with `sums` by parts of sums, too; an empty list when
    nothing does."""
    return _Solver(layouts, attempt, bind, seen, kinds).solve(node, sums=sums)
