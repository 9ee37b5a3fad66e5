"""Where the tensors of a conversion come from: one protocol, and the plain checkpoint behind it.

The others are `ranks.Ranks` (the shards of all ranks) and `pickled.Pickled` (what torch.save wrote).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from autotp.checkpoint.digest import digest_of
from autotp.checkpoint.folder import Folder
from autotp.checkpoint.manifest import Digests
from autotp.checkpoint.read import Part, Source, open_to_read
from autotp.checkpoint.write import Gathers
from autotp.diagnostic import CheckpointError
from autotp.header import Entry, Header
from autotp.slicing import rows

__all__ = ["Supply", "Ties", "Whole", "identity", "refuse_changed"]


class Supply(Protocol):
    """Where the tensors of a conversion come from; the digests of `watched` tensors are always taken."""

    watched: frozenset[str]

    @property
    def folder(self) -> Any:
        """The checkpoint as one of safetensors, a `Folder`; of `ranks.Ranks`, where it stands."""

    def identity(self) -> list[list[Any]]:
        """What tells whether the files are the same ones later: [name, size, time, header], each."""

    def open(self, file: Header, stack: ExitStack) -> Callable[[Entry], Gathers]:
        """Open what holds a source file's tensors until the stack closes."""

    def check(self, file: Header) -> None:
        """Raise CheckpointError when the files have changed since their headers were read."""

    def check_digests(self, file: Header, digests: Mapping[str, Digests]) -> None:
        """Raise CheckpointError when the tensors were not what they should be."""

    def differs(self, file: Header, entry: Entry, rank: int) -> CheckpointError:
        """The error for a rank's copy that is not the first holder's."""

    def companions(self) -> Mapping[str, Path | bytes]:
        """The other files, by relative name: where they are, or what they hold."""


class Ties:
    """Tensors that the config ties, {one: the other}: where a checkpoint has both, they must be equal.

    `by` says what ties them, if it is not config.json.
    """

    def __init__(self, folder: Path, tied: Mapping[str, str], by: str = "config.json") -> None:
        self.by = by
        self.folder = folder
        self.tied = tied
        self.names = frozenset({*tied, *tied.values()})
        self.seen: dict[str, str] = {}

    def check(self, digests: Mapping[str, Digests]) -> None:
        """Take in the digests of a file; raises CheckpointError naming both tensors."""
        self.seen |= {name: digest.whole for name, digest in digests.items() if name in self.names}
        for head, first in self.tied.items():
            if head in self.seen and first in self.seen and self.seen[head] != self.seen[first]:
                raise CheckpointError(
                    f"{self.folder}: {self.by} ties {head!r} to {first!r}, but their values differ; "
                    'set "tie_word_embeddings": false, or remove the one that is wrong'
                )


class Whole:
    """An unsharded checkpoint; `tied` maps a tensor to the one that must have the same values."""

    def __init__(self, folder: Folder, tied: Mapping[str, str]) -> None:
        self.folder = folder
        self.ties = Ties(folder.path, tied)
        self.watched = self.ties.names

    def identity(self) -> list[list[Any]]:
        """See Supply."""
        return [
            *map(identity, self.folder.files),
            *(_small_identity(n, p) for n, p in self.companions().items()),
        ]

    def open(self, file: Header, stack: ExitStack) -> Callable[[Entry], Source]:
        """See Supply."""
        fd = open_to_read(file.path)
        stack.callback(os.close, fd)
        return lambda entry: Source(
            [Part(fd, file.path, entry.start, rows(entry.shape, entry.itemsize, None, 0))]
        )

    def check(self, file: Header) -> None:
        """See Supply."""
        refuse_changed(file)

    def check_digests(self, file: Header, digests: Mapping[str, Digests]) -> None:
        """Tied tensors that are both in the checkpoint must be equal."""
        self.ties.check(digests)

    def differs(self, file: Header, entry: Entry, rank: int) -> CheckpointError:
        """See Supply."""
        raise AssertionError("an unsharded checkpoint has one copy of each tensor")

    def companions(self) -> Mapping[str, Path]:
        """See Supply."""
        return {name: self.folder.path / name for name in self.folder.companions}


def identity(file: Header) -> list[Any]:
    """What tells whether a weight file is the same one later."""
    return [file.path.name, file.size, file.mtime_ns, digest_of(file.raw, "xxh3")]


def refuse_changed(file: Header) -> None:
    """Raise CheckpointError when a file is not what it was when its header was read."""
    try:
        status = file.path.stat()
    except OSError as error:
        raise CheckpointError(f"{file.path}: cannot be read: {error.strerror}") from error
    if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
        raise CheckpointError(f"{file.path}: changed while it was read; start again")


def _small_identity(name: str, path: Path) -> list[Any]:
    status = path.stat()
    return [name, status.st_size, status.st_mtime_ns, ""]
