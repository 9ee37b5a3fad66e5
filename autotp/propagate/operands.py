"""Whole values without a gradient that meet a shard: each rank takes its own part of them, at the op.

ALiBi's biases, masks with heads: computed once, from what is no parameter, and used in every layer. Taking
a part costs nothing in forward, and there is no backward. The part is taken by an edit of the model's code
(`rewrite/edits`), where the value is an operand.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from autotp.placement import Layout, Shard, is_whole
from autotp.propagate.call import Conflict

__all__ = ["Part", "parts_for"]

Attempt = Callable[[fx.Node, Mapping[fx.Node, Layout]], list[Layout]]


@dataclass(frozen=True)
class Part:
    """`reader` is given only a rank's part of `value`."""

    reader: fx.Node
    value: fx.Node
    shard: Shard


def parts_for(
    node: fx.Node,
    layouts: Mapping[fx.Node, list[Layout]],
    attempt: Attempt,
    draws: Callable[[fx.Node], bool],
) -> list[Part]:
    """The part of one whole input with which the op at `node` has no conflict; an empty list when there is
    none. `draws` says which ops draw random numbers."""
    for value in node.all_input_nodes:
        if not _constant(value, draws) or not all(map(is_whole, layouts.get(value, []))):
            continue
        for shard in _cuts(node, value, layouts):
            try:
                attempt(node, {value: shard})
            except Conflict:
                continue
            return [Part(node, value, shard)]
    return []


def _cuts(node: fx.Node, value: fx.Node, layouts: Mapping[fx.Node, list[Layout]]) -> Iterator[Shard]:
    """Each dim of the value cut like an input that is a shard."""
    for other in node.all_input_nodes:
        for layout in layouts.get(other, []):
            if isinstance(layout, Shard) and layout.sections is None:
                for dim, size in enumerate(value.meta["val"].shape):
                    if size > 1 and layout.at(dim).fits(size):
                        yield layout.at(dim)


def _constant(value: fx.Node, draws: Callable[[fx.Node], bool]) -> bool:
    """Whether a value comes from nothing that may have a gradient, in whatever mode the model runs."""
    if isinstance(value.meta["val"], list):
        return False
    frontier, seen = [value], set()
    while frontier:
        node = frontier.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "call_function" and node.target is not operator.getitem and draws(node):
            return False  # random numbers are drawn where they are used
        if node.op == "placeholder" or node.meta.get("origin") == "parameter":
            val = node.meta["val"]
            if val.dtype.is_floating_point or val.dtype.is_complex:
                return False
        frontier += node.all_input_nodes
    return True
