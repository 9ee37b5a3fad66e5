"""Record a module as a rank runs it: with the rank's local shapes, and the mappings of the sharded model as
aliases or changes of shape at their places."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from autotp.match import Placed
from autotp.placement import Shard
from autotp.propagate.propagation import Propagation
from autotp.propagate.reads import Read
from autotp.propagate.regions import Region
from autotp.trace.graph import Trace, tensors_in
from autotp.trace.inventory import kind_of
from autotp.trace.layers import Layers
from autotp.trace.modes import Mode
from autotp.trace.recorder import Guide

__all__ = ["distinct_ranks", "trace_rank"]


def distinct_ranks(shapes: Mapping[str, tuple[int, ...]], cuts: Mapping[str, Shard], tp: int) -> list[int]:
    """One rank for each distinct vector of local shapes."""
    seen: dict[tuple[Any, ...], int] = {}
    for rank in range(tp):
        key = tuple(cut.local_shape(shapes[name], rank) for name, cut in cuts.items())
        seen.setdefault(key, rank)
    return list(seen.values())


def trace_rank(
    module: nn.Module,
    mode: Mode,
    whole: Propagation,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    placed: Mapping[str, Placed],
    aliases: Mapping[str, str],
    rank: int,
    guide: Guide | None = None,
    layers: Layers | None = None,
) -> Trace:
    """The module as `rank` runs it in `mode`; layers that gather or split do so at their border. `guide` is
    the recorder's."""
    cuts, reads = whole.cuts, whole.reads

    def weight_cut(layer: Placed) -> Shard:
        return next(cuts[aliases.get(n, n)] for n in layer.layouts if n.rpartition(".")[2] == "weight")

    def before(path: str, inputs: tuple[Any, ...]) -> Any:
        layer = placed.get(path)
        if layer is None or not layer.rule.split_input or not inputs:
            return None
        whole = inputs[0]
        held = weight_cut(layer).local_size(whole.shape[-1], rank)
        return (whole.narrow(-1, 0, held).clone(), *inputs[1:])

    def after(path: str, output: Any) -> Any:
        layer = placed.get(path)
        if layer is None or not layer.rule.gather_output or not isinstance(output, torch.Tensor):
            return None
        cut = weight_cut(layer)
        weight = next(n for n in layer.layouts if n.rpartition(".")[2] == "weight")
        size = shapes[aliases.get(weight, weight)][cut.dim]
        return output.narrow(-1, 0, 1).expand(*output.shape[:-1], size).clone()

    parts = {**cuts, **{name: read.shard for name, read in reads.items() if read.shard is not None}}
    held = {name: cut.local_shape(shapes[name], rank) for name, cut in parts.items()}
    with _as_sharded(module, reads, whole.regions, aliases), _by_weight(module, placed):
        return mode.capture(
            module, shapes=held, before=before, after=after, like=whole.trace, guide=guide, layers=layers
        )


@contextlib.contextmanager
def _as_sharded(
    module: nn.Module, reads: Mapping[str, Read], regions: Mapping[str, Region], aliases: Mapping[str, str]
) -> Iterator[None]:
    """Read the tensors that are read mapped as the sharded model will: through a property of the class, and
    map at a region's border in its class's forward. Here both give an alias, so that what passes them by can
    be told."""
    swapped: list[tuple[nn.Module, type[nn.Module]]] = []
    made: dict[tuple[int, str], torch.Tensor] = {}
    try:
        for path, owner in module.named_modules():
            keys = [*owner._parameters, *owner._buffers]
            names = [k for k in keys if aliases.get(n := f"{path}.{k}" if path else k, n) in reads]
            body: dict[str, Any] = {name: property(_aliased(name, made)) for name in names}
            if path in regions:
                body["forward"] = _bordered(regions[path], type(owner))
            if body:
                swapped.append((owner, type(owner)))
                owner.__class__ = type(type(owner).__name__, (type(owner),), body)
        yield
    finally:
        for owner, own in swapped:
            owner.__class__ = own


def _bordered(region: Region, base: type[nn.Module]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = aliased((args, kwargs), region.copied)
        return aliased(base.forward(self, *args, **kwargs), region.reduced)

    def aliased(value: Any, places: frozenset[str]) -> Any:
        found = {id(t): torch.ops.aten.alias.default(t) for p, t, _ in tensors_in(value) if p in places}
        return pytree.tree_map(lambda leaf: found.get(id(leaf), leaf), value)

    return forward


@contextlib.contextmanager
def _by_weight(module: nn.Module, placed: Mapping[str, Placed]) -> Iterator[None]:
    """Conv1Ds and norms of the plan take their size from their weight, as the parallel layers do."""
    swapped: list[tuple[nn.Module, type[nn.Module]]] = []
    rows: list[tuple[nn.Module, int]] = []
    try:
        for path in placed:
            owner = module.get_submodule(path)
            if placed[path].style == "vocab" and owner.__dict__.get("padding_idx") is not None:
                rows.append((owner, owner.__dict__["padding_idx"]))
                owner.__dict__["padding_idx"] = None  # of all rows; the parallel layer knows whose it is
            forward = _BY_WEIGHT.get(kind_of(owner)) if placed[path].layouts else None
            if forward is not None:
                swapped.append((owner, type(owner)))
                owner.__class__ = type(type(owner).__name__, (type(owner),), {"forward": forward})
        yield
    finally:
        for owner, own in swapped:
            owner.__class__ = own
        for owner, row in rows:
            owner.__dict__["padding_idx"] = row


def _conv1d(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
    return y.view((*x.size()[:-1], self.weight.size(1)))


def _norm(self: Any, input: torch.Tensor) -> torch.Tensor:
    if isinstance(self, nn.RMSNorm):
        return F.rms_norm(input, tuple(self.weight.shape), self.weight, self.eps)
    return F.layer_norm(input, tuple(self.weight.shape), self.weight, self.bias, self.eps)


_BY_WEIGHT: dict[str, Callable[..., torch.Tensor]] = {"conv1d": _conv1d, "norm": _norm}


def _aliased(
    name: str, made: dict[tuple[int, str], torch.Tensor]
) -> Callable[[nn.Module], torch.Tensor | None]:
    def read(owner: nn.Module) -> torch.Tensor | None:
        stored = owner._parameters.get(name)
        tensor = owner._buffers.get(name) if stored is None else stored
        if tensor is None:
            return None
        key = (id(tensor), name)  # one object for every reading, as the tensor itself is
        if key not in made:
            made[key] = torch.ops.aten.alias.default(tensor)
        return made[key]

    return read
