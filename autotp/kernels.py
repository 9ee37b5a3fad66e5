"""What the mappings do to a rank's tensor: x, the group and how the dim is cut -> the rank's result.

Linear, each with an adjoint among them (`mappings.MAPPINGS` has the pairs). Nothing is written in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autotp.comm import Group
from autotp.comm.group import check_summed, contiguous_copy
from autotp.cut import Cut

__all__ = [
    "Kernel",
    "embed",
    "first",
    "join",
    "join_sum",
    "keep",
    "owned",
    "part",
    "sum_owned",
    "sum_part",
    "sum_shared",
    "total",
    "without_others",
]

Kernel = Callable[[Tensor, Group, Any], Tensor]


def keep(x: Tensor, group: Group, cut: Any) -> Tensor:
    """The value itself."""
    return x


def total(x: Tensor, group: Group, cut: Any) -> Tensor:
    """The sum over the ranks."""
    return group.all_reduce(x)


def first(x: Tensor, group: Group, cut: Any) -> Tensor:
    """The value on rank 0, zeros elsewhere."""
    check_summed(x)  # a term of a sum; the scales of 8-bit floats have no zero
    return contiguous_copy(x) if group.rank == 0 else torch.zeros_like(x)


def part(x: Tensor, group: Group, cut: Cut) -> Tensor:
    """The rank's own elements."""
    rows = [x.narrow(cut.dim, start, stop - start) for start, stop in cut.ranges[group.rank]]
    return contiguous_copy(rows[0]) if len(rows) == 1 else torch.cat(rows, cut.dim)


def owned(x: Tensor, group: Group, cut: Cut) -> Tensor:
    """The rank's own elements, with zeros for those that an earlier rank owns."""
    mine = part(x, group, cut)
    return without_others(mine, group, cut) if cut.shared else mine


def without_others(mine: Tensor, group: Group, cut: Cut) -> Tensor:
    """Zeros for the elements that an earlier rank owns."""
    done = 0
    for start, length, rank, local in cut.pieces():
        if rank == group.rank and start < done:
            mine.narrow(cut.dim, local, length).zero_()
        done = max(done, start + length)
    return mine


def join(x: Tensor, group: Group, cut: Cut) -> Tensor:
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


def join_sum(x: Tensor, group: Group, cut: Cut) -> Tensor:
    """All elements in their original order; those that several ranks hold are summed."""
    return group.all_reduce(embed(x, group, cut)) if cut.shared else join(x, group, cut)


def embed(x: Tensor, group: Group, cut: Cut) -> Tensor:
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


def sum_part(x: Tensor, group: Group, cut: Cut) -> Tensor:
    """The rank's own elements of the sum over the ranks."""
    if not cut.whole:  # bring the elements into rank order
        pieces = [bounds for own in cut.ranges for bounds in own]
        x = torch.cat([x.narrow(cut.dim, start, stop - start) for start, stop in pieces], cut.dim)
    return group.reduce_scatter(x, cut.dim, cut.sizes)


def sum_owned(x: Tensor, group: Group, cut: Cut) -> Tensor:
    """The rank's own elements of the sum, with zeros for those that an earlier rank owns."""
    mine = sum_part(x, group, cut)
    return without_others(mine, group, cut) if cut.shared else mine


def sum_shared(x: Tensor, group: Group, cut: Cut) -> Tensor:
    """The elements that several ranks hold, summed over their holders; the others as they are."""
    shared = cut.shared_pieces()
    if not shared:
        return x
    rows = []
    for start, length in shared:
        local = [own for at, _, rank, own in cut.pieces() if (at, rank) == (start, group.rank)]
        piece = x.narrow(cut.dim, local[0] if local else 0, length if local else 0)
        if not local:
            shape = [*x.shape[: cut.dim], length, *x.shape[cut.dim + 1 :]]
            piece = x.new_zeros(shape)
        rows.append(piece)
    summed = group.all_reduce(torch.cat(rows, cut.dim))
    y = contiguous_copy(x)
    done = 0
    for start, length in shared:
        for at, _, rank, own in cut.pieces():
            if (at, rank) == (start, group.rank):
                y.narrow(cut.dim, own, length).copy_(summed.narrow(cut.dim, done, length))
        done += length
    return y
