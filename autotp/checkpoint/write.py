"""Writing: blocks of tensors into the files of the ranks, each byte once, in one pass.

stream  source ──block──► sinks       one whole file -> the shards of all ranks (convert)
                                      the shards of all ranks -> one whole file (merge)
                                      shards of tp ranks -> shards of other ranks (reshard)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from autotp.checkpoint.digest import Digest
from autotp.checkpoint.read import CHUNK, Block, Part, spans
from autotp.diagnostic import CheckpointError

__all__ = ["UNWRITTEN", "Buffers", "Gathers", "create", "scatter", "stream", "write_exactly"]


UNWRITTEN = -1  # the descriptor of a sink whose digest alone is wanted
LARGEST_WRITE = 512 << 10  # bytes of a call: with more, Linux may look long for so large a page of its cache


class Buffers:
    """The memory that one lane of a conversion uses: a block, and room to rearrange it."""

    def __init__(self) -> None:
        self.block = np.empty(CHUNK, np.uint8)
        self.scratch = np.empty(CHUNK, np.uint8)


class Gathers(Protocol):
    """Where the blocks of one tensor come from; `length` is how long its rows are (read.Source)."""

    length: int

    def gather(self, block: Block, start: int, scratch: Block) -> None:
        """Fill `block` with the tensor's bytes from `start` on."""


def stream(
    source: Gathers,
    sinks: Sequence[Part],
    nbytes: int,
    *,
    buffers: Buffers,
    whole: Digest,
    parts: Sequence[Digest] = (),
    progress: Callable[[int], None],
) -> None:
    """Carry one tensor of `nbytes` from its source to its sinks, block by block.

    `whole` takes in the tensor's bytes, `parts` (when given) the bytes of each sink. `progress` is told
    how many bytes have been carried. Raises CheckpointError, and Differs for unequal copies.
    """
    cuts = spans(nbytes, [source.length, *(sink.rows.length for sink in sinks)])
    for start, stop in cuts:
        block = buffers.block[: stop - start]
        source.gather(block, start, buffers.scratch)
        whole.update(block)
        scatter(block, start, sinks, parts, buffers.scratch)
        progress(len(block))


def scatter(
    block: Block, start: int, sinks: Sequence[Part], digests: Sequence[Digest], scratch: Block
) -> None:
    """Write to every sink what it holds of a tensor's bytes from `start` on, a block as `spans` cuts it.

    `digests` take in what each sink gets. The inverse of `gather`.
    """
    for number, sink in enumerate(sinks):
        part = sink.rows
        if part.whole:
            pieces = [(block, start)]
        elif len(block) % part.length or start % part.length:
            held = part.within(start, start + len(block))
            pieces = [(block[low:high], place) for low, high, place in held]
        else:
            count = len(block) // part.length
            local = scratch[: count * part.local]
            there, here = local.reshape(count, -1), block.reshape(count, -1)
            for low, high, place in part.ranges:
                there[:, place : place + high - low] = here[:, low:high]
            pieces = [(local, start // part.length * part.local)]
        for piece, place in pieces:
            if sink.fd != UNWRITTEN:
                write_exactly(sink.fd, sink.path, piece, sink.offset + place)
            if digests:
                digests[number].update(piece)


def create(path: Path, header: bytes, size: int) -> int:
    """A new file of `size` bytes that begins with `header`; returns its open descriptor.

    What has its name is unlinked, never written into: it may be a link to a file elsewhere.
    """
    try:
        if os.path.lexists(path):
            os.unlink(path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        os.ftruncate(fd, size)
    except OSError as error:
        raise _cannot(path, error) from error
    write_exactly(fd, path, header, 0)
    return fd


def write_exactly(fd: int, path: Path, data: bytes | Block, at: int) -> None:
    """Write all of `data` at byte `at`; raises CheckpointError, for a full disk too."""
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    while len(view):
        try:
            done = os.pwrite(fd, view[:LARGEST_WRITE], at)
        except OSError as error:
            raise _cannot(path, error) from error
        view, at = view[done:], at + done


def _cannot(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be written: {error.strerror}")
