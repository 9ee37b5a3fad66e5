"""Values that may take a layout for free: expanded over a dim, or made by the forward.

A value that an expand repeats over the heads, or that `zeros` makes, is nobody's part: each rank can make
only its own elements, at no cost. Such an op is granted the layout that its readers need:

- a shard of a dim that the op makes or repeats; a gradient that flows on is then a part on each rank, so
  what goes in is copied
- a part of a sum, for zeros (0 + 0 = 0) and for memory that is written before it is read
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autotp.placement import Layout, Partial, Shard
from autotp.propagate.call import Call, Value, normal_dim

__all__ = ["Grant", "grantable"]

_ZEROS = ("zeros", "new_zeros", "zeros_like", "empty", "new_empty", "empty_like")
_MADE = ("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty")
_EXPANDED = ("expand", "broadcast_to", "repeat", "tile")


@dataclass(frozen=True)
class Grant:
    """The layout that an op's result takes, of those that cost it nothing."""

    node: fx.Node
    layout: Layout


def grantable(call: Call, layout: Layout) -> bool:
    """Whether the op can give this layout for free."""
    if isinstance(layout, Partial):
        return call.name in _ZEROS
    if not isinstance(layout, Shard):
        return False
    if call.name in _MADE:  # the tensor that `x.new_zeros` is called on gives its dtype
        return True
    value = call["self"]
    if not isinstance(value, Value) or not value.whole:
        return False
    if call.name in _EXPANDED:
        dim = layout.dim - (len(call.shape) - value.rank)
        return dim < 0 or value.shape[dim] == 1
    if call.name == "repeat_interleave" and isinstance(call["repeats"], int) and call["dim"] is not None:
        dim = normal_dim(call["dim"], value.rank)
        return dim == layout.dim and value.shape[dim] == 1
    return False
