"""What a module was called with in the traces: flags, numbers, None. Another one may take another way.

A guard stands at the border of each region of raw tensors (`rewrite/specialise.py`) and at the model itself
(`rewrite/called.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotp.trace.graph import Trace

__all__ = ["TENSOR", "Guard", "flag", "guard_of", "is_number"]

TENSOR = "a tensor"


@dataclass(frozen=True)
class Guard:
    """What the calls of a module were given in the traces: argument -> the flags, numbers and None that were
    seen there, or "a tensor". Any number may stand at the `free` ones."""

    seen: Mapping[str, frozenset[str]] = field(default_factory=dict)
    free: frozenset[str] = frozenset()

    def unseen(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What of a call no trace has shown; nothing for a call like the traced ones."""
        return {
            place: value
            for place, value in given.items()
            if flag(value) not in self.seen.get(place, ()) and not (is_number(value) and place in self.free)
        }

    def shown(self, place: str) -> str:
        """What the traces gave an argument, in words."""
        values = sorted(self.seen.get(place, ()))
        return f"with {place}={' and '.join(values)}" if values else "without it"

    def __or__(self, other: Guard) -> Guard:
        """What either of them shows."""
        none: frozenset[str] = frozenset()
        places = dict.fromkeys([*self.seen, *other.seen])
        seen = {place: self.seen.get(place, none) | other.seen.get(place, none) for place in places}
        return Guard(seen, self.free | other.free)


def is_number(value: Any) -> bool:
    """Whether a value counts or measures, and is no flag."""
    return isinstance(value, (int, float, complex)) and not isinstance(value, bool)


def flag(value: Any) -> str:
    """A value as a guard remembers it."""
    return TENSOR if isinstance(value, type) else repr(value)


def guard_of(path: str, traces: Iterable[Trace], sizes: Iterable[int]) -> Guard:
    """The guard of a module from all traced calls. Whole numbers that are multiples of one of `sizes`, those
    of the inputs, change with the inputs, and are no flags."""
    sizes = [size for size in sizes if size > 1]
    seen: dict[str, set[str]] = {}
    free: set[str] = set()
    for given in (given for trace in traces for given in trace.given.get(path, [])):
        for place, value in given.items():
            seen.setdefault(place, set()).add(flag(value))
            if (
                isinstance(value, int)
                and is_number(value)
                and value
                and any(value % size == 0 for size in sizes)
            ):
                free.add(place)
    return Guard({place: frozenset(flags) for place, flags in seen.items()}, frozenset(free))
