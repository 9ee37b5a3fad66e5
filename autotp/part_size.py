"""A tensor that stands where this rank's part of it stood, of another size: a whole one, or a resized one.

With a whole column layer before a whole row layer every rank computes the whole, and the row layer's reduce
sums it over the ranks, without a word.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from autotp.comm import Group
from autotp.diagnostic import UsageError
from autotp.placement import Shard

__all__ = ["check_size", "held_sizes"]


def held_sizes(module: nn.Module, path: str, layouts: Mapping[str, Shard]) -> dict[str, tuple[int, int]]:
    """The cut dim of each parameter that `module` owns, and its size on this rank, by local name."""
    own = {name: layouts.get(f"{path}.{name}" if path else name) for name in module._parameters}
    cut = {name: shard.dim for name, shard in own.items() if shard is not None}
    return {name: (dim, module.get_parameter(name).shape[dim]) for name, dim in cut.items()}


def check_size(where: str, name: str, tensor: Tensor | None, dim: int, held: int, group: Group) -> None:
    """Raises UsageError where `tensor` has not the `held` elements of this rank in the dim that is cut."""
    if tensor is not None and tensor.shape[dim] != held:
        raise UsageError(
            f"{where}: its {name} has {tensor.shape[dim]} elements in dim {dim}, and rank {group.rank} of "
            f"{group.size} holds {held}: it was put in the place of this rank's part, or resized"
            "\n  = help: autotp.load_state_dict(model, state) takes whole tensors; autotp.unshard(model) "
            "makes the model whole, to be changed and sharded again"
        )
