"""An optimizer's state, saved whole and loaded at any number of ranks: cut and merged like the weights.

State goes by the name of its parameter, never by position. A tensor of a parameter's shape (AdamW's
exp_avg and exp_avg_sq, SGD's momentum_buffer) is cut as the parameter is; a single number (AdamW's step) is
the same on every rank. One .safetensors file holds all of it, with the groups' settings in its metadata.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import nn

from autotp.checkpoint.fit import DTYPES, NAMES
from autotp.checkpoint.groups import checked_names, like, settings
from autotp.checkpoint.read import CHUNK, Part, open_to_read, read_local
from autotp.checkpoint.save import ALL_CALL, SLOWEST_SAVE, check_equal, full_tensors, whole_shape
from autotp.checkpoint.together import together
from autotp.checkpoint.write import create, write_exactly
from autotp.comm import Group
from autotp.diagnostic import CheckpointError, UsageError
from autotp.header import Entry, encode_header, read_header
from autotp.placement import Shard
from autotp.slicing import rows

__all__ = ["load_optimizer", "save_optimizer"]


def save_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, file: str | Path) -> None:
    """Write an optimizer's whole state to one .safetensors file; call it on every rank of the model's group.

    Rank 0 writes, one whole tensor at a time is in memory. The file appears whole or not at all, and
    replaces one of that name. Raises UsageError for state that belongs to no parameter of the model or is
    neither of its parameter's shape nor one number, and for settings that are no plain data; CheckpointError
    when the file cannot be written.

        save_optimizer(model, optimizer, "step-1000/optimizer.safetensors")
    """
    from autotp.parts import group_and_cuts

    group, layouts = group_and_cuts(model)
    path = Path(file)
    with together(group, timeout=ALL_CALL):
        named, cuts = _state(model, optimizer, layouts)
        groups = json.dumps(settings(model, optimizer))
        if group.rank == 0 and path.is_dir():
            raise CheckpointError(f"{path}: is a folder; name a file in it")
        if group.rank == 0 and path.exists() and not path.is_file():  # a device would be replaced
            raise CheckpointError(f"{path}: exists and is not a regular file; name a new one")
    shapes = {key: whole_shape(tensor, cuts.get(key), group) for key, tensor in named.items()}
    described = {
        key: (NAMES[tensor.dtype], shapes[key], torch.Size(shapes[key]).numel() * tensor.element_size())
        for key, tensor in named.items()
    }
    raw, starts = encode_header(described, {"format": "pt", "groups": groups})
    size = len(raw) + sum(nbytes for _, _, nbytes in described.values())
    aside = path.with_name(f".{path.name}.autotp-partial")
    try:
        with together(group, timeout=SLOWEST_SAVE):
            digests = _write(aside, raw, size, named, cuts, starts, group)
        check_equal(path, group, digests)
        with together(group, timeout=SLOWEST_SAVE):
            if group.rank == 0:
                _put_in_place(aside, path)
    finally:
        if group.rank == 0:
            aside.unlink(missing_ok=True)


def _put_in_place(aside: Path, path: Path) -> None:
    try:
        os.replace(aside, path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from error


def _write(
    path: Path,
    raw: bytes,
    size: int,
    named: Mapping[str, torch.Tensor],
    cuts: Mapping[str, Shard],
    starts: Mapping[str, int],
    group: Group,
) -> dict[str, str]:
    """Rank 0 writes every whole tensor; the digests of those that are whole on every rank."""
    failure: CheckpointError | None = None
    digests: dict[str, str] = {}
    with ExitStack() as stack:
        fd = create(path, raw, size) if group.rank == 0 else -1
        if group.rank == 0:
            stack.callback(os.close, fd)
        for key, whole in full_tensors(named, cuts, group, digests):
            if group.rank == 0 and failure is None and whole.numel():
                try:
                    write_exactly(fd, path, whole.reshape(-1).view(torch.uint8).numpy(), starts[key])
                except CheckpointError as error:  # the others are inside a gather: go on, tell them after
                    failure = error
    if failure is not None:
        raise failure
    return digests


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, file: str | Path) -> None:
    """Give an optimizer the state that `save_optimizer` wrote, at whatever number of ranks.

    Each rank reads its own slices. The optimizer has the same groups of parameters, by name; their
    settings are taken from the file. Raises CheckpointError for a file that does not fit.
    """
    from autotp.parts import group_and_cuts

    group, layouts = group_and_cuts(model)
    with together(group, timeout=SLOWEST_SAVE):
        header = read_header(file)
        try:
            saved = json.loads(header.metadata.get("groups", "null"))
        except (ValueError, RecursionError):
            saved = None
        if not isinstance(saved, list) or not all(isinstance(entry, dict) for entry in saved):
            raise CheckpointError(f"{file}: was not written by save_optimizer")
        names, order = (
            checked_names(model, optimizer),
            [p for g in optimizer.param_groups for p in g["params"]],
        )
        groups, position = [], 0
        for current in optimizer.param_groups:
            mine = [names[id(parameter)] for parameter in current["params"]]
            found = next((one for one in saved if one.get("names") == mine), None)
            if found is None:
                raise CheckpointError(f"{file}: holds no group of the parameters {_some(mine)}")
            kept = {key: value for key, value in current.items() if key not in found}
            told = {key: like(current.get(key), v) for key, v in found.items() if key != "names"}
            indices = list(range(position, position + len(mine)))
            groups.append({**kept, **told, "params": indices})
            position += len(mine)
        state = _read(Path(file), header.tensors, [names[id(p)] for p in order], order, layouts, group)
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def _state(
    model: nn.Module, optimizer: torch.optim.Optimizer, layouts: Mapping[str, Shard]
) -> tuple[dict[str, torch.Tensor], dict[str, Shard]]:
    """Every tensor of the state as "parameter:key", and how the cut ones are cut."""
    names, found, cuts = checked_names(model, optimizer), dict[str, torch.Tensor](), dict[str, Shard]()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            for key, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, torch.Tensor | bool | int | float):
                    raise UsageError(
                        f"the optimizer's {key} of {name!r} is {type(value).__name__}, neither a tensor "
                        "nor a number: such state cannot be saved for any number of ranks"
                    )
                tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
                if tensor.dtype not in NAMES:
                    raise UsageError(
                        f"the optimizer's {key} of {name!r} is {tensor.dtype}, which .safetensors files "
                        "have not"
                    )
                alike = tensor.shape == parameter.shape and tensor.dim() > 0
                if not alike and tensor.numel() != 1:
                    raise UsageError(
                        f"the optimizer's {key} of {name!r} has shape {list(tensor.shape)}, its parameter "
                        f"{list(parameter.shape)}: it is not known how to cut it"
                    )
                found[f"{name}:{key}"] = tensor
                if alike and name in layouts:
                    cuts[f"{name}:{key}"] = layouts[name]
    return found, cuts


def _read(
    file: Path,
    entries: Mapping[str, Entry],
    names: list[str],
    parameters: list[torch.Tensor],
    layouts: Mapping[str, Shard],
    group: Group,
) -> dict[int, dict[str, torch.Tensor]]:
    """This rank's part of the state, by the position of the parameter in the optimizer."""
    position = {name: index for index, name in enumerate(names)}
    state: dict[int, dict[str, torch.Tensor]] = {}
    scratch, fd = np.empty(CHUNK, np.uint8), open_to_read(file)
    try:
        for full, entry in entries.items():
            name, _, key = full.rpartition(":")
            if name not in position:
                raise CheckpointError(f"{file}: holds state of {name!r}, which the optimizer has not")
            if entry.dtype not in DTYPES:
                raise CheckpointError(
                    f"{file}: {key} of {name!r} is {entry.dtype}, which torch has no dtype for"
                )
            shard = layouts.get(name) if entry.shape else None
            local = entry.shape if shard is None else shard.local_shape(entry.shape, group.rank)
            expected = tuple(parameters[position[name]].shape)
            if entry.shape and local != expected and local != (1,):
                raise CheckpointError(
                    f"{file}: {key} of {name!r} is {list(local)} here, not {list(expected)}"
                )
            wanted = rows(entry.shape, entry.itemsize, shard, group.rank)
            tensor = torch.empty(local, dtype=DTYPES[entry.dtype])
            if wanted.nbytes:
                into = tensor.reshape(-1).view(torch.uint8).numpy()
                read_local(Part(fd, file, entry.start, wanted), wanted, into, scratch)
            state.setdefault(position[name], {})[key] = tensor
    finally:
        os.close(fd)
    return state


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
