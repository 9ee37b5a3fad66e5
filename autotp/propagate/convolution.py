"""Layout rules of convolutions: a contraction over channels at every place, or channel by channel."""

from __future__ import annotations

from dataclasses import replace

from autotp.placement import Layout
from autotp.propagate.call import Call, Conflict, Value, over
from autotp.propagate.contract import added, product

__all__ = ["CONVOLUTIONS"]


def _convolution(call: Call) -> Layout:
    value, weight, bias = call["input"], call["weight"], call["bias"]
    front = value.rank - weight.rank + 2  # batch and channels, or channels alone
    for one, dims in ((value, front), (weight, 2)):
        if one.shard is not None and one.shard.dim >= dims:
            raise over(call, one)
    if value.whole and weight.whole:
        raise Conflict("AT307", f"{call.name}: {bias.name} is not whole, the result is", blame=(bias,))
    inside, filters, result = _letters(call, value.shape[front - 1], weight.shape[0])
    batch, places = "b" * (front - 1), weight.rank - 2
    # The places of the input and of the filter have letters of their own, which nothing shares.
    found = product(
        call, [(value, batch + inside + "x" * places), (weight, filters + "w" * places)], batch + result
    )
    return added(call, found, None if bias is None else _beside_places(bias, places), value)


def _letters(call: Call, channels: int, filters: int) -> tuple[str, str, str]:
    """Channels of the input, both dims of the weight, channels of the result."""
    if call["groups"] == 1:
        return "k", "nk", "n"
    if call["groups"] == channels == filters:  # depthwise: each channel its own filter
        return "c", "c1", "c"
    raise Conflict(
        "AT304",
        f"{call.name} in {call['groups']} groups of channels, of a value that is not whole",
        blame=tuple(v for v in call.values if not v.whole),
    )


def _beside_places(bias: Value, places: int) -> Value:
    """The bias as it broadcasts: channels before the places."""
    return replace(bias, shape=(*bias.shape, *[1] * places))


CONVOLUTIONS = dict.fromkeys(["conv1d", "conv2d", "conv3d"], _convolution)
