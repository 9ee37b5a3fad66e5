"""A linear layer whose input gradient is summed over the ranks while its weight gradient is computed.

    backward of copy, then linear:   dX = dY W, dW = dYᵀ X, all-reduce a copy of dX
    here, with overlap:              dX = dY W, start the all-reduce of dX, dW = dYᵀ X, wait
    here, without:                   dW = dYᵀ X, dX = dY W, all-reduce dX

As Megatron-LM's LinearWithGradAccumulationAndAsyncCommunication (tensor_parallel/layers.py). Only the
order differs, and dX, a product that is nobody else's, is summed where it lies: the numbers are the same to
the last bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autotp import mappings
from autotp.comm import Group, sum_into, sum_into_later
from autotp.derivatives import transformed

__all__ = ["copied_linear"]


class _CopiedLinear(torch.autograd.Function):
    """y = linear(copy(x), weight, bias), as a matrix: autograd lets nobody write into a view made in here."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, overlap: bool
    ) -> Tensor:
        ctx.group, ctx.overlap = group, overlap
        ctx.save_for_backward(x, weight)
        return F.linear(x.reshape(-1, x.shape[-1]), weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dbias = dy.sum(0) if ctx.needs_input_grad[2] else None
        if torch.is_grad_enabled():  # to be differentiated again: nothing is hidden from autograd
            whole = mappings.copy(x, ctx.group)
            total = mappings.reduce((dy @ weight).view(x.shape), ctx.group)
            return total, dy.t() @ whole.reshape(-1, x.shape[-1]), dbias, None, None
        rows = x.reshape(-1, x.shape[-1])
        if ctx.overlap:
            wait = sum_into_later((dy @ weight).view(x.shape), ctx.group)
            dweight = dy.t() @ rows
            return wait(), dweight, dbias, None, None
        dweight = dy.t() @ rows
        dx = (dy @ weight).view(x.shape)  # last: it is summed while it is in the cache
        return sum_into(dx, ctx.group), dweight, dbias, None, None


def copied_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, *, overlap: bool | None = None
) -> Tensor:
    """linear(copy(x), weight, bias): x (..., in), the same on all ranks, -> (..., out/tp).

    `overlap` says whether the sum of dX runs while dW is computed; None: on accelerators, and not on the
    CPU, where both would use the same cores. When not both x and weight need a gradient, under autocast
    (which casts inside linear), under torch.func and in compiled code (whose compiler orders the collectives)
    it is the plain pair.

    >>> from autotp.comm import GroupOfOne
    >>> copied_linear(torch.ones(1, 2), torch.ones(3, 2), None, GroupOfOne()).tolist()
    [[2.0, 2.0, 2.0]]
    """
    fused = (
        group.size > 1
        and torch.is_grad_enabled()
        and x.requires_grad
        and weight.requires_grad
        and x.shape[-1] > 0
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled(x.device.type)
        and not transformed()
    )
    if fused:
        if overlap is None:
            overlap = x.device.type != "cpu"
        y: Tensor = _CopiedLinear.apply(x, weight, bias, group, overlap)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], y.shape[-1])
    return F.linear(mappings.copy(x, group), weight, bias)
