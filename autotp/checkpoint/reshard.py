"""Reshard: rank folders for one number of ranks to rank folders for another, in one pass, without a merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autotp.checkpoint.layouts import check_depth, decide_layouts
from autotp.checkpoint.manifest import load_manifest
from autotp.checkpoint.output import rank_folder, rank_outputs
from autotp.checkpoint.staging import check_target, free_bytes
from autotp.checkpoint.written import Progress, Written, files_of

if TYPE_CHECKING:
    from torch import nn

__all__ = ["reshard"]


def reshard(
    source: str | Path,
    target: str | Path,
    *,
    tp: int,
    check: Literal["layouts", "shapes"] = "layouts",
    ranks: Sequence[int] | None = None,
    model: nn.Module | None = None,
    inputs: Any = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> Written:
    """Write the converted folder `source` again for `tp` ranks, as `convert` of the original would.

    The plan is the folder's own, matched and (unless `check` is "shapes") proven for the new number of
    ranks, on `model` as `convert` takes it. Of the ranks `ranks` are written, all by default. Every byte is
    read once, checked against the manifest's digests, and written once. `target` appears whole or not at all.
    Raises what `convert` and `merge` raise.

        autotp.reshard("out-tp8", "out-tp4", tp=4)
    """
    from autotp.checkpoint.carry import carry
    from autotp.checkpoint.ranks import Ranks

    source, target = Path(source), Path(target)
    manifest = load_manifest(source)
    supply = Ranks(source, manifest)
    supply.check_companions()  # the plan reads config.json
    entries = [entry for file in manifest.files for entry in file.tensors.values()]
    home = rank_folder(source, 0, manifest.tp)
    if check == "layouts" and model is None:
        check_depth(home, manifest.config, len(entries))
    layouts = decide_layouts(
        home, entries, manifest.config, manifest.plan, tp, check, model=model, inputs=inputs
    )
    proof: Literal["layouts", "none"] = "layouts" if check == "layouts" else "none"
    again = replace(manifest, tp=tp, layouts=layouts, proof=proof)
    outputs = rank_outputs(layouts, tp, ranks)
    check_target(target, source)
    files = files_of(manifest.files, manifest.index, supply.companions(), outputs)
    written = Written(target, tp, manifest.plan, "", proof, files, free_bytes(target), dry_run)
    if not dry_run:
        written.check_room()
        kept = carry(supply, again, outputs, target, job="reshard", progress=progress)
        written = replace(written, kept=kept)
    return written
