"""Reading: this rank's part of each tensor, straight into the memory where it stays."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autotp.checkpoint.digest import new_digest
from autotp.checkpoint.fit import DTYPES
from autotp.checkpoint.folder import MANIFEST
from autotp.checkpoint.read import CHUNK, Part, open_to_read, read_local
from autotp.checkpoint.stored import Stored
from autotp.comm import Group
from autotp.diagnostic import CheckpointError
from autotp.placement import Shard
from autotp.slicing import rows, take, transfer

__all__ = ["Loader"]

MOST_AHEAD = 256 << 20  # bytes that are asked for before they are read


class Loader:
    """Reads slices of files into tensors, with one block of room for what has to be rearranged."""

    def __init__(self, group: Group, dtype: torch.dtype | None, device: torch.device) -> None:
        self.group = group
        self.dtype = dtype
        self.device = device
        self.scratch = np.empty(CHUNK, np.uint8)
        self.open: dict[Path, int] = {}

    def read(self, stored: Stored, layout: Shard | None, stack: ExitStack) -> torch.Tensor:
        """This rank's part of a tensor, in memory of its own; the stack closes the files.

        Raises CheckpointError for a file that ends too early, or a part that has not its digest.
        """
        rank, entry = self.group.rank, stored.entry
        if stored.load is not None:
            whole = stored.load()
            return self._cast(whole.clone() if layout is None else take(whole, layout, rank))
        shard = None if stored.own else layout
        shape = entry.shape if shard is None else shard.local_shape(entry.shape, rank)
        tensor = torch.empty(shape, dtype=DTYPES[entry.dtype])
        wanted = rows(entry.shape, entry.itemsize, shard, rank)
        if wanted.nbytes:
            into = tensor.reshape(-1).view(torch.uint8).numpy()
            if stored.pieces:
                plans = transfer([piece.rows for piece in stored.pieces], wanted)
                for piece, plan in zip(stored.pieces, plans, strict=True):
                    if plan.ranges:
                        part = Part(self._file(piece.path, stack), piece.path, piece.start, plan)
                        read_local(part, plan, into, self.scratch)
            else:
                part = Part(self._file(stored.path, stack), stored.path, entry.start, wanted)
                read_local(part, wanted, into, self.scratch)
            self._verify(stored, into)
        return self._cast(tensor)

    def soon(self, stored: Stored, layout: Shard | None, stack: ExitStack) -> None:
        """Ask the system to have ready what is read after this, if it is in one piece."""
        if stored.load is not None or stored.pieces or not hasattr(os, "posix_fadvise"):
            return
        shard = None if stored.own else layout
        wanted = rows(stored.entry.shape, stored.entry.itemsize, shard, self.group.rank)
        if wanted.count == 1:
            for low, high, _ in wanted.ranges:
                file, start = self._file(stored.path, stack), stored.entry.start + low
                os.posix_fadvise(file, start, min(high - low, MOST_AHEAD), os.POSIX_FADV_WILLNEED)

    def _file(self, path: Path, stack: ExitStack) -> int:
        if path not in self.open:
            self.open[path] = open_to_read(path)
            stack.callback(os.close, self.open[path])
        return self.open[path]

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
                f"bytes have not the digest that {MANIFEST} tells"
            )
