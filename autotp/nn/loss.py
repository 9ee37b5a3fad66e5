"""Cross entropy over logits whose vocabulary is cut over the ranks, without gathering them.

    loss = logsumexp(z) - z[target]

Each rank reduces its part of the vocabulary to a few numbers a token (the logsumexp of its logits, the
target's logit, for label smoothing a weighted sum), one all-gather of those gives every rank the whole,
and the rest is arithmetic on numbers a token. Backward communicates nothing: it saves the logits
themselves and one number a token, and builds softmax from them.

The semantics are those of torch.nn.functional.cross_entropy; the idea is Megatron-LM's
(tensor_parallel/cross_entropy.py), the multi-label form PaddlePaddle's
(fleet/layers/mpu/mp_ops.py).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from autotp import mappings
from autotp.comm import Group, group_of
from autotp.derivatives import quick
from autotp.diagnostic import UsageError
from autotp.mappings import Mesh
from autotp.placement import Shard, deal

__all__ = ["vocab_parallel_cross_entropy", "vocab_parallel_multi_label_cross_entropy"]

Reduction = Literal["none", "mean", "sum"]


class _Statistics(torch.autograd.Function):
    """logits (n, local), index (n, k), held (n, k) -> logsumexp (n), picked (n, k), weighted sum (n).

    All over the whole vocabulary, of `whole` ids, the same on all ranks. `index` are local positions, `held`
    says which of them are this rank's. `weights` (local) or None.
    """

    @staticmethod
    def forward(
        logits: Tensor, index: Tensor, held: Tensor, weights: Tensor | None, group: Group, whole: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        z = logits.to(_wide(logits.dtype))
        own = [torch.logsumexp(z, -1, keepdim=True), z.gather(-1, index).masked_fill_(~held, 0)]
        if weights is not None:
            with torch.autocast(z.device.type, enabled=False):  # which would take the product in 16 bits
                own.append((z @ weights.to(z.dtype)).unsqueeze(-1))
        every = torch.cat(own, -1).unsqueeze(0)  # (1, n, 1 + k [+ 1]), and of all ranks (p, …)
        if group.size > 1:
            every = _gathered(every[0], z.shape[-1], whole, group)
        picked = every[..., 1 : 1 + index.shape[-1]].sum(0)
        weighted = every[..., -1].sum(0) if weights is not None else picked.new_zeros(z.shape[0])
        return torch.logsumexp(every[..., 0], 0), picked, weighted

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.group, _ = inputs
        ctx.save_for_backward(*tensors, output[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, index, held, weights, lse = ctx.saved_tensors
        wide = lse.dtype
        # the same on all ranks, used on each rank's part: this sums what a second backward needs
        lse, d_lse, d_picked, d_weighted = (mappings.copy(x, ctx.group) for x in (lse, *gradients))
        d_picked = d_picked.masked_fill(~held, 0)
        if torch.is_grad_enabled():
            d = (logits.to(wide) - lse.unsqueeze(-1)).exp() * d_lse.unsqueeze(-1)
            d = d.scatter_add(-1, index, d_picked)
        else:
            d = logits.to(wide, copy=True).sub_(lse.unsqueeze(-1)).exp_().mul_(d_lse.unsqueeze(-1))
            d.scatter_add_(-1, index, d_picked)
        if weights is not None:
            d = d + d_weighted.unsqueeze(-1) * weights.to(wide)
        return d.to(logits.dtype), None, None, None, None, None


_statistics = quick(_Statistics)


def _gathered(mine: Tensor, local: int, whole: int, group: Group) -> Tensor:
    """The numbers (n, c) of every rank, (p, n, c); two rows more tell what each rank takes its part for.

    Raises UsageError on every rank where they do not agree; in compiled code and on accelerators, which do
    not wait for numbers, the result is NaN.
    """
    more = [mine.new_full((1, mine.shape[-1]), size) for size in (whole, local)]
    every = group.all_gather(torch.cat([mine, *more]).unsqueeze(0), 0, [1] * group.size)
    every, told = every[:, :-2], every[:, -2:, 0]  # (p, 2)
    slack = whole * 2**-23  # of float32: none up to four million ids
    agreed = ((told[:, 0] - whole).abs() <= slack).all() & ((told[:, 1].sum() - whole).abs() <= slack)
    if mine.device.type != "cpu" or torch.compiler.is_compiling():
        return torch.where(agreed, every, torch.nan)
    if not agreed:
        parts = ", ".join(f"{own:g} columns of {all_:g}" for all_, own in told.tolist())
        raise UsageError(
            f"cross entropy: the ranks' logits are not parts of one vocabulary of {whole}: from rank 0 on "
            f"they take them for {parts}\n  = help: give every rank the same vocab_size, the whole one"
        )
    return every


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _check_tensors(name: str, **given: object) -> None:
    for argument, value in given.items():
        if not isinstance(value, Tensor):
            raise UsageError(f"{name}: {argument} must be a tensor, not {type(value).__name__}")


def _own_range(
    name: str, logits: Tensor, group: Group, vocab_size: int | None, shard: Shard | None
) -> tuple[int, int]:
    """The first id of this rank's part, and the size of the whole vocabulary."""
    if vocab_size is not None and (type(vocab_size) is not int or vocab_size < 1):
        raise UsageError(f"{name}: vocab_size={vocab_size!r} is no number of ids")
    if not isinstance(shard, Shard | None):
        raise UsageError(f"{name}: shard={shard!r} is no Shard")
    if not (logits.is_floating_point() and logits.ndim):
        raise UsageError(
            f"{name}: logits of shape {list(logits.shape)} and {logits.dtype}: floating-point numbers are "
            "needed, with this rank's ids in the last dim"
        )
    local = logits.shape[-1]
    if shard is None:
        whole = local * group.size if vocab_size is None else vocab_size
        shard = Shard(0, deal(whole, group.size))
    elif vocab_size is None:
        raise UsageError(f"{name}: with a shard, vocab_size is needed")
    else:
        whole = vocab_size
    ranges = shard.ranges(whole, group.rank)
    if shard.tp != group.size or len(ranges) != 1 or shard.shared:
        raise UsageError(
            f"{name}: {shard} does not give each of {group.size} ranks one range of ids of its own"
        )
    start, stop = ranges[0]
    if stop - start != local:
        raise UsageError(
            f"{name}: the logits have {local} columns, but rank {group.rank} of {group.size} holds "
            f"{stop - start} of vocab_size={whole}"
        )
    return start, whole


def _positions(
    name: str, target: Tensor, *, start: int, local: int, whole: int, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Local positions of the targets, which of them this rank holds, and which are ignored."""
    if type(ignore_index) is not int:
        raise UsageError(f"{name}: ignore_index={ignore_index!r} is no id")
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise UsageError(f"{name}: targets are ids of an integer dtype, not {target.dtype}")
    target = target.long()
    ignored = target == ignore_index
    inside = (target >= 0) & (target < whole) & ~ignored
    if target.device.type == "cpu" and not torch.compiler.is_compiling():
        outside = target[~inside & ~ignored]
        if outside.numel() > 0:
            raise IndexError(f"Target {int(outside[0])} is out of bounds for a vocabulary of {whole}")
    position = target - start
    held = inside & (position >= 0) & (position < local)
    # an id in no rank's range keeps a position outside of the logits, where gather itself stops
    position = torch.where(held, position, torch.where(inside | ignored, 0, local))
    return position, held, ignored


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: Mesh = None,
    vocab_size: int | None = None,
    shard: Shard | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    return_softmax: bool = False,
) -> Any:
    """Cross entropy of `logits` (..., vocabulary/tp), this rank's columns, with `target` (...) or (..., 1).

    As torch.nn.functional.cross_entropy of the whole logits, with the classes in the last dim: `weight`
    (vocabulary), `ignore_index`, `label_smoothing` and `reduction` mean what they mean there. The loss is
    the same on all ranks; it is computed, and returned, in float32 for 16-bit logits. With
    `return_softmax` the result is (loss, softmax), softmax of the logits' shape and dtype.

    The vocabulary is dealt out as by VocabParallelEmbedding. `vocab_size` is its whole size; it is needed
    when the parts are uneven, and lets full-width logits be refused. `shard` names another cut.

    Raises UsageError for logits of the wrong width, targets of the wrong shape or dtype, and ranks that take
    the vocabulary for different ones (on CUDA the loss is NaN), IndexError for a target outside of the
    vocabulary (on CUDA a device-side assertion).

    >>> logits = torch.tensor([[2.0, 0.0, 1.0]])
    >>> vocab_parallel_cross_entropy(logits, torch.tensor([0])).item()
    0.4076...
    """
    name = "vocab_parallel_cross_entropy"
    group = group_of(group)
    _check_tensors(name, logits=logits, target=target, **({} if weight is None else {"weight": weight}))
    start, whole = _own_range(name, logits, group, vocab_size, shard)
    local = logits.shape[-1]
    if target.shape not in (logits.shape[:-1], (*logits.shape[:-1], 1)):
        raise UsageError(
            f"{name}: targets of shape {list(target.shape)} do not go with logits of shape "
            f"{list(logits.shape)}: {list(logits.shape[:-1])} is needed"
        )
    if type(label_smoothing) not in (int, float) or not 0.0 <= label_smoothing <= 1.0:
        raise UsageError(f"{name}: label_smoothing={label_smoothing!r} is not between 0 and 1")
    if reduction not in ("none", "mean", "sum"):
        raise UsageError(f"{name}: reduction={reduction!r} is not 'none', 'mean' or 'sum'")
    if weight is not None and weight.shape != (whole,):
        raise UsageError(
            f"{name}: weight has shape {list(weight.shape)}, one number for each of {whole} ids is needed"
        )
    position, held, ignored = _positions(
        name, target.reshape(-1, 1), start=start, local=local, whole=whole, ignore_index=ignore_index
    )
    wide = _wide(logits.dtype)
    smoothed = None
    if label_smoothing > 0:
        smoothed = logits.new_ones(local, dtype=wide) if weight is None else weight[start : start + local]
    flat = logits.reshape(-1, local)
    lse, picked, weighted = _statistics(flat, position, held, smoothed, group, whole)
    ignored = ignored.squeeze(-1)
    loss = lse - picked.squeeze(-1)
    of_target: Tensor | None = None
    if weight is not None:
        of_target = weight.to(wide)[target.reshape(-1).long().clamp(0, whole - 1)].masked_fill(ignored, 0)
        loss = loss * of_target
    if label_smoothing > 0:
        total = float(whole) if weight is None else weight.to(wide).sum()
        loss = (1 - label_smoothing) * loss + label_smoothing / whole * (total * lse - weighted)
    loss = loss.masked_fill(ignored, 0)
    if reduction == "none":
        loss = loss.reshape(target.shape)
    else:
        loss = loss.sum()
        if reduction == "mean":
            loss = loss / ((~ignored).sum() if of_target is None else of_target.sum())
    if not return_softmax:
        return loss
    softmax = (flat.to(wide) - mappings.copy(lse, group).unsqueeze(-1)).exp()
    return loss, softmax.to(logits.dtype).reshape(logits.shape)


def vocab_parallel_multi_label_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor,
    *,
    group: Mesh = None,
    vocab_size: int | None = None,
    shard: Shard | None = None,
    ignore_index: int = -100,
    sum_labels: bool = True,
    return_softmax: bool = False,
) -> Any:
    """Weighted cross entropy with several labels a token: w_ij (logsumexp(z_i) - z_i[label_ij]).

    `logits` (..., vocabulary/tp), `labels` and `weights` (..., C); ignored labels count 0. The loss is
    summed over the labels to (..., 1), or kept (..., C) with `sum_labels=False`. The other arguments and
    errors are those of `vocab_parallel_cross_entropy`.

    >>> logits = torch.tensor([[2.0, 0.0, 1.0]])
    >>> labels, weights = torch.tensor([[0, 2]]), torch.tensor([[0.5, 0.5]])
    >>> vocab_parallel_multi_label_cross_entropy(logits, labels, weights).item()
    0.9076...
    """
    name = "vocab_parallel_multi_label_cross_entropy"
    group = group_of(group)
    _check_tensors(name, logits=logits, labels=labels, weights=weights)
    start, whole = _own_range(name, logits, group, vocab_size, shard)
    local = logits.shape[-1]
    if labels.shape[:-1] != logits.shape[:-1] or weights.shape != labels.shape:
        raise UsageError(
            f"{name}: labels of shape {list(labels.shape)} and weights of shape {list(weights.shape)} do not "
            f"go with logits of shape {list(logits.shape)}: {[*logits.shape[:-1], 'C']} is needed for both"
        )
    tokens, count = logits.shape[:-1].numel(), labels.shape[-1]
    position, held, ignored = _positions(
        name, labels.reshape(tokens, count), start=start, local=local, whole=whole, ignore_index=ignore_index
    )
    flat = logits.reshape(tokens, local)
    lse, picked, _ = _statistics(flat, position, held, None, group, whole)
    kept = weights.reshape(tokens, count).to(lse.dtype)
    loss = (kept * (lse.unsqueeze(-1) - picked)).masked_fill(ignored, 0)
    loss = loss.sum(-1, keepdim=True) if sum_labels else loss
    loss = loss.reshape(*logits.shape[:-1], loss.shape[-1])
    if not return_softmax:
        return loss
    softmax = (flat.to(lse.dtype) - mappings.copy(lse, group).unsqueeze(-1)).exp()
    return loss, softmax.to(logits.dtype).reshape(logits.shape)
