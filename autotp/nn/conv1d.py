"""transformers' Conv1D, a linear layer whose weight is [in, out], cut by output or by input features.

    column   x (..., in)    -> copy -> addmm -> y (..., out/tp)  [-> gather -> (..., out)]
    row      x (..., in/tp) -> addmm -> reduce -> + bias -> y (..., out)   [scatter first for a whole x]

The same as `autotp.nn.linear`, for GPT-2 and its kin. They are made from a live layer only (`adopt`), and
need transformers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from autotp import mappings
from autotp.comm import Group, group_of
from autotp.cut import cut_of
from autotp.diagnostic import UsageError
from autotp.mappings import Mesh
from autotp.nn.product import column_product, row_product
from autotp.nn.shared import SharedCopy
from autotp.part_guard import refuse_other
from autotp.placement import Shard

__all__ = ["ColumnParallelConv1D", "RowParallelConv1D"]


class _ParallelConv1D(Conv1D):  # type: ignore[misc]
    """What both have: a group, and a cut of the weight [in, out]; `nx` and `nf` are of the whole layer."""

    group: Group
    shard: Shard
    held: int
    """How many elements of the cut dim this rank holds."""
    layouts: dict[str, Shard]
    """How each parameter is cut, by its name; a parameter that is not there is whole on every rank."""

    @classmethod
    def _adopt(cls, module: Any, *, shard: Shard, group: Mesh, dim: int) -> None:
        if type(module) is not Conv1D:
            raise UsageError(f"{cls.__name__} takes the place of a Conv1D, not of {type(module).__name__}")
        ranks, size = group_of(group), (module.nx, module.nf)[dim]
        if shard.dim != dim or shard.tp != ranks.size or not shard.fits(size):
            raise UsageError(
                f"{cls.__name__}: {shard} is no cut of dim {dim} of the weight, {size} elements over "
                f"{ranks.size} ranks"
            )
        module.__class__ = cls
        module.group, module.shard, module.layouts = ranks, shard, {"weight": shard}
        module.held = shard.local_size(size, ranks.rank)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(nf={self.nf}, nx={self.nx}, tp={self.group.size})"


class ColumnParallelConv1D(_ParallelConv1D):
    """y = x W + b with W [in, out] and b [out] cut by output features.

    x (..., in) is the same on all ranks; y is (..., out/tp), or (..., out) with `gather_output`.

    >>> import torch
    >>> from autotp.placement import deal
    >>> layer = Conv1D(6, 4)
    >>> ColumnParallelConv1D.adopt(layer, shard=Shard(1, deal(6, 1)), group=None)
    >>> layer(torch.ones(2, 4)).shape
    torch.Size([2, 6])
    """

    gather_output: bool
    copy_input: bool | SharedCopy
    shares: bool
    """Whether some columns are held by several ranks, as kv heads are when there are fewer than ranks."""

    @classmethod
    def adopt(
        cls,
        module: nn.Module,
        *,
        shard: Shard,
        group: Mesh,
        gather_output: bool = False,
        copy_input: bool | SharedCopy = True,
    ) -> None:
        """Turn a Conv1D into this class in place; hooks, identity and parameters stay.

        `shard` cuts dim 1 of the weight, and the bias alike; the caller slices them. `copy_input` may be a
        copy that several layers share; with False the input's gradient is summed elsewhere.

        Raises UsageError, with the module as it was, for another class than Conv1D, whose forward might
        differ, and for a shard of another dim, size or number of ranks.
        """
        cls._adopt(module, shard=shard, group=group, dim=1)
        assert isinstance(module, ColumnParallelConv1D)
        module.layouts["bias"] = shard.at(0)
        module.gather_output, module.copy_input = gather_output, copy_input
        module.shares = cut_of(shard, module.nf, 1).shared

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out/tp), or (..., out) with `gather_output`."""
        weight: Tensor = self.weight
        refuse_other(self, weight)
        bias: Tensor = self.bias
        if self.shares:  # columns that several ranks hold: their gradient is summed over the holders
            weight = mappings.copy_shared(weight, self.group, shard=self.shard)
            bias = mappings.copy_shared(bias, self.group, shard=self.shard.at(0))
        return column_product(
            x, weight.t(), bias, self.group,
            copy_input=self.copy_input, gather=self.shard if self.gather_output else None,
        )  # fmt: skip


class RowParallelConv1D(_ParallelConv1D):
    """y = x W + b with W [in, out] cut by input features; b is whole, and added once, after the sum.

    With `input_is_parallel` x is this rank's part (..., in/tp), else it is whole (..., in) and the same on
    all ranks. y is (..., out) on all ranks.

    >>> import torch
    >>> from autotp.placement import deal
    >>> layer = Conv1D(4, 6)
    >>> RowParallelConv1D.adopt(layer, shard=Shard(0, deal(6, 1)), group=None)
    >>> layer(torch.ones(2, 6)).shape
    torch.Size([2, 4])
    """

    input_is_parallel: bool
    reduce_output: bool

    @classmethod
    def adopt(
        cls,
        module: nn.Module,
        *,
        shard: Shard,
        group: Mesh,
        input_is_parallel: bool = True,
        reduce_output: bool = True,
    ) -> None:
        """Turn a Conv1D into this class in place; hooks, identity and parameters stay.

        `shard` cuts dim 0 of the weight; the caller slices it. With `reduce_output=False` the output stays
        partial, with the bias in rank 0's part.

        Raises UsageError, with the module as it was, for another class than Conv1D, for a shard of another
        dim, size or number of ranks, and for one that gives a row to several ranks.
        """
        shared = isinstance(module, Conv1D) and shard.fits(module.nx) and cut_of(shard, module.nx, 0).shared
        if shared:
            raise UsageError(
                f"RowParallelConv1D: {shard} gives some rows to several ranks, each of which would add them "
                "to the sum"
            )
        cls._adopt(module, shard=shard, group=group, dim=0)
        assert isinstance(module, RowParallelConv1D)
        module.input_is_parallel, module.reduce_output = input_is_parallel, reduce_output

    def forward(self, x: Tensor) -> Tensor:
        """(..., in/tp), or (..., in) unless `input_is_parallel`, -> (..., out)."""
        expected = self.held if self.input_is_parallel else self.nx
        if x.shape[-1] != expected:
            raise UsageError(
                f"RowParallelConv1D: the input has {x.shape[-1]} features, expected {expected} of "
                f"nx={self.nx} on rank {self.group.rank} of {self.group.size} "
                f"(input_is_parallel={self.input_is_parallel})"
            )
        weight: Tensor = self.weight
        refuse_other(self, weight)
        return row_product(
            x, weight.t(), self.bias, self.group,
            scatter=None if self.input_is_parallel else self.shard, reduce_output=self.reduce_output,
        )  # fmt: skip
