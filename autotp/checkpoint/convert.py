"""Convert: a Hugging Face style checkpoint to one folder a rank.

The plan is matched on the headers and, unless the caller says otherwise, proven on the model that
config.json describes; only then the first byte is written. What the folder looks like: manifest.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autotp.checkpoint.folder import INDEX, MANIFEST, left_out, open_folder
from autotp.checkpoint.formats import other_format
from autotp.checkpoint.inventory import describe_tensors
from autotp.checkpoint.layouts import check_depth, choose_plan, decide_layouts, described_model
from autotp.checkpoint.manifest import Manifest
from autotp.checkpoint.output import rank_outputs
from autotp.checkpoint.staging import check_target, free_bytes
from autotp.checkpoint.written import Progress, Written, files_of
from autotp.diagnostic import CheckpointError
from autotp.plan import Plan

if TYPE_CHECKING:
    from torch import nn

    from autotp.checkpoint.meta import Meta
    from autotp.checkpoint.perrank import PerRank
    from autotp.checkpoint.pickled import Pickled
    from autotp.checkpoint.supply import Supply, Whole

__all__ = ["convert"]


def convert(
    source: str | Path,
    target: str | Path,
    *,
    plan: Plan | Mapping[str, Any] | str | Path | None = None,
    tp: int,
    check: Literal["layouts", "shapes"] = "layouts",
    digest: Literal["xxh3", "sha256", "none"] = "xxh3",
    ranks: Sequence[int] | None = None,
    model: nn.Module | None = None,
    inputs: Any = None,
    biases: Literal["equal", "summed"] = "equal",
    progress: Progress | None = None,
    dry_run: bool = False,
) -> Written:
    """Cut the checkpoint `source` for `tp` ranks and write their folders and a manifest to `target`.

    - `source`: a folder (one file or an index), or one .safetensors file; read once, in file order. A
      pytorch_model.bin, or Meta's consolidated.NN.pth with params.json (these import torch), is read as
      plain tensors and merges into .safetensors; and so are the files of each rank that Megatron-LM,
      DeepSpeed and others write (`mp_rank_00`, …), by a plan for the names in them
    - `target`: absent or an empty folder; it appears whole or not at all. A run that was killed goes on
      where it stopped when it is started again
    - `plan`: a plan, a file or a name; None: the shipped plan of config.json's model_type; "auto": one that
      is derived from the graph of the model that config.json describes
    - `check`: "layouts" proves the plan on the model that config.json describes (this imports torch), or on
      `model`, one of your own whose parameters have these names, with sample `inputs` where they are needed;
      "shapes" matches names and shapes alone, and the manifest says `proof: none`
    - `digest`: of the bytes of each tensor, which `merge` verifies
    - `ranks`: only these are written (a machine needs the folders of its own ranks); the manifest tells all
    - `biases`: of row layers in other trainers' files of each rank: "equal", or "summed" when each rank has a
      part of the sum
    - `progress`: called with (bytes done, bytes in all, file name)
    - `dry_run`: plan, headers and room are checked, and nothing is written; the bytes of tensors are not
      read, so that damage, and copies that differ, are not found

    Memory: some blocks of 1 MiB, whatever the model and tp. dtypes are kept. Raises CheckpointError (the
    source or the target), PlanError (the plan, with every finding), UsageError (a wrong option).

        autotp.convert("all-MiniLM-L6-v2", "out", tp=2)      # out/rank-0-of-2/model.safetensors, …
    """
    from autotp.checkpoint.carry import carry
    from autotp.checkpoint.digest import new_digest
    from autotp.checkpoint.supply import Whole

    source, target = Path(source), Path(target)
    new_digest(digest)
    check_target(target, source)
    if (source / MANIFEST).exists():
        raise CheckpointError(f"{source}: is converted already; `reshard` it, or `merge` it first")
    other = other_format(source, plan, biases)
    folder = open_folder(source) if other is None else other.folder
    entries = [entry for _, entry in folder.tensors().values()]
    if check == "layouts" and model is None:
        check_depth(source, folder.config, len(entries))
    chosen, name = choose_plan(plan, folder.config, source, tp=tp, check=check, model=model, inputs=inputs)
    if check == "layouts":
        model = described_model(source, folder.config, model)
    layouts = decide_layouts(source, entries, folder.config, chosen, tp, check, model=model, inputs=inputs)
    manifest = Manifest(
        tp=tp,
        plan=chosen,
        proof="layouts" if check == "layouts" else "none",
        digest=digest,
        files=folder.files,
        layouts=layouts,
        index=folder.index,
        config=folder.config,
    )
    outputs = rank_outputs(layouts, tp, ranks)
    check_target(target, source)
    supply = other or Whole(folder, describe_tensors(entries, folder.config).aliases)
    if model is not None:
        _tie_as_model(supply, model, [entry.name for entry in entries])
    files = files_of(folder.files, folder.index, supply.companions(), outputs)
    free, left = free_bytes(target), _left_out(source, supply)
    notes: tuple[str, ...] = getattr(other, "assumed", ())
    if check == "shapes":  # with a model the shapes are compared
        notes += getattr(other, "notes", ())
    written = Written(target, tp, chosen, name, manifest.proof, files, free, dry_run, left, notes)
    if not dry_run:
        written.check_room()
        kept = carry(supply, manifest, outputs, target, job="convert", progress=progress)
        written = replace(written, kept=kept)
    return written


def _left_out(source: Path, supply: Supply) -> tuple[str, ...]:
    """The files of the source folder that are not converted: weights in other forms, large files."""
    if not source.is_dir():
        return ()
    read = {str(entry[0]) for entry in supply.identity()}
    indices = set() if supply.folder.index is None else {INDEX, "pytorch_model.bin.index.json"}
    return left_out(source, {*supply.companions(), *read, *indices})


def _tie_as_model(supply: Whole | Pickled | Meta | PerRank, model: nn.Module, names: Sequence[str]) -> None:
    """What the model ties must be equal too: a config may say nothing of it, and the class ties."""
    from autotp.checkpoint.fit import tied_names
    from autotp.checkpoint.supply import Ties

    known = {} if supply.ties is None else supply.ties.tied
    more = {one: other for one, other in tied_names(model, names).items() if one not in known}
    if more:
        supply.ties = Ties(supply.folder.path, {**known, **more}, by=type(model).__name__)
        supply.watched = supply.ties.names
