"""What a rank can ask of its group. Collectives are out of place and return contiguous tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from autotp.diagnostic import UsageError

__all__ = ["EXCHANGE_TIMEOUT", "Group", "GroupOfOne", "KnownGroup", "check_summed", "contiguous_copy"]

T = TypeVar("T")
_NEVER_ADDED = {torch.float8_e8m0fnu, torch.uint16, torch.uint32, torch.uint64}
EXCHANGE_TIMEOUT = 60.0
"""Seconds that `exchange` waits for the other ranks of the group."""


@runtime_checkable
class Group(Protocol):
    """One rank's view of a tensor-parallel group.

    Every rank calls the same methods in the same order. Inputs are never written to, whatever their
    strides; results are new and contiguous. A deepcopy is the same object, a pickle finds its group
    again within the same job.
    """

    @property
    def rank(self) -> int:
        """This rank, 0 … size - 1."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`; all have the same shape."""

    def all_reduce_later(self, x: Tensor) -> Callable[[], Tensor]:
        """Start `all_reduce(x)`; the function that is returned waits for the sum. Call it once."""

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """Every rank's `x`, concatenated on `dim` in rank order.

        `sizes[r]` is rank r's size of `dim`; the sizes are known beforehand and may differ.
        """

    def reduce_scatter(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """This rank's block of the sum of every rank's `x`; block r has `sizes[r]` of `dim`."""

    def exchange(self, obj: T, *, timeout: float = EXCHANGE_TIMEOUT) -> list[T]:
        """Every rank's `obj` (any picklable object), in rank order, within `timeout` seconds.

        A rank that has failed passes its exception: it is raised on that rank, and a `UsageError`
        that names it on all others. Ranks that call with another group raise `UsageError` as well.
        """


class KnownGroup:
    """Marks our own groups, so that a call which is given one need not ask for its methods."""


class GroupOfOne(KnownGroup):
    """The group of a process that shares its work with nobody.

    >>> group = GroupOfOne()
    >>> group.rank, group.size, group.exchange("plan")
    (0, 1, ['plan'])
    """

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """A contiguous copy of `x`."""
        return contiguous_copy(x)

    def all_reduce_later(self, x: Tensor) -> Callable[[], Tensor]:
        """A function that gives a contiguous copy of `x`."""
        total = contiguous_copy(x)
        return lambda: total

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """A contiguous copy of `x`."""
        return contiguous_copy(x)

    def reduce_scatter(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """A contiguous copy of `x`."""
        return contiguous_copy(x)

    def exchange(self, obj: T, *, timeout: float = EXCHANGE_TIMEOUT) -> list[T]:
        """`[obj]`; an exception is raised."""
        if isinstance(obj, BaseException):
            raise obj
        return [obj]

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupOfOne:
        return self

    def __repr__(self) -> str:
        return "GroupOfOne()"


def check_summed(x: Tensor) -> None:
    """Raise UsageError for values that torch cannot add."""
    if x.dtype in _NEVER_ADDED:
        raise UsageError(
            f"values of {x.dtype} cannot be summed over the ranks: torch does not add them; gather moves them"
        )


def contiguous_copy(x: Tensor) -> Tensor:
    """A new tensor with the values of `x`, contiguous, whatever strides `x` has."""
    return x.clone(memory_format=torch.contiguous_format)
