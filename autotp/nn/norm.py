"""Norms over a dim that is cut: each rank normalises its own features with the statistics of all.

    LayerNorm   y = (x - mean) / sqrt(var + eps) * w + b      mean and var over all features
    RMSNorm     y = x / sqrt(mean(x²) + eps) * w

Sums over a rank's features are summed over the ranks, (..., 1) numbers each, in forward, and so are their
gradients in backward, since every rank's features depend on them. Ranks may hold unequal numbers of
features: the sums are divided by the number of all. w and b are cut like the features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autotp import mappings
from autotp.comm import Group, group_of
from autotp.diagnostic import UsageError
from autotp.mappings import Mesh
from autotp.part_guard import refuse_other
from autotp.placement import Shard

__all__ = ["ParallelLayerNorm", "ParallelRMSNorm"]


class _ParallelNorm(nn.Module):
    """What both have: a group and a cut; `normalized_shape` is that of the whole norm."""

    group: Group
    shard: Shard
    held: int
    """How many features this rank holds."""
    layouts: dict[str, Shard]
    """How each parameter is cut, by its name."""

    @classmethod
    def adopt(cls, module: Any, *, shard: Shard, group: Mesh) -> None:
        """Turn a norm over one dim into this class in place; hooks, identity and parameters stay.

        `shard` cuts dim 0 of the weight and the bias; the caller slices them.

        Raises UsageError, with the module as it was, for a norm of another class or over several dims, for
        one without a weight, and for a shard of another dim, size or number of ranks, or that gives a
        feature to several ranks.
        """
        own: Any = cls.__mro__[2]
        if type(module) is not own:
            raise UsageError(
                f"{cls.__name__} takes the place of an {own.__name__}, not of {type(module).__name__}"
            )
        ranks, shape = group_of(group), tuple(module.normalized_shape)
        if len(shape) != 1 or module.weight is None:
            raise UsageError(
                f"{cls.__name__}: a norm over one dim with a weight can be cut, not one over {list(shape)}"
                f"{'' if module.weight is not None else ' without a weight'}"
            )
        if shard.dim != 0 or shard.tp != ranks.size or not shard.fits(shape[0]) or shard.shared:
            raise UsageError(
                f"{cls.__name__}: {shard} is no cut of {shape[0]} features over {ranks.size} ranks, each "
                "feature on one of them"
            )
        module.__class__ = cls
        module.group, module.shard = ranks, shard
        module.held = shard.local_size(shape[0], ranks.rank)
        module.layouts = {n: shard for n in ("weight", "bias") if getattr(module, n, None) is not None}

    def _mean(self, x: Tensor, size: int) -> Tensor:
        """The mean over the features of all ranks, (..., n) -> (..., 1); its gradient is summed, too."""
        total = mappings.reduce(x.sum(-1, keepdim=True), self.group)
        return mappings.copy(total, self.group) / size


class ParallelLayerNorm(_ParallelNorm, nn.LayerNorm):
    """nn.LayerNorm over features that are cut: x (..., n/tp) -> y (..., n/tp), statistics of all n.

    Two all-reduces of (..., 1) in forward, two in backward. Made from a live norm by `adopt`.

    >>> from autotp.placement import deal
    >>> norm = nn.LayerNorm(6)
    >>> ParallelLayerNorm.adopt(norm, shard=Shard(0, deal(6, 1)), group=None)
    >>> torch.equal(norm(torch.eye(6)), nn.LayerNorm(6)(torch.eye(6)))
    True
    """

    def forward(self, input: Tensor) -> Tensor:
        """(..., n/tp) -> (..., n/tp)."""
        if self.group.size == 1:
            return nn.LayerNorm.forward(self, input)
        refuse_other(self, self.weight)
        x = _precise(input)
        x = x - self._mean(x, self.normalized_shape[0])
        y = x * (self._mean(x * x, self.normalized_shape[0]) + self.eps).rsqrt()
        y = y * self.weight
        return (y if self.bias is None else y + self.bias).to(_result(input))


class ParallelRMSNorm(_ParallelNorm, nn.RMSNorm):
    """nn.RMSNorm over features that are cut: x (..., n/tp) -> y (..., n/tp), the mean square of all n.

    One all-reduce of (..., 1) in forward, one in backward. Made from a live norm by `adopt`.

    >>> from autotp.placement import deal
    >>> norm = nn.RMSNorm(6)
    >>> ParallelRMSNorm.adopt(norm, shard=Shard(0, deal(6, 1)), group=None)
    >>> torch.equal(norm(torch.eye(6)), nn.RMSNorm(6)(torch.eye(6)))
    True
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., n/tp) -> (..., n/tp)."""
        if self.group.size == 1:
            return nn.RMSNorm.forward(self, x)
        refuse_other(self, self.weight)
        wide = _precise(x)
        eps = torch.finfo(wide.dtype).eps if self.eps is None else self.eps
        y = wide * (self._mean(wide * wide, self.normalized_shape[0]) + eps).rsqrt()
        return (y * self.weight).to(_result(x))


def _precise(x: Tensor) -> Tensor:
    """Half precision is normalised in float32, as torch's kernels do."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _result(x: Tensor) -> torch.dtype:
    """The input's dtype; autocast on a GPU gives norms in float32."""
    wide = x.is_cuda and torch.is_autocast_enabled("cuda") and x.dtype != torch.float64
    return torch.float32 if wide else x.dtype
