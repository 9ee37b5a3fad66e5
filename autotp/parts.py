"""The tensors of a model of which this rank holds a part: of parallel layers and of what `shard` has cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from autotp import mappings
from autotp.comm import Group, GroupOfOne
from autotp.comm.group import KnownGroup
from autotp.cut import local_cut
from autotp.diagnostic import UsageError
from autotp.placement import Shard
from autotp.rewrite.apply import sharded

__all__ = ["Part", "group_and_cuts", "parts_of"]


@dataclass(frozen=True)
class Part:
    """This rank's part of a tensor, its name, and how the whole is cut over its group."""

    name: str
    tensor: Tensor
    shard: Shard
    group: Group

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole. Raises UsageError when the tensor is no part of this cut any more."""
        if self.group.size == 1:
            return tuple(self.tensor.shape)
        shape = list(self.tensor.shape)
        shape[self.shard.dim] = local_cut(self.name, self.tensor, self.group, None, self.shard).size
        return tuple(shape)

    def gathered(self, of: Tensor | None = None) -> Tensor:
        """The whole tensor, or the whole of another one that is cut alike; all ranks of the group call it."""
        part = self.tensor if of is None else of
        with torch.no_grad():
            return mappings.gather(part.detach(), self.group, shard=self.shard)


def parts_of(model: nn.Module) -> dict[int, Part]:
    """Every cut parameter and buffer of a model, by its `id`.

    >>> parts_of(nn.Linear(2, 2))
    {}
    """
    found: dict[int, Part] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        remembered = sharded(module)
        if remembered is not None:
            named: dict[str, Tensor] = {
                **dict(module.named_parameters(remove_duplicate=False)),
                **dict(module.named_buffers(remove_duplicate=False)),
            }
            for name, tensor in named.items():
                if name in remembered.layouts:
                    shard = remembered.layouts[name]
                    found[id(tensor)] = Part(prefix + name, tensor, shard, remembered.group)
        layouts, group = getattr(module, "layouts", None), getattr(module, "group", None)
        if isinstance(layouts, dict) and isinstance(group, (KnownGroup, Group)):
            for name, shard in layouts.items():
                own = module._parameters.get(name)
                if own is not None:
                    found.setdefault(id(own), Part(prefix + name, own, shard, cast(Group, group)))
    return found


def group_and_cuts(model: nn.Module) -> tuple[Group, dict[str, Shard]]:
    """The group that a model's parts lie on, and how each cut tensor is cut, by each of its names.

    Of a model that no rank has a part of: a group of one. Raises UsageError for parts on several groups.

    >>> group_and_cuts(nn.Linear(2, 2))
    (GroupOfOne(), {})
    """
    parts = parts_of(model)
    memories = [memory for module in model.modules() if (memory := sharded(module)) is not None]
    every = [*(memory.group for memory in memories), *(part.group for part in parts.values())]
    groups = {id(group): group for group in every}
    shared = [group for group in groups.values() if group.size > 1]
    if len(shared) > 1:
        raise UsageError(
            f"{type(model).__name__}: its parts are of {len(shared)} groups ({shared[0]} and {shared[1]}), "
            "and it is written or read by one; take the modules of each group by themselves"
        )
    named: dict[str, Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    cuts = {name: parts[id(tensor)].shard for name, tensor in named.items() if id(tensor) in parts}
    return next(iter([*shared, *groups.values()]), GroupOfOne()), cuts
