"""Load: a checkpoint folder, or the rank folders of a converted one, into a sharded model.

The model is built without memory (its parameters on the meta device), sharded by its plan, and then each
rank reads its own slices, each straight into the memory where it stays.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from autotp.checkpoint.digest import new_digest
from autotp.checkpoint.fit import DTYPES, Stored, misfits, same_bits, slots_of
from autotp.checkpoint.folder import MANIFEST, open_folder
from autotp.checkpoint.manifest import Manifest, load_manifest
from autotp.checkpoint.names import resolve
from autotp.checkpoint.output import Output, rank_folder
from autotp.checkpoint.pickled import Pickled, holds_pickles
from autotp.checkpoint.ranks import checked_header
from autotp.checkpoint.read import CHUNK, Part, open_to_read, read_local
from autotp.checkpoint.together import together
from autotp.comm import Group, group_of
from autotp.diagnostic import CheckpointError, UsageError
from autotp.placement import Shard
from autotp.plan import Plan, as_plan
from autotp.slicing import rows, take

__all__ = ["from_pretrained"]

SLOWEST_BUILD = 300.0  # seconds that ranks wait for one that is still building its model
SLOWEST_LOAD = 7200.0  # seconds that ranks wait for one that is still reading; a fault is told at once


def from_pretrained(
    folder: str | Path,
    *,
    plan: Plan | Mapping[str, Any] | str | Path | None = None,
    mesh: Any = None,
    dtype: torch.dtype | None = None,
    check: str = "layouts",
    inputs: Any = None,
    strict: bool = True,
) -> nn.Module:
    """The model of a checkpoint, sharded over the ranks of `mesh`; call it on every rank.

    - `folder`: a Hugging Face style checkpoint, of which each rank reads its slices, or a folder that
      `convert` wrote, of which each rank reads its own sub-folder and verifies the digests
    - `plan`: as `shard` takes it. None: what the folder was converted by, or else the shipped plan of the
      model's type. "auto": what it was converted by, or else a derived one. Another plan than the folder's
      is an error
    - `mesh`, `check`, `inputs`: as `shard` takes them
    - `dtype`: what floating-point tensors are cast to; without it each keeps the dtype of its file
    - `strict`: False ignores tensors that the model has not; a missing one is an error all the same

    The model is in eval mode, on the device of the mesh (the CPU when `mesh` is no DeviceMesh). Each rank
    holds its local bytes and nothing else: no rank ever holds the whole model. Raises CheckpointError with
    all missing, unexpected and mismatched tensors together, PlanError for a refused plan, and UsageError
    for a wrong number of ranks.

        model = autotp.from_pretrained("all-MiniLM-L6-v2", mesh=mesh)
    """
    from autotp import hf
    from autotp.api import shard

    group = group_of(mesh)
    with together(group, timeout=SLOWEST_BUILD):
        manifest = load_manifest(folder) if (Path(folder) / MANIFEST).is_file() else None
        if manifest is not None:
            plan = _same_plan(Path(folder), manifest, plan, group)
        home = Path(folder) if manifest is None else rank_folder(Path(folder), group.rank, group.size)
        stored = _whole(home) if manifest is None else _own(home, manifest, group.rank)
        model = hf.build(home)
    shard(model, plan, group, inputs=inputs, check=check)
    with together(group, timeout=SLOWEST_LOAD):
        device = torch.device(getattr(mesh, "device_type", "cpu"))
        _fill(model, stored, home, _Loader(group, dtype, device), strict)
        model.to(device)  # buffers that are computed
        _take_generation_config(model, home)
    return model


def _take_generation_config(model: nn.Module, home: Path) -> None:
    """What `generate` does by default comes with the checkpoint, as in transformers."""
    if getattr(model, "generation_config", None) is not None and (home / "generation_config.json").is_file():
        from transformers import GenerationConfig

        try:
            settings = GenerationConfig.from_pretrained(home, local_files_only=True)
        except (OSError, ValueError) as error:
            reason = (str(error).splitlines() or [""])[0]
            raise CheckpointError(f"{home / 'generation_config.json'}: cannot be read: {reason}") from error
        model.generation_config = settings


def _same_plan(folder: Path, manifest: Manifest, plan: Any, group: Group) -> Plan:
    """The plan of a converted folder, which must be the one that is asked for, and the ranks as many."""
    if plan is not None and not (isinstance(plan, str) and plan == "auto"):
        asked = as_plan(plan)
        if asked != manifest.plan:
            both = {**asked.rules, **manifest.plan.rules}
            odd = sorted(key for key in both if asked.rules.get(key) != manifest.plan.rules.get(key))
            raise UsageError(
                f"{folder} was converted by another plan: {', '.join(odd) or 'model_type or optional'} "
                "differs; leave the plan out, or convert the checkpoint again"
            )
    if group.size != manifest.tp:
        raise UsageError(
            f"{folder} was converted for tp={manifest.tp}, and there {_are(group.size)}; "
            f"start {manifest.tp}, or reshard the folder for {group.size}"
        )
    return manifest.plan


def _are(ranks: int) -> str:
    return f"are {ranks} ranks" if ranks > 1 else "is 1 rank"


def _whole(home: Path) -> dict[str, Stored]:
    """The tensors of an unsharded checkpoint."""
    if home.exists() and holds_pickles(home):
        pickled = Pickled(home)
        loaded, entries = pickled.tensors(), pickled.folder.tensors()
        return {
            name: Stored(file.path, entry, entry.shape, False, tensor=loaded[name])
            for name, (file, entry) in entries.items()
        }
    tensors = open_folder(home).tensors()
    return {name: Stored(file.path, entry, entry.shape, False) for name, (file, entry) in tensors.items()}


def _own(home: Path, manifest: Manifest, rank: int) -> dict[str, Stored]:
    """The tensors of this rank's own folder, checked against the manifest."""
    stored, output = {}, Output(home, manifest.layouts, rank, manifest.tp)
    for file in manifest.files:
        header = checked_header(output.header(file))
        for name, entry in file.tensors.items():
            digests, shard = manifest.digests[name], manifest.layouts.get(name)
            digest = digests.parts[rank] if digests.parts else digests.whole
            local = header.tensors[name]
            stored[name] = Stored(header.path, local, entry.shape, True, shard, digest, manifest.digest)
    return stored


def _fill(
    model: nn.Module,
    stored: Mapping[str, Stored],
    home: Path,
    loader: _Loader,
    strict: bool,
) -> None:
    """Give every parameter and persistent buffer its values; all faults are told at once, before."""
    from autotp.rewrite.apply import sharded

    memory = sharded(model)
    assert memory is not None, "the model was just sharded"
    slots = slots_of(model)
    names_of_all = [name for names in slots for name in names]
    found = resolve(names_of_all, stored, str(getattr(model, "base_model_prefix", "") or ""))
    faults = misfits(model, slots, stored, found, shapes=memory.shapes, layouts=memory.layouts, strict=strict)
    if faults:
        do = "tensors do" if len(faults) > 1 else "tensor does"
        raise CheckpointError(f"{home}: {len(faults)} {do} not fit the model:\n" + "\n".join(faults))
    with ExitStack() as stack:
        for names in slots:
            in_file = [name for name in names if name in found]
            if not in_file:
                continue  # a buffer that the class computes, and that a checkpoint may miss
            first, *others = in_file
            layout = memory.layouts.get(first)
            tensor = loader.read(stored[found[first]], layout, stack)
            for other in others:
                if found[other] != found[first] and not same_bits(
                    tensor, loader.read(stored[found[other]], layout, stack)
                ):
                    raise CheckpointError(
                        f"{home}: the model ties {other!r} to {first!r}, but their values differ in the "
                        "checkpoint; remove the one that is wrong, or untie them in config.json"
                    )
            _put(model, names, tensor)


class _Loader:
    """Reads slices of files into tensors, with one block of room for what has to be rearranged."""

    def __init__(self, group: Group, dtype: torch.dtype | None, device: torch.device) -> None:
        self.group = group
        self.dtype = dtype
        self.device = device
        self.scratch = np.empty(CHUNK, np.uint8)
        self.open: dict[Path, int] = {}

    def read(self, stored: Stored, layout: Shard | None, stack: ExitStack) -> torch.Tensor:
        """This rank's part of a tensor, in memory of its own."""
        if stored.tensor is not None:
            taken = stored.tensor.clone() if layout is None else take(stored.tensor, layout, self.group.rank)
            return self._cast(taken)
        entry = stored.entry
        shard = None if stored.converted else layout
        wanted = rows(entry.shape, entry.itemsize, shard, self.group.rank)
        shape = entry.shape if shard is None else shard.local_shape(entry.shape, self.group.rank)
        tensor = torch.empty(shape, dtype=DTYPES[entry.dtype])
        if stored.path not in self.open:
            self.open[stored.path] = open_to_read(stored.path)
            stack.callback(os.close, self.open[stored.path])
        if wanted.nbytes:
            into = tensor.reshape(-1).view(torch.uint8).numpy()
            read_local(
                Part(self.open[stored.path], stored.path, entry.start, wanted), wanted, into, self.scratch
            )
            self._verify(stored, into)
        return self._cast(tensor)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        floats = self.dtype is not None and tensor.is_floating_point()
        return tensor.to(self.device, self.dtype if floats else tensor.dtype)

    def _verify(self, stored: Stored, data: Any) -> None:
        if stored.kind == "none":
            return
        digest = new_digest(stored.kind)
        digest.update(data)
        if digest.hexdigest() != stored.digest:
            raise CheckpointError(
                f"{stored.path}: tensor {stored.entry.name!r} of rank {self.group.rank} is damaged: its "
                f"bytes have not the digest that {MANIFEST} tells"
            )


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
