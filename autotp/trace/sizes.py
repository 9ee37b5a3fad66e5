"""Batch and sequence sizes that say, wherever they turn up in a graph, where they come from.

A size that equals or divides a size of the model could be taken for one of the model's, or be dealt to
ranks in its place. So sizes are primes, larger than every head count, that divide no size of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import nn

__all__ = ["Sizes", "heads_of", "primes", "sizes_of"]

_LARGEST = 521  # head counts beyond it are taken for something else


@dataclass(frozen=True)
class Sizes:
    """The sizes of one trace."""

    batch: int
    sequence: int
    decoder: int

    @classmethod
    def of(cls, module: nn.Module, *, limit: int | None = None, pair: int = 0) -> Sizes:
        """Sizes for a trace of `module`, of at most `limit` positions. Each `pair` gives other ones.

        >>> Sizes.of(nn.Linear(10, 14))
        Sizes(batch=13, sequence=11, decoder=17)
        """
        avoid = sizes_of(module)
        above = max(heads_of(module), 4)
        first, second, third = islice(primes(above, avoid), 3 * pair, 3 * pair + 3)
        if limit is None or third <= limit:
            return cls(second, first, third)
        # Few positions: the largest sizes that fit, from the top.
        below = [p for p in islice(primes(1, avoid), limit) if p <= limit] or [max(1, limit)]
        batch = next(p for p in islice(primes(above, avoid), pair, None) if p not in below)
        return cls(batch, below[-1 - pair % len(below)], below[-1 - (pair + 1) % len(below)])


def primes(above: int, avoid: frozenset[int] = frozenset()) -> Iterator[int]:
    """Primes larger than `above` that divide none of `avoid`.

    >>> list(islice(primes(10, frozenset({26})), 2))
    [11, 17]
    """
    number = max(above, 1) + 1
    while True:
        prime = all(number % d for d in range(2, int(number**0.5) + 1))
        if prime and not any(size % number == 0 for size in avoid):
            yield number
        number += 1


def sizes_of(module: nn.Module) -> frozenset[int]:
    """Every size of a parameter or buffer, and every number of the config."""
    found = {n for t in (*module.parameters(), *module.buffers()) for n in t.shape}
    found |= {value for _, value in _numbers(_config(module))}
    return frozenset(n for n in found if n > 1)


def heads_of(module: nn.Module) -> int:
    """The largest head count of the config or of any module; 1 where there is none."""
    counts = [v for key, v in _numbers(_config(module)) if _counts_heads(key)]
    for owner in module.modules():
        counts += [v for key, v in vars(owner).items() if type(v) is int and _counts_heads(key)]
    return max((n for n in counts if 0 < n <= _LARGEST), default=1)


def _counts_heads(key: str) -> bool:
    return "head" in key and not any(word in key for word in ("dim", "size", "width"))


def _config(module: nn.Module) -> Any:
    config = getattr(module, "config", None)
    to_dict = getattr(config, "to_dict", None)
    return to_dict() if callable(to_dict) else getattr(config, "__dict__", {})


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _numbers(part, str(name))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _numbers(part, key)
    elif type(value) is int and value > 0:
        yield key, value
