"""The products of column and row layers, with their mappings around them. Weights are [out, in] here.

column   x -> copy -> x Wᵀ + b [-> gather]
row      [scatter ->] x -> x Wᵀ -> reduce -> + b
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from autotp import mappings
from autotp.comm import Group
from autotp.nn.overlap import copied_linear
from autotp.nn.shared import SharedCopy
from autotp.placement import Shard

__all__ = ["column_product", "row_product"]


def column_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: Group,
    *,
    copy_input: bool | SharedCopy,
    gather: Shard | None,
    overlap: bool | None = None,
) -> Tensor:
    """(..., in) x (out/tp, in) -> (..., out/tp), or (..., out), gathered by the cut `gather`.

    The input's gradient is summed over the ranks, by the layer's own copy (True), one that layers share, or
    elsewhere (False).
    """
    if copy_input is True:
        y = copied_linear(x, weight, bias, group, overlap=overlap)
    else:
        y = F.linear(copy_input(x) if copy_input else x, weight, bias)
    return y if gather is None else mappings.gather(y, group, dim=-1, shard=gather)


def row_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: Group,
    *,
    scatter: Shard | None,
    reduce_output: bool,
) -> Tensor:
    """(..., in/tp), or (..., in), scattered by the cut `scatter`, x (out, in/tp) -> (..., out).

    The bias is added once, after the sum; without `reduce_output` it is in rank 0's part.
    """
    if group.size == 1:
        return F.linear(x, weight, bias)
    if scatter is not None:
        x = mappings.scatter(x, group, dim=-1, shard=scatter)
    y = F.linear(x, weight)  # (..., out), partial
    if not reduce_output:
        return y if bias is None else y + mappings.share(bias, group).to(y.dtype)
    y = mappings.reduce_(y, group)
    return y if bias is None else y + bias.to(y.dtype)
