"""Planners for torch.distributed.checkpoint, which tell it of every cut tensor where its parts belong.

Without them each rank's part is a plain tensor of one name, of which `torch.distributed.checkpoint.save`
keeps a single one, silently. With them a checkpoint holds whole tensors in chunks, and loads at any number
of ranks. State goes by the parameters' names, as `get_state_dict` of torch gives it
(https://docs.pytorch.org/docs/stable/distributed.checkpoint.html).

    weights, moments = get_state_dict(model, optimizer)    # torch.distributed.checkpoint.state_dict
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder, planner=SavePlanner(model))
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from autotp.checkpoint.chunks import Chunked, Chunks
from autotp.checkpoint.digest import new_digest
from autotp.checkpoint.together import together
from autotp.comm import Group
from autotp.diagnostic import CheckpointError, UsageError

__all__ = ["LoadPlanner", "SavePlanner"]

SLOWEST_STATE = 600.0  # seconds that ranks wait for one that is still making its state


class SavePlanner(DefaultSavePlanner):
    """For `torch.distributed.checkpoint.save` of state that belongs to a sharded model.

    A tensor is a part of a parameter when a key on its way, in the nested state, is the parameter's name, and
    it has the parameter's shape: weights, moments, averages. All others must be equal on the ranks: an
    optimizer's own `state_dict()`, which numbers its parameters, is refused for that. `options` are those of
    torch's DefaultSavePlanner. Every rank of the model's group saves. Raises UsageError and CheckpointError.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(**{**options, "flatten_state_dict": True, "enable_plan_caching": False})
        self._chunks = Chunks(model)

    def create_local_plan(self) -> SavePlan:
        """Chunks of the cut tensors, and all others whole."""
        group = self._chunks.group
        with together(group, timeout=SLOWEST_STATE):
            self._cuts = self._chunks.cuts(self.state_dict, self.mappings)
            plan = super().create_local_plan()
            held = dict(self._held_by_several())
        _compare(group, {key for key, value in self.state_dict.items() if _plain(value)}, held)
        items = []
        for item in plan.items:
            key = item.index.fqn
            items += [item] if key not in self._cuts else _write_items(key, self._cuts[key], self.state_dict)
        self.plan = replace(plan, items=items)
        return self.plan

    def _held_by_several(self) -> Iterator[tuple[tuple[str, tuple[int, ...]], str]]:
        """The digest of every tensor, or piece of one, that more than this rank holds; by key and place."""
        for key, value in self.state_dict.items():
            if not _plain(value):
                continue
            if key not in self._cuts:
                yield (key, ()), _digest(value)
                continue
            found = self._cuts[key]
            others = {
                chunk.offsets
                for rank in range(self._chunks.group.size)
                if rank != found.rank
                for chunk, _ in replace(found, rank=rank).chunks()
            }
            for chunk, _ in found.chunks():
                if chunk.offsets in others:
                    piece = found.piece(value, MetadataIndex(key, chunk.offsets))
                    yield (key, tuple(chunk.offsets)), _digest(piece)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """A chunk of a cut tensor, or what the state has."""
        if index.fqn in self._cuts:
            return self._cuts[index.fqn].piece(self.state_dict[index.fqn].detach(), index).contiguous()
        return super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
    """For `torch.distributed.checkpoint.load` into the state of a sharded model, at any number of ranks.

    What is cut is found as `SavePlanner` does. All that is missing or has another shape is told together,
    and so is a checkpoint whose chunks leave a part of a tensor out; other objects than tensors are read as
    plain data. Torch reads a checkpoint's `.metadata` as a pickle: load only what you trust. `options` are
    those of torch's DefaultLoadPlanner. Raises CheckpointError.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(**{**options, "flatten_state_dict": True})
        self._chunks = Chunks(model)

    def create_local_plan(self) -> LoadPlan:
        """What to read of which chunk; all faults are told at once, before."""
        assert self.metadata is not None, "set_up_planner comes first"
        self._cuts = self._chunks.cuts(self.state_dict, self.mappings)
        faults, items = [], []
        for key, value in self.state_dict.items():
            there = self.metadata.state_dict_metadata.get(key)
            found = self._cuts.get(key)
            if there is None:
                faults += [] if self.allow_partial_load else [f"  missing: {key}"]
                continue
            if not isinstance(value, torch.Tensor) or not isinstance(there, TensorStorageMetadata):
                if isinstance(value, torch.Tensor) != isinstance(there, TensorStorageMetadata):
                    faults.append(f"  mismatched: {key} is a tensor on one side only")
                    continue
                items += create_default_local_load_plan({key: value}, self.metadata).items
                continue
            shape = found.shape if found is not None else tuple(value.shape)
            if tuple(there.size) != shape:
                faults.append(f"  mismatched: {key} is {list(there.size)}, the model's is {list(shape)}")
                continue
            if found is not None:
                wanted = [chunk for chunk, _ in found.chunks()]
                reads = create_read_items_for_chunk_list(key, there, wanted)
                held = sum(prod(chunk.sizes) for chunk in wanted)
            else:
                reads, held = create_default_local_load_plan({key: value}, self.metadata).items, None
            if held is not None and sum(prod(read.lengths) for read in reads) != held:
                faults.append(f"  incomplete: {key}: its chunks do not make up the tensor")
            items += reads
        if faults:
            do = "entries do" if len(faults) > 1 else "entry does"
            raise CheckpointError(f"{len(faults)} {do} not fit the checkpoint:\n" + "\n".join(faults))
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Where a chunk goes."""
        if index.fqn in self._cuts:
            return self._cuts[index.fqn].piece(self.state_dict[index.fqn].detach(), index)
        return super().lookup_tensor(index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Numbers and names, and no code."""
        place: Any = self.original_state_dict
        key = read_item.dest_index.fqn
        *path, last = self.mappings[key]
        for step in path:
            place = place[step]
        try:
            place[last] = torch.load(value, weights_only=True)
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise CheckpointError(
                f"{key!r} is not plain data, and nothing else is read ({reason})"
            ) from error


def _compare(group: Group, keys: set[str], held: Mapping[tuple[str, tuple[int, ...]], str]) -> None:
    """Every rank must have the same keys, and the same values where several ranks hold them."""
    for rank, (their_keys, theirs) in enumerate(group.exchange((keys, dict(held)))):
        odd = sorted(keys ^ their_keys)
        if odd:
            raise UsageError(
                f"the states of ranks {group.rank} and {rank} are not alike: {odd[0]!r} is in one only"
            )
        differs = next(
            (key for (key, at), digest in held.items() if theirs.get((key, at), digest) != digest), None
        )
        if differs is not None:
            raise UsageError(
                f"{differs!r} differs on ranks {group.rank} and {rank}, and one copy would be kept: the "
                "ranks have drifted apart, or it is a part of a parameter whose name is not on its way\n"
                "  = help: key an optimizer's state by names, as "
                "torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer) does"
            )


def _write_items(key: str, found: Chunked, state: Mapping[str, Any]) -> list[WriteItem]:
    properties = TensorProperties.create_from_tensor(state[key].detach())
    return [
        WriteItem(
            MetadataIndex(key, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, torch.Size(found.shape)),
        )
        for chunk, _ in found.chunks()
    ]


def _plain(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor)


def _digest(tensor: torch.Tensor) -> str:
    digest = new_digest("xxh3")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
    digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return digest.hexdigest()
