"""Layouts to try, and what each rank holds of a value: cut here by index lists, not by `autotp.slicing`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from autotp.placement import (
    INVARIANT,
    PARTIAL,
    REPLICATE,
    Deal,
    Joint,
    Layout,
    Partial,
    Replicate,
    Shard,
    deal,
)

__all__ = ["Placed", "cut", "cuts", "indices", "part", "parts", "placements", "sides", "tensor"]

Placed = tuple[Layout, bool]  # a layout, and whether a gradient flows


def tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Random values in 0.2…1.2, safe for logarithms and roots."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.rand(shape, generator=generator, dtype=torch.float64) + 0.2).to(dtype)


def _deals(size: int, tp: int) -> list[Deal]:
    """Every deal of a size's units; over three ranks also two units, of which two ranks hold the same."""
    found = [deal(units, tp) for units in range(tp, size + 1) if size % units == 0]
    if tp == 3 and size % 2 == 0:
        found.append(Deal(2, ((0, 1), (0, 1), (1, 2))))
    return list(dict.fromkeys(found))


def cuts(dim: int, size: int, tp: int) -> Iterator[Shard]:
    """Ways to cut a dim of `size`: every deal, 2 and 3 groups, unequal sections, sections that are whole."""
    for dealt in _deals(size, tp):
        yield Shard(dim, dealt)
    for groups in (2, 3):
        if size % groups == 0:
            for dealt in _deals(size // groups, tp)[:2]:
                yield Shard(dim, dealt, groups)
    first = next((n for n in range(size - 1, tp - 1, -1) if n % tp == 0), 0)
    if first:
        rest = size - first
        yield Shard(dim, sections=((first, deal(tp, tp)), (rest, None)))
        if rest >= tp and rest != first:
            yield Shard(dim, sections=((first, deal(tp, tp)), (rest, deal(rest, tp))))


def placements(value: torch.Tensor, tp: int, *, few: int = 9) -> list[Placed]:
    """Every layout of a tensor that a test tries."""
    differentiable = value.is_floating_point() or value.is_complex()
    shards = [s for dim, size in enumerate(value.shape) for s in _some(list(cuts(dim, size, tp)), few)]
    if not differentiable:
        return [(INVARIANT, False), *((s, False) for s in shards)]
    found: list[Placed] = [(INVARIANT, True), (INVARIANT, False), (REPLICATE, True), (PARTIAL, True)]
    return [*found, *((s, True) for s in shards)]


def _some(shards: list[Shard], few: int) -> list[Shard]:
    """The first, and the last: a plain deal and one with sections."""
    return shards if len(shards) <= few else [*shards[: few - 1], shards[-1]]


def cut(dim: int, units: int = 2, *, tp: int = 2, groups: int = 1) -> Shard:
    """A shard of a dim."""
    return Shard(dim, deal(units, tp), groups)


def indices(shard: Shard, size: int, rank: int) -> torch.Tensor:
    """The elements of the dim that `rank` holds, by their places."""
    pieces = shard.sections or ((size // shard.groups, shard.deal),) * shard.groups
    held: list[int] = []
    offset = 0
    for length, dealt in pieces:
        if dealt is None:
            held += range(offset, offset + length)
        else:
            unit = length // dealt.units
            start, stop = dealt.ranges[rank]
            held += range(offset + start * unit, offset + stop * unit)
        offset += length
    return torch.tensor(held, dtype=torch.long)


def block(layout: Joint, shape: Sequence[int], rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements of both dims that `rank` holds: every pair of them, and no other."""
    units, each = (shape[dim] for dim in layout.dims)
    size = units * each // layout.deal.units
    held = [divmod(place, each) for unit in range(*layout.deal.ranges[rank]) for place in
            range(unit * size, unit * size + size)]  # fmt: skip
    first, second = (sorted({pair[n] for pair in held}) for n in (0, 1))
    assert sorted(held) == [(a, b) for a in first for b in second]
    return torch.tensor(first), torch.tensor(second)


def part(value: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    if isinstance(layout, Joint):
        for dim, held in zip(layout.dims, block(layout, value.shape, rank), strict=True):
            value = value.index_select(dim, held)
        return value
    if not isinstance(layout, Shard):
        return value
    return value.index_select(layout.dim, indices(layout, value.shape[layout.dim], rank))


def parts(value: torch.Tensor, layout: Layout, tp: int) -> list[torch.Tensor]:
    """What each rank holds of an input: its slice, the whole, or a random part of the sum."""
    if isinstance(layout, Partial):
        rest = [tensor(*value.shape, seed=11 + rank, dtype=value.dtype) for rank in range(tp - 1)]
        return [*rest, value - sum(rest)]
    return [part(value, layout, rank) for rank in range(tp)]


def sides(gradient: torch.Tensor, layout: Layout, tp: int) -> list[torch.Tensor]:
    """What each rank has of the gradient of a result with this layout.

    A value that several ranks hold has a part of its gradient on each of them.
    """
    if isinstance(layout, Replicate):
        return parts(gradient, PARTIAL, tp)
    if isinstance(layout, Joint):
        return parts(gradient, layout, tp)
    if not isinstance(layout, Shard):
        return [gradient] * tp
    size = gradient.shape[layout.dim]
    left, sides = gradient.clone(), []
    for rank in range(tp):
        held = indices(layout, size, rank)
        later = torch.cat([indices(layout, size, r) for r in range(rank + 1, tp)] or [held[:0]])
        last = ~torch.isin(held, later)
        rest = left.index_select(layout.dim, held)
        shape = [1] * rest.dim()
        shape[layout.dim] = -1
        side = torch.where(last.view(shape), rest, tensor(*rest.shape, seed=13 + rank, dtype=rest.dtype))
        left.index_add_(layout.dim, held, -side)
        sides.append(side)
    return sides
