"""The mappings at the border of a module that owns sharded tensors: hooks that copy what goes in, reduce
what comes out. A call that is made otherwise than the proof saw it raises `UnprovenPath`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autotp import mappings
from autotp.comm import Group
from autotp.diagnostic import UnprovenPath
from autotp.propagate.regions import Region
from autotp.trace.graph import tensors_in

__all__ = ["install"]


def install(model: nn.Module, regions: Iterable[Region], group: Group) -> None:
    """Put each region's mappings at its module's border."""
    for region in regions:
        module = model.get_submodule(region.path)
        hooks = _Border(region, group)
        if region.copied:
            module.register_forward_pre_hook(hooks.enter, with_kwargs=True)
        if region.reduced:
            module.register_forward_hook(hooks.leave)


class _Border:
    def __init__(self, region: Region, group: Group) -> None:
        self.region = region
        self.group = group

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return None  # a copy is for its gradient
        return self._mapped((args, kwargs), self.region.copied, mappings.copy, "is called with")

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return self._mapped(output, self.region.reduced, mappings.reduce, "returns")

    def _mapped(self, value: Any, places: frozenset[str], mapping: Callable[..., Tensor], does: str) -> Any:
        found = {place: tensor for place, tensor, _ in tensors_in(value)}
        missing = sorted(places - found.keys())
        if missing:
            raise UnprovenPath(
                f"{self.region.path} {does} other tensors than when its plan was proven: there is none at "
                f"{', '.join(missing)}, but at {', '.join(sorted(found)) or 'no place'}; shard the model "
                "with inputs= that call it this way"
            )
        new = {id(found[place]): mapping(found[place], self.group) for place in places}
        return pytree.tree_map(lambda leaf: new.get(id(leaf), leaf), value)
