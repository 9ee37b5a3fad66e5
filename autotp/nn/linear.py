"""Linear layers whose weight is cut by output (column) or by input features (row).

    column   x (..., in)    -> copy -> linear + bias -> y (..., out/tp)  [-> gather -> (..., out)]
    row      x (..., in/tp) -> linear -> reduce -> + bias -> y (..., out)   [scatter first for a whole x]

Weights are [out, in] as in nn.Linear. The layers of Megatron-LM (https://arxiv.org/abs/1909.08053) and
FairScale's nn.model_parallel; unlike there, sizes need not divide by tp, and sections come back in their
original order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autotp import mappings
from autotp.comm import Group, group_of
from autotp.cut import cut_of
from autotp.diagnostic import UsageError
from autotp.mappings import Mesh
from autotp.nn.behind import behind
from autotp.nn.master import (
    InitMethod,
    checked_init,
    checked_kind,
    drawn_alike,
    own_part,
    shard_of,
    whole_number,
)
from autotp.nn.product import column_product, row_product
from autotp.nn.shared import SharedCopy
from autotp.part_guard import refuse_other, watch
from autotp.placement import Shard
from autotp.trace.delegates import adds_nothing

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


class _ParallelLinear(nn.Linear):
    """What both have: a group, a cut of the weight, and the way to their first weights."""

    group: Group
    shard: Shard
    held: int
    """How many elements of the cut dim this rank holds."""
    init_method: InitMethod | None = None
    master_weight: Tensor | None = None
    layouts: dict[str, Shard]
    """How each parameter is cut, by its name; a parameter that is not there is whole on every rank."""

    def _build(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        *,
        layouts: dict[str, Shard],
        group: Group,
        init_method: InitMethod,
        keep_master_weight_for_test: bool,
        device: Any,
        dtype: torch.dtype | None,
    ) -> None:
        nn.Module.__init__(self)
        layer = type(self).__name__
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            whole_number(layer, name, size)
            if size < 0:
                raise UsageError(f"{layer}: {name} must not be negative, and is {size}")
        checked_init(layer, init_method)
        checked_kind(layer, dtype, bias=bias, keep_master_weight_for_test=keep_master_weight_for_test)
        self.in_features, self.out_features = in_features, out_features
        self.group, self.shard, self.layouts = group, layouts["weight"], layouts
        self.init_method = init_method
        self.keep_master_weight_for_test = keep_master_weight_for_test
        shape = self.shard.local_shape((out_features, in_features), group.rank)
        self.held = shape[self.shard.dim]
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if bias:
            whole = "bias" not in layouts
            self.bias = nn.Parameter(
                torch.empty(out_features if whole else shape[0], device=device, dtype=dtype)
            )
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()
        watch(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        watch(self)  # a copy, too

    def reset_parameters(self) -> None:
        """Fill the full master weight by `init_method`, alike on all ranks, and keep this rank's part."""
        if self.init_method is None:
            raise UsageError(f"{type(self).__name__}: a layer that was sharded has no init_method")
        if self.weight.is_meta:
            return
        master = torch.empty(
            (self.out_features, self.in_features), device=self.weight.device, dtype=self.weight.dtype
        )
        with torch.no_grad():
            with drawn_alike(self.group, master.device):
                self.init_method(master)
            self.weight.copy_(own_part(master, self.shard, self.group.rank))
            if self.bias is not None:
                self.bias.zero_()
        self.master_weight = master if self.keep_master_weight_for_test else None

    def get_master_weight(self) -> Tensor:
        """The full [out, in] weight in its original order, the same on all ranks; call it on all."""
        return mappings.gather(self.weight.detach(), self.group, shard=self.shard)

    @classmethod
    def _adopt(cls, module: nn.Linear, *, shard: Shard, group: Mesh, dim: int, cut_bias: bool) -> None:
        kind = type(module)
        if kind is not nn.Linear and not adds_nothing(kind, nn.Linear):
            raise UsageError(f"{cls.__name__} takes the place of an nn.Linear, not of {kind.__name__}")
        ranks, size = group_of(group), (module.out_features, module.in_features)[dim]
        if shard.dim != dim or shard.tp != ranks.size or not shard.fits(size):
            raise UsageError(
                f"{cls.__name__}: {shard} is no cut of dim {dim} of the weight, {size} elements over "
                f"{ranks.size} ranks"
            )
        module.__class__ = cls if kind is nn.Linear else behind(kind, cls)
        assert isinstance(module, _ParallelLinear)
        module.group, module.shard, module.layouts = ranks, shard, {"weight": shard}
        module.held = shard.local_size(size, ranks.rank)
        if cut_bias and module.bias is not None:
            module.layouts["bias"] = shard

    def extra_repr(self) -> str:
        """in_features and out_features are those of the whole layer."""
        return f"{super().extra_repr()}, tp={self.group.size}"


def _features(x: Tensor) -> str:
    return f"{x.shape[-1]} features" if x.ndim else "no dims"


class ColumnParallelLinear(_ParallelLinear):
    """y = x Wᵀ + b with W and b cut by output features.

    `in_features` and `out_features` are those of the whole layer; this rank holds `weight` [out/tp, in]
    and `bias` [out/tp]. x (..., in) is the same on all ranks. With `gather_output` y is (..., out) on all
    ranks, else (..., out/tp).

    `stride` equal sections, or `sections` of these sizes, are each cut on their own: for fused q|k|v or
    gate|up weights. `overlap` lets the input's gradient be summed while the weight's is computed (default:
    on accelerators). `init_method` fills the full weight, biases start at zero. `group` is a DeviceMesh
    (its axis "tp"), a process group, a `Group`, or None for the default.

    Raises UsageError when the sizes, stride and sections do not go together.

    >>> layer = ColumnParallelLinear(4, 6, gather_output=False)
    >>> layer(torch.ones(2, 4)).shape
    torch.Size([2, 6])
    """

    gather_output: bool
    copy_input: bool | SharedCopy
    overlap: bool | None = None
    shares: bool
    """Whether some rows are held by several ranks, as kv heads are when there are fewer than ranks."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather_output: bool = True,
        overlap: bool | None = None,
        init_method: InitMethod = nn.init.xavier_normal_,
        stride: int = 1,
        sections: Sequence[int] | None = None,
        keep_master_weight_for_test: bool = False,
        group: Mesh = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        checked_kind("ColumnParallelLinear", None, gather_output=gather_output)
        group = group_of(group)
        shard = shard_of(
            "ColumnParallelLinear",
            "out_features",
            0,
            out_features,
            group.size,
            stride=stride,
            sections=sections,
        )
        self._build(
            in_features,
            out_features,
            bias,
            layouts={"weight": shard, "bias": shard} if bias else {"weight": shard},
            group=group,
            init_method=init_method,
            keep_master_weight_for_test=keep_master_weight_for_test,
            device=device,
            dtype=dtype,
        )
        self.gather_output, self.copy_input, self.shares = gather_output, True, False
        self.overlap = overlap

    @classmethod
    def adopt(
        cls,
        module: nn.Linear,
        *,
        shard: Shard,
        group: Mesh,
        gather_output: bool = False,
        copy_input: bool | SharedCopy = True,
    ) -> None:
        """Turn an nn.Linear into this class in place; hooks, identity and parameters stay.

        `shard` cuts dim 0 of the weight, and the bias alike; the caller slices them. Rows may be held by
        several ranks: their gradient is summed over these. `copy_input` may be a copy that several layers
        share; with False the input's gradient is summed elsewhere.

        Raises UsageError, with the module as it was, for a subclass of nn.Linear that overrides anything of
        it, and for a shard of another dim, size or number of ranks.
        """
        cls._adopt(module, shard=shard, group=group, dim=0, cut_bias=True)
        assert isinstance(module, ColumnParallelLinear)
        module.gather_output, module.copy_input = gather_output, copy_input
        module.shares = cut_of(shard, module.out_features, 0).shared

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out), or (..., out/tp) without `gather_output`."""
        if input.shape[-1:] != (self.in_features,):
            raise UsageError(
                f"ColumnParallelLinear: the input has {_features(input)}, in_features={self.in_features}"
            )
        weight: Tensor = self.weight
        refuse_other(self, weight)
        bias: Tensor | None = self.bias
        if self.shares:  # rows that several ranks hold: their gradient is summed over the holders
            weight = mappings.copy_shared(weight, self.group, shard=self.shard)
            if bias is not None:
                bias = mappings.copy_shared(bias, self.group, shard=self.shard)
        return column_product(
            input, weight, bias, self.group,
            copy_input=self.copy_input,
            gather=self.shard if self.gather_output else None,
            overlap=self.overlap,
        )  # fmt: skip


class RowParallelLinear(_ParallelLinear):
    """y = x Wᵀ + b with W cut by input features; the bias is whole, and added once, after the sum.

    This rank holds `weight` [out, in/tp] and `bias` [out]. With `input_is_parallel` x is this rank's part
    (..., in/tp), else it is whole (..., in) and the same on all ranks. y is (..., out) on all ranks.
    The other arguments are those of ColumnParallelLinear, with sections of the input features.

    >>> layer = RowParallelLinear(6, 4)
    >>> layer(torch.ones(2, 6)).shape
    torch.Size([2, 4])
    """

    input_is_parallel: bool
    reduce_output: bool

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        input_is_parallel: bool = False,
        init_method: InitMethod = nn.init.xavier_normal_,
        stride: int = 1,
        sections: Sequence[int] | None = None,
        keep_master_weight_for_test: bool = False,
        group: Mesh = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        checked_kind("RowParallelLinear", None, input_is_parallel=input_is_parallel)
        group = group_of(group)
        shard = shard_of(
            "RowParallelLinear", "in_features", 1, in_features, group.size, stride=stride, sections=sections
        )
        self._build(
            in_features,
            out_features,
            bias,
            layouts={"weight": shard},
            group=group,
            init_method=init_method,
            keep_master_weight_for_test=keep_master_weight_for_test,
            device=device,
            dtype=dtype,
        )
        self.input_is_parallel, self.reduce_output = input_is_parallel, True

    @classmethod
    def adopt(
        cls,
        module: nn.Linear,
        *,
        shard: Shard,
        group: Mesh,
        input_is_parallel: bool = True,
        reduce_output: bool = True,
    ) -> None:
        """Turn an nn.Linear into this class in place; hooks, identity and parameters stay.

        `shard` cuts dim 1 of the weight; the caller slices it. With `reduce_output=False` the output
        stays partial, with the bias in rank 0's part: for a reduce that stands after a sum of branches.

        Raises UsageError, with the module as it was, for a subclass of nn.Linear that overrides anything of
        it, and for a shard of another dim, size or number of ranks.
        """
        if shard.tp > 1 and shard.fits(module.in_features) and cut_of(shard, module.in_features, 1).shared:
            raise UsageError(
                f"RowParallelLinear: {shard} gives some columns to several ranks, each of which would add "
                "them to the sum"
            )
        cls._adopt(module, shard=shard, group=group, dim=1, cut_bias=False)
        assert isinstance(module, RowParallelLinear)
        module.input_is_parallel, module.reduce_output = input_is_parallel, reduce_output

    def forward(self, input: Tensor) -> Tensor:
        """(..., in/tp), or (..., in) unless `input_is_parallel`, -> (..., out)."""
        expected = self.held if self.input_is_parallel else self.in_features
        if input.shape[-1:] != (expected,):
            part = f", rank {self.group.rank} of {self.group.size} holds {expected}"
            raise UsageError(
                f"RowParallelLinear: the input has {_features(input)}, "
                f"in_features={self.in_features}{part if self.input_is_parallel else ''} "
                f"(input_is_parallel={self.input_is_parallel})"
            )
        weight: Tensor = self.weight
        refuse_other(self, weight)
        return row_product(
            input, weight, self.bias, self.group,
            scatter=None if self.input_is_parallel else self.shard, reduce_output=self.reduce_output,
        )  # fmt: skip
