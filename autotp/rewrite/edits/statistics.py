"""The mappings that stand around expressions of an edited model: what they compute.

    mean(v)         v is the mean of a rank's elements: the mean of all ranks' elements
    var(v, x)       v is the variance of a rank's elements x: that of all ranks' elements; std alike
    reduce(v)       the sum over the ranks
    copy(v)         v, whose gradient is summed over the ranks
    share(v)        v as a term of a sum over the ranks: it is rank 0's part
    gather(v)       the whole value, of which v is a rank's part

With n_r of n elements on rank r, the mean is the sum of mean_r n_r / n. A variance is computed anew from the
elements: one element on a rank has none of its own. While a model is proven each is a mark in the trace, by
which `propagate.dual` tells that it stands where it must, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from autotp import mappings
from autotp.comm import Group
from autotp.rewrite.edits.edit import Mapped

__all__ = ["mapping_of"]

_library = torch.library.Library("autotp", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "mapped(Tensor value, Tensor[] others, str how, int dim, int size) -> Tensor"
)


def _mark(value: Tensor, others: Sequence[Tensor], how: str, dim: int, size: int) -> Tensor:
    if how == "gather":
        shape = list(value.shape)
        shape[dim] = size
        return value.narrow(dim, 0, 1).expand(shape).contiguous()
    return value.view_as(value)


_library.impl("mapped", _mark, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]


def mapping_of(how: Mapped, step: str, group: Group | None) -> Callable[..., Tensor]:
    """The function that is called around the expression for one step of `how`; without a group its mark."""
    if group is None:
        whole = 0 if how.size is None else how.size.whole

        def mark(value: Tensor, *others: Tensor) -> Tensor:
            marked: Tensor = torch.ops.autotp.mapped(value, list(others), step, how.dim, whole)
            marked.autotp_mapped = step  # type: ignore[attr-defined]
            return marked

        return mark
    known: Group = group
    if step == "reduce":
        return lambda value: mappings.reduce(value, known)
    if step == "share":
        return lambda value: mappings.share(value, known)
    if step == "copy":
        if how.how == ("copy",):  # of an operand, which nothing writes
            return lambda value: mappings.copy(value, known)
        return lambda value: _own(mappings.copy(value, known))
    if step == "gather":
        return lambda value: mappings.gather(value, known, dim=how.dim, shard=how.shard)
    assert how.size is not None
    whole, own = how.size.whole, how.size.parts[known.rank]
    if step == "mean":
        return lambda value: mappings.reduce(value * (own / whole), known)
    return _spread(how, step, whole, known)


def _spread(how: Mapped, step: str, whole: int, group: Group) -> Callable[..., Tensor]:
    """The variance of all elements, or its root."""
    assert how.along is not None
    dim, keep, correction = how.along

    def spread(value: Tensor, x: Tensor) -> Tensor:
        mean = mappings.copy(mappings.reduce(x.sum(dim, keepdim=True), group), group) / whole
        squares = mappings.reduce((x - mean).square().sum(dim, keepdim=keep), group)
        variance = squares / max(whole - correction, 0)
        return variance if step == "var" else _root(variance)

    return spread


def _own(copied: Tensor) -> Tensor:
    """A value that may be written in place, which what a function passes on may not."""
    return copied.clone() if copied.requires_grad else copied


def _root(variance: Tensor) -> Tensor:
    """The square root, without a gradient where it is 0, as in torch's own std."""
    zero = variance == 0
    return variance.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)
