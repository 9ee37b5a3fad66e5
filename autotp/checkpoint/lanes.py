"""Lanes: the tensors of a file are carried by two threads, each with its own memory, a tensor at a time.

What takes the time are copies inside the operating system, which one core cannot do fast enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

__all__ = ["in_lanes"]

Item = TypeVar("Item")
Lane = TypeVar("Lane")


def in_lanes(work: Callable[[Lane, Item], None], items: Iterable[Item], lanes: Sequence[Lane]) -> None:
    """Call `work(lane, item)` for every item, in each lane one at a time, the items in their order.

    The first error ends all lanes, after the items they are at, and is raised.

    >>> done = []
    >>> in_lanes(lambda lane, item: done.append(item), range(5), ["left", "right"])
    >>> sorted(done)
    [0, 1, 2, 3, 4]
    """
    waiting, one_at_a_time = iter(items), Lock()
    failed: list[BaseException] = []

    def drive(lane: Lane) -> None:
        while not failed:
            with one_at_a_time:
                try:
                    item = next(waiting)
                except StopIteration:
                    return
            try:
                work(lane, item)
            except BaseException as error:
                failed.append(error)

    pool = ThreadPoolExecutor(len(lanes), thread_name_prefix="autotp carries")
    try:
        for _ in pool.map(drive, lanes):
            pass
    except BaseException as error:  # such as an interrupt from the keyboard
        failed.append(error)
        raise
    finally:
        pool.shutdown()
    if failed:
        raise failed[0]
