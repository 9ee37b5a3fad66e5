"""The one slice algebra: which elements of a tensor each rank holds, and the way back.

    split   XXXXXX -> [XXX, XXX]         merge   [XXX, XXX] -> XXXXXX
    take    the part of one rank         put     one rank's part back into its place

The same description cuts live weights, reads ranges of a file, writes shards, merges and reshards.
`take`, `put`, `split` and `merge` only index, so they serve numpy arrays and torch tensors alike (on any
device, the meta device too); this file imports neither. `rows` says the same in bytes of a row-major file.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autotp.diagnostic import CheckpointError, UsageError
from autotp.placement import Shard

__all__ = ["Rows", "cut", "holders", "merge", "put", "rows", "split", "take", "transfer"]


def cut(shape: Sequence[int], shard: Shard, rank: int) -> list[tuple[int, int]]:
    """The (start, stop) ranges of dim `shard.dim` that `rank` holds, in order, adjacent ones joined.

    >>> from autotp.placement import deal
    >>> cut((8, 3), Shard(0, deal(4, 2), groups=2), 1)  # gate|up, each half cut in two
    [(2, 4), (6, 8)]

    Raises UsageError when the shape cannot be cut this way, or there is no such rank.
    """
    if shard.dim >= len(shape) or not shard.fits(shape[shard.dim]):
        raise UsageError(f"shape {list(shape)} cannot be cut as {shard}")
    if not 0 <= rank < shard.tp:
        raise UsageError(f"there is no rank {rank} in a cut over {shard.tp} ranks")
    joined: list[tuple[int, int]] = []
    for start, stop in shard.ranges(shape[shard.dim], rank):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif stop > start:
            joined.append((start, stop))
    return joined


def take(array: Any, shard: Shard, rank: int) -> Any:
    """`rank`'s part of `array`: new contiguous memory, so the whole array can be freed.

    >>> import numpy
    >>> from autotp.placement import deal
    >>> take(numpy.arange(5), Shard(0, deal(5, 2)), 0).tolist()
    [0, 1, 2]
    """
    part = _empty(array, shard.local_shape(array.shape, rank))
    for whole, local in _places(array.shape, shard, rank):
        part[local] = _plain(array)[whole]
    return part


def put(array: Any, part: Any, shard: Shard, rank: int) -> None:
    """Write `rank`'s `part` into its place in the whole `array`: the inverse of `take`.

    Raises UsageError when the part's shape is not the one that the cut gives this rank.
    """
    expected = shard.local_shape(array.shape, rank)
    if tuple(part.shape) != expected:
        raise UsageError(
            f"rank {rank}'s part has shape {list(part.shape)}; {list(array.shape)} cut as {shard} "
            f"gives it {list(expected)}"
        )
    for whole, local in _places(array.shape, shard, rank):
        array[whole] = _plain(part)[local]


def split(array: Any, shard: Shard) -> list[Any]:
    """The parts of all ranks: `merge(split(array, shard), shard)` is `array`, bit for bit.

    >>> import numpy
    >>> from autotp.placement import deal
    >>> [part.tolist() for part in split(numpy.arange(6), Shard(0, deal(3, 2)))]
    [[0, 1, 2, 3], [4, 5]]
    """
    return [take(array, shard, rank) for rank in range(shard.tp)]


def merge(parts: Sequence[Any], shard: Shard, *, check: bool = False) -> Any:
    """The whole tensor from the parts of all ranks: the inverse of `split`.

    What several ranks hold (whole sections, shared units) is taken from the first that holds it; with
    `check`, copies whose bits differ raise CheckpointError with the rank and the largest difference.
    Raises UsageError for a wrong number of parts, or a part of the wrong shape.
    """
    if len(parts) != shard.tp:
        raise UsageError(f"{len(parts)} parts for a cut over {shard.tp} ranks")
    shape = list(parts[0].shape)
    if shard.dim >= len(shape):
        raise UsageError(f"parts of shape {shape} cannot be merged as {shard}")
    shape[shard.dim] = _whole_size(parts, shard)
    whole = _empty(parts[0], tuple(shape))
    for rank in reversed(range(shard.tp)):  # the first holder writes last
        put(whole, parts[rank], shard, rank)
    if check:
        for rank, part in enumerate(parts):
            kept = take(whole, shard, rank)
            if not bool((_bits(kept) == _bits(part)).all()):
                largest = _largest_difference(kept, _plain(part))
                raise CheckpointError(
                    f"rank {rank}'s copy of what several ranks hold differs from the first holder's: "
                    f"largest difference {largest:g}"
                )
    return whole


@dataclass(frozen=True)
class Rows:
    """A cut tensor in row-major bytes: `count` rows of `length` bytes each; a rank holds of every row
    the `ranges` (start, stop, place): bytes start to stop, which stand at `place` in its own row of
    `local` bytes. A rank that holds everything holds one row, whatever the dim."""

    count: int
    length: int
    local: int
    ranges: tuple[tuple[int, int, int], ...]

    @property
    def whole(self) -> bool:
        """Whether the rank holds every byte."""
        return self.local == self.length

    @property
    def nbytes(self) -> int:
        """How many bytes the rank holds."""
        return self.count * self.local

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """What the rank holds of the tensor's bytes `start` to `stop`, which lie inside one row.

        Yields (first, last, place): positions counted from `start`, and the position in the rank's bytes.
        """
        row, begin = divmod(start, self.length)
        end = begin + stop - start
        for low, high, place in self.ranges:
            first, last = max(low, begin), min(high, end)
            if first < last:
                yield first - begin, last - begin, row * self.local + place + first - low


def holders(parts: Sequence[Rows]) -> list[tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]]:
    """For each rank the ranges that it is the first to hold, and those that an earlier rank holds too.

    >>> from autotp.placement import deal
    >>> shard = Shard(0, sections=((2, deal(2, 2)), (1, None)))
    >>> holders([rows((3,), 1, shard, rank) for rank in range(2)])
    [([(0, 1, 0), (2, 3, 1)], []), ([(1, 2, 0)], [(2, 3, 1)])]
    """
    seen: set[int] = set()  # the borders of all ranges cut the row into atoms; each has one first holder
    borders = sorted({edge for part in parts for low, high, _ in part.ranges for edge in (low, high)})
    found = []
    for part in parts:
        kept: tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]] = ([], [])
        for low, high, place in part.ranges:
            for at in range(bisect_left(borders, low), bisect_left(borders, high)):
                start, stop = borders[at], borders[at + 1]
                into = kept[at in seen]
                if into and into[-1][1] == start and into[-1][2] + start - into[-1][0] == place + start - low:
                    into[-1] = (into[-1][0], stop, into[-1][2])
                else:
                    into.append((start, stop, place + start - low))
                seen.add(at)
        found.append(kept)
    return found


def transfer(parts: Sequence[Rows], wanted: Rows) -> list[Rows]:
    """How `wanted` is made of the ranks' parts of one tensor, each byte from the first that holds it.

    Of each part the rows to read: `length` is that of the part's own row, and the ranges (start, stop, place)
    lead from it into a row of `wanted`.

    >>> from autotp.placement import deal
    >>> halves, thirds = (Shard(1, deal(6, tp)) for tp in (2, 3))
    >>> for one in transfer([rows((4, 6), 1, halves, rank) for rank in range(2)], rows((4, 6), 1, thirds, 1)):
    ...     print(one)
    Rows(count=4, length=3, local=2, ranges=((2, 3, 0),))
    Rows(count=4, length=3, local=2, ranges=((0, 1, 1),))
    """
    count = max(one.count for one in (*parts, wanted))
    even = [one if one.count == count else _in_rows(one, count) for one in (*parts, wanted)]
    found = []
    for part, (first, _) in zip(even, holders(even[:-1]), strict=False):
        ranges = tuple(
            (place + max(low, start) - low, place + min(high, stop) - low, into + max(low, start) - start)
            for low, high, place in first
            for start, stop, into in even[-1].ranges
            if max(low, start) < min(high, stop)
        )
        found.append(Rows(count, part.local, even[-1].local, ranges))
    return found


def _in_rows(one: Rows, count: int) -> Rows:
    """A tensor that is held whole, and so is one row, as `count` rows."""
    length = one.length // count
    return Rows(count, length, length, ((0, length, 0),))


def rows(shape: Sequence[int], itemsize: float, shard: Shard | None, rank: int) -> Rows:
    """How the bytes of a row-major tensor are dealt to `rank`; a shard of None is the whole tensor.

    >>> from autotp.placement import deal
    >>> rows((3, 4), 2, Shard(1, deal(4, 2)), 1)
    Rows(count=3, length=8, local=4, ranges=((4, 8, 0),))

    Raises UsageError when the shape cannot be cut this way, or its elements are smaller than a byte.
    """
    if shard is None:
        total = int(math.prod(shape) * itemsize)
        return Rows(1, total, total, ((0, total, 0),))
    if itemsize != int(itemsize):
        raise UsageError(f"elements of {itemsize:g} bytes cannot be cut")
    inner = math.prod(shape[shard.dim + 1 :]) * int(itemsize)
    places, local = [], 0
    for start, stop in cut(shape, shard, rank):
        places.append((start * inner, stop * inner, local))
        local += (stop - start) * inner
    count, length = math.prod(shape[: shard.dim]), shape[shard.dim] * inner
    if local == length:
        return Rows(1, count * length, count * length, ((0, count * length, 0),))
    return Rows(count, length, local, tuple(places))


def _places(shape: Sequence[int], shard: Shard, rank: int) -> Iterator[tuple[Any, Any]]:
    """The index in the whole and the index in the part, for each range that the rank holds."""
    before, local = (slice(None),) * shard.dim, 0
    for start, stop in cut(shape, shard, rank):
        length = stop - start
        yield (*before, slice(start, stop)), (*before, slice(local, local + length))
        local += length


def _whole_size(parts: Sequence[Any], shard: Shard) -> int:
    """The size of the whole dim, from the first part (the others are checked when they are put)."""
    if shard.sections is not None:
        return sum(size for size, _ in shard.sections)
    assert shard.deal is not None, "a Shard without sections has a deal"
    for part, (start, stop) in zip(parts, shard.deal.ranges, strict=True):
        if stop > start:
            return int(part.shape[shard.dim]) * shard.deal.units // (stop - start)
    raise UsageError(f"no rank holds anything in a cut as {shard}")


def _empty(like: Any, shape: tuple[int, ...]) -> Any:
    """Uninitialised memory of the kind, dtype and device of `like`."""
    if hasattr(like, "new_empty"):
        return like.new_empty(shape)
    import numpy

    return numpy.empty(shape, like.dtype)


def _plain(array: Any) -> Any:
    """The values alone: a torch tensor without its history."""
    return array.detach() if hasattr(array, "detach") else array


def _largest_difference(one: Any, other: Any) -> float:
    """How far two arrays of any dtype are apart; unsigned numbers and truth values do not wrap around."""
    if hasattr(one, "detach"):
        torch = sys.modules["torch"]
        wide = torch.complex128 if one.is_complex() else torch.float64
        return float((one.to(wide) - other.to(wide)).abs().nan_to_num().max())
    import numpy

    wide = numpy.complex128 if one.dtype.kind == "c" else numpy.float64
    return float(numpy.nan_to_num(abs(one.astype(wide) - other.astype(wide))).max())


def _bits(array: Any) -> Any:
    """The array as bytes, in which NaN equals itself."""
    if hasattr(array, "detach"):
        return array.detach().contiguous().view(sys.modules["torch"].uint8)
    return array.copy(order="C").view("uint8")
