"""What costs nothing in forward and is added by itself: parameters and buffers that meet shards.

A norm's weight over head_dim, a learned scale, the slopes of ALiBi, a table of relative positions stay
whole, in the model and in its state_dict, and are transformed where they are read:

- `copy`: a parameter that meets a shard; its gradient on each rank is a part, and is summed
- `slice` after `copy`: a parameter or buffer with an element for each head; each rank reads its own

Both are found from the conflict: take the value for copied (or sliced on some dim), see whether the op's
rule then accepts it, and walk back to the tensors that it comes from, with the rules run forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from autotp.placement import REPLICATE, Layout, Partial, Shard
from autotp.propagate.call import Conflict

__all__ = ["Read", "solve"]

Attempt = Callable[[fx.Node, Mapping[fx.Node, Layout]], list[Layout]]
_LAYERS = ("linear", "conv1d")  # whose weights take part by a rule of the plan, or not at all


@dataclass(frozen=True)
class Read:
    """How a whole parameter or buffer is read: summed in backward when `copied`, only a part when `shard`."""

    name: str
    copied: bool
    shard: Shard | None = None


class _Solver:
    def __init__(
        self, layouts: Mapping[fx.Node, list[Layout]], attempt: Attempt, kinds: Mapping[str, str]
    ) -> None:
        self.layouts = layouts
        self.attempt = attempt
        self.kinds = kinds  # tensor name -> the kind of the module that owns it

    def solve(self, node: fx.Node) -> list[Read]:
        copies = self._copies(node, node.all_input_nodes)
        overrides: dict[fx.Node, Layout] = dict.fromkeys(copies, REPLICATE)
        if copies and self._fits(node, overrides) is not None:
            return [read for reads in copies.values() for read in reads]
        for cut in self._cuts(node):
            for value in node.all_input_nodes:
                if not self._whole(value):
                    continue
                for shard in self._on_each_dim(value, cut):
                    others = {n: layout for n, layout in overrides.items() if n is not value}
                    if self._fits(node, others | {value: shard}) is None:
                        continue
                    reads = self._back(value, shard, value in node.meta["grads"])
                    if reads is not None:
                        return reads + [r for n in others for r in copies[n]]
        return []

    def _fits(self, node: fx.Node, overrides: Mapping[fx.Node, Layout]) -> list[Layout] | None:
        try:
            return self.attempt(node, overrides)
        except Conflict:
            return None

    def _whole(self, node: fx.Node) -> bool:
        return not any(isinstance(x, (Shard, Partial)) for x in self.layouts.get(node, [REPLICATE]))

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
        """The whole values with a gradient that come from parameters alone, with those parameters."""
        found: dict[fx.Node, list[Read]] = {}
        for value in values:
            if value in node.meta["grads"] and self._whole(value):
                sources = self._sources(value)
                if sources:
                    found[value] = [Read(name, copied=True) for name in sources]
        return found

    def _sources(self, value: fx.Node) -> list[str]:
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
            elif node.op != "call_function" or not node.all_input_nodes:
                return []
            else:
                frontier += [n for n in node.all_input_nodes if n in node.meta["grads"]]
        return list(names)

    def _readable(self, node: fx.Node, *origins: str) -> bool:
        return node.meta["origin"] in origins and self.kinds.get(node.meta["name"], "other") not in _LAYERS

    def _back(self, value: fx.Node, shard: Shard, grad: bool, depth: int = 0) -> list[Read] | None:
        """The reads that make `value` this shard; None when it does not come from tensors alone."""
        if value.op == "get_attr":
            return (
                [Read(value.meta["name"], grad, shard)]
                if self._readable(value, "parameter", "buffer")
                else None
            )
        if value.op != "call_function" or depth > 32 or isinstance(value.meta["val"], list):
            return None
        copies = self._copies(value, value.all_input_nodes)
        for source in value.all_input_nodes:
            others: dict[fx.Node, Layout] = {n: REPLICATE for n in copies if n is not source}
            for before in self._on_each_dim(source, shard):
                if self._fits(value, others | {source: before}) != [shard]:
                    continue
                reads = self._back(source, before, source in value.meta["grads"], depth + 1)
                if reads is not None:
                    return reads + [r for n in others for r in copies[n]]
        return None


def solve(
    node: fx.Node, layouts: Mapping[fx.Node, list[Layout]], attempt: Attempt, kinds: Mapping[str, str]
) -> list[Read]:
    """The reads with which the op at `node` has no conflict; an empty list when there are none."""
    return _Solver(layouts, attempt, kinds).solve(node)
