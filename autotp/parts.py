"""The tensors of a model of which this rank holds a part: of parallel layers and of what `shard` has cut."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autotp import mappings
from autotp.comm import Group
from autotp.cut import local_cut
from autotp.placement import Shard
from autotp.rewrite.apply import sharded

__all__ = ["Part", "parts_of"]


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
        if isinstance(layouts, dict) and isinstance(group, Group):
            for name, shard in layouts.items():
                own = module._parameters.get(name)
                if own is not None:
                    found.setdefault(id(own), Part(prefix + name, own, shard, group))
    return found
