"""Layout rules of ops that take a dim apart or put it together: slices, splits, concatenations.

On the sharded dim only whole pieces can be taken: every rank has its part of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from autotp.placement import Layout, Replicate, join_pieces
from autotp.propagate.call import Call, Conflict, Value, normal_dim, over

__all__ = ["SPLITTING", "cut_pieces"]


def cut_pieces(call: Call, value: Value, start: int, stop: int) -> Layout:
    """The layout of elements start…stop of the sharded dim: whole pieces only."""
    assert value.shard is not None
    inside, offset = [], 0
    pieces = value.shard.pieces(value.shape[value.shard.dim])
    for size, dealt in pieces:
        if start <= offset and offset + size <= stop:
            inside.append((size, dealt))
        offset += size
    if sum(size for size, _ in inside) != stop - start or not inside:
        borders = ", ".join(map(str, accumulate(size for size, _ in pieces)))
        raise Conflict(
            "AT309",
            f"{call.name} takes elements {start}:{stop} of a dim of {value.shape[value.shard.dim]} that is "
            f"sharded in {len(pieces)} section{'s' * (len(pieces) > 1)}: it cuts across the ranks' parts",
            blame=(value,),
            notes=(f"{value}; its sections end at {borders}",),
        )
    return join_pieces(value.shard.dim, inside)


def _elsewhere(call: Call, value: Value, dim: int | None = None) -> bool:
    """Whether the op works on another dim than the sharded one."""
    dim = call["dim"] if dim is None else dim
    return value.shard is None or normal_dim(dim or 0, value.rank) != value.shard.dim


def _slice(call: Call) -> Layout:
    value: Value = call["self"]
    if _elsewhere(call, value):
        return value.layout
    assert value.shard is not None
    size, step = value.shape[value.shard.dim], call["step"] or 1
    start, stop, _ = slice(call["start"], call["end"], step).indices(size)
    if step != 1:
        return _strided(call, value, start, stop, step)
    return value.layout if (start, stop) == (0, size) else cut_pieces(call, value, start, max(start, stop))


def _strided(call: Call, value: Value, start: int, stop: int, step: int) -> Layout:
    """Every `step`-th element (interleaved pairs): each rank's part must begin at a multiple of the step."""
    assert value.shard is not None
    size = value.shape[value.shard.dim]
    pieces = value.shard.pieces(size)
    aligned = all((n if dealt is None else n // dealt.units) % step == 0 for n, dealt in pieces)
    if not aligned or start >= step or (call["start"] or 0) < 0 or stop != size:
        raise over(call, value, f"with step {step}")
    return join_pieces(value.shard.dim, [(n // step, dealt) for n, dealt in pieces])


def _narrow(call: Call) -> Layout:
    value: Value = call["self"]
    if _elsewhere(call, value):
        return value.layout
    assert value.shard is not None
    start = call["start"] % value.shape[value.shard.dim] if call["start"] else 0
    return cut_pieces(call, value, start, start + call["length"])


def _select(call: Call) -> Layout:
    value: Value = call["self"]
    if value.shard is None:
        return value.layout
    if not _elsewhere(call, value):
        raise over(call, value, f"takes element {call['index']}")
    return value.shard.at(value.shard.dim - (normal_dim(call["dim"], value.rank) < value.shard.dim))


def _unbind(call: Call) -> list[Layout]:
    value: Value = call["self"]
    if value.shard is None:
        return [value.layout] * len(call.results)
    if not _elsewhere(call, value):
        raise over(call, value, "takes single elements")
    dim = normal_dim(call["dim"] or 0, value.rank)
    return [value.shard.at(value.shard.dim - (dim < value.shard.dim))] * len(call.results)


_BY_NUMBER = ("split_size", "chunks", "sections")  # one number says where to split


def _split(call: Call) -> list[Layout]:
    value: Value = call["self"]
    if _elsewhere(call, value):
        return [value.layout] * len(call.results)
    assert value.shard is not None
    found: list[Layout] = []
    start = 0
    for shape in call.results:
        found.append(cut_pieces(call, value, start, start + shape[value.shard.dim]))
        start += shape[value.shard.dim]
    by_number = any(isinstance(call[n], int) for n in _BY_NUMBER)
    if (by_number and len(set(found)) > 1) or len(found) != (call["chunks"] or len(found)):
        raise Conflict(
            "AT309",
            f"{call.name} into parts that are not alike, of a sharded dim: a rank would split elsewhere",
            blame=(value,),
            notes=(f"{value}", f"the parts: {', '.join(str(s[value.shard.dim]) for s in call.results)}"),
        )
    return found


def _glu(call: Call) -> Layout:
    """The first half times the sigmoid of the second: both halves cut alike."""
    value: Value = call["self"]
    if value.partial:
        raise Conflict("AT310", f"{call.name} of a sum whose parts are still on the ranks", blame=(value,))
    if _elsewhere(call, value):
        return value.layout
    assert value.shard is not None
    half = value.shape[value.shard.dim] // 2
    first, second = cut_pieces(call, value, 0, half), cut_pieces(call, value, half, 2 * half)
    if first != second:
        raise over(call, value, "pairs two halves that are cut differently")
    return first


# -- put together


def _joined(call: Call, dim: int, values: Sequence[Value], *, new: bool) -> Layout:
    """Concatenation (`new` False) or stacking on a new dim of values of which one at least is sharded."""
    first = next(v for v in values if not v.whole)
    if first.partial:
        if all(v.partial for v in values):
            return first.layout
        raise Conflict(
            "AT310",
            f"{call.name} of a sum whose parts are still on the ranks with a value that is not",
            blame=(first,),
        )
    assert first.shard is not None
    if not new and first.shard.dim == dim:
        return _in_a_row(call, dim, values, first)
    for value in values:
        if value.whole:
            raise Conflict(
                "AT306",
                f"{call.name}: {value.name} is whole, with {value.shape[first.shard.dim]} elements on the "
                f"dim that is sharded in {first.name}",
                blame=(first,),
                notes=(f"{first}", f"{value}"),
            )
        if value.layout != first.layout:
            raise Conflict(
                "AT307",
                f"{call.name} of two values that are cut differently over the ranks",
                blame=(value, first),
                notes=(f"{first}", f"{value}"),
            )
    return first.shard.at(first.shard.dim + (new and first.shard.dim >= dim))


def _in_a_row(call: Call, dim: int, values: Sequence[Value], first: Value) -> Layout:
    pieces: list[Any] = []
    for value in values:
        if value.shard is None or value.shard.dim != dim:
            raise Conflict(
                "AT306",
                f"{call.name}: {value.name} is whole and is joined to the sharded dim of {first.name}",
                blame=(first,),
                notes=(f"{first}", f"{value}"),
            )
        pieces += value.shard.pieces(value.shape[dim])
    joined = join_pieces(dim, pieces)
    assert not isinstance(joined, Replicate)
    return joined


def _cat(call: Call) -> Layout:
    # The legacy empty tensor of a cache's first step joins anything.
    values = [v for v in call["tensors"] if v.shape != (0,) or not v.whole]
    return _joined(call, normal_dim(call["dim"] or 0, len(call.shape)), values, new=False)


def _stack(call: Call) -> Layout:
    return _joined(call, normal_dim(call["dim"] or 0, len(call.shape)), call["tensors"], new=True)


SPLITTING = {
    "slice": _slice,
    "narrow": _narrow,
    "narrow_copy": _narrow,
    "select": _select,
    "unbind": _unbind,
    **dict.fromkeys(["split", "split_with_sizes", "chunk", "tensor_split"], _split),
    **dict.fromkeys(["unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes"], _split),
    "glu": _glu,
    "cat": _cat,
    "concat": _cat,
    "concatenate": _cat,
    "stack": _stack,
}
