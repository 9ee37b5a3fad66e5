"""Layout rules of ops that make tensors from another's dtype, and of complex numbers seen as pairs."""

from __future__ import annotations

from autotp.placement import INVARIANT, Layout
from autotp.propagate.call import Call, Value, over

__all__ = ["CREATION"]


def _made(call: Call) -> Layout:
    """A new tensor of a given size: the same on every rank, as long as the size is."""
    return INVARIANT


def _pairs(call: Call) -> Layout:
    """(.., 2) as complex numbers, or back: the pair must be whole."""
    value: Value = call["self"]
    if value.shard is not None and call.name == "view_as_complex" and value.shard.dim == value.rank - 1:
        raise over(call, value, "pairs elements")
    return value.layout


CREATION = {
    **dict.fromkeys(["new_empty", "new_full", "new_ones", "new_zeros"], _made),
    "view_as_complex": _pairs,
    "view_as_real": _pairs,
}
