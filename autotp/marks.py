"""Calls that stay one node of a graph: mappings and lookups, while a sharded model is exported.

Export sees through Python, down to the collectives and past the backward that a function has of its own.
While a capture runs, such a call is one op that only knows the shape of its result; `graph_form` puts the
function's own call in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Call", "capturing", "marked", "marking"]


@dataclass(frozen=True)
class Call:
    """`function(*tensors, **keywords)`, whose result is as `like(*tensors)`."""

    function: Callable[..., Tensor]
    keywords: Mapping[str, Any]
    like: Callable[..., Tensor]


_CALLS: list[list[Call]] = []  # of the captures that run, the innermost last


@torch.library.custom_op("autotp::call", mutates_args=())
def _call(tensors: Sequence[Tensor], index: int) -> Tensor:
    """Stands for the call of this index. It runs only where the exporter looks at a module's attributes."""
    return _CALLS[-1][index].like(*tensors).zero_()


@_call.register_fake
def _(tensors: Sequence[Tensor], index: int) -> Tensor:
    return _CALLS[-1][index].like(*tensors)


def capturing() -> bool:
    """Whether calls are to be marked."""
    return bool(_CALLS)


@contextmanager
def marking() -> Iterator[list[Call]]:
    """Mark calls, and collect them in a list: a mark's last argument is the place there."""
    _CALLS.append([])
    try:
        yield _CALLS[-1]
    finally:
        _CALLS.pop()


def marked(
    function: Callable[..., Tensor], *tensors: Tensor, like: Callable[..., Tensor], **keywords: Any
) -> Tensor:
    """One node in the place of `function(*tensors, **keywords)`."""
    calls = _CALLS[-1]
    calls.append(Call(function, keywords, like))
    result: Tensor = torch.ops.autotp.call(list(tensors), len(calls) - 1)
    return result
