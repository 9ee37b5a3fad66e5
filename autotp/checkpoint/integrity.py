"""Integrity: whether rank folders are still what was written, and still what the source holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autotp.checkpoint.folder import INDEX, Folder, open_folder, read_text, regular_file
from autotp.checkpoint.manifest import Manifest, load_manifest
from autotp.checkpoint.output import Output
from autotp.checkpoint.written import Progress
from autotp.diagnostic import CheckpointError
from autotp.header import Entry, Header

if TYPE_CHECKING:
    from autotp.checkpoint.ranks import Ranks

__all__ = ["Integrity", "check_shards"]


@dataclass(frozen=True)
class Integrity:
    """What was checked, and everything that was found wrong, each finding with its file."""

    folder: Path
    manifest: Manifest
    nbytes: int
    findings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings


def check_shards(
    folder: str | Path, *, source: str | Path | None = None, progress: Progress | None = None
) -> Integrity:
    """Read all of a converted folder and compare it with its manifest, and with `source` if it is given.

    Checked are the rank folders, names, shapes, dtypes and headers, the digest of every rank's part of
    every tensor, that copies which several ranks hold are equal, and the files that travelled along. That
    the parts make up each tensor exactly once is checked when the manifest is read. All findings come
    together; only a manifest that cannot be read raises (CheckpointError).

        autotp.checkpoint.check_shards("out").ok
    """
    from autotp.checkpoint.ranks import Ranks

    folder = Path(folder)
    manifest = load_manifest(folder)
    try:
        ranks = Ranks(folder, manifest)
    except CheckpointError as error:
        return Integrity(folder, manifest, 0, (str(error),))
    total = sum(header.size for headers in ranks.headers.values() for header in headers)
    done, findings = 0, list[str]()
    for file in manifest.files:
        for entry in file.tensors.values():
            findings += _tensor(ranks, file, entry)
        done += sum(header.size for header in ranks.headers[file.path.name])
        if progress is not None:
            progress(done, total, file.path.name)
    for output in ranks.outputs:
        findings += manifest.changed_companions(output.home)
        findings += manifest.unlisted(output.home)
        findings += _index(manifest, output)
    if source is not None:
        findings += _against(ranks, Path(source))
    return Integrity(folder, manifest, total, tuple(findings))


def _index(manifest: Manifest, output: Output) -> Iterator[str]:
    """A rank's index that is not the one that was written."""
    if manifest.index is None:
        return
    path = output.home / INDEX
    try:
        text = read_text(regular_file(output.home, INDEX))
    except CheckpointError as error:
        yield str(error)
        return
    if text != output.index([output.header(file) for file in manifest.files], manifest.index):
        yield f"{path}: is not what was written"


def _tensor(ranks: Ranks, file: Header, entry: Entry) -> Iterator[str]:
    """Parts whose digest is wrong, and copies that differ."""
    from autotp.checkpoint.read import Differs, spans
    from autotp.checkpoint.write import Buffers

    damaged = [] if ranks.manifest.digest == "none" else ranks.damaged(file, entry)
    for rank in damaged:
        yield str(ranks.damage(file, entry, rank))
    if not damaged and ranks.manifest.digest != "none":
        return  # every part is what was written, and so are the copies
    with ExitStack() as stack:
        gathered, buffers = ranks.open(file, stack)(entry), Buffers()
        try:
            for start, stop in spans(entry.nbytes, [gathered.length]):
                gathered.gather(buffers.block[: stop - start], start, buffers.scratch)
        except Differs as unequal:
            yield str(ranks.differs(file, entry, unequal.rank))


def _against(ranks: Ranks, source: Path) -> Iterator[str]:
    """What of the shards is not in the source, and the reverse."""
    try:
        there = open_folder(source)
    except CheckpointError as error:
        yield str(error)
        return
    ours = {file.path.name: file for file in ranks.manifest.files}
    for file in there.files:
        mine = ours.pop(file.path.name, None)
        if mine is None:
            yield f"{file.path}: is not among the files that were converted"
        elif mine.raw != file.raw:
            yield f"{file.path}: its header is not the one that was converted"
        else:
            for entry in file.tensors.values():
                if not _same(ranks, mine, file, entry):
                    yield f"{file.path}: tensor {entry.name!r} is not what was converted"
    for name in ours:
        yield f"{source}: {name!r} was converted, and is not there"
    yield from _against_small(ranks, there)


def _against_small(ranks: Ranks, there: Folder) -> Iterator[str]:
    from autotp.checkpoint.digest import digest_of

    if there.index != ranks.manifest.index:
        yield f"{there.path / INDEX}: is not the one that was converted"
    for name, digest in ranks.manifest.companions.items():
        path = there.path / name
        if not path.is_file() or digest_of(path.read_bytes(), ranks.manifest.digest) != digest:
            yield f"{path}: is not what was converted"


def _same(ranks: Ranks, mine: Header, file: Header, entry: Entry) -> bool:
    """Whether a tensor of the source is the one that was converted: by its digest, else by its bytes."""
    import numpy as np

    from autotp.checkpoint.carry import part_digest
    from autotp.checkpoint.read import Differs, Part, open_to_read, read_exactly, spans
    from autotp.checkpoint.write import Buffers
    from autotp.slicing import rows

    buffers = Buffers()
    with ExitStack() as stack:
        fd = open_to_read(file.path)
        stack.callback(os.close, fd)
        part = Part(fd, file.path, entry.start, rows(entry.shape, entry.itemsize, None, 0))
        if ranks.manifest.digest != "none":
            digest = part_digest(part, ranks.manifest.digest, buffers)
            return digest == ranks.manifest.digests[entry.name].whole
        gathered, other = ranks.open(mine, stack)(entry), np.empty_like(buffers.block)
        try:
            for start, stop in spans(entry.nbytes, [gathered.length]):
                block = buffers.block[: stop - start]
                gathered.gather(block, start, buffers.scratch)
                read_exactly(part, other[: stop - start], start)
                if not np.array_equal(block, other[: stop - start]):
                    return False
        except Differs:
            return False
    return True
