"""Layout rules of losses of two values of one shape: element by element, then none, their mean, or their sum.

F.mse_loss(h, g)                      the mean: each rank's, weighed by its number of elements (`mapped.py`)
F.mse_loss(h, g, reduction="sum")     a part of the sum
"""

from __future__ import annotations

from autotp.placement import PARTIAL, Layout
from autotp.propagate.call import Call, Conflict, Value, counted_once, not_partial, over
from autotp.propagate.pointwise import align

__all__ = ["LOSSES", "MEAN", "SUM", "aligned"]

MEAN, SUM = 1, 2
"""What torch calls its reductions."""


def aligned(call: Call) -> Layout:
    """The layout of a loss element by element. Raises Conflict where its values are not cut alike."""
    not_partial(call)
    return align(call, call.values, max(v.rank for v in call.values))


def _loss(call: Call) -> Layout:
    found = aligned(call)
    if call["reduction"] not in (MEAN, SUM):
        return found
    value = next(call.sharded())
    if call["reduction"] == MEAN:
        raise over(call, value, "takes the mean")
    counted_once(call, value)
    return PARTIAL


def _broadcast(call: Call) -> list[Layout]:
    """`torch.broadcast_tensors` of what has one shape already, as losses call it."""
    values: list[Value] = call["tensors"]
    for value in values:
        if value.shape != call.shape:
            raise Conflict(
                "AT304", f"{call.name} that expands {value.name}, beside a value that is not whole",
                blame=tuple(v for v in values if not v.whole), notes=tuple(map(str, values)),
            )  # fmt: skip
    return [value.layout for value in values]


LOSSES = {
    **dict.fromkeys(
        ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
         "binary_cross_entropy_with_logits", "kl_div", "soft_margin_loss"],
        _loss,
    ),
    "broadcast_tensors": _broadcast,
}  # fmt: skip
