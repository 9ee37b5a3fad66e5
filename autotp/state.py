"""The state_dict of the whole model, from a model that is spread over ranks, and back into one.

    gather_state_dict   each rank's parts -> the unsharded model's state_dict
    load_state_dict     the unsharded model's state_dict -> each rank's parts

For states that are in memory; `autotp.save_pretrained` and `autotp.from_pretrained` do the same with files,
and never hold a whole model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor, nn

from autotp.checkpoint.together import together
from autotp.comm import Group
from autotp.comm.group import EXCHANGE_TIMEOUT
from autotp.diagnostic import UsageError
from autotp.fingerprint import sampled
from autotp.parts import Part, parts_of
from autotp.rewrite.own_state import WHOSE
from autotp.slicing import take

__all__ = ["NotLoaded", "gather_state_dict", "load_state_dict"]


class NotLoaded(NamedTuple):
    """The names that `load_state_dict` left out, as torch's own returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def gather_state_dict(model: nn.Module, *, rank0_only: bool = False) -> OrderedDict[str, Any]:
    """The state_dict of the unsharded model, in memory of its own on the CPU. Call it on every rank.

    `model` is one that `autotp.shard` made, or is built from autotp.nn's layers, or both. Names, dtypes and
    ties are those of `model.state_dict()`. One whole tensor at a time is gathered. With `rank0_only` the
    first rank of the group has the state, and the others an empty dict.

    Raises UsageError when not every rank calls, for a tensor without values or one that a state_dict hook
    has made, and when tensors that every rank holds whole differ between the ranks.

    >>> sorted(gather_state_dict(nn.Linear(2, 1)))
    ['bias', 'weight']
    """
    entries, parts = model.state_dict(keep_vars=True), parts_of(model)
    groups = _groups(parts)
    with _on_all(groups):
        known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        for name, value in entries.items():
            if isinstance(value, Tensor) and value.is_meta:
                raise UsageError(f"gather_state_dict: {name!r} is on the meta device, it has no values")
            if isinstance(value, Tensor) and id(value) not in known and parts:
                raise UsageError(
                    f"gather_state_dict: {name!r} is no parameter or buffer of the model; a hook made it, "
                    "and it is not known how it is cut"
                )
    for group in groups:
        if len(set(group.exchange(tuple(entries)))) > 1:
            raise UsageError("gather_state_dict: the ranks' models have tensors of different names")
    state: OrderedDict[str, Any] = OrderedDict()
    if hasattr(entries, "_metadata"):
        told = {path: dict(each) for path, each in entries._metadata.items()}
        for each in told.values():
            each.pop(WHOSE, None)
        state._metadata = told  # type: ignore[attr-defined]
    keep = not rank0_only or all(group.rank == 0 for group in groups)
    done: dict[int, Any] = {}
    digests: dict[str, str] = {}
    for name, value in entries.items():
        if id(value) not in done:
            done[id(value)] = _whole(value, parts.get(id(value)), keep)
            if id(value) not in parts and isinstance(value, Tensor):
                digests[name] = _digest(value)
        if keep:
            state[name] = done[id(value)]
    for group in groups:
        every = group.exchange(digests)
        differ = [name for name in digests if len({theirs[name] for theirs in every}) > 1]
        if differ:
            raise UsageError(
                f"gather_state_dict: {_some(differ)} must be the same on every rank, and is not: the ranks "
                "have drifted apart"
            )
    return state


def load_state_dict(model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> NotLoaded:
    """Copy each rank's part of the unsharded model's state_dict into `model`. Call it on every rank.

    Parameters and buffers stay the same objects; dtypes and devices are the model's. With `strict` the names
    must be the same, but of tied tensors one is enough; without it what is missing or unexpected is left
    out, and returned. Shapes must fit in any case.

    Raises UsageError, with every fault on a line, on all ranks, and with the model as it was.

    >>> model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    >>> load_state_dict(model, other.state_dict())
    NotLoaded(missing_keys=[], unexpected_keys=[])
    >>> bool((model.weight == other.weight).all())
    True
    """
    entries, parts = model.state_dict(keep_vars=True), parts_of(model)
    groups = _groups(parts)
    named = {id(value) for name, value in entries.items() if name in state}
    missing = [name for name, value in entries.items() if name not in state and id(value) not in named]
    unexpected = [name for name in state if name not in entries]
    with _on_all(groups):
        faults = [f"missing: {name}" for name in missing if strict]
        faults += [f"unexpected: {name}" for name in unexpected if strict]
        faults += _misfits(entries, state, parts)
        if faults:
            raise UsageError(
                f"load_state_dict: {type(model).__name__} does not fit:\n"
                + "\n".join(f"  {f}" for f in faults)
            )
    given = [value for name, value in state.items() if name in entries and isinstance(value, Tensor)]
    for group in groups:
        if len(set(group.exchange(sampled(given)))) > 1:
            raise UsageError("load_state_dict: the ranks were given states of different values")
    with torch.no_grad():
        for name, value in entries.items():
            if name not in state:
                continue
            part = parts.get(id(value))
            if not isinstance(value, Tensor):
                path = name.rpartition(".")[0]
                model.get_submodule(path).set_extra_state(state[name])
            elif part is None or part.group.size == 1:
                value.copy_(state[name])
            else:
                value.copy_(take(state[name], part.shard, part.group.rank))
    return NotLoaded(missing, unexpected)


def _groups(parts: Mapping[int, Part]) -> list[Group]:
    """The groups of more than one rank, each once."""
    return list({id(part.group): part.group for part in parts.values() if part.group.size > 1}.values())


def _on_all(groups: Iterable[Group]) -> ExitStack:
    """What fails inside on one rank fails on all ranks of the groups."""
    stack = ExitStack()
    for group in groups:
        stack.enter_context(together(group, timeout=EXCHANGE_TIMEOUT))
    return stack


def _whole(value: Any, part: Part | None, keep: bool) -> Any:
    """The whole of an entry: gathered on all ranks, and kept on those that keep it."""
    if not isinstance(value, Tensor):
        return value
    whole = value.detach() if part is None else part.gathered()
    if not keep:
        return None
    return whole.to("cpu", copy=True) if whole.data_ptr() == value.data_ptr() else whole.cpu()


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().reshape(-1).contiguous().cpu()
    return xxhash.xxh3_128_hexdigest(flat.view(torch.uint8).numpy().data if flat.numel() else b"")


def _misfits(entries: Mapping[str, Any], state: Mapping[str, Any], parts: Mapping[int, Part]) -> list[str]:
    """What is wrong with the values that are there."""
    found: list[str] = []
    first: dict[int, str] = {}
    for name, value in entries.items():
        if name not in state or not isinstance(value, Tensor):
            continue
        given, part = state[name], parts.get(id(value))
        shape = tuple(value.shape) if part is None else part.shape
        before = first.setdefault(id(value), name)
        if value.is_meta:
            found.append(f"{name}: the model's is on the meta device; autotp.from_pretrained fills those")
        elif not isinstance(given, Tensor) or given.is_meta:
            kind = "on the meta device" if isinstance(given, Tensor) else type(given).__name__
            found.append(f"{name}: a tensor with values is needed, it is {kind}")
        elif tuple(given.shape) != shape:
            found.append(f"{name}: its shape is {list(given.shape)}, the unsharded model's {list(shape)}")
        elif given.is_floating_point() != value.is_floating_point():
            found.append(f"{name}: its dtype is {given.dtype}, the model's {value.dtype}")
        elif before != name and not torch.equal(given, state[before]):
            found.append(f"{name}: the model ties it to {before}, and the two differ")
    return found


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
