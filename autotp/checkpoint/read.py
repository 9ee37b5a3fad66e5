"""Reading: parts of tensors out of files, into a block of memory, each byte once.

A tensor travels in blocks of its row-major bytes, at most 1 MiB each (they stay in the cache of the
core). `Source.gather` fills one block from the parts that hold it, one whole source or the shards of all
ranks; `scatter` (write.py) is its inverse. Plain `preadv`, no map of the file: what is read is what is held.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from autotp.checkpoint.folder import open_folder
from autotp.diagnostic import CheckpointError
from autotp.header import BITS, Entry
from autotp.placement import Shard
from autotp.slicing import Rows, holders, rows

__all__ = [
    "CHUNK",
    "Block",
    "Differs",
    "Memory",
    "Part",
    "Source",
    "open_to_read",
    "read_exactly",
    "read_local",
    "read_rank",
    "spans",
    "typed",
]

CHUNK = 1 << 20  # bytes of a block
LONG = 64 << 10  # bytes from which on a piece of a row is read alone
Block = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Part:
    """What one file holds of one tensor: an open file, where the tensor's data starts, and which bytes."""

    fd: int
    path: Path
    offset: int
    rows: Rows


class Differs(Exception):
    """Two ranks hold different copies; `rank` is the later one."""

    def __init__(self, rank: int, first: Block, copy: Block) -> None:
        self.rank = rank


def _raise(rank: int, first: Block, copy: Block) -> None:
    raise Differs(rank, first, copy)


def spans(nbytes: int, lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut `nbytes` into (start, stop) blocks of at most CHUNK bytes.

    Each block is, for every row length given, either a number of whole rows or lies inside one row.

    >>> list(spans(4 << 20, [3 << 19]))[:3]  # rows of 1.5 MiB
    [(0, 1048576), (1048576, 1572864), (1572864, 2621440)]
    """
    if not nbytes:
        return
    unit = min((length for length in lengths if length > CHUNK), default=nbytes)
    small = max((length for length in lengths if length <= CHUNK), default=1)
    step = CHUNK // small * small
    for row in range(0, nbytes, unit):
        for start in range(row, row + unit, step):
            yield start, min(start + step, row + unit)


class Source:
    """The parts of one tensor, in the order of the ranks; who is first to hold each byte is decided once."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self.held = [
            tuple(replace(part.rows, ranges=tuple(ranges)) for ranges in both)
            for part, both in zip(parts, holders([part.rows for part in parts]), strict=True)
        ]
        self.length = parts[0].rows.length

    def gather(
        self,
        block: Block,
        start: int,
        scratch: Block,
        *,
        differs: Callable[[int, Block, Block], None] = _raise,
    ) -> None:
        """Fill `block` with the tensor's bytes from `start` on, a block as `spans` cuts it.

        Bytes that several ranks hold come from the first; the other copies are read too, and where one is
        not the same, `differs(rank, first, copy)` is called: by default it raises Differs. Raises
        CheckpointError when a file ends too early.
        """
        whole_rows = len(block) % self.length == 0 and start % self.length == 0
        for rank, (part, (first, again)) in enumerate(zip(self.parts, self.held, strict=True)):
            if part.rows.whole and not again.ranges:
                read_exactly(part, block, start)
            elif not whole_rows or part.rows.count == 1:
                for low, high, place in first.within(start, start + len(block)):
                    read_exactly(part, block[low:high], place)
                for low, high, place in again.within(start, start + len(block)):
                    read_exactly(part, scratch[: high - low], place)
                    if not np.array_equal(scratch[: high - low], block[low:high]):
                        differs(rank, block[low:high], scratch[: high - low])
            elif part.rows.local:
                count = len(block) // self.length
                local = scratch[: count * part.rows.local]
                read_exactly(part, local, start // self.length * part.rows.local)
                there, here = local.reshape(count, -1), block.reshape(count, -1)
                for low, high, place in first.ranges:
                    here[:, low:high] = there[:, place : place + high - low]
                for low, high, place in again.ranges:
                    copy = there[:, place : place + high - low]
                    if not np.array_equal(here[:, low:high], copy):
                        differs(rank, here[:, low:high].ravel(), copy.ravel())


class Memory:
    """One tensor that is in memory (or mapped), as a source of blocks."""

    def __init__(self, data: Block) -> None:
        self.data = data
        self.length = max(1, len(data))

    def gather(self, block: Block, start: int, scratch: Block) -> None:
        """Fill `block` with the bytes from `start` on."""
        block[:] = self.data[start : start + len(block)]


def read_exactly(part: Part, into: Block, place: int) -> None:
    """Fill `into` from byte `place` of a part; raises CheckpointError when the file ends before."""
    view, at = into.data, part.offset + place
    while len(view):
        try:
            got = os.preadv(part.fd, [view], at)
        except OSError as error:
            raise CheckpointError(f"{part.path}: cannot be read: {error.strerror}") from error
        if not got:
            raise CheckpointError(f"{part.path}: ended at byte {at} while it was read; it was longer before")
        view, at = view[got:], at + got


def read_local(part: Part, wanted: Rows, into: Block, scratch: Block) -> None:
    """Fill `into` with what `wanted` says of a tensor that `part` holds whole.

    Long pieces, and those of a tensor that is one row, are read alone, each into its place; short ones a
    block at a time, with what lies between them: that is faster than a call for each.
    """
    shortest = min((high - low for low, high, _ in wanted.ranges), default=0)
    if wanted.count == 1 or shortest >= LONG or wanted.length > CHUNK:
        _read_ahead(part.fd, part.rows.whole)
        for row in range(wanted.count):
            for low, high, place in wanted.ranges:
                at = row * wanted.local + place
                read_exactly(part, into[at : at + high - low], row * wanted.length + low)
        return
    _read_ahead(part.fd, True)
    for start, stop in spans(wanted.count * wanted.length, [wanted.length]):
        count, row = (stop - start) // wanted.length, start // wanted.length
        block = scratch[: stop - start]
        read_exactly(part, block, start)
        local = into[row * wanted.local : (row + count) * wanted.local].reshape(count, -1)
        for low, high, place in wanted.ranges:
            local[:, place : place + high - low] = block.reshape(count, -1)[:, low:high]


def _read_ahead(fd: int, wanted: bool) -> None:
    """Whether the system should read on after what it is asked for: behind a slice is what others need."""
    if hasattr(os, "posix_fadvise"):  # not on every system
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NORMAL if wanted else os.POSIX_FADV_RANDOM)


def open_to_read(path: Path) -> int:
    """A file descriptor for reading; raises CheckpointError."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def read_rank(
    folder: str | Path, layouts: Mapping[str, Shard], rank: int
) -> Iterator[tuple[Entry, np.ndarray[Any, Any]]]:
    """The slices of one rank out of an unsharded checkpoint, tensor by tensor in file order.

    Yields the tensor's entry in its file (name, dtype, global shape) and its local slice; tensors without
    a layout are whole. dtypes that numpy lacks (BF16, F8, …) come as unsigned integers of their width,
    sub-byte ones as bytes. Only the slices are held in memory. Raises CheckpointError and UsageError.
    """
    scratch = np.empty(CHUNK, np.uint8)
    for file in open_folder(folder).files:
        fd = open_to_read(file.path)
        try:
            for entry in file.tensors.values():
                shard = layouts.get(entry.name)
                wanted = rows(entry.shape, entry.itemsize, shard, rank)
                into = np.empty(wanted.nbytes, np.uint8)
                read_local(Part(fd, file.path, entry.start, wanted), wanted, into, scratch)
                shape = entry.shape if shard is None else shard.local_shape(entry.shape, rank)
                array = typed(into, entry.dtype)
                yield entry, array if entry.itemsize < 1 else array.reshape(shape)
        finally:
            os.close(fd)


def typed(data: Block, dtype: str) -> np.ndarray[Any, Any]:
    """Bytes as a flat array of a safetensors dtype, or of what comes next to it in numpy."""
    if dtype == "BOOL":
        return data.view(np.bool_)
    if BITS[dtype] < 8:
        return data
    kind = {"I": "i", "F": "f", "C": "c"}.get(dtype[0], "u") if "_" not in dtype else "u"
    return data.view(f"{kind}{BITS[dtype] // 8}")
