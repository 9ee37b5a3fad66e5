"""Samples of other sizes: those for which a comparison with a size of the model could come out otherwise.

Comparing a number with n comes out another way than with m for n or for m themselves, or for what lies
between. So each size of the samples that may be another one takes each of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autotp.trace.capture import capture
from autotp.trace.graph import TraceError, tensors_in
from autotp.trace.inputs import Samples
from autotp.trace.surroundings import quiet

__all__ = ["resized", "sizes_said", "witnesses"]

Place = tuple[int | None, int]
"""A dim and a size of it; None: whatever dim has that size."""


def witnesses(module: nn.Module, samples: Samples, pairs: Iterable[tuple[int, int]]) -> Iterator[Samples]:
    """The samples with sizes that tell the two of each pair apart."""
    wanted = sorted({n for pair in pairs for n in (*pair, sum(pair) // 2) if n > 0})
    free = list(_free(module, samples))
    for turn in range(len(wanted) if free else 0):
        sizes = {place: wanted[(turn + n) % len(wanted)] for n, place in enumerate(free)}
        if _runs(module, together := resized(samples, sizes)):
            yield together
        else:
            alone = (resized(samples, {place: size}) for place, size in sizes.items())
            yield from (one for one in alone if _runs(module, one))


def resized(samples: Samples, sizes: Mapping[Place, int]) -> Samples:
    """The samples with other sizes at these places; further samples are left out.

    >>> resized(Samples.given(torch.zeros(2, 7, 7)), {(1, 7): 5}).args[0].shape
    torch.Size([2, 5, 7])
    """

    def made(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        shape = [sizes.get((d, n), sizes.get((None, n), n)) for d, n in enumerate(value.shape)]
        return torch.zeros(shape, dtype=value.dtype, device=value.device)

    args, kwargs, labels = pytree.tree_map(made, (samples.args, dict(samples.kwargs), dict(samples.labels)))
    return replace(samples, args=args, kwargs=kwargs, labels=labels, also=(), pair=None, crossed=None)


def sizes_said(samples: Samples) -> str:
    """The shapes of the samples, in words."""
    return " and ".join(str(list(tensor.shape)) for tensor in _tensors(samples))


def _tensors(samples: Samples) -> list[torch.Tensor]:
    return [tensor for _, tensor, _ in tensors_in((samples.args, dict(samples.kwargs)))]


def _free(module: nn.Module, samples: Samples) -> Iterator[Place]:
    """The sizes of the samples that may be others: all dims of one size, or the dims on their own."""
    dims: dict[int, dict[int, None]] = {}
    for tensor in _tensors(samples):
        for dim, size in enumerate(tensor.shape):
            dims.setdefault(size, {})[dim] = None
    for size, of in dims.items():
        if _runs(module, resized(samples, {(None, size): 2 * size + 1})):
            yield None, size
        elif len(of) > 1:
            for dim in of:
                if _runs(module, resized(samples, {(dim, size): 2 * size + 1})):
                    yield dim, size


def _runs(module: nn.Module, samples: Samples) -> bool:
    try:
        with quiet():
            capture(module, samples.args, samples.kwargs, grad=False)
    except TraceError as error:
        return error.dynamic
    return True
