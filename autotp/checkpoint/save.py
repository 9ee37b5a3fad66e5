"""Save: a sharded model as a plain checkpoint in the style of Hugging Face, one tensor at a time."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autotp.checkpoint.digest import new_digest
from autotp.checkpoint.fit import NAMES, slots_of
from autotp.checkpoint.folder import INDEX, SINGLE
from autotp.checkpoint.staging import Staging, check_target
from autotp.checkpoint.together import together
from autotp.checkpoint.write import create, write_exactly
from autotp.comm import Group
from autotp.diagnostic import CheckpointError, UsageError
from autotp.header import encode_header
from autotp.placement import Shard
from autotp.slicing import merge

__all__ = ["check_equal", "full_tensors", "save_pretrained", "whole_shape"]

LARGEST_FILE = 5_000_000_000  # bytes of tensors, as transformers splits
ALL_CALL = 20.0  # seconds that ranks wait for one that does not call
SLOWEST_SAVE = 7200.0  # seconds that ranks wait for rank 0 to finish writing; a fault is told at once


def save_pretrained(model: nn.Module, folder: str | Path, *, largest_file: int = LARGEST_FILE) -> None:
    """Write a sharded model as the unsharded one would be saved; call it on every rank of its group.

    `model` is one that `autotp.shard` made, or is built from autotp.nn's layers, or both.
    Rank 0 writes `folder`, which must be absent or empty and appears whole or not at all: safetensors
    files of at most `largest_file` bytes with an index where there is more than one, config.json and
    generation_config.json of a transformers model. Tied tensors are written once, under their first name;
    the header's metadata maps the others to it. One whole tensor is in memory at a time, on every rank.

    Plain transformers loads the result. Raises CheckpointError when it cannot be written or when copies
    that must be equal differ between the ranks, and UsageError when not every rank calls.

        autotp.save_pretrained(model, "trained")
    """
    from autotp.parts import group_and_cuts

    if not isinstance(model, nn.Module):
        raise UsageError(f"a model is an nn.Module, not {type(model).__name__}")
    target = Path(folder)
    group, layouts = group_and_cuts(model)
    slots = slots_of(model)
    named = {next(iter(names)): tensor for names in slots for tensor in [next(iter(names.values()))]}
    with together(group, timeout=ALL_CALL):
        if largest_file < 1:
            raise UsageError(f"largest_file is a number of bytes, not {largest_file}")
        if group.rank == 0:
            check_target(target)
        for name, tensor in named.items():
            if tensor.dtype not in NAMES or tensor.is_meta:
                raise CheckpointError(f"{target}: tensor {name!r} is {tensor.dtype} on {tensor.device}")
    aliases = {other: first for names in slots for first, *others in [list(names)] for other in others}
    shapes = {name: whole_shape(tensor, layouts.get(name), group) for name, tensor in named.items()}
    files = _files(named, shapes, largest_file)
    digests: dict[str, str] = {}
    with ExitStack() as stack:
        with together(group, timeout=SLOWEST_SAVE):
            writer = _Writer(target, files, named, shapes, aliases, stack) if group.rank == 0 else None
            failure: Exception | None = None
            for name, whole in full_tensors(named, layouts, group, digests):
                if writer is not None and failure is None:
                    try:
                        writer.write(name, whole)
                    except CheckpointError as error:  # the others are inside a gather: go on, tell them after
                        failure = error
            if failure is not None:
                raise failure
        check_equal(target, group, digests)
        with together(group, timeout=SLOWEST_SAVE):
            if writer is not None:
                writer.finish(model)


def full_tensors(
    named: Mapping[str, torch.Tensor],
    layouts: Mapping[str, Shard],
    group: Group,
    digests: dict[str, str],
) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole of every tensor, in turn, on every rank; all ranks must iterate to the end.

    `digests` takes in those of the tensors that are whole on every rank, for `check_equal` at the end. Copies
    of what some ranks hold (kv heads) are compared at once: CheckpointError, on every rank.
    """
    for name, tensor in named.items():
        local, shard = tensor.detach().resolve_conj().resolve_neg(), layouts.get(name)
        if shard is None or group.size == 1:
            whole = local.cpu().contiguous()
            digest = new_digest("xxh3")
            if whole.numel():
                digest.update(whole.reshape(-1).view(torch.uint8).numpy().data)
            digests[name] = digest.hexdigest()
        else:
            size = whole_shape(local, shard, group)[shard.dim]
            sizes = [shard.local_size(size, rank) for rank in range(group.size)]
            every = group.all_gather(local, shard.dim, sizes).cpu()
            try:
                whole = merge(torch.split(every, sizes, shard.dim), shard, check=_held_twice(shard))
            except CheckpointError as error:
                raise CheckpointError(f"tensor {name!r}: {error}; they have drifted apart") from None
        yield name, whole


def check_equal(target: Path, group: Group, digests: Mapping[str, str]) -> None:
    """Raise CheckpointError, on every rank, where what is whole on every rank is not the same."""
    for rank, theirs in enumerate(group.exchange(dict(digests))):
        differs = [name for name, digest in digests.items() if theirs[name] != digest]
        if differs:
            more = f" and {len(differs) - 1} more" if len(differs) > 1 else ""
            first, second = sorted((group.rank, rank))
            raise CheckpointError(
                f"{target}: tensor {differs[0]!r}{more} is not the same on ranks {first} and {second}: "
                "they have drifted apart"
            )


def _held_twice(shard: Shard) -> bool:
    """Whether several ranks hold the same part of a tensor."""
    deals = [shard.deal] if shard.sections is None else [deal for _, deal in shard.sections]
    return any(deal is None or deal.shared for deal in deals)


class _Writer:
    """The files that rank 0 writes, aside until they are finished."""

    def __init__(
        self,
        target: Path,
        files: Mapping[str, list[str]],
        named: Mapping[str, torch.Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        aliases: Mapping[str, str],
        stack: ExitStack,
    ) -> None:
        self.files = files
        self.staging = stack.enter_context(Staging(target, {"job": "save", "source": []}, resumable=False))
        self.places: dict[str, tuple[int, Path, int]] = {}
        self.total = 0
        for file, names in files.items():
            path = self.staging.path / file
            local = {n: (NAMES[named[n].dtype], shapes[n], _bytes(named[n], shapes[n])) for n in names}
            tied = {other: first for other, first in aliases.items() if first in local}
            raw, starts = encode_header(local, {**tied, "format": "pt"})
            size = sum(nbytes for _, _, nbytes in local.values())
            fd = create(path, raw, len(raw) + size)
            stack.callback(os.close, fd)
            self.places |= {name: (fd, path, start) for name, start in starts.items()}
            self.total += size

    def write(self, name: str, whole: torch.Tensor) -> None:
        """Write one tensor into its place."""
        fd, path, start = self.places[name]
        if whole.numel():
            write_exactly(fd, path, whole.reshape(-1).view(torch.uint8).numpy(), start)

    def finish(self, model: nn.Module) -> None:
        """Write what belongs to the weights, and put the folder in place."""
        if len(self.files) > 1:
            weight_map = {name: file for file, names in self.files.items() for name in names}
            table = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(weight_map.items()))}
            (self.staging.path / INDEX).write_text(json.dumps(table, indent=2) + "\n")
        for part in ("config", "generation_config"):
            settings = getattr(model, part, None)
            if settings is not None and hasattr(settings, "save_pretrained"):
                if part == "config":  # the class that is built from it again, as transformers writes it
                    settings = copy.deepcopy(settings)
                    settings.architectures = [type(model).__name__]
                    _tell_dtype(settings, model)
                settings.save_pretrained(self.staging.path)
        self.staging.commit()


def _tell_dtype(settings: Any, model: nn.Module) -> None:
    """What transformers loads the weights in: the dtype that they have, whatever the config said before."""
    floats = (one.dtype for one in model.parameters() if one.is_floating_point())
    dtype = next(floats, None)
    if dtype is not None and hasattr(settings, "dtype"):
        settings.dtype = dtype


def whole_shape(tensor: torch.Tensor, shard: Shard | None, group: Group) -> tuple[int, ...]:
    """The global shape of a rank's part."""
    shape = list(tensor.shape)
    if shard is not None:
        if shard.sections is not None:
            shape[shard.dim] = sum(size for size, _ in shard.sections)
        else:
            assert shard.deal is not None, "a Shard without sections has a deal"
            start, stop = shard.deal.ranges[group.rank]
            shape[shard.dim] = shape[shard.dim] * shard.deal.units // (stop - start)
    return tuple(shape)


def _files(
    named: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]], largest: int
) -> dict[str, list[str]]:
    """{file: tensor names}: as many in a row as fit one file."""
    shares: list[list[str]] = [[]]
    room = largest
    for name, tensor in named.items():
        nbytes = _bytes(tensor, shapes[name])
        if nbytes > room and shares[-1]:
            shares.append([])
            room = largest
        shares[-1].append(name)
        room -= nbytes
    if len(shares) == 1:
        return {SINGLE: shares[0]}
    return {f"model-{at:05}-of-{len(shares):05}.safetensors": share for at, share in enumerate(shares, 1)}


def _bytes(tensor: torch.Tensor, shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * tensor.element_size()
