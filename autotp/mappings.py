"""The eight mappings between layouts, each a pair of linear kernels that are each other's adjoint.

    mapping         from -> to               forward                        backward
    copy            Invariant -> Replicate   nothing                        all-reduce
    reduce          Partial -> Invariant     all-reduce                     nothing
    gather          Shard -> Invariant       all-gather                     own part
    scatter         Invariant -> Shard       own part                       all-gather
    reduce_scatter  Partial -> Shard         reduce-scatter                 all-gather
    all_gather      Shard -> Replicate       all-gather                     reduce-scatter
    share           Invariant -> Partial     the value on rank 0, 0 else    nothing
    slice           Replicate -> Shard       own part                       own part, 0 elsewhere

After Megatron-LM's f and g (https://arxiv.org/abs/1909.08053) and its sequence-parallel pair
(https://arxiv.org/abs/2205.05198). Backward is the same function with the two kernels swapped, so it can
be differentiated again. Nothing is written in place, and a group of one returns its input untouched.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from autotp.comm import Group, group_of
from autotp.comm.group import contiguous_copy
from autotp.diagnostic import UsageError
from autotp.placement import Shard, deal

__all__ = [
    "MAPPINGS",
    "Cut",
    "all_gather",
    "copy",
    "cut_of",
    "gather",
    "owned",
    "reduce",
    "reduce_scatter",
    "scatter",
    "share",
    "slice",
]

Mesh = Group | DeviceMesh | ProcessGroup | None


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


Kernel = Callable[[Tensor, Group, Any], Tensor]


def _keep(x: Tensor, group: Group, cut: Any) -> Tensor:
    """The value itself."""
    return x


def _total(x: Tensor, group: Group, cut: Any) -> Tensor:
    """The sum over the ranks."""
    return group.all_reduce(x)


def _first(x: Tensor, group: Group, cut: Any) -> Tensor:
    """The value on rank 0, zeros elsewhere."""
    return contiguous_copy(x) if group.rank == 0 else torch.zeros_like(x)


def _part(x: Tensor, group: Group, cut: Cut) -> Tensor:
    """The rank's own elements."""
    rows = [x.narrow(cut.dim, start, stop - start) for start, stop in cut.ranges[group.rank]]
    return contiguous_copy(rows[0]) if len(rows) == 1 else torch.cat(rows, cut.dim)


def _owned(x: Tensor, group: Group, cut: Cut) -> Tensor:
    """The rank's own elements, with zeros for those that an earlier rank owns."""
    part = _part(x, group, cut)
    return _without_others(part, group, cut) if cut.shared else part


def _without_others(part: Tensor, group: Group, cut: Cut) -> Tensor:
    """Zeros for the elements that an earlier rank owns."""
    done = 0
    for start, length, rank, local in cut.pieces():
        if rank == group.rank and start < done:
            part.narrow(cut.dim, local, length).zero_()
        done = max(done, start + length)
    return part


def _join(x: Tensor, group: Group, cut: Cut) -> Tensor:
    """All elements in their original order, each from its owner."""
    every = group.all_gather(x, cut.dim, cut.sizes)
    if cut.whole:
        return every
    offsets = [sum(cut.sizes[:rank]) for rank in range(len(cut.sizes))]
    rows, done = [], 0
    for start, length, rank, local in cut.pieces():
        if start >= done:
            rows.append(every.narrow(cut.dim, offsets[rank] + local, length))
            done = start + length
    return torch.cat(rows, cut.dim)


def _join_sum(x: Tensor, group: Group, cut: Cut) -> Tensor:
    """All elements in their original order; those that several ranks hold are summed."""
    return group.all_reduce(_embed(x, group, cut)) if cut.shared else _join(x, group, cut)


def _embed(x: Tensor, group: Group, cut: Cut) -> Tensor:
    """The rank's own elements in their places of the whole dim, zeros elsewhere."""
    shape = list(x.shape)
    shape[cut.dim] = cut.size
    whole = x.new_zeros(shape)
    local = 0
    for start, stop in cut.ranges[group.rank]:
        length = stop - start
        whole.narrow(cut.dim, start, length).copy_(x.narrow(cut.dim, local, length))
        local += length
    return whole


def _sum_part(x: Tensor, group: Group, cut: Cut) -> Tensor:
    """The rank's own elements of the sum over the ranks."""
    if not cut.whole:  # bring the elements into rank order
        pieces = [bounds for own in cut.ranges for bounds in own]
        x = torch.cat([x.narrow(cut.dim, start, stop - start) for start, stop in pieces], cut.dim)
    return group.reduce_scatter(x, cut.dim, cut.sizes)


def _sum_owned(x: Tensor, group: Group, cut: Cut) -> Tensor:
    """The rank's own elements of the sum, with zeros for those that an earlier rank owns."""
    part = _sum_part(x, group, cut)
    return _without_others(part, group, cut) if cut.shared else part


@dataclass(frozen=True)
class Mapping:
    """One row of the table: from one layout to another, by `forward`; gradients go by `backward`."""

    source: str
    target: str
    forward: Kernel
    backward: Kernel


MAPPINGS: dict[str, Mapping] = {
    "copy": Mapping("Invariant", "Replicate", _keep, _total),
    "reduce": Mapping("Partial", "Invariant", _total, _keep),
    "gather": Mapping("Shard", "Invariant", _join, _owned),
    "scatter": Mapping("Invariant", "Shard", _part, _join_sum),
    "reduce_scatter": Mapping("Partial", "Shard", _sum_part, _join_sum),
    "all_gather": Mapping("Shard", "Replicate", _join, _sum_owned),
    "share": Mapping("Invariant", "Partial", _first, _keep),
    "slice": Mapping("Replicate", "Shard", _part, _embed),
}


class _Linear(torch.autograd.Function):
    """y = there(x), with dx = back(dy); `there` and `back` are adjoint, so dx is the same the other way."""

    @staticmethod
    def forward(x: Tensor, there: Kernel, back: Kernel, group: Group, cut: Cut | None) -> Tensor:
        return there(x, group, cut)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.there, ctx.back, ctx.group, ctx.cut = inputs

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        dx = _Linear.apply(dy, ctx.back, ctx.there, ctx.group, ctx.cut)  # type: ignore[no-untyped-call]
        return dx, None, None, None, None


def _apply(name: str, x: Tensor, group: Group, cut: Cut | None) -> Tensor:
    """Map `x`; a value without a gradient needs no node in the graph."""
    row = MAPPINGS[name]
    y: Tensor = _Linear.apply(x, row.forward, row.backward, group, cut)  # type: ignore[no-untyped-call]
    return y


def _whole_cut(name: str, x: Tensor, group: Group, dim: int | None, shard: Shard | None) -> Cut:
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


def _local_cut(name: str, x: Tensor, group: Group, dim: int | None, shard: Shard | None) -> Cut:
    """How the whole dim is cut of which `x` holds this rank's part."""
    dim = _checked_dim(name, x, dim, shard)
    local = x.shape[dim]
    if shard is None:
        if local == 0:
            raise UsageError(f"{name} on dim {dim}: its size is 0 on each of {group.size} ranks")
        return cut_of(Shard(dim, deal(local * group.size, group.size)), local * group.size, dim)
    _check_ranks(name, shard, group)
    size = _whole_size(shard, local, group.rank)
    if size is None or not shard.fits(size) or shard.local_size(size, group.rank) != local:
        raise UsageError(
            f"{name} on dim {dim}: its local size {local} is not a part of {shard} "
            f"on rank {group.rank} of {group.size}"
        )
    return cut_of(shard, size, dim)


def _whole_size(shard: Shard, local: int, rank: int) -> int | None:
    """The size of a dim of which `rank` holds `local` elements."""
    if shard.deal is None:
        return sum(size for size, _ in shard.pieces(0))
    start, stop = shard.deal.ranges[rank]
    size, rest = divmod(local * shard.deal.units, max(stop - start, 1))
    return None if rest or stop == start else size


def _checked_dim(name: str, x: Tensor, dim: int | None, shard: Shard | None) -> int:
    if dim is None:
        dim = -1 if shard is None else shard.dim
    if not -x.ndim <= dim < x.ndim:
        raise UsageError(f"{name} on dim {dim}: the value has {x.ndim} dims")
    return dim % x.ndim


def _check_ranks(name: str, shard: Shard, group: Group) -> None:
    if shard.tp != group.size:
        raise UsageError(f"{name}: {shard} is for {shard.tp} ranks, the group has {group.size}")


def owned(x: Tensor, group: Group, *, shard: Shard) -> Tensor:
    """This rank's part `x` of a sharded value, with zeros for the elements that an earlier rank holds too.

    For what counts every element of the whole once. No communication; without shared elements `x` itself.
    """
    cut = _local_cut("owned", x, group, None, shard)
    return _without_others(contiguous_copy(x), group, cut) if cut.shared else x


def copy(x: Tensor, group: Mesh = None) -> Tensor:
    """`x`, the same on every rank, for use by each rank's own part of a computation.

    Its gradient is summed over the ranks. No communication in forward.

    >>> copy(torch.ones(2)).tolist()
    [1.0, 1.0]
    """
    group = group_of(group)
    return x if group.size == 1 else _apply("copy", x, group, None)


def reduce(x: Tensor, group: Mesh = None) -> Tensor:
    """The sum of the ranks' `x`, the same on every rank. The gradient is passed on unchanged."""
    group = group_of(group)
    return x if group.size == 1 else _apply("reduce", x, group, None)


def share(x: Tensor, group: Mesh = None) -> Tensor:
    """`x`, the same on every rank, as a term of a sum over the ranks: whole on rank 0, zeros elsewhere.

    For a bias or residual that is added before a `reduce`. Its gradient is whole on every rank.
    """
    group = group_of(group)
    return x if group.size == 1 else _apply("share", x, group, None)


def gather(x: Tensor, group: Mesh = None, *, dim: int | None = None, shard: Shard | None = None) -> Tensor:
    """The whole value, of which each rank holds the part `x`: [XX, XX] -> XXXX on every rank.

    `shard` says how the whole was cut: uneven parts, sections that are brought back into their original
    order. Without it all parts have the size of this one. `dim` is the cut dim of `x`; the default is
    the shard's dim, or the last without a shard. Any dtype.

    Raises UsageError when the local size is no part of `shard`, or for a dim that `x` has not.
    """
    group = group_of(group)
    if group.size == 1:
        return x
    return _apply("gather", x, group, _local_cut("gather", x, group, dim, shard))


def all_gather(
    x: Tensor, group: Mesh = None, *, dim: int | None = None, shard: Shard | None = None
) -> Tensor:
    """As `gather`, for use by each rank's own part of a computation: the gradient is reduce-scattered."""
    group = group_of(group)
    if group.size == 1:
        return x
    return _apply("all_gather", x, group, _local_cut("all_gather", x, group, dim, shard))


def scatter(x: Tensor, group: Mesh = None, *, dim: int | None = None, shard: Shard | None = None) -> Tensor:
    """This rank's part of `x`, which is the same on every rank: XXXX -> [XX, XX].

    `shard` says how to cut; without it `dim` (default: the last) is cut into one part a rank, the first
    ranks holding one more where it does not divide. The gradient is gathered on the same dim.

    Raises UsageError when the dim has fewer elements than there are ranks, or does not fit `shard`.
    """
    group = group_of(group)
    if group.size == 1:
        return x
    return _apply("scatter", x, group, _whole_cut("scatter", x, group, dim, shard))


def slice(x: Tensor, group: Mesh = None, *, dim: int | None = None, shard: Shard | None = None) -> Tensor:
    """As `scatter`, of a value whose gradient is summed elsewhere (a `copy` before it): no communication."""
    group = group_of(group)
    if group.size == 1:
        return x
    return _apply("slice", x, group, _whole_cut("slice", x, group, dim, shard))


def reduce_scatter(
    x: Tensor, group: Mesh = None, *, dim: int | None = None, shard: Shard | None = None
) -> Tensor:
    """This rank's part of the sum of the ranks' `x`. The gradient is gathered."""
    group = group_of(group)
    if group.size == 1:
        return x
    return _apply("reduce_scatter", x, group, _whole_cut("reduce_scatter", x, group, dim, shard))
