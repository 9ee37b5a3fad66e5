"""Load: a checkpoint folder, or the rank folders of a converted one, into a sharded model.

The model is built without memory (its parameters on the meta device), sharded by its plan, and then each
rank reads its own slices, each straight into the memory where it stays.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from autotp.checkpoint.fit import misfits, same_bits, slots_of
from autotp.checkpoint.folder import MANIFEST
from autotp.checkpoint.layouts import check_depth, described_model
from autotp.checkpoint.loader import Loader
from autotp.checkpoint.manifest import Manifest, load_manifest
from autotp.checkpoint.names import resolve
from autotp.checkpoint.output import rank_folder
from autotp.checkpoint.ranks import Ranks
from autotp.checkpoint.stored import (
    Stored,
    as_the_model_names_them,
    in_checkpoint,
    in_own_folder,
    in_rank_folders,
)
from autotp.checkpoint.together import together
from autotp.comm import Group, group_of
from autotp.diagnostic import CheckpointError, UsageError
from autotp.plan import Plan, as_plan

__all__ = ["from_pretrained"]

SLOWEST_BUILD = 300.0  # seconds that ranks wait for one that is still building its model
SLOWEST_LOAD = 7200.0  # seconds that ranks wait for one that is still reading; a fault is told at once


def from_pretrained(
    folder: str | Path,
    *,
    plan: Plan | Mapping[str, Any] | str | Path | None = None,
    mesh: Any = None,
    dtype: torch.dtype | str | None = None,
    check: str = "layouts",
    inputs: Any = None,
    model: nn.Module | None = None,
    strict: bool = True,
    biases: Literal["equal", "summed"] = "equal",
) -> nn.Module:
    """The model of a checkpoint, sharded over the ranks of `mesh`; call it on every rank.

    - `folder`: any checkpoint that `convert` reads, of which each rank reads its slices, or a folder that
      `convert` wrote, of which each rank reads its own sub-folder and verifies the digests; one for another
      number of ranks is resharded as it is read, and verified by all ranks together
    - `plan`: as `shard` takes it. None: what the folder was converted by, or else the shipped plan of the
      model's type. "auto": what it was converted by, or else a derived one. Another plan than the folder's
      is an error
    - `mesh`, `check`, `inputs`: as `shard` takes them
    - `model`: one of your own, on any device, in place of the one that config.json describes; it is sharded
      and filled in place, with new parameters
    - `dtype`: what floating-point tensors are cast to, as torch.bfloat16 or "bfloat16"; without it, and with
      "auto", each keeps the dtype of its file
    - `strict`: False ignores tensors that the model has not; a missing one is an error all the same
    - `biases`: of other trainers' files of each rank, as `convert` takes it

    What a config needs and Meta's params.json does not tell is assumed, with a warning.

    The model is in eval mode, on the device of the mesh (the CPU when `mesh` is no DeviceMesh). Each rank
    holds its local bytes and nothing else: no rank ever holds the whole model. Raises CheckpointError with
    all missing, unexpected and mismatched tensors together, PlanError for a refused plan, and UsageError
    for a wrong number of ranks.

        model = autotp.from_pretrained("all-MiniLM-L6-v2", mesh=mesh)
    """
    from autotp.api import shard

    group = group_of(mesh)
    with together(group, timeout=SLOWEST_BUILD):
        wanted = _floating(dtype)
        manifest = load_manifest(folder) if (Path(folder) / MANIFEST).is_file() else None
        home, ranks = Path(folder), None
        if manifest is None:
            stored, config, assumed = in_checkpoint(home, plan, biases)
            for said in assumed if group.rank == 0 else ():
                warnings.warn(f"{home}: {said}", stacklevel=2)
        else:
            if biases != "equal":
                raise UsageError(f"{home}: is converted: its biases are whole; leave `biases` out")
            plan, config = _same_plan(home, manifest, plan), dict(manifest.config)
            if manifest.tp == group.size:
                stored = in_own_folder(home, manifest, group.rank)
            else:
                ranks = Ranks(home, manifest)
                stored = in_rank_folders(ranks, group.rank)
            home = rank_folder(home, group.rank % manifest.tp, manifest.tp)
        if model is None:
            check_depth(home, config, len(stored))
        model = described_model(home, config, model)
    shard(model, plan, group, inputs=inputs, check=check)
    with together(group, timeout=SLOWEST_LOAD):
        device = torch.device(getattr(mesh, "device_type", "cpu"))
        if ranks is not None:
            _check_parts(ranks, group)
        _fill(model, stored, home, Loader(group, wanted, device), strict)
        model.to(device)  # buffers that are computed
        _take_generation_config(model, home)
    return model


def _floating(dtype: object) -> torch.dtype | None:
    """The floating-point dtype that is asked for, as transformers spells it too; None keeps the files'."""
    if dtype is None or dtype == "auto":
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if isinstance(found, torch.dtype) and found.is_floating_point:
        return found
    raise UsageError(
        f"dtype is a floating-point dtype, as torch.bfloat16 or 'bfloat16', or 'auto', not {dtype!r}"
    )


def _take_generation_config(model: nn.Module, home: Path) -> None:
    """What `generate` does by default comes with the checkpoint, as in transformers."""
    if getattr(model, "generation_config", None) is not None and (home / "generation_config.json").is_file():
        from transformers import GenerationConfig

        try:
            settings = GenerationConfig.from_pretrained(home, local_files_only=True)
        except Exception as error:  # whatever its own code makes of the file
            reason = (str(error).splitlines() or [""])[0]
            raise CheckpointError(f"{home / 'generation_config.json'}: cannot be read: {reason}") from error
        model.generation_config = settings


def _same_plan(folder: Path, manifest: Manifest, plan: Any) -> Plan:
    """The plan of a converted folder, which must be the one that is asked for."""
    if plan is not None and not (isinstance(plan, str) and plan == "auto"):
        asked = as_plan(plan)
        if asked != manifest.plan:
            both = {**asked.rules, **manifest.plan.rules}
            odd = sorted(key for key in both if asked.rules.get(key) != manifest.plan.rules.get(key))
            raise UsageError(
                f"{folder} was converted by another plan: {', '.join(odd) or 'model_type or optional'} "
                "differs; leave the plan out, or convert the checkpoint again"
            )
    return manifest.plan


def _check_parts(ranks: Ranks, group: Group) -> None:
    """Together the ranks read all that the folders hold, a share each, and compare it with the digests."""
    if ranks.manifest.digest == "none":
        return
    for file in ranks.manifest.files:
        for entry in file.tensors.values():
            for damaged in ranks.damaged(file, entry, range(group.rank, ranks.manifest.tp, group.size)):
                raise ranks.damage(file, entry, damaged)


def _fill(
    model: nn.Module,
    stored: Mapping[str, Stored],
    home: Path,
    loader: Loader,
    strict: bool,
) -> None:
    """Give every parameter and persistent buffer its values; all faults are told at once, before."""
    from autotp.rewrite.apply import sharded

    memory = sharded(model)
    assert memory is not None, "the model was just sharded"
    slots = slots_of(model)
    names_of_all = [name for names in slots for name in names]
    stored = as_the_model_names_them(model, stored)
    found = resolve(names_of_all, stored, str(getattr(model, "base_model_prefix", "") or ""))
    faults = misfits(model, slots, stored, found, shapes=memory.shapes, layouts=memory.layouts, strict=strict)
    if faults:
        do = "tensors do" if len(faults) > 1 else "tensor does"
        raise CheckpointError(f"{home}: {len(faults)} {do} not fit the model:\n" + "\n".join(faults))
    # A buffer that the class computes, and that a checkpoint may miss, is in none.
    listed = [(names, [name for name in names if name in found]) for names in slots]
    listed = [(names, in_file) for names, in_file in listed if in_file]
    wanted = [(stored[found[first]], memory.layouts.get(first)) for _, (first, *_) in listed]
    with closing(loader.all(wanted)) as tensors:
        for (names, (first, *others)), tensor in zip(listed, tensors, strict=True):
            for other in others:
                if found[other] != found[first] and not same_bits(
                    tensor, loader.read(stored[found[other]], memory.layouts.get(first))
                ):
                    raise CheckpointError(
                        f"{home}: the model ties {other!r} to {first!r}, but their values differ in the "
                        "checkpoint; remove the one that is wrong, or untie them in config.json"
                    )
            _put(model, names, tensor)


def _put(model: nn.Module, names: Mapping[str, torch.Tensor], tensor: torch.Tensor) -> None:
    """The tensor takes its place under all its names, as one parameter or buffer."""
    old = next(iter(names.values()))
    parameter = (
        nn.Parameter(tensor, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else None
    )
    for name in names:
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        if parameter is not None:
            module._parameters[key] = parameter
        else:
            module._buffers[key] = tensor
