"""The rank folders of a converted checkpoint, opened and checked as one source of whole tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from autotp.checkpoint.carry import part_digest
from autotp.checkpoint.folder import MANIFEST, RANK_FOLDER, regular_file
from autotp.checkpoint.manifest import PUT_BACK, Digests, Manifest
from autotp.checkpoint.output import Output, rank_folder
from autotp.checkpoint.read import Block, Part, Source, open_to_read, spans, typed
from autotp.checkpoint.supply import identity, refuse_changed
from autotp.checkpoint.write import Buffers
from autotp.diagnostic import CheckpointError
from autotp.header import Entry, Header, read_header

__all__ = ["AGAIN", "Ranks", "checked_header"]

AGAIN = "copy this rank's folder again, or convert again"


class Ranks:
    """A `Supply` (supply.py) that gathers each tensor from the shards of all ranks.

    Every rank's headers are checked against the manifest first. Raises CheckpointError for a rank folder
    too few or too many, and for a file whose tensors are not those that were written.
    """

    watched = frozenset[str]()

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        homes = [rank_folder(folder, rank, manifest.tp) for rank in range(manifest.tp)]
        _check_folders(folder, homes)
        self.outputs = [Output(home, manifest.layouts, rank, manifest.tp) for rank, home in enumerate(homes)]
        self.headers = {
            file.path.name: [checked_header(output.header(file)) for output in self.outputs]
            for file in manifest.files
        }

    def identity(self) -> list[list[Any]]:
        """The files of all ranks, as Supply says."""
        files = [header for headers in self.headers.values() for header in headers]
        return [[str(file.path.relative_to(self.folder)), *identity(file)[1:]] for file in files]

    def open(self, file: Header, stack: ExitStack) -> Callable[[Entry], Source]:
        """Open the file of every rank that holds a part of this source file."""
        parts_of = self.parts(file, stack)
        return lambda entry: Source(parts_of(entry))

    def parts(self, file: Header, stack: ExitStack) -> Callable[[Entry], list[Part]]:
        """What each rank's file holds of a tensor of this source file, in the order of the ranks."""
        opened = []
        for header in self.headers[file.path.name]:
            fd = open_to_read(header.path)
            stack.callback(os.close, fd)
            opened.append((fd, header))

        def parts_of(entry: Entry) -> list[Part]:
            return [
                Part(fd, header.path, header.tensors[entry.name].start, output.rows(entry))
                for (fd, header), output in zip(opened, self.outputs, strict=True)
            ]

        return parts_of

    def check(self, file: Header) -> None:
        """Raise CheckpointError when a rank's file has changed since its header was read."""
        for header in self.headers[file.path.name]:
            refuse_changed(header)

    def check_digests(self, file: Header, digests: Mapping[str, Digests]) -> None:
        """Compare with the manifest; the error names tensor, file and rank."""
        for name, found in digests.items():
            if found.whole != self.manifest.digests[name].whole:
                entry = file.tensors[name]
                rank = next(iter(self.damaged(file, entry)), None)
                if rank is None:
                    _refuse(
                        self.folder / MANIFEST, f"its digest of tensor {name!r} is not that of the shards"
                    )
                raise self.damage(file, entry, rank)

    def damaged(self, file: Header, entry: Entry, among: Iterable[int] | None = None) -> list[int]:
        """The ranks, `among` these, whose part of a tensor has not the digest that the manifest tells."""
        known = self.manifest.digests[entry.name]
        with ExitStack() as stack:
            parts, buffers = self.parts(file, stack)(entry), Buffers()
            expected = known.parts or (known.whole,) * len(parts)
            found = {
                rank: part_digest(parts[rank], self.manifest.digest, buffers)
                for rank in (range(len(parts)) if among is None else among)
            }
        return [rank for rank, digest in found.items() if digest != expected[rank]]

    def differs(self, file: Header, entry: Entry, rank: int) -> CheckpointError:
        """The error for unequal copies: by the digest if one tells which is wrong, with the difference."""
        path = self.headers[file.path.name][rank].path
        says = f"{path}: rank {rank}'s copy of tensor {entry.name!r} differs from the first holder's: "
        says += f"largest difference {self.largest_difference(file, entry)}"
        damaged = self.damaged(file, entry) if self.manifest.digest != "none" else []
        if not damaged:
            return CheckpointError(f"{says}; nothing tells which is right: convert again")
        wrong = ", ".join(str(bad) for bad in damaged)
        return CheckpointError(f"{says} (not what was written: rank {wrong}); copy that folder again")

    def largest_difference(self, file: Header, entry: Entry) -> str:
        """How far the copies of a tensor that several ranks hold are apart, as text."""
        largest, count = 0.0, 0

        def compare(rank: int, first: Block, copy: Block) -> None:
            nonlocal largest, count
            count += int((first != copy).sum())
            numbers = [_numbers(block, entry.dtype) for block in (first, copy)]
            if numbers[0] is not None and numbers[1] is not None:
                apart = np.abs(numbers[0] - numbers[1])
                largest = max(largest, float(apart.max(initial=0.0)))

        with ExitStack() as stack:
            source, buffers = self.open(file, stack)(entry), Buffers()
            for start, stop in spans(entry.nbytes, [source.length]):
                source.gather(buffers.block[: stop - start], start, buffers.scratch, differs=compare)
        return f"{largest:g}" if largest else f"in {count} bytes"

    def companions(self) -> Mapping[str, Path]:
        """The files that travelled along, from rank 0."""
        home = self.outputs[0].home
        return {name: regular_file(home, name) for name in self.manifest.companions}

    def check_companions(self, among: Collection[str] | None = None) -> None:
        """Raise CheckpointError when a rank's copy of a file that travelled along is not what was written,
        or there are others, `among` these names."""
        for output in self.outputs:
            for fault in (
                *self.manifest.changed_companions(output.home),
                *self.manifest.unlisted(output.home, among),
            ):
                raise CheckpointError(fault)
            for name in self.manifest.companions if self.manifest.digest == "none" else ():
                if (output.home / name).read_bytes() != (self.outputs[0].home / name).read_bytes():
                    _refuse(output.home / name, f"is not the one that rank 0 has; {PUT_BACK}")

    def damage(self, file: Header, entry: Entry, rank: int) -> CheckpointError:
        """The error for a rank's part that has not its digest."""
        path = self.headers[file.path.name][rank].path
        return CheckpointError(
            f"{path}: tensor {entry.name!r} of rank {rank} is damaged: its bytes have not the digest that "
            f"{MANIFEST} tells; {AGAIN}"
        )


def _check_folders(folder: Path, homes: list[Path]) -> None:
    """Exactly these rank folders must be there."""
    there = {entry for entry in folder.iterdir() if RANK_FOLDER.fullmatch(entry.name)}
    missing = [home.name for home in homes if home not in there]
    if missing:
        some = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        _refuse(folder, f"{len(missing)} of {len(homes)} rank folders are missing: {some}; copy them here")
    extra = sorted(entry.name for entry in there - set(homes))
    if extra:
        _refuse(folder, f"is for tp={len(homes)}, and holds other rank folders too: {', '.join(extra)}")


def checked_header(expected: Header) -> Header:
    """The header of a rank's file, which must be the one that was written."""
    found = read_header(regular_file(expected.path.parent, expected.path.name))
    for name, entry in expected.tensors.items():
        there = found.tensors.get(name)
        if there is None:
            _refuse(found.path, f"tensor {name!r} is missing; {AGAIN}")
        if (there.dtype, there.shape) != (entry.dtype, entry.shape):
            _refuse(
                found.path,
                f"tensor {name!r} is {there.dtype} {list(there.shape)}; {MANIFEST} gives this rank "
                f"{entry.dtype} {list(entry.shape)}; {AGAIN}",
            )
    unexpected = next((name for name in found.tensors if name not in expected.tensors), None)
    if unexpected is not None:
        _refuse(found.path, f"tensor {unexpected!r} is not in {MANIFEST}; {AGAIN}")
    if found.raw != expected.raw:
        _refuse(found.path, f"its header is not the one that was written; {AGAIN}")
    return found


def _numbers(block: Block, dtype: str) -> np.ndarray[Any, Any] | None:
    """Bytes as float64 numbers, or None where numpy has no such dtype."""
    if dtype == "BF16":
        return (block.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype[0] in "IUF" and "_" not in dtype and dtype != "F4":
        return typed(block, dtype).astype(np.float64)
    return None


def _refuse(path: Path, fault: str) -> NoReturn:
    raise CheckpointError(f"{path}: {fault}")
