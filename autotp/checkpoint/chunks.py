"""Which tensors of a training state are parts of a sharded model, and where each piece of them belongs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.tensor import DTensor

from autotp.diagnostic import CheckpointError, UsageError
from autotp.placement import Shard
from autotp.slicing import cut

__all__ = ["Chunked", "Chunks"]


@dataclass(frozen=True)
class Chunked:
    """How one tensor of the state is cut: the whole shape, and this rank's pieces of it."""

    shape: tuple[int, ...]
    shard: Shard
    rank: int

    def chunks(self) -> Iterator[tuple[ChunkStorageMetadata, int]]:
        """Each piece that this rank holds, and where it stands in the rank's own dim."""
        local = 0
        for start, stop in cut(self.shape, self.shard, self.rank):
            offsets, sizes = [0] * len(self.shape), list(self.shape)
            offsets[self.shard.dim], sizes[self.shard.dim] = start, stop - start
            yield ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)), local
            local += stop - start

    def piece(self, tensor: torch.Tensor, index: MetadataIndex) -> torch.Tensor:
        """The part of this rank's tensor that is the chunk of this index."""
        for chunk, local in self.chunks():
            if chunk.offsets == index.offset:
                return tensor.narrow(self.shard.dim, local, chunk.sizes[self.shard.dim])
        raise CheckpointError(f"{index.fqn!r} has no part at {list(index.offset or ())} on rank {self.rank}")


class Chunks:
    """What is remembered of a model's cuts, and the parameters that a state's keys name."""

    def __init__(self, model: nn.Module) -> None:
        from autotp.parts import group_and_cuts, parts_of

        self.group, _ = group_and_cuts(model)
        self.cut: dict[str, Chunked] = {}
        self.names = set(model.state_dict())
        parts = parts_of(model)
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) in parts:
                part = parts[id(tensor)]
                self.cut[name] = Chunked(part.shape, part.shard, self.group.rank)

    def cuts(
        self, state: Mapping[str, Any], mappings: Mapping[str, tuple[str | int, ...]]
    ) -> dict[str, Chunked]:
        """How the cut tensors of a flat state are cut, by its keys."""
        found = {}
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or value.dim() == 0:
                continue
            named = [step for step in mappings[key] if step in self.names]
            if not named or named[-1] not in self.cut:
                continue
            one = self.cut[str(named[-1])]
            local = one.shard.local_shape(one.shape, one.rank)
            if tuple(value.shape) == local:
                found[key] = one
            elif value.numel() != 1:
                raise UsageError(
                    f"{key!r} has shape {list(value.shape)}, and rank {one.rank}'s part of {named[-1]!r} is "
                    f"{list(local)}: it is not known how to cut it"
                )
        return found
