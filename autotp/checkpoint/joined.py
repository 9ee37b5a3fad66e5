"""What supplies of whole tensors have in common that put them together in memory, from files of parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from autotp.checkpoint.digest import digest_of
from autotp.checkpoint.fit import NAMES, same_bits
from autotp.checkpoint.folder import SINGLE
from autotp.checkpoint.manifest import Digests
from autotp.checkpoint.pickled import in_memory
from autotp.checkpoint.read import Memory
from autotp.checkpoint.supply import Ties
from autotp.diagnostic import CheckpointError
from autotp.header import Entry, Header, encode_header, parse_header

__all__ = ["Joined", "as_single", "check_equal"]


class Joined(ABC):
    """A `Supply` (supply.py) of one file, `folder.files[0]`, whose tensors are made of those of `parts`."""

    watched = frozenset[str]()
    ties: Ties | None = None
    folder: Any
    parts: Sequence[Path]
    notes: tuple[str, ...] = ()  # what names and shapes leave open
    assumed: tuple[str, ...] = ()  # what config.json was given that no file tells
    others: Sequence[Path] = ()  # further files that decide what the tensors are

    @abstractmethod
    def load(self) -> Callable[[str], torch.Tensor]:
        """Open the parts; the whole tensor of a name, one at a time."""

    def identity(self) -> list[list[Any]]:
        """See Supply."""
        return [*self._stamps(), [SINGLE, 0, 0, digest_of(self.folder.files[0].raw, "xxh3")]]

    def open(self, file: Header, stack: ExitStack) -> Callable[[Entry], Memory]:
        """See Supply; one whole tensor is in memory at a time."""
        self._opened = self._stamps()
        whole = self.load()
        return lambda entry: in_memory(whole(entry.name))

    def check(self, file: Header) -> None:
        """See Supply."""
        for before, now in zip(self._opened, self._stamps(), strict=True):
            if before != now:
                raise CheckpointError(
                    f"{self.folder.path / before[0]}: changed while it was read; start again"
                )

    def check_digests(self, file: Header, digests: Mapping[str, Digests]) -> None:
        """Tied tensors that are both in the checkpoint must be equal."""
        if self.ties is not None:
            self.ties.check(digests)

    def differs(self, file: Header, entry: Entry, rank: int) -> CheckpointError:
        """See Supply."""
        raise AssertionError("the parts are put together before they are carried")

    def _stamps(self) -> list[list[Any]]:
        found = []
        for part in (*self.parts, *self.others):
            status = part.stat()
            name = str(part.relative_to(self.folder.path))
            found.append([name, status.st_size, status.st_mtime_ns, ""])
        return found


def as_single(
    folder: Path, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> Header:
    """The header of the one .safetensors file that would hold these tensors."""
    described = {}
    for name, (dtype, shape) in tensors.items():
        described[name] = (NAMES[dtype], tuple(shape), torch.Size(shape).numel() * dtype.itemsize)
    raw, _ = encode_header(described, metadata)
    size = len(raw) + sum(nbytes for _, _, nbytes in described.values())
    return parse_header(raw, size=size, path=folder / SINGLE)


def check_equal(name: str, parts: Sequence[torch.Tensor], files: Sequence[Path], help: str = "") -> None:
    """Raise CheckpointError when what several files hold whole is not the same, bit for bit."""
    first = parts[0]
    for part, file in zip(parts, files, strict=True):
        if part.shape != first.shape or part.dtype != first.dtype:
            there, here = (f"{one.dtype} {list(one.shape)}" for one in (first, part))
            raise CheckpointError(
                f"{file}: tensor {name!r} is {here}, and {there} in {_told(files[0], file)}{help}"
            )
        if not same_bits(part, first):
            wide = torch.complex128 if part.is_complex() else torch.float64
            apart = float((part.to(wide) - first.to(wide)).abs().nan_to_num().max())
            raise CheckpointError(
                f"{file}: tensor {name!r} differs from that of {_told(files[0], file)}: "
                f"largest difference {apart:g}{help}"
            )


def _told(first: Path, other: Path) -> str:
    return first.name if first.name != other.name else f"{first.parent.name}/{first.name}"
