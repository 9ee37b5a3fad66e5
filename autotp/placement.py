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
    Shard(0, shared_deal(2, 3))      AB           -> [A, A, B]            kv heads, fewer than ranks

Query heads follow their kv heads: `joined` deals each head's queries inside the ranks that share it. Where
heads and queries are two dims, no one dim says what a rank holds: a `Joint` cuts both at once.

This file knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from autotp.deals import Deal, deal, joined, shared_deal

__all__ = [
    "INVARIANT",
    "PARTIAL",
    "REPLICATE",
    "Deal",
    "Invariant",
    "Joint",
    "Layout",
    "Partial",
    "Replicate",
    "Shard",
    "deal",
    "describe",
    "is_whole",
    "join_pieces",
    "joined",
    "shared_deal",
]


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

    @property
    def shared(self) -> bool:
        """Whether some elements are on several ranks: whole sections, units that ranks share."""
        deals = [self.deal] if self.sections is None else [dealt for _, dealt in self.sections]
        return any(dealt is None or dealt.shared for dealt in deals)

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


@dataclass(frozen=True)
class Joint:
    """Two dims, taken together as one row-major dim, are cut by `deal`: kv heads and the queries of each.

    No rank's part crosses a unit of the first dim but by whole ones: it holds some units with all of the
    second dim, or a part of the second dim of one unit. Parts of two ranks are disjoint.
    """

    dims: tuple[int, int]
    deal: Deal

    @property
    def tp(self) -> int:
        """Number of ranks."""
        return self.deal.tp

    def fits(self, units: int, each: int) -> bool:
        """Whether dims of `units` and `each` elements can be cut this way."""
        if not self.deal.fits(units * each):
            return False
        held = [self.deal.bounds(units * each, rank) for rank in range(self.tp)]
        return all(
            (start % each == 0 and stop % each == 0) or start // each == (stop - 1) // each
            for start, stop in held
        )

    def bounds(self, units: int, each: int, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The (start, stop) of `rank` on the first dim, and on the second."""
        start, stop = self.deal.bounds(units * each, rank)
        if start % each == 0 and stop % each == 0:
            return (start // each, stop // each), (0, each)
        unit = start // each
        return (unit, unit + 1), (start - unit * each, stop - unit * each)

    def local_shape(self, shape: Iterable[int], rank: int) -> tuple[int, ...]:
        """The shape of `rank`'s part of a tensor of `shape`."""
        sizes = list(shape)
        first, second = self.dims
        (a, b), (c, d) = self.bounds(sizes[first], sizes[second], rank)
        sizes[first], sizes[second] = b - a, d - c
        return tuple(sizes)

    def __str__(self) -> str:
        return f"shard(dims {self.dims[0]} and {self.dims[1]} together: {self.deal})"


Layout = Invariant | Replicate | Partial | Shard | Joint
INVARIANT = Invariant()
REPLICATE = Replicate()
PARTIAL = Partial()


def join_pieces(dim: int, pieces: Iterable[tuple[int, Deal | None]]) -> Shard | Replicate:
    """The layout of a dim that is these pieces in a row; whole pieces only give `Replicate`."""
    row = tuple((size, None if dealt is None or dealt.whole else dealt) for size, dealt in pieces)
    if all(dealt is None for _, dealt in row):
        return REPLICATE
    if len(set(row)) == 1:
        return Shard(dim, row[0][1], groups=len(row))
    return Shard(dim, sections=row)


def describe(layout: Layout) -> str:
    """The layout as users read it: replicate, partial, or shard(...)."""
    if isinstance(layout, (Shard, Joint)):
        return str(layout)
    return "partial" if isinstance(layout, Partial) else "replicate"


def is_whole(layout: Layout) -> bool:
    """Whether the value is the same on every rank."""
    return isinstance(layout, (Invariant, Replicate))
