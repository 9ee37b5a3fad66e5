"""Sums over the ranks in another dtype than that of the values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from autotp.comm.group import EXCHANGE_TIMEOUT, Group, KnownGroup
from autotp.diagnostic import UsageError

__all__ = ["ReducedIn"]

T = TypeVar("T")


class ReducedIn(KnownGroup):
    """A group whose sums of less precise floating-point values run in `dtype`. Made by `reduced_in`."""

    def __init__(self, group: Group, dtype: torch.dtype, device_type: str) -> None:
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise UsageError(f"sums run in a floating-point dtype, not {dtype!r}")
        self.group, self.dtype, self.device_type = group, dtype, device_type

    @property
    def rank(self) -> int:
        """This rank."""
        return self.group.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size

    def _wider(self, x: Tensor) -> bool:
        return x.dtype.is_floating_point and torch.finfo(x.dtype).eps > torch.finfo(self.dtype).eps

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, rounded to its dtype once."""
        return (
            self.group.all_reduce(x.to(self.dtype)).to(x.dtype)
            if self._wider(x)
            else self.group.all_reduce(x)
        )

    def all_reduce_later(self, x: Tensor) -> Callable[[], Tensor]:
        """Start `all_reduce(x)`."""
        if not self._wider(x):
            return self.group.all_reduce_later(x)
        wait = self.group.all_reduce_later(x.to(self.dtype))
        return lambda: wait().to(x.dtype)

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """As the group: nothing is summed."""
        return self.group.all_gather(x, dim, sizes)

    def reduce_scatter(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """This rank's block of the sum, rounded to its dtype once."""
        if not self._wider(x):
            return self.group.reduce_scatter(x, dim, sizes)
        return self.group.reduce_scatter(x.to(self.dtype), dim, sizes).to(x.dtype)

    def exchange(self, obj: T, *, timeout: float = EXCHANGE_TIMEOUT) -> list[T]:
        """As the group."""
        return self.group.exchange(obj, timeout=timeout)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReducedIn:
        return self

    def __repr__(self) -> str:
        return f"ReducedIn({self.group!r}, {self.dtype})"
