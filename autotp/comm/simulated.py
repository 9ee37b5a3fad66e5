"""All ranks in one process: a thread a rank, and one baton that lets one of them run at a time.

A rank runs until its next collective, hands the baton on, and goes on when every rank of the group has
arrived. What is global in a process but belongs to a rank (random states, default dtype) changes hands
with the baton; what is local to a thread (grad mode, autocast, default device) is set as the caller
has it. Backward runs in the rank's own thread, so its collectives are like any other.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from autotp.comm.baton import Call, Room, Stopped, read_globals, write_globals
from autotp.comm.group import EXCHANGE_TIMEOUT, KnownGroup, check_summed
from autotp.diagnostic import UsageError

__all__ = ["SimulatedGroup", "simulate"]

T = TypeVar("T")
_here = threading.local()  # .seat: the (room, rank) that this thread runs as


class SimulatedGroup(KnownGroup):
    """A `Group` of ranks that run in this process. Made by `simulate`.

    It belongs to its rank, not to one call of `simulate`: a module that was sharded in one simulation
    runs in the next.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def _meet(self, call: Call) -> Any:
        room, rank = getattr(_here, "seat", (None, None))
        if room is None:
            raise UsageError(
                f"simulated rank {self.rank} of {self.size} calls {call} outside of a simulation: "
                "run it in autotp.comm.simulate"
            )
        if (rank, room.size) != (self.rank, self.size):
            raise UsageError(
                f"simulated rank {rank} of {room.size} uses the group of rank {self.rank} of {self.size}"
            )
        return room.meet(rank, call)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, added in rank order: a new tensor."""
        check_summed(x)
        terms = (x.dtype, tuple(x.shape))
        total: Tensor = self._meet(Call("all_reduce", terms, x.detach(), _sums))
        return total

    def all_reduce_later(self, x: Tensor) -> Callable[[], Tensor]:
        """The sum, at once: one rank runs at a time."""
        total = self.all_reduce(x)
        return lambda: total

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """The ranks' tensors concatenated on `dim`."""
        dim = dim % x.ndim
        if x.shape[dim] != sizes[self.rank]:
            raise UsageError(
                f"all_gather on dim {dim}: rank {self.rank} brings {x.shape[dim]}, "
                f"but its size is {sizes[self.rank]} of {list(sizes)}"
            )
        rest = (*x.shape[:dim], *x.shape[dim + 1 :])

        def combine(values: list[Tensor]) -> list[Tensor]:
            return [torch.cat(values, dim) for _ in values]

        terms = (x.dtype, rest, f"dim={dim}", f"sizes={list(sizes)}")
        gathered: Tensor = self._meet(Call("all_gather", terms, x.detach(), combine))
        return gathered

    def reduce_scatter(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """This rank's block of the sum."""
        check_summed(x)
        dim = dim % x.ndim
        if x.shape[dim] != sum(sizes):
            raise UsageError(
                f"reduce_scatter on dim {dim}: {x.shape[dim]} elements for blocks of {list(sizes)}"
            )

        def combine(values: list[Tensor]) -> list[Tensor]:
            blocks = torch.split(_sum(values), list(sizes), dim)
            return [block.clone(memory_format=torch.contiguous_format) for block in blocks]

        terms = (x.dtype, tuple(x.shape), f"dim={dim}", f"sizes={list(sizes)}")
        block: Tensor = self._meet(Call("reduce_scatter", terms, x.detach(), combine))
        return block

    def exchange(self, obj: T, *, timeout: float = EXCHANGE_TIMEOUT) -> list[T]:
        """Every rank's object; an exception ends the simulation and is raised by it."""
        if isinstance(obj, BaseException):
            raise obj
        every: list[T] = self._meet(Call("exchange", (), obj, lambda values: [list(values) for _ in values]))
        return every

    def __deepcopy__(self, memo: dict[int, Any]) -> SimulatedGroup:
        return self

    def __repr__(self) -> str:
        return f"SimulatedGroup(rank={self.rank}, size={self.size})"


def _sum(values: list[Tensor]) -> Tensor:
    total = values[0].clone(memory_format=torch.contiguous_format)
    for value in values[1:]:
        total += value
    return total


def _sums(values: list[Tensor]) -> list[Tensor]:
    total = _sum(values)
    return [total, *(total.clone() for _ in values[1:])]


@contextmanager
def _as_the_caller(settings: dict[str, Any]) -> Iterator[None]:
    """Set in this thread what torch keeps per thread."""
    torch.set_num_threads(settings["threads"])  # a new thread has its own number, and other last bits
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(settings["inference"]))
        stack.enter_context(torch.set_grad_enabled(settings["grad"]))
        # backward of CUDA tensors too runs in this thread, or all ranks would wait in one thread
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        for device_type, (enabled, dtype) in settings["autocast"].items():
            if enabled:
                stack.enter_context(torch.autocast(device_type, dtype=dtype))
        if settings["device"] != torch.device("cpu"):
            stack.enter_context(settings["device"])
        yield


def _settings() -> dict[str, Any]:
    """What the caller's thread has set."""
    return {
        "threads": torch.get_num_threads(),
        "inference": torch.is_inference_mode_enabled(),
        "grad": torch.is_grad_enabled(),
        "device": torch.get_default_device(),
        "autocast": {
            device_type: (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
            for device_type in ("cpu", "cuda")
        },
    }


def simulate(tp: int, function: Callable[[SimulatedGroup], T]) -> list[T]:
    """Run `function(group)` as each of `tp` ranks in this process; the results in rank order.

    Each rank has its own group, its own random states (all start as the caller's) and its own thread;
    one runs at a time. An exception in one rank ends all and is raised here, with a note that names the
    rank. Ranks that make different collective calls raise UsageError. The caller's random states and
    default dtype are afterwards as before.

    >>> simulate(3, lambda group: group.all_reduce(torch.tensor([float(group.rank)])).item())
    [3.0, 3.0, 3.0]
    """
    if tp < 1:
        raise UsageError(f"tp must be at least 1, not {tp}")
    before = read_globals()
    settings = _settings()
    room = Room(tp)
    results: list[Any] = [None] * tp

    def live(rank: int) -> None:
        _here.seat = (room, rank)
        try:
            room.wait(rank)
            with _as_the_caller(settings):
                results[rank] = function(SimulatedGroup(rank, tp))
            room.globals[rank] = read_globals()
            room.leave(rank)
        except Stopped:
            pass
        except BaseException as error:
            room.stop(rank, error)

    threads = [
        threading.Thread(
            target=contextvars.copy_context().run,
            args=(live, rank),
            name=f"simulated rank {rank}",
            daemon=True,
        )
        for rank in range(tp)
    ]
    for thread in threads:
        thread.start()
    room.turns[0].release()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:  # an interrupt: let no thread go on
        room.stop(0, error)
        raise
    finally:
        write_globals(before)
    if room.failure is not None:
        rank, fault = room.failure
        fault.add_note(f"in simulated rank {rank} of {tp}")
        raise fault
    return results
