"""One pass from a checkpoint in one form to the other: convert, merge and reshard are this pass.

A `Supply` is where tensors come from, `Output`s are the folders that are written. File by file, in the
order of the source's files; each finished one is noted, so that a run that was killed can go on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Lock

import numpy as np

from autotp.checkpoint.digest import digest_of, new_digest
from autotp.checkpoint.folder import INDEX, LARGEST_JSON, MANIFEST
from autotp.checkpoint.lanes import in_lanes
from autotp.checkpoint.manifest import PUT_BACK, Digests, Manifest
from autotp.checkpoint.output import Output
from autotp.checkpoint.read import CHUNK, Differs, Memory, Part, Source, open_to_read, read_exactly
from autotp.checkpoint.staging import Staging
from autotp.checkpoint.supply import Supply
from autotp.checkpoint.write import UNWRITTEN, Buffers, Gathers, create, stream, write_exactly
from autotp.checkpoint.written import Progress, kept_words, size_of
from autotp.diagnostic import CheckpointError
from autotp.header import Entry, Header
from autotp.slicing import rows

__all__ = ["carry", "part_digest"]

LANES = 2  # tensors of a file that are carried at once


def carry(
    supply: Supply,
    manifest: Manifest,
    outputs: Sequence[Output],
    target: Path,
    *,
    job: str,
    progress: Progress | None = None,
) -> tuple[str, ...]:
    """Write the outputs aside, file by file, and put them in place as `target`.

    Returns the files that were kept as an earlier run had finished them; progress counts them at once. With
    ranks among the outputs the manifest is written too, with the digests of what was written.
    """
    from autotp import __version__

    total = sum(file.size for file in manifest.files)
    done, lanes, digests = 0, [Buffers() for _ in range(LANES)], dict[str, Digests]()
    buffers, telling = lanes[0], Lock()
    plain = replace(manifest, digests={}, companions={}).dumps()
    _check_manifest_size(target, manifest, plain)
    ranks = [output.rank for output in outputs if output.written]
    description = {
        "job": job,
        "ranks": ranks,
        "autotp": __version__,
        "manifest": digest_of(plain.encode(), "xxh3"),
    }
    with Staging(target, {**description, "source": supply.identity()}) as staging:
        placed = [replace(output, home=staging.path / output.home) for output in outputs]
        there = [output for output in placed if output.written]
        names = [file for file in manifest.files if file.path.name in staging.finished]
        staging.keep([output.header(file).path for output in there for file in names])
        for output in there:
            output.home.mkdir(exist_ok=True)
        kept = [file.path.name for file in names]
        if kept and progress is not None:
            done = sum(file.size for file in names)
            progress(done, total, kept_words(kept))
        for file in manifest.files:
            name = file.path.name

            def tell(count: int, name: str = name) -> None:
                nonlocal done
                with telling:
                    done += count
                    if progress is not None:
                        progress(done, total, name)

            headers = [output.header(file) for output in placed]
            found = _finished(staging.finished.get(name), manifest, file, placed, headers, buffers)
            if found is None:
                if name in kept:
                    kept.remove(name)
                    tell(-file.size if progress is not None else 0)
                tell(len(file.raw))
                found = _carry_file(supply, manifest.digest, file, placed, headers, lanes, tell)
                supply.check(file)
                supply.check_digests(file, found)
                if manifest.digest == "none":
                    found = dict.fromkeys(found, Digests("", ("",) * manifest.tp))
                staging.finish(name, {key: [value.whole, *value.parts] for key, value in found.items()})
            else:
                supply.check_digests(file, found)
            digests |= found
        companions = _carry_companions(supply, manifest, there, buffers)
        for output in there:
            if manifest.index is not None:
                headers = [output.header(file) for file in manifest.files]
                _write_small(output.home / INDEX, output.index(headers, manifest.index))
        if any(output.rank is not None for output in outputs):
            text = replace(manifest, digests=digests, companions=companions).dumps()
            _write_small(staging.path / MANIFEST, text.encode())
        staging.commit()
    return tuple(kept)


def _check_manifest_size(target: Path, manifest: Manifest, plain: str) -> None:
    """Raise CheckpointError for a manifest longer than what is read; `plain` lacks the digests."""
    digest = len(new_digest(manifest.digest).hexdigest())
    parts = len(manifest.layouts) * manifest.tp + sum(len(file.tensors) for file in manifest.files)
    size = len(plain) + digest * parts
    if size > LARGEST_JSON:
        raise CheckpointError(
            f"{target}: its {MANIFEST} would take {size} bytes, and at most {LARGEST_JSON} are read: "
            f"{len(manifest.layouts)} cut tensors over {manifest.tp} ranks; take fewer ranks, or no digest"
        )


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
    lanes: Sequence[Buffers],
    tell: Callable[[int], None],
) -> dict[str, Digests]:
    """Carry all tensors of one source file; returns their digests."""
    found: dict[str, Digests] = {}
    with ExitStack() as stack:
        source_of = supply.open(file, stack)
        fds = []
        for output, header in zip(outputs, headers, strict=True):
            if not output.written:
                fds.append(UNWRITTEN)
                continue
            fds.append(create(header.path, header.raw, header.size))
            stack.callback(os.close, fds[-1])

        def carry_tensor(buffers: Buffers, item: tuple[str, Entry]) -> None:
            name, entry = item
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

        in_lanes(carry_tensor, file.tensors.items(), lanes)
    return {name: found[name] for name in file.tensors}


def _finished(
    record: Mapping[str, Sequence[str]] | None,
    manifest: Manifest,
    file: Header,
    outputs: Sequence[Output],
    headers: Sequence[Header],
    buffers: Buffers,
) -> dict[str, Digests] | None:
    """The digests of a file that an earlier run finished, or None when it must be done again.

    What was finished is read again and compared: a machine that stopped may have lost what it wrote.
    """
    if record is None or manifest.digest == "none" or set(record) != set(file.tensors):
        return None
    for name, values in record.items():
        count = 1 + (len(outputs) if outputs[0].rank is not None and name in outputs[0].layouts else 0)
        if (
            not isinstance(values, list)
            or len(values) != count
            or not all(isinstance(v, str) for v in values)
        ):
            return None
    found = {name: Digests(values[0], tuple(values[1:])) for name, values in record.items()}
    for rank, header in enumerate(headers):
        if not outputs[rank].written:
            continue
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
    for name, content in supply.companions().items():
        size = size_of(content)
        digest, part_of = new_digest(manifest.digest), rows((size,), 1, None, 0)
        with ExitStack() as stack:
            source: Gathers
            if isinstance(content, bytes):
                source = Memory(np.frombuffer(content, np.uint8))
            else:
                fd = open_to_read(content)
                stack.callback(os.close, fd)
                source = Source([Part(fd, content, 0, part_of)])
            sinks = []
            for output in outputs:
                copy = output.home / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                sinks.append(Part(create(copy, b"", size), copy, 0, part_of))
                stack.callback(os.close, sinks[-1].fd)
            stream(source, sinks, size, buffers=buffers, whole=digest, progress=lambda count: None)
        digests[name] = digest.hexdigest()
        if manifest.companions and manifest.companions[name] != digests[name]:
            raise CheckpointError(
                f"{content!s}: is not what was written (its digest differs from {MANIFEST}'s); {PUT_BACK}"
            )
    return digests


def _write_small(path: Path, data: bytes) -> None:
    """Write a small file and wait until the disk has it."""
    fd = create(path, b"", len(data))
    try:
        write_exactly(fd, path, data, 0)
        os.fsync(fd)
    finally:
        os.close(fd)
