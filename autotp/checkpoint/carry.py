"""One pass from a checkpoint in one form to the other: convert, merge and reshard are this pass.

A `Supply` is where tensors come from: the files of a checkpoint (`Whole`) or the shards of all ranks
(`merge.Ranks`). `Output`s are the folders that are written. File by file, in the order of the source's
files, each finished one is noted, so that a run that was killed can go on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from autotp.checkpoint.digest import digest_of, new_digest
from autotp.checkpoint.folder import INDEX, MANIFEST, Folder
from autotp.checkpoint.manifest import Digests, Manifest, Output
from autotp.checkpoint.read import CHUNK, Differs, Part, Source, open_to_read, read_exactly
from autotp.checkpoint.staging import Staging
from autotp.checkpoint.write import Buffers, Gathers, create, stream, write_exactly
from autotp.checkpoint.written import Progress
from autotp.diagnostic import CheckpointError
from autotp.header import Entry, Header
from autotp.slicing import rows

__all__ = ["Supply", "Ties", "Whole", "carry", "identity", "part_digest", "refuse_changed"]


class Supply(Protocol):
    """Where the tensors of a conversion come from; the digests of `watched` tensors are always taken."""

    watched: frozenset[str]

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

    def companions(self) -> Mapping[str, Path]:
        """The other files, by relative name."""


class Ties:
    """Tensors that the config ties, {one: the other}: where a checkpoint has both, they must be equal."""

    def __init__(self, folder: Path, tied: Mapping[str, str]) -> None:
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
                    f"{self.folder}: config.json ties {head!r} to {first!r}, but their values differ; "
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


def carry(
    supply: Supply,
    manifest: Manifest,
    outputs: Sequence[Output],
    target: Path,
    *,
    job: str,
    progress: Progress | None = None,
) -> None:
    """Write the outputs aside, file by file, and put them in place as `target`.

    With ranks among the outputs the manifest is written too, with the digests of what was written.
    """
    from autotp import __version__

    total = sum(file.size for file in manifest.files)
    done, buffers, digests = 0, Buffers(), dict[str, Digests]()
    plain = replace(manifest, digests={}, companions={}).dumps()
    description = {"job": job, "autotp": __version__, "manifest": digest_of(plain.encode(), "xxh3")}
    with Staging(target, {**description, "source": supply.identity()}) as staging:
        placed = [replace(output, home=staging.path / output.home) for output in outputs]
        for output in placed:
            output.home.mkdir(exist_ok=True)
        for file in manifest.files:
            name = file.path.name

            def tell(count: int, name: str = name) -> None:
                nonlocal done
                done += count
                if progress is not None:
                    progress(done, total, name)

            headers = [output.header(file) for output in placed]
            found = _finished(staging.finished.get(name), manifest, file, headers, buffers)
            if found is None:
                tell(len(file.raw))
                found = _carry_file(supply, manifest.digest, file, placed, headers, buffers, tell)
                supply.check(file)
                supply.check_digests(file, found)
                if manifest.digest == "none":
                    found = dict.fromkeys(found, Digests("", ("",) * manifest.tp))
                staging.finish(name, {key: [value.whole, *value.parts] for key, value in found.items()})
            else:
                supply.check_digests(file, found)
                tell(file.size)
            digests |= found
        companions = _carry_companions(supply, manifest, placed, buffers)
        for output in placed:
            if manifest.index is not None:
                headers = [output.header(file) for file in manifest.files]
                _write_small(output.home / INDEX, output.index(headers, manifest.index))
        if any(output.rank is not None for output in outputs):
            text = replace(manifest, digests=digests, companions=companions).dumps()
            _write_small(staging.path / MANIFEST, text.encode())
        staging.commit()


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


def part_digest(part: Part, kind: str, buffers: Buffers) -> str:
    """The digest of what a file holds of one tensor."""
    digest = new_digest(kind)
    for start in range(0, part.rows.nbytes, CHUNK):
        block = buffers.block[: min(CHUNK, part.rows.nbytes - start)]
        read_exactly(part, block, start)
        digest.update(block)
    return digest.hexdigest()


def _carry_file(
    supply: Supply,
    kind: str,
    file: Header,
    outputs: Sequence[Output],
    headers: Sequence[Header],
    buffers: Buffers,
    tell: Callable[[int], None],
) -> dict[str, Digests]:
    """Carry all tensors of one source file; returns their digests."""
    found = {}
    with ExitStack() as stack:
        source_of = supply.open(file, stack)
        fds = []
        for header in headers:
            fds.append(create(header.path, header.raw, header.size))
            stack.callback(os.close, fds[-1])
        for name, entry in file.tensors.items():
            sinks = [
                Part(fd, header.path, header.tensors[name].start, output.rows(entry))
                for fd, header, output in zip(fds, headers, outputs, strict=True)
            ]
            cut = any(output.rank is not None and name in output.layouts for output in outputs)
            whole = new_digest("xxh3" if kind == "none" and name in supply.watched else kind)
            parts = [new_digest(kind) for _ in sinks] if cut else []
            try:
                stream(
                    source_of(entry),
                    sinks,
                    entry.nbytes,
                    buffers=buffers,
                    whole=whole,
                    parts=parts,
                    progress=tell,
                )
            except Differs as unequal:
                raise supply.differs(file, entry, unequal.rank) from None
            found[name] = Digests(whole.hexdigest(), tuple(part.hexdigest() for part in parts))
    return found


def _finished(
    record: Mapping[str, Sequence[str]] | None,
    manifest: Manifest,
    file: Header,
    headers: Sequence[Header],
    buffers: Buffers,
) -> dict[str, Digests] | None:
    """The digests of a file that an earlier run finished, or None when it must be done again.

    What was finished is read again and compared: a machine that stopped may have lost what it wrote.
    """
    if record is None or manifest.digest == "none" or set(record) != set(file.tensors):
        return None
    found = {name: Digests(values[0], tuple(values[1:])) for name, values in record.items()}
    for rank, header in enumerate(headers):
        try:
            fd = open_to_read(header.path)
        except CheckpointError:
            return None
        try:
            if os.fstat(fd).st_size != header.size or os.pread(fd, len(header.raw), 0) != header.raw:
                return None
            for name, entry in header.tensors.items():
                part = Part(fd, header.path, entry.start, rows((entry.nbytes,), 1, None, 0))
                expected = found[name].parts[rank] if found[name].parts else found[name].whole
                if part_digest(part, manifest.digest, buffers) != expected:
                    return None
        finally:
            os.close(fd)
    return found


def _carry_companions(
    supply: Supply, manifest: Manifest, outputs: Sequence[Output], buffers: Buffers
) -> dict[str, str]:
    """Copy the other files to every output; returns their digests."""
    digests = {}
    for name, path in supply.companions().items():
        size = _size(path)
        digest, part_of = new_digest(manifest.digest), rows((size,), 1, None, 0)
        with ExitStack() as stack:
            source = Part(open_to_read(path), path, 0, part_of)
            stack.callback(os.close, source.fd)
            sinks = []
            for output in outputs:
                copy = output.home / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                sinks.append(Part(create(copy, b"", size), copy, 0, part_of))
                stack.callback(os.close, sinks[-1].fd)
            stream(Source([source]), sinks, size, buffers=buffers, whole=digest, progress=lambda count: None)
        digests[name] = digest.hexdigest()
        if manifest.companions and manifest.companions[name] != digests[name]:
            raise CheckpointError(f"{path}: is not what was written (its digest differs from {MANIFEST}'s)")
    return digests


def _write_small(path: Path, data: bytes) -> None:
    """Write a small file and wait until the disk has it."""
    fd = create(path, b"", len(data))
    try:
        write_exactly(fd, path, data, 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _small_identity(name: str, path: Path) -> list[Any]:
    status = path.stat()
    return [name, status.st_size, status.st_mtime_ns, ""]
