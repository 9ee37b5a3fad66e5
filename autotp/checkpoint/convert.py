"""Convert: a Hugging Face style checkpoint to one folder a rank.

The plan is matched on the headers and, unless the caller says otherwise, proven on the model that
config.json describes; only then the first byte is written. What the folder looks like: manifest.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from autotp.checkpoint.folder import INDEX, MANIFEST, Folder, open_folder
from autotp.checkpoint.inventory import describe_tensors
from autotp.checkpoint.manifest import Manifest, Output, rank_folder
from autotp.checkpoint.names import base_prefix, resolve
from autotp.checkpoint.staging import check_target, free_bytes
from autotp.checkpoint.written import Progress, Written
from autotp.diagnostic import CheckpointError, PlanError, UsageError, errors
from autotp.header import Entry
from autotp.match import Matches, match
from autotp.placement import Shard
from autotp.plan import Plan, as_plan, plan_for, shipped_plans

__all__ = ["convert"]


def convert(
    source: str | Path,
    target: str | Path,
    *,
    plan: Plan | Mapping[str, Any] | str | Path | None = "auto",
    tp: int,
    check: Literal["layouts", "shapes"] = "layouts",
    digest: Literal["xxh3", "sha256", "none"] = "xxh3",
    progress: Progress | None = None,
    dry_run: bool = False,
) -> Written:
    """Cut the checkpoint `source` for `tp` ranks and write their folders and a manifest to `target`.

    - `source`: a folder (one file or an index), or one .safetensors file; read once, in file order
    - `target`: absent or an empty folder; it appears whole or not at all. A run that was killed goes on
      where it stopped when it is started again
    - `plan`: a plan, a file or a name; "auto" or None: the shipped plan of config.json's model_type
    - `check`: "layouts" proves the plan on the model that config.json describes (this imports torch);
      "shapes" matches names and shapes alone, and the manifest says `proof: none`
    - `digest`: of the bytes of each tensor, which `merge` verifies
    - `progress`: called with (bytes done, bytes in all, file name)
    - `dry_run`: everything but the writing

    Memory: two blocks of 1 MiB, whatever the model and tp. dtypes are kept. Raises CheckpointError (the
    source or the target), PlanError (the plan, with every finding), UsageError (a wrong option).

        autotp.convert("all-MiniLM-L6-v2", "out", tp=2)      # out/rank-0-of-2/model.safetensors, …
    """
    from autotp.checkpoint.carry import Whole, carry
    from autotp.checkpoint.digest import new_digest

    source, target = Path(source), Path(target)
    new_digest(digest)
    if check not in ("layouts", "shapes"):
        raise UsageError(f"check is 'layouts' or 'shapes', not {check!r}")
    if (source / MANIFEST).exists():
        raise CheckpointError(f"{source}: is converted already; `merge` it first")
    folder = open_folder(source)
    chosen, name = _choose(plan, folder, source)
    matches = match(chosen, describe_tensors(_entries(folder), folder.config, name=folder.path.name), tp)
    if check == "shapes" and errors(matches.diagnostics):
        raise PlanError(matches.diagnostics)
    layouts = _proven(source, folder, matches) if check == "layouts" else dict(matches.layouts)
    _refuse_sub_byte(folder, layouts)
    manifest = Manifest(
        tp=tp,
        plan=chosen,
        proof="layouts" if check == "layouts" else "none",
        digest=digest,
        files=folder.files,
        layouts={key: shard for key, shard in layouts.items() if key in folder.tensors()},
        index=folder.index,
        config=folder.config,
    )
    outputs = [Output(rank_folder(Path(), rank, tp), manifest.layouts, rank) for rank in range(tp)]
    check_target(target)
    files = _files(folder, outputs)
    written = Written(target, tp, chosen, name, manifest.proof, files, free_bytes(target), dry_run)
    if not dry_run:
        written.check_room()
        tied = describe_tensors(_entries(folder), folder.config).aliases
        carry(Whole(folder, tied), manifest, outputs, target, job="convert", progress=progress)
    return written


def _choose(plan: Any, folder: Folder, source: Path) -> tuple[Plan, str]:
    """The plan, and its name when it is a shipped one that the config chose."""
    if plan is not None and not (isinstance(plan, str) and plan == "auto"):
        return as_plan(plan), ""
    model_type = folder.config.get("model_type")
    found = plan_for(model_type) if isinstance(model_type, str) else None
    if found is None:
        why = (
            f"no plan is shipped for model_type {model_type!r}"
            if model_type
            else "no config tells a model_type"
        )
        raise UsageError(f"{source}: {why}; give a plan, or one of {', '.join(shipped_plans())}")
    return found, str(model_type)


def _entries(folder: Folder) -> list[Entry]:
    return [entry for _, entry in folder.tensors().values()]


def _proven(source: Path, folder: Folder, matches: Matches) -> dict[str, Shard]:
    """The layouts as they are proven on the model, under the checkpoint's names.

    Where the headers tell a cut too, it must be the same one; only a row rule without heads leaves its
    units to the proof. Tensors that the model has not are carried whole.
    """
    from autotp.hf import prove

    analysis = prove(source, matches.plan, matches.tp)
    if not analysis.ok:
        raise PlanError(analysis.diagnostics)
    there, known = folder.tensors(), analysis.inventory.tensors()
    names = resolve(known, there, base_prefix(known, there))
    layouts = {names[name]: shard for name, shard in analysis.layouts.items() if name in names}
    left_to_the_proof = {
        name
        for placed in matches.placed.values()
        if placed.style == "row" and not placed.declared
        for name in placed.layouts
    }
    for name in set(names.values()):
        cut, proven = matches.layouts.get(name), layouts.get(name)
        if cut == proven or (cut and proven and cut.dim == proven.dim and name in left_to_the_proof):
            continue
        if errors(matches.diagnostics) and cut is None:
            continue  # the headers alone could not place it; the model could
        says, proves = (str(one) if one else "whole" for one in (cut, proven))
        raise CheckpointError(
            f"{source}: tensor {name!r} is {says} by the headers, and {proves} by the proof"
        )
    return layouts


def _refuse_sub_byte(folder: Folder, layouts: Mapping[str, Shard]) -> None:
    """Elements below a byte are carried whole, or not at all."""
    for name, (file, entry) in folder.tensors().items():
        if name in layouts and entry.itemsize < 1:
            raise CheckpointError(
                f"{file.path}: tensor {name!r} has elements of {entry.itemsize:g} bytes ({entry.dtype}), "
                "which cannot be cut; leave it whole with `replicate`"
            )


def _files(folder: Folder, outputs: list[Output]) -> tuple[tuple[str, int], ...]:
    """Every file to write but the manifest, and its size."""
    files = []
    for output in outputs:
        headers = [output.header(file) for file in folder.files]
        files += [(str(header.path), header.size) for header in headers]
        if folder.index is not None:
            files.append((str(output.home / INDEX), len(output.index(headers, folder.index))))
        sizes = ((name, (folder.path / name).stat().st_size) for name in folder.companions)
        files += [(str(output.home / name), size) for name, size in sizes]
    return tuple(files)
