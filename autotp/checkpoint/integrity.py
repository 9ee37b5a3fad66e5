"""Integrity: whether rank folders are still what was written, and still what the source holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autotp.checkpoint.folder import INDEX, Folder, open_folder, read_text, regular_file
from autotp.checkpoint.manifest import Manifest, load_manifest
from autotp.checkpoint.output import Output
from autotp.checkpoint.written import Progress
from autotp.diagnostic import AutotpError, CheckpointError
from autotp.header import Entry, Header

if TYPE_CHECKING:
    from autotp.checkpoint.ranks import Ranks
    from autotp.checkpoint.supply import Supply

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
    from autotp.checkpoint.formats import other_format
    from autotp.checkpoint.supply import Whole

    summed = any(file.metadata.get("biases", "").startswith("sums of ") for file in ranks.manifest.files)
    try:
        other = other_format(source, ranks.manifest.plan, "summed" if summed else "equal")
        supply: Supply = other or Whole(open_folder(source), {})
        there = supply.folder
    except AutotpError as error:
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
            yield from _differing(ranks, mine, supply, file)
    for name in ours:
        yield f"{source}: {name!r} was converted, and is not there"
    if there.index != ranks.manifest.index:
        yield f"{there.path / INDEX}: is not the one that was converted"
    yield from _against_small(ranks, there, supply.companions())


def _against_small(ranks: Ranks, there: Folder, companions: Mapping[str, Path | bytes]) -> Iterator[str]:
    from autotp.checkpoint.digest import digest_of

    for name, digest in ranks.manifest.companions.items():
        found = companions.get(name, there.path / name)
        if isinstance(found, Path):
            found = found.read_bytes() if found.is_file() else b""
        if digest_of(found, ranks.manifest.digest) != digest or not (name in companions or found):
            yield f"{there.path / name}: is not what was converted"


def _differing(ranks: Ranks, mine: Header, supply: Supply, file: Header) -> Iterator[str]:
    """Tensors of a source file that are not the ones that were converted: by digests, else by their bytes."""
    import numpy as np

    from autotp.checkpoint.digest import new_digest
    from autotp.checkpoint.read import Differs, spans
    from autotp.checkpoint.write import Buffers

    kind, buffers, again = ranks.manifest.digest, Buffers(), Buffers()
    with ExitStack() as stack:
        sources, gathered_of = supply.open(file, stack), ranks.open(mine, stack)
        for entry in file.tensors.values():
            whole, gathered = sources(entry), gathered_of(entry) if kind == "none" else None
            digest, same = new_digest(kind), True
            try:
                for start, stop in spans(
                    entry.nbytes, [whole.length, *([gathered.length] if gathered else [])]
                ):
                    block, other = buffers.block[: stop - start], again.block[: stop - start]
                    whole.gather(block, start, buffers.scratch)
                    digest.update(block)
                    if gathered is not None:
                        gathered.gather(other, start, buffers.scratch)
                        same = same and np.array_equal(block, other)
            except Differs:
                same = False
            if not same or (
                gathered is None and digest.hexdigest() != ranks.manifest.digests[entry.name].whole
            ):
                yield f"{file.path}: tensor {entry.name!r} is not what was converted"
