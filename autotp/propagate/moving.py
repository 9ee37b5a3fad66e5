"""Layout rules of ops that move elements along dims: flips, rolls, windows, differences, padding, triangles.

They are right on every dim but the sharded one. All are linear but padding with a number.
"""

from __future__ import annotations

from autotp.placement import Layout
from autotp.propagate.call import Call, Conflict, Value, normal_dim, over

__all__ = ["MOVING"]


def _along(call: Call) -> Layout:
    value: Value = call["self"]
    dims = call["dims"] if call["dims"] is not None else call["dim"]
    return _beside(
        call, value, range(value.rank) if dims in (None, []) else [dims] if isinstance(dims, int) else dims
    )


def _beside(call: Call, value: Value, dims: range | list[int]) -> Layout:
    """The layout of an op along `dims`, which must not be the sharded one."""
    if value.shard is not None and value.shard.dim in {normal_dim(d, value.rank) for d in dims}:
        raise over(call, value, "moves elements")
    return value.layout


def _rot90(call: Call) -> Layout:
    return _beside(call, call["self"], call["dims"])


def _difference(call: Call) -> Layout:
    value: Value = call["self"]
    if any(v.layout != value.layout for v in call.values):
        raise Conflict(
            "AT307",
            f"{call.name} with a value before or after that is laid out differently",
            blame=call.values,
            notes=tuple(str(v) for v in call.values),
        )
    return _beside(call, value, [call["dim"]])


def _windows(call: Call) -> Layout:
    """The windows of a dim stand on a new last dim."""
    return _beside(call, call["self"], [call["dimension"]])


def _diagonal(call: Call) -> Layout:
    value: Value = call["self"]
    dims = [normal_dim(call[n], value.rank) for n in ("dim1", "dim2")]
    _beside(call, value, dims)
    return (
        value.layout
        if value.shard is None
        else value.shard.at(value.shard.dim - sum(d < value.shard.dim for d in dims))
    )


def _triangle(call: Call) -> Layout:
    value: Value = call["self"]
    if value.shard is not None and value.shard.dim >= value.rank - 2:
        raise over(call, value, "counts positions")
    return value.layout


def _pad(call: Call) -> Layout:
    value: Value = call["self"]
    if value.partial and call["value"] not in (None, 0, 0.0):
        raise Conflict(
            "AT310",
            f"{call.name} with a constant of a sum whose parts are still on the ranks",
            blame=(value,),
        )
    if value.shard is None:
        return value.layout
    last = 2 * (value.rank - 1 - value.shard.dim)
    if any(call["pad"][last : last + 2]):
        raise over(call, value, "adds elements")
    return value.layout


MOVING = {
    "flip": _along,
    "roll": _along,
    "rot90": _rot90,
    "diff": _difference,
    "unfold": _windows,
    "diagonal": _diagonal,
    "tril": _triangle,
    "triu": _triangle,
    "pad": _pad,
    "constant_pad_nd": _pad,
}
