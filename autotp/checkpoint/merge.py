"""Merge: the rank folders that `convert` wrote, back into the checkpoint they came from, byte for byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autotp.checkpoint.manifest import load_manifest
from autotp.checkpoint.output import Output
from autotp.checkpoint.staging import check_target, free_bytes
from autotp.checkpoint.written import Progress, Written, files_of

__all__ = ["merge"]


def merge(
    source: str | Path, target: str | Path, *, progress: Progress | None = None, dry_run: bool = False
) -> Written:
    """Put a converted folder back together: the original's files, order, headers and bytes.

    Every byte is read once and checked against the manifest's digests; what several ranks hold is compared.
    `target` appears whole or not at all, as in `convert`. Raises CheckpointError naming tensor, file and
    rank for shards that are missing, damaged or not equal.

        autotp.merge("out", "back")      # back/model.safetensors, …
    """
    from autotp.checkpoint.carry import carry
    from autotp.checkpoint.ranks import Ranks

    source, target = Path(source), Path(target)
    manifest = load_manifest(source)
    supply = Ranks(source, manifest)
    check_target(target, source)
    output = Output(Path(), {}, None)
    files = files_of(manifest.files, manifest.index, supply.companions(), [output])
    written = Written(target, 1, manifest.plan, "", manifest.proof, files, free_bytes(target), dry_run)
    if not dry_run:
        written.check_room()
        supply.check_companions()
        kept = carry(supply, manifest, [output], target, job="merge", progress=progress)
        written = replace(written, kept=kept)
    return written
