"""The baton of a simulation: the ranks' turns, their meetings, and the globals that change hands with it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from autotp.diagnostic import UsageError

__all__ = ["Call", "Room", "Stopped", "read_globals", "write_globals"]


class Stopped(BaseException):
    """Raised in the ranks that are left when one has failed; not an Exception, so that nobody keeps it."""


@dataclass(frozen=True)
class Call:
    """A rank's part of a collective: what must agree (`kind`, `terms`), and what it brings."""

    kind: str
    terms: tuple[Any, ...]
    value: Any
    combine: Callable[[list[Any]], list[Any]]

    def __str__(self) -> str:
        if not isinstance(self.value, Tensor):
            return self.kind
        detail = "".join(f", {term}" for term in self.terms[2:])
        return f"{self.kind}({str(self.value.dtype).removeprefix('torch.')}{list(self.value.shape)}{detail})"


class Room:
    """What the ranks of one simulation share. Only the rank that holds the baton touches it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turns = [threading.Semaphore(0) for _ in range(size)]
        self.globals: list[tuple[Any, ...]] = [read_globals()] * size
        self.calls: list[Call | None] = [None] * size
        self.results: list[Any] = [None] * size
        self.running = [True] * size
        self.failure: tuple[int, BaseException] | None = None

    def meet(self, rank: int, call: Call) -> Any:
        """Bring a call, let the others arrive, and take the result."""
        if self.failure is not None:
            raise Stopped
        self.calls[rank] = call
        if not all(self.running):
            left = self.running.index(False)
            raise UsageError(f"rank {rank} waits in {call}, but rank {left} has returned without that call")
        if all(other is not None for other in self.calls):
            calls = [other for other in self.calls if other is not None]
            if any((other.kind, other.terms) != (call.kind, call.terms) for other in calls):
                listed = "; ".join(f"rank {r}: {other}" for r, other in enumerate(calls))
                raise UsageError(f"the ranks do not make the same collective call: {listed}")
            self.results = call.combine([other.value for other in calls])
            self.calls = [None] * self.size
        else:
            self.globals[rank] = read_globals()
            self.pass_baton(rank)
            self.wait(rank)
        result, self.results[rank] = self.results[rank], None
        return result

    def wait(self, rank: int) -> None:
        """Until the baton comes."""
        self.turns[rank].acquire()
        if self.failure is not None:
            raise Stopped
        write_globals(self.globals[rank])

    def pass_baton(self, rank: int) -> None:
        """To the next rank that can run."""
        for step in range(1, self.size + 1):
            other = (rank + step) % self.size
            if self.running[other] and self.calls[other] is None:
                self.turns[other].release()
                return

    def leave(self, rank: int) -> None:
        """The rank has returned: pass the baton, or say that the others wait in vain."""
        self.running[rank] = False
        waiting = [other for other in range(self.size) if self.calls[other] is not None]
        if waiting:
            raise UsageError(
                f"rank {waiting[0]} waits in {self.calls[waiting[0]]}, "
                f"but rank {rank} has returned without that call"
            )
        self.pass_baton(rank)

    def stop(self, rank: int, error: BaseException) -> None:
        """End all ranks because of one rank's exception."""
        if self.failure is None:
            self.failure = (rank, error)
        for turn in self.turns:
            turn.release()


def read_globals() -> tuple[Any, ...]:
    """What is global in a process and belongs to a rank."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    return (
        torch.get_rng_state(),
        cuda,
        random.getstate(),
        numpy.random.get_state(),
        torch.get_default_dtype(),
    )


def write_globals(state: tuple[Any, ...]) -> None:
    torch_state, cuda, python_state, numpy_state, dtype = state
    torch.set_rng_state(torch_state)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)
    random.setstate(python_state)
    numpy.random.set_state(numpy_state)
    torch.set_default_dtype(dtype)
