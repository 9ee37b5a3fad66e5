"""Layout rules of ops that only move elements: views, transposes, splits, slices, concatenations.

A `Shard(dim, deal, groups)` read in row-major order has exactly one number to carry through a view: how
many groups stand in front of the place where the ranks divide the elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autotp.placement import Layout, Replicate, Shard, join_pieces
from autotp.propagate.call import Call, Conflict, Value, needs_copy, normal_dim

__all__ = ["SHAPES", "cut_pieces", "slice_bounds", "view"]


def view(call: Call, value: Value, shape: tuple[int, ...]) -> Layout:
    """The layout of `value` seen as `shape`, elements in the same order."""
    if value.partial or value.shard is None:
        return value.layout
    shard, source = value.shard, value.shape
    if 0 in shape or -1 in shape:
        raise _cuts(call, value, shape)
    if shard.sections is not None:
        for dim, size in enumerate(shape):
            if size == source[shard.dim] and math.prod(shape[:dim]) == math.prod(source[: shard.dim]):
                return shard.at(dim)
        raise _cuts(call, value, shape)
    assert shard.deal is not None
    groups, before = math.prod(source[: shard.dim]) * shard.groups, 1
    for dim, size in enumerate(shape):
        pieces = groups // before
        if size != 1 and groups % before == 0 and size % (pieces * shard.deal.units) == 0:
            return Shard(dim, shard.deal, pieces)
        before *= size
    raise _cuts(call, value, shape)


def _cuts(call: Call, value: Value, shape: tuple[int, ...]) -> Conflict:
    shard = value.shard
    assert shard is not None
    return Conflict(
        "AT308",
        f"{call.name} {list(value.shape)} -> {list(shape)} cuts through a unit (a head or a section): "
        f"no dim of the result can be dealt as {shard}",
        blame=(value,),
        notes=(f"{value}",),
    )


def _view(call: Call) -> Layout:
    return view(call, call["self"], call.shape)


def _transpose(call: Call) -> Layout:
    value: Value = call["self"]
    if value.shard is None:
        return value.layout
    first, second = (normal_dim(call[n], value.rank) for n in ("dim0", "dim1"))
    dim = value.shard.dim
    return value.shard.at(second if dim == first else first if dim == second else dim)


def _reverse(call: Call) -> Layout:
    value: Value = call["self"]
    return value.layout if value.shard is None else value.shard.at(value.rank - 1 - value.shard.dim)


def _adjoint(call: Call) -> Layout:
    value: Value = call["self"]
    if value.shard is None or value.shard.dim < value.rank - 2:
        return value.layout
    return value.shard.at(2 * value.rank - 3 - value.shard.dim)


def _permute(call: Call) -> Layout:
    value: Value = call["self"]
    if value.shard is None:
        return value.layout
    order = [normal_dim(d, value.rank) for d in call["dims"]]
    return value.shard.at(order.index(value.shard.dim))


def _unsqueeze(call: Call) -> Layout:
    value: Value = call["self"]
    if value.shard is None:
        return value.layout
    dim = normal_dim(call["dim"], value.rank + 1)
    return value.shard.at(value.shard.dim + (value.shard.dim >= dim))


def _squeeze(call: Call) -> Layout:
    value: Value = call["self"]
    if value.shard is None:
        return value.layout
    dims = call["dim"]
    chosen = range(value.rank) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {normal_dim(d, value.rank) for d in chosen if value.shape[d] == 1}
    return value.shard.at(value.shard.dim - sum(d < value.shard.dim for d in gone))


def _expand(call: Call) -> Layout:
    value: Value = call["self"]
    if value.shard is None:
        return value.layout
    return value.shard.at(value.shard.dim + len(call.shape) - value.rank)


def _repeat(call: Call) -> Layout:
    value: Value = call["self"]
    if value.shard is None:
        return value.layout
    dim = value.shard.dim + len(call.shape) - value.rank
    if call["repeats"][dim] != 1:
        raise _over(call, value, "repeats")
    return value.shard.at(dim)


def _over(call: Call, value: Value, what: str) -> Conflict:
    assert value.shard is not None
    return Conflict(
        "AT303",
        f"{call.name} {what} over dim {value.shard.dim}, which is sharded: each rank has only its part",
        blame=(value,),
        notes=(f"{value}",),
    )


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
        borders = ", ".join(map(str, _borders([size for size, _ in pieces])))
        raise Conflict(
            "AT309",
            f"{call.name} takes elements {start}:{stop} of a dim of {value.shape[value.shard.dim]} that is "
            f"sharded in {len(pieces)} section{'s' * (len(pieces) > 1)}: it cuts across the ranks' parts",
            blame=(value,),
            notes=(f"{value}; its sections end at {borders}",),
        )
    return join_pieces(value.shard.dim, inside)


def _borders(sizes: Sequence[int]) -> list[int]:
    total, ends = 0, []
    for size in sizes:
        total += size
        ends.append(total)
    return ends


def slice_bounds(call: Call, size: int) -> tuple[int, int]:
    """The (start, stop) of a slice of a dim of `size` elements, as Python counts."""
    start, stop, _ = slice(call["start"], call["end"], 1).indices(size)
    return start, max(start, stop)


def _slice(call: Call) -> Layout:
    value: Value = call["self"]
    if value.shard is None or normal_dim(call["dim"] or 0, value.rank) != value.shard.dim:
        return value.layout
    size = value.shape[value.shard.dim]
    start, stop = slice_bounds(call, size)
    if call["step"] not in (None, 1):
        raise _over(call, value, f"with step {call['step']}")
    return value.layout if (start, stop) == (0, size) else cut_pieces(call, value, start, stop)


def _narrow(call: Call) -> Layout:
    value: Value = call["self"]
    if value.shard is None or normal_dim(call["dim"], value.rank) != value.shard.dim:
        return value.layout
    start = call["start"] % value.shape[value.shard.dim] if call["start"] else 0
    return cut_pieces(call, value, start, start + call["length"])


def _select(call: Call) -> Layout:
    value: Value = call["self"]
    if value.shard is None:
        return value.layout
    dim = normal_dim(call["dim"], value.rank)
    if dim == value.shard.dim:
        raise _over(call, value, f"takes element {call['index']}")
    return value.shard.at(value.shard.dim - (dim < value.shard.dim))


def _split(call: Call) -> list[Layout]:
    value: Value = call["self"]
    count = len(call.results)
    if value.shard is None or normal_dim(call["dim"] or 0, value.rank) != value.shard.dim:
        return [value.layout] * count
    found: list[Layout] = []
    start = 0
    for shape in call.results:
        found.append(cut_pieces(call, value, start, start + shape[value.shard.dim]))
        start += shape[value.shard.dim]
    return found


def _unbind(call: Call) -> list[Layout]:
    return [_select_one(call)] * len(call.results)


def _select_one(call: Call) -> Layout:
    value: Value = call["self"]
    if value.shard is None:
        return value.layout
    dim = normal_dim(call["dim"] or 0, value.rank)
    if dim == value.shard.dim:
        raise _over(call, value, "takes single elements")
    return value.shard.at(value.shard.dim - (dim < value.shard.dim))


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
    for value in values:
        if value.whole:
            if value.shape[first.shard.dim] != 1 or new:
                raise Conflict(
                    "AT306",
                    f"{call.name}: {value.name} is whole, with {value.shape[first.shard.dim]} elements on the "
                    f"dim that is sharded in {first.name}",
                    blame=(first,),
                    notes=(f"{first}", f"{value}"),
                )
            if value.grad:
                raise needs_copy(call, value, first)
        elif value.layout != first.layout:
            raise Conflict(
                "AT307",
                f"{call.name} of two values that are cut differently over the ranks",
                blame=(value, first),
                notes=(f"{first}", f"{value}"),
            )
    return first.shard.at(first.shard.dim + (new and first.shard.dim >= dim))


def _cat(call: Call) -> Layout:
    # The legacy empty tensor of a cache's first step joins anything.
    values = [v for v in call["tensors"] if v.shape != (0,)]
    return _joined(call, normal_dim(call["dim"] or 0, len(call.shape)), values, new=False)


def _stack(call: Call) -> Layout:
    return _joined(call, normal_dim(call["dim"] or 0, len(call.shape)), call["tensors"], new=True)


def _unflatten(call: Call) -> Layout:
    return view(call, call["self"], call.shape)


def _along(call: Call) -> Layout:
    """Ops that move elements along dims: right on every dim but the sharded one."""
    value: Value = call["self"]
    if value.shard is None:
        return value.layout
    dims = call["dims"] if call["dims"] is not None else call["dim"]
    chosen = range(value.rank) if dims in (None, []) else [dims] if isinstance(dims, int) else dims
    if value.shard.dim in {normal_dim(d, value.rank) for d in chosen}:
        raise _over(call, value, "moves elements")
    return value.layout


def _triangle(call: Call) -> Layout:
    value: Value = call["self"]
    if value.shard is not None and value.shard.dim >= value.rank - 2:
        raise _over(call, value, "counts positions")
    return value.layout


def _pad(call: Call) -> Layout:
    value: Value = call["self"]
    if value.partial and call["value"] not in (None, 0, 0.0):
        raise Conflict("AT310", f"{call.name} with a constant of a sum whose parts are still on the ranks", blame=(value,))
    if value.shard is None:
        return value.layout
    last = 2 * (value.rank - 1 - value.shard.dim)
    if any(call["pad"][last : last + 2]):
        raise _over(call, value, "adds elements")
    return value.layout


SHAPES = {
    "view": _view, "reshape": _view, "_unsafe_view": _view, "flatten": _view, "unflatten": _unflatten,
    "view_as": _view, "reshape_as": _view,
    "transpose": _transpose, "swapaxes": _transpose, "swapdims": _transpose,
    "t": _reverse, "numpy_T": _reverse, "mT": _adjoint, "adjoint": _adjoint,
    "permute": _permute, "unsqueeze": _unsqueeze, "squeeze": _squeeze,
    "expand": _expand, "expand_as": _expand, "broadcast_to": _expand, "repeat": _repeat,
    "slice": _slice, "narrow": _narrow, "select": _select,
    "split": _split, "split_with_sizes": _split, "chunk": _split, "tensor_split": _split, "unsafe_split": _split,
    "unsafe_chunk": _split, "unbind": _unbind,
    "cat": _cat, "concat": _cat, "concatenate": _cat, "stack": _stack,
    "flip": _along, "roll": _along, "tril": _triangle, "triu": _triangle, "pad": _pad, "constant_pad_nd": _pad,
}  # fmt: skip
