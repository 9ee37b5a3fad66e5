"""Which units (heads, features) each rank holds.

    deal(5, 2)           aaabb                the first ranks hold one more
    shared_deal(2, 4)    A A B B              fewer units than ranks: the ranks are dealt to the units
    joined(…, 3)         AA A BB B            three query heads to each of these kv heads, dealt inside

This file knows nothing of torch.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

__all__ = ["Deal", "deal", "joined", "shared_deal"]


@dataclass(frozen=True)
class Deal:
    """Which of `units` equal units each rank holds: rank r holds units `ranges[r] = (start, stop)`.

    Two ranks' ranges are disjoint or equal. Kept in lowest terms, so that 4 heads over 2 ranks and 32
    features over 2 ranks compare equal. `declared` remembers the number of units that was dealt (heads, kv
    heads, features), `over` the number of shared units whose repeats were dealt by `joined`.
    Made by `deal`, `shared_deal` and `joined`.
    """

    units: int
    ranges: tuple[tuple[int, int], ...]
    declared: int = field(default=0, compare=False)
    over: int = field(default=0, compare=False)

    @property
    def tp(self) -> int:
        """Number of ranks."""
        return len(self.ranges)

    @property
    def whole(self) -> bool:
        """Whether every one of several ranks holds all of it."""
        return self.tp > 1 and all(held == (0, self.units) for held in self.ranges)

    def fits(self, size: int) -> bool:
        """Whether `size` elements can be cut by this deal without cutting a unit."""
        return size % self.units == 0

    def bounds(self, size: int, rank: int) -> tuple[int, int]:
        """The (start, stop) elements of a piece of `size` elements that `rank` holds."""
        start, stop = self.ranges[rank]
        unit = size // self.units
        return start * unit, stop * unit

    @property
    def shared(self) -> bool:
        """Whether several ranks hold the same units, as kv heads are when there are fewer than ranks."""
        return len(set(self.ranges)) < self.tp

    def __str__(self) -> str:
        if self.shared:
            holders = [self.ranges.count(held) for held in dict.fromkeys(self.ranges)]
            return f"{len(holders)} parts, held by {'+'.join(map(str, holders))} ranks"
        sizes = [stop - start for start, stop in self.ranges]
        if len(set(sizes)) == 1:
            return f"{self.tp} equal parts"
        return "+".join(map(str, sizes)) + f" of {self.units}"


def deal(units: int, tp: int) -> Deal:
    """Deal `units` to `tp` ranks in order; the first `units % tp` ranks hold one more.

    >>> deal(3, 2).ranges
    ((0, 2), (2, 3))
    >>> deal(12, 2) == deal(384, 2)
    True

    Raises ValueError when there are fewer units than ranks.
    """
    if tp < 1:
        raise ValueError(f"tp must be at least 1, not {tp}")
    if units < tp:
        raise ValueError(f"{units} units cannot be dealt to {tp} ranks")
    return _lowest(units, list(itertools.pairwise(_starts(units, tp))), declared=units)


def shared_deal(units: int, tp: int) -> Deal:
    """`deal`, or with fewer units than ranks the ranks are dealt to the units: some ranks hold the same one.

    >>> shared_deal(3, 4).ranges
    ((0, 1), (0, 1), (1, 2), (2, 3))
    >>> shared_deal(3, 2) == deal(3, 2)
    True
    """
    if units >= tp:
        return deal(units, tp)
    starts = _starts(tp, units)
    held = [(unit, unit + 1) for unit in range(units) for _ in range(starts[unit + 1] - starts[unit])]
    return Deal(units, tuple(held), declared=units)


def joined(units: Deal, repeats: int) -> Deal:
    """The deal of `units` that each stand `repeats` times in a row: query heads, which follow their kv heads.

    The repeats of a unit that several ranks share are dealt inside of these.

    >>> joined(shared_deal(2, 4), 3).ranges
    ((0, 2), (2, 3), (3, 5), (5, 6))
    >>> joined(deal(3, 2), 2) == deal(3, 2)
    True
    """
    ranges: list[tuple[int, int]] = []
    for rank, (start, stop) in enumerate(units.ranges):
        size, holders = (stop - start) * repeats, units.ranges.count((start, stop))
        first, last = shared_deal(size, holders).bounds(size, units.ranges[:rank].count((start, stop)))
        ranges.append((start * repeats + first, start * repeats + last))
    declared = (units.declared or units.units) * repeats
    return _lowest(units.units * repeats, ranges, declared, over=units.units if units.shared else units.over)


def _starts(units: int, ranks: int) -> list[int]:
    """Where each rank's units begin, and the end of the last."""
    more, base = units % ranks, units // ranks
    return [rank * base + min(rank, more) for rank in range(ranks + 1)]


def _lowest(units: int, ranges: list[tuple[int, int]], declared: int, over: int = 0) -> Deal:
    """A deal in lowest terms."""
    common = math.gcd(units, *(edge for held in ranges for edge in held))
    return Deal(
        units // common, tuple((a // common, b // common) for a, b in ranges), declared=declared, over=over
    )
