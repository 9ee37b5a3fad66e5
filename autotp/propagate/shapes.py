"""Layout rules of ops that give the same elements another shape: views, transposes, expansions.

A `Shard(dim, deal, groups)` read in row-major order has exactly one number to carry through a view: how
many groups stand in front of the place where the ranks divide the elements.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autotp.placement import Deal, Joint, Layout, Shard, join_pieces
from autotp.propagate.call import Call, Conflict, Value, normal_dim, over
from autotp.propagate.joint import expanded, repeats, split_jointly
from autotp.propagate.pointwise import expand_as

__all__ = ["SHAPES", "VIEWS", "repeated", "view"]


def view(call: Call, value: Value, shape: tuple[int, ...]) -> Layout:
    """The layout of `value` seen as `shape`, elements in the same order."""
    if isinstance(value.layout, Joint):
        return view(call, _flat(call, value), shape)
    if value.shard is None:
        return value.layout
    source, seen = _filled(value.shape, shape)
    known = 0 not in seen and -1 not in seen
    found: Layout | None = _seen_as(value.shard, source, seen) if known else None
    if found is None and known:
        found = _seen_jointly(value.shard, source, seen)
    if found is None or (isinstance(found, Shard) and shape[found.dim] == 0):
        raise Conflict(
            "AT308",
            f"{call.name} {list(value.shape)} -> {list(shape)} cuts through a unit (a head or a section): "
            f"no dim of the result can be dealt as {value.shard}",
            blame=(value,),
            notes=(f"{value}",),
        )
    return found


def _filled(source: tuple[int, ...], shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of a view of an empty value, with sizes in the place of the 0 that keep it a view.

    >>> _filled((0, 9, 48), (0, 6, 8))
    ((48, 9, 48), (432, 6, 8))
    """
    if source.count(0) != 1 or shape.count(0) != 1 or -1 in shape:
        return source, shape
    rows = math.prod(size for size in shape if size), math.prod(size for size in source if size)
    return tuple(size or rows[0] for size in source), tuple(size or rows[1] for size in shape)


def _seen_as(shard: Shard, source: tuple[int, ...], shape: tuple[int, ...]) -> Shard | None:
    if shard.sections is not None:
        return _sections_seen_as(shard, source, shape)
    assert shard.deal is not None
    groups, before = math.prod(source[: shard.dim]) * shard.groups, 1
    for dim, size in enumerate(shape):
        pieces = groups // before
        if size != 1 and groups % before == 0 and size % (pieces * shard.deal.units) == 0:
            return Shard(dim, shard.deal, pieces)
        before *= size
    return None


def _flat(call: Call, value: Value) -> Value:
    """A joint value with its two dims as one."""
    assert isinstance(value.layout, Joint)
    first, second = value.layout.dims
    if second != first + 1:
        raise Conflict(
            "AT308",
            f"{call.name} of heads and their repeats, which are dealt together and do not stand side by side",
            blame=(value,),
            notes=(f"{value}",),
        )
    units, each = value.shape[first], value.shape[second]
    shape = (*value.shape[:first], units * each, *value.shape[second + 1 :])
    return replace(value, shape=shape, layout=Shard(first, value.layout.deal))


def _seen_jointly(shard: Shard, source: tuple[int, ...], shape: tuple[int, ...]) -> Joint | None:
    """Query heads seen as (kv heads that ranks share, queries of each): one dim becomes two."""
    for dim in range(len(shape) - 1):
        merged = (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])
        found = _seen_as(shard, source, merged)
        if found is not None and found.dim == dim:
            jointly = split_jointly(found, shape)
            if jointly is not None:
                return jointly
    return None


def _sections_seen_as(shard: Shard, source: tuple[int, ...], shape: tuple[int, ...]) -> Shard | None:
    """Unequal sections keep what stands before their dim: (.., heads*d) -> (.., heads, d) and back."""
    assert shard.sections is not None
    size, front = source[shard.dim], math.prod(source[: shard.dim])
    for dim, seen in enumerate(shape):
        if seen == 1 or math.prod(shape[:dim]) != front:
            continue
        sections = tuple((n * seen // size, dealt) for n, dealt in shard.sections)
        whole_units = all(n * seen % size == 0 for n, _ in shard.sections)
        found = Shard(dim, sections=sections)
        return found if whole_units and found.fits(seen) else None
    return None


def _view(call: Call) -> Layout:
    return view(call, call["self"], call.shape)


def _view_as(call: Call) -> Layout:
    """The second value gives only its shape; on a rank it is the local one."""
    value, other = call["self"], call["other"]
    found = _view(call)
    if found != other.layout and any(isinstance(x, (Shard, Joint)) for x in (found, other.layout)):
        raise Conflict(
            "AT307",
            f"{call.name} of two values that are cut differently over the ranks",
            blame=tuple(call.sharded()),
            notes=(f"{value}", f"{other}"),
        )
    return found


# -- dims change places


def _order(call: Call, value: Value) -> list[int]:
    """For each dim of the result, the dim of the value that it is."""
    dims = list(range(value.rank))
    if call.name in ("transpose", "swapaxes", "swapdims"):
        names = ("axis0", "axis1") if call.name == "swapaxes" else ("dim0", "dim1")
        first, second = (normal_dim(call[n], value.rank) for n in names)
        dims[first], dims[second] = second, first
    elif call.name == "permute":
        dims = [normal_dim(d, value.rank) for d in call["dims"]]
    elif call.name in ("movedim", "moveaxis"):
        dims = _moved(call["source"], call["destination"], value.rank)
    elif call.name in ("mT", "mH", "adjoint"):
        dims[-2:] = dims[:-3:-1]
    else:  # t, numpy_T, matrix_H
        dims.reverse()
    return dims


def _moved(source: int | list[int], destination: int | list[int], rank: int) -> list[int]:
    pairs = zip(
        *([d % rank for d in ([x] if isinstance(x, int) else x)] for x in (source, destination)), strict=True
    )
    placed = {to: came for came, to in pairs}
    rest = iter(d for d in range(rank) if d not in placed.values())
    return [placed[d] if d in placed else next(rest) for d in range(rank)]


def _reordered(call: Call) -> Layout:
    value: Value = call["self"]
    return value.layout if value.shard is None else value.shard.at(_order(call, value).index(value.shard.dim))


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
    dims, dim = call["dim"], value.shard.dim
    chosen = {
        normal_dim(d, value.rank)
        for d in (range(value.rank) if dims is None else [dims] if isinstance(dims, int) else dims)
    }
    held = (value.shard.local_size(value.shape[dim], rank) for rank in range(value.shard.tp))
    if dim in chosen and 1 in held:
        raise over(call, value, "drops a dim")
    return value.shard.at(dim - sum(d < dim and value.shape[d] == 1 for d in chosen))


# -- elements stand several times


def _expand(call: Call) -> Layout:
    value: Value = call["self"]
    if value.shard is None:
        return value.layout
    jointly = expanded(value.shard, value.shape, call.shape)
    return jointly or value.shard.at(value.shard.dim + len(call.shape) - value.rank)


def _repeat(call: Call) -> Layout:
    """Whole copies one after the other: so many times the pieces."""
    value: Value = call["self"]
    if value.shard is None:
        return value.layout
    dim = value.shard.dim + len(call.shape) - value.rank
    size = value.shape[value.shard.dim]
    found = join_pieces(dim, value.shard.pieces(size) * (call.shape[dim] // size))
    assert isinstance(found, Shard)
    return found


def repeated(shard: Shard, times: int) -> Shard:
    """The layout of a dim of which every element stands `times` times in a row."""
    if shard.sections is None:
        return shard
    sections: tuple[tuple[int, Deal | None], ...] = tuple((n * times, dealt) for n, dealt in shard.sections)
    return Shard(shard.dim, sections=sections)


def _repeat_interleave(call: Call) -> Layout:
    value: Value = call["self"] if call["self"] is not None else call["repeats"]
    times, dim = call["repeats"], call["dim"]
    counted = isinstance(times, Value)
    if (counted and not times.whole) or value.shard is None:
        if counted and not times.whole:
            raise Conflict("AT304", f"{call.name} with counts that are not whole", blame=(times,))
        return value.layout
    if dim is None:
        flat = (math.prod(value.shape),)
        shard = view(call, value, flat)
        assert isinstance(shard, Shard)
    else:
        shard = value.shard
    if dim is None or normal_dim(dim, value.rank) == shard.dim:
        if counted:
            raise over(call, value, "repeats by a tensor of counts")
        dealt = None if dim is None else repeats(shard, value.shape, times)
        return Shard(shard.dim, dealt) if dealt is not None else repeated(shard, times)
    return shard


VIEWS = {
    **dict.fromkeys(["view", "reshape", "_unsafe_view", "flatten", "unflatten", "ravel"], _view),
    **dict.fromkeys(["view_as", "reshape_as"], _view_as),
}
SHAPES = {
    **VIEWS,
    **dict.fromkeys(["transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis"], _reordered),
    **dict.fromkeys(["t", "numpy_T", "matrix_H", "mT", "mH", "adjoint"], _reordered),
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "broadcast_to": _expand,
    "expand_as": expand_as,
    "repeat": _repeat,
    "tile": _repeat,
    "repeat_interleave": _repeat_interleave,
}
