"""Where a value lives on the tensor-parallel axis: whole, sharded, or waiting to be summed.

Four layouts, as in DTensor (https://docs.pytorch.org/docs/stable/distributed.tensor.html) plus the
gradient's side, which decides the mappings (Megatron-LM, https://arxiv.org/abs/1909.08053):

- `Invariant`  the same on every rank, and its gradient is whole on every rank
- `Replicate`  the same on every rank, but each rank holds only a part of its gradient
- `Shard`      each rank holds some units of one dim
- `Partial`    the value is the sum over the ranks

A `Shard` is a dim cut into pieces, each piece dealt to the ranks by a `Deal`:

    Shard(0, deal(8, 2))             XXXXXXXX     -> [XXXX, XXXX]
    Shard(0, deal(3, 2))             XXX          -> [XX, X]              the first ranks hold one more
    Shard(0, deal(4, 2), groups=2)   AAAABBBB     -> [AABB, AABB]         fused gate|up: each half is cut
    Shard(0, sections=((4, deal(4, 2)), (2, deal(2, 2))))
                                     AAAABB       -> [AAB, AAB]           fused q|k, unequal parts

This file knows nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

__all__ = [
    "INVARIANT",
    "PARTIAL",
    "REPLICATE",
    "Deal",
    "Invariant",
    "Layout",
    "Partial",
    "Replicate",
    "Shard",
    "deal",
    "describe",
    "join_pieces",
]


@dataclass(frozen=True)
class Deal:
    """Which of `units` equal units each rank holds: rank r holds units `ranges[r] = (start, stop)`.

    Kept in lowest terms, so that 4 heads over 2 ranks and 32 features over 2 ranks compare equal.
    `declared` remembers the number of units that was dealt (heads, kv heads, features).
    Use `deal(units, tp)` to make one.
    """

    units: int
    ranges: tuple[tuple[int, int], ...]
    declared: int = field(default=0, compare=False)

    @property
    def tp(self) -> int:
        """Number of ranks."""
        return len(self.ranges)

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
    more, base = units % tp, units // tp
    starts = [rank * base + min(rank, more) for rank in range(tp + 1)]
    common = math.gcd(units, *starts)
    return Deal(
        units // common,
        tuple((starts[r] // common, starts[r + 1] // common) for r in range(tp)),
        declared=units,
    )


@dataclass(frozen=True)
class Invariant:
    """The same on every rank; the gradient is whole on every rank."""


@dataclass(frozen=True)
class Replicate:
    """The same on every rank; each rank holds a part of the gradient, to be summed."""


@dataclass(frozen=True)
class Partial:
    """The value is the sum of the ranks' values."""


@dataclass(frozen=True)
class Shard:
    """Dim `dim` is cut into pieces, and each piece is dealt to the ranks.

    Either `groups` equal pieces that all follow `deal`, or `sections`: (size, deal) of each piece in
    order, where a deal of None means that the piece is whole on every rank. A rank's local dim is its
    parts of all pieces, in order.
    """

    dim: int
    deal: Deal | None = None
    groups: int = 1
    sections: tuple[tuple[int, Deal | None], ...] | None = None

    def __post_init__(self) -> None:
        assert (self.deal is None) != (self.sections is None), "a Shard has a deal or sections"
        assert self.dim >= 0, "a Shard counts its dim from the front"

    @property
    def tp(self) -> int:
        """Number of ranks."""
        deals = [self.deal] if self.sections is None else [d for _, d in self.sections]
        return next(d.tp for d in deals if d is not None)

    def pieces(self, size: int) -> tuple[tuple[int, Deal | None], ...]:
        """The pieces of a dim of `size` elements, each with its size and deal."""
        if self.sections is not None:
            return self.sections
        return ((size // self.groups, self.deal),) * self.groups

    def fits(self, size: int) -> bool:
        """Whether a dim of `size` elements can be cut this way."""
        if self.sections is None and size % self.groups:
            return False
        pieces = self.pieces(size)
        return sum(n for n, _ in pieces) == size and all(d is None or d.fits(n) for n, d in pieces)

    def ranges(self, size: int, rank: int) -> list[tuple[int, int]]:
        """The (start, stop) element ranges of a dim of `size` elements that `rank` holds, in order."""
        found: list[tuple[int, int]] = []
        offset = 0
        for length, dealt in self.pieces(size):
            start, stop = (0, length) if dealt is None else dealt.bounds(length, rank)
            found.append((offset + start, offset + stop))
            offset += length
        return found

    def local_size(self, size: int, rank: int) -> int:
        """How many of a dim's `size` elements `rank` holds."""
        return sum(stop - start for start, stop in self.ranges(size, rank))

    def local_shape(self, shape: Iterable[int], rank: int) -> tuple[int, ...]:
        """The shape of `rank`'s part of a tensor of `shape`."""
        sizes = list(shape)
        sizes[self.dim] = self.local_size(sizes[self.dim], rank)
        return tuple(sizes)

    def at(self, dim: int) -> Shard:
        """The same cut on another dim."""
        return replace(self, dim=dim)

    def same_cut(self, other: Shard) -> bool:
        """Whether two shards cut their dims alike, whatever the dims are."""
        return self.at(0) == other.at(0)

    def __str__(self) -> str:
        if self.sections is not None:
            parts = ", ".join(f"{n} whole" if d is None else f"{n} in {d}" for n, d in self.sections)
            return f"shard(dim {self.dim}: sections {parts})"
        pieces = "" if self.groups == 1 else f"{self.groups} sections, each in "
        return f"shard(dim {self.dim}: {pieces}{self.deal})"


Layout = Invariant | Replicate | Partial | Shard
INVARIANT = Invariant()
REPLICATE = Replicate()
PARTIAL = Partial()


def join_pieces(dim: int, pieces: Iterable[tuple[int, Deal | None]]) -> Shard | Replicate:
    """The layout of a dim that is these pieces in a row; whole pieces only give `Replicate`."""
    row = tuple(pieces)
    if all(dealt is None for _, dealt in row):
        return REPLICATE
    if len(set(row)) == 1:
        return Shard(dim, row[0][1], groups=len(row))
    return Shard(dim, sections=row)


def describe(layout: Layout) -> str:
    """The layout as users read it: replicate, partial, or shard(...)."""
    if isinstance(layout, Shard):
        return str(layout)
    return "partial" if isinstance(layout, Partial) else "replicate"
