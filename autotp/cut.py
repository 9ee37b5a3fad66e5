"""Which elements of a dim each rank holds: a shard, worked out for one size.

Shard(0, deal(4, 2), groups=2) on 8 elements   AAAABBBB -> [AABB, AABB]
    ranges   ((0, 2), (4, 6)), ((2, 4), (6, 8))      of rank 0, of rank 1
    sizes    4, 4
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from autotp.comm import Group
from autotp.diagnostic import UsageError
from autotp.placement import Shard, deal

__all__ = ["Cut", "cut_of", "local_cut", "whole_cut"]


@dataclass(frozen=True)
class Cut:
    """Which elements of a dim of `size` each rank holds: `ranges[rank]` in order.

    `whole` says that the ranks' parts in rank order are the dim itself; `shared` that some element is
    held by more than one rank (its owner is the first of them).
    """

    dim: int
    size: int
    ranges: tuple[tuple[tuple[int, int], ...], ...]
    sizes: tuple[int, ...]
    whole: bool
    shared: bool

    def pieces(self) -> list[tuple[int, int, int, int]]:
        """(start in the dim, length, rank, start in the rank's part) of every piece, by start and rank."""
        found = []
        for rank, ranges in enumerate(self.ranges):
            local = 0
            for start, stop in ranges:
                if stop > start:
                    found.append((start, stop - start, rank, local))
                local += stop - start
        return sorted(found)

    def shared_pieces(self) -> list[tuple[int, int]]:
        """(start in the dim, length) of the pieces that several ranks hold."""
        if not self.shared:
            return []
        holders: dict[tuple[int, int], int] = {}
        for start, length, _, _ in self.pieces():
            holders[start, length] = holders.get((start, length), 0) + 1
        return [piece for piece, count in sorted(holders.items()) if count > 1]


def cut_of(shard: Shard, size: int, dim: int) -> Cut:
    """The cut of a dim of `size` elements by `shard`, on `dim` of the value (0 … ndim - 1)."""
    ranges = tuple(tuple(shard.ranges(size, rank)) for rank in range(shard.tp))
    sizes = tuple(shard.local_size(size, rank) for rank in range(shard.tp))
    flat = [bounds for own in ranges for bounds in own if bounds[1] > bounds[0]]
    return Cut(
        dim=dim,
        size=size,
        ranges=ranges,
        sizes=sizes,
        whole=all(a[1] == b[0] for a, b in itertools.pairwise(flat)),
        shared=sum(sizes) > size,
    )


def whole_cut(name: str, x: Tensor, group: Group, dim: int | None, shard: Shard | None) -> Cut:
    """How a whole dim of `x` is cut."""
    dim = _checked_dim(name, x, dim, shard)
    size = x.shape[dim]
    if shard is None:
        if size < group.size:
            raise UsageError(f"{name} on dim {dim}: its size {size} is less than the {group.size} ranks")
        shard = Shard(dim, deal(size, group.size))
    _check_ranks(name, shard, group)
    if not shard.fits(size):
        raise UsageError(f"{name} on dim {dim}: its size {size} does not fit {shard} over {group.size} ranks")
    return cut_of(shard, size, dim)


def local_cut(name: str, x: Tensor, group: Group, dim: int | None, shard: Shard | None) -> Cut:
    """How the whole dim is cut of which `x` holds this rank's part."""
    dim = _checked_dim(name, x, dim, shard)
    local = x.shape[dim]
    if shard is None:
        sizes = _everyones(x, group, dim)
        if not any(sizes):
            raise UsageError(f"{name} on dim {dim}: its size is 0 on each of {group.size} ranks")
        ends = list(itertools.accumulate(sizes, initial=0))
        ranges = tuple((bounds,) for bounds in itertools.pairwise(ends))
        return Cut(dim, ends[-1], ranges, sizes, whole=True, shared=False)
    _check_ranks(name, shard, group)
    size = _whole_size(shard, local, group.rank)
    if size is None or not shard.fits(size) or shard.local_size(size, group.rank) != local:
        raise UsageError(
            f"{name} on dim {dim}: its local size {local} is not a part of {shard} "
            f"on rank {group.rank} of {group.size}"
        )
    return cut_of(shard, size, dim)


def _everyones(x: Tensor, group: Group, dim: int) -> tuple[int, ...]:
    """Every rank's size of a dim. Where no number can be asked for (compiled code, a tensor without values)
    it is this one's."""
    if torch.compiler.is_compiling() or x.is_meta or type(x) not in (Tensor, torch.nn.Parameter):
        return (x.shape[dim],) * group.size
    mine = torch.tensor([x.shape[dim]], device=x.device)
    return tuple(group.all_gather(mine, 0, [1] * group.size).tolist())


def _whole_size(shard: Shard, local: int, rank: int) -> int | None:
    """The size of a dim of which `rank` holds `local` elements."""
    if shard.deal is None:
        return sum(size for size, _ in shard.pieces(0))
    start, stop = shard.deal.ranges[rank]
    size, rest = divmod(local * shard.deal.units, max(stop - start, 1))
    return None if rest or stop == start else size


def _checked_dim(name: str, x: Tensor, dim: int | None, shard: Shard | None) -> int:
    if not isinstance(x, Tensor):
        raise UsageError(f"{name}: a tensor is mapped, not {type(x).__name__}")
    if not isinstance(shard, Shard | None):
        raise UsageError(f"{name}: shard={shard!r} is no Shard")
    if dim is None:
        dim = -1 if shard is None else shard.dim
    if type(dim) is not int:
        raise UsageError(f"{name}: dim={dim!r} is no dim of a tensor")
    if not -x.ndim <= dim < x.ndim:
        raise UsageError(f"{name} on dim {dim}: the value has {x.ndim} dims")
    return dim % x.ndim


def _check_ranks(name: str, shard: Shard, group: Group) -> None:
    if shard.tp != group.size:
        raise UsageError(f"{name}: {shard} is for {shard.tp} ranks, the group has {group.size}")
