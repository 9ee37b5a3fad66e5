"""Objects passed between ranks through the job's key-value store, with conflicts found, not waited for.

A collective over ranks that disagree on the group hangs. The store does not: each call publishes a
record under (ranks of the mesh, number of the call, rank), so that a rank that calls with another
group, or that has failed, is read by all others.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from autotp.diagnostic import UsageError

__all__ = ["exchange_through"]

POLL = 0.005
GRACE = 5.0
"""Seconds to wait for ranks outside the group, whose calls can only bring a conflict to light."""


class Store(Protocol):
    """What is needed of a torch.distributed store."""

    def add(self, key: str, value: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def get(self, key: str) -> bytes: ...
    def set(self, key: str, value: bytes) -> None: ...
    def delete_key(self, key: str) -> bool: ...


@dataclass(frozen=True)
class _Record:
    """What one rank publishes in one call."""

    members: tuple[int, ...]
    payload: bytes | None
    failure: str | None


def exchange_through(
    store: Store, obj: Any, *, rank: int, members: Sequence[int], everyone: Sequence[int], timeout: float
) -> list[Any]:
    """The objects of all `members` (global ranks) in order; `everyone` are the ranks of the whole mesh.

    Raises `obj` itself when it is an exception, and UsageError when another rank failed, calls with
    another group, or does not call within `timeout` seconds.
    """
    place = "autotp/exchange/" + ".".join(map(str, everyone))
    call = store.add(f"{place}/calls/{rank}", 1)

    def key(number: int, other: int) -> str:
        return f"{place}/{number}/{other}"

    failed = isinstance(obj, BaseException)
    record = _Record(
        members=tuple(members),
        payload=None if failed else pickle.dumps(obj),
        failure=f"{type(obj).__name__}: {obj}" if failed else None,
    )
    store.set(key(call, rank), pickle.dumps(record))
    if failed:
        raise obj
    records: dict[int, _Record] = {rank: record}
    started = time.monotonic()
    while missing := [other for other in everyone if other not in records]:
        for other in missing:
            if store.check([key(call, other)]):
                records[other] = pickle.loads(store.get(key(call, other)))
                _refuse(rank, record, other, records[other])
        waited = time.monotonic() - started
        absent = [other for other in members if other not in records]
        if absent and waited > timeout:
            fault = (
                f"rank {rank} waited {timeout:g} s for rank{'s' * (len(absent) > 1)} "
                f"{', '.join(map(str, absent))} of its group {list(members)}: "
                "every rank of the group must make the same call"
            )
            withdrawn = replace(record, payload=None, failure=fault)  # a late rank must not pair with it
            store.set(key(call, rank), pickle.dumps(withdrawn))
            raise UsageError(fault)
        if not absent and waited > min(GRACE, timeout):
            break
        time.sleep(POLL)
    if call > 2:  # every member has answered the call before this one, so nobody reads this record again
        store.delete_key(key(call - 2, rank))
    return [pickle.loads(records[other].payload or b"") for other in members]


def _refuse(rank: int, record: _Record, other: int, theirs: _Record) -> None:
    """Raise for a record that cannot go with ours."""
    if theirs.members != record.members:
        mine, others = set(record.members), set(theirs.members)
        if mine & others or len(mine) != len(others):
            raise UsageError(
                f"the ranks do not agree on the group: rank {rank} calls with tp {len(mine)} on ranks "
                f"{list(record.members)}, rank {other} with tp {len(others)} on ranks {list(theirs.members)}"
            )
    elif theirs.failure is not None:
        raise UsageError(f"rank {other} failed: {theirs.failure}")
