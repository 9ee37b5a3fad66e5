"""Reading: this rank's part of each tensor, straight into the memory where it stays, several at a time."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch

from autotp.checkpoint.assembled import Assembled
from autotp.checkpoint.digest import new_digest
from autotp.checkpoint.fit import DTYPES
from autotp.checkpoint.folder import MANIFEST
from autotp.checkpoint.ranks import AGAIN
from autotp.checkpoint.read import CHUNK, Block, Part, open_to_read, read_local
from autotp.checkpoint.stored import Stored
from autotp.comm import Group
from autotp.diagnostic import CheckpointError
from autotp.placement import Shard
from autotp.slicing import Rows, rows, take, transfer

__all__ = ["Loader"]

READERS = 4  # threads: a disk that is asked for several things at once gives more


class Loader:
    """Reads slices of files into tensors."""

    def __init__(self, group: Group, dtype: torch.dtype | None, device: torch.device) -> None:
        self.group = group
        self.dtype = dtype
        self.device = device
        self._made = Lock()  # for what is unpickled

    def all(self, wanted: Sequence[tuple[Stored, Shard | None]]) -> Generator[torch.Tensor]:
        """What `read` gives for each, in this order, with some read ahead. Close it, or take all."""
        with (
            ThreadPoolExecutor(READERS, "autotp reads") as pool,
            closing(pool.map(self.read, *zip(*wanted, strict=True))) as tensors,  # type: ignore[type-var]
        ):
            yield from tensors

    def read(self, stored: Stored, layout: Shard | None) -> torch.Tensor:
        """This rank's part of a tensor, in memory of its own.

        Raises CheckpointError for a file that ends too early, or a part that has not its digest.
        """
        rank, entry = self.group.rank, stored.entry
        if stored.made is not None:
            return self._assemble(stored, stored.made, layout)
        if stored.load is not None:
            with self._made:
                whole = stored.load()
                return self._cast(whole.clone() if layout is None else take(whole, layout, rank))
        shard = None if stored.own else layout
        shape = entry.shape if shard is None else shard.local_shape(entry.shape, rank)
        tensor = torch.empty(shape, dtype=DTYPES[entry.dtype])
        wanted = rows(entry.shape, entry.itemsize, shard, rank)
        if wanted.nbytes:
            into, room = tensor.reshape(-1).view(torch.uint8).numpy(), np.empty(CHUNK, np.uint8)
            if stored.pieces:
                plans = transfer([piece.rows for piece in stored.pieces], wanted)
                for piece, plan in zip(stored.pieces, plans, strict=True):
                    if plan.ranges:
                        _read(piece.path, piece.start, plan, into, room)
            else:
                _read(stored.path, entry.start, wanted, into, room)
            self._verify(stored, into)
        return self._cast(tensor)

    def _assemble(self, stored: Stored, made: Assembled, layout: Shard | None) -> torch.Tensor:
        """This rank's part of a tensor that is stored in parts, each read and put in its place."""
        rank, shape = self.group.rank, stored.entry.shape
        cuts = stored.cuts(layout)
        assert cuts is not None, "checked before anything is read (fit.misfits)"
        local = shape if layout is None else layout.local_shape(shape, rank)
        dim = made.dim - made.stacked if len(cuts) > 1 else 0
        whole: torch.Tensor | None = None
        start = 0
        for part, cut in zip(stored.parts, cuts, strict=True):
            for number, one in enumerate(part):
                tensor = self.read(one, cut)
                whole = tensor.new_empty(local) if whole is None else whole
                room = whole[number] if made.stacked else whole
                room.narrow(dim, start, tensor.shape[dim]).copy_(tensor)
            start += tensor.shape[dim]
        assert whole is not None, "there is a part"
        return whole

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        floats = self.dtype is not None and tensor.is_floating_point()
        return tensor.to(self.device, self.dtype if floats else tensor.dtype)

    def _verify(self, stored: Stored, data: Any) -> None:
        if stored.kind == "none":
            return
        digest = new_digest(stored.kind)
        digest.update(data)
        if digest.hexdigest() != stored.digest:
            raise CheckpointError(
                f"{stored.path}: tensor {stored.entry.name!r} of rank {self.group.rank} is damaged: its "
                f"bytes have not the digest that {MANIFEST} tells; {AGAIN}"
            )


def _read(path: Path, start: int, wanted: Rows, into: Block, room: Block) -> None:
    """Fill `into` from a file of this reader's own: how the system reads ahead is told to the open file."""
    fd = open_to_read(path)
    try:
        read_local(Part(fd, path, start, wanted), wanted, into, room)
    finally:
        os.close(fd)
