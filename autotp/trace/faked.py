"""Put fake tensors in the place of a module's tensors while the context lasts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autotp.trace.copies import copied
from autotp.trace.graph import tensors_in
from autotp.trace.handed import Noting, Reader
from autotp.trace.hooks import Fakes

__all__ = ["Faked", "faked"]


@dataclass
class Faked:
    """A module on fake tensors: `attributes` are those of each module, by its id, `handed` the parameters
    that code reads off a module that is not its own."""

    fakes: Fakes
    names: dict[int, tuple[str, str]]  # id(fake) -> (name, origin)
    owned: list[torch.Tensor]
    attributes: dict[int, dict[str, Any]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    handed: dict[str, set[Reader]]


@contextlib.contextmanager
def faked(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    grad: bool,
    shapes: Mapping[str, tuple[int, ...]],
    as_given: bool = False,
) -> Iterator[Faked]:
    """Put fake tensors in the place of every parameter, buffer and input (shared ones stay shared). With
    `grad` every floating one requires a gradient; of the inputs `as_given` those that do."""
    fakes = Fakes()
    names: dict[int, tuple[str, str]] = {}
    made: dict[int, torch.Tensor] = {}
    handed: dict[str, set[Reader]] = {}

    def owned(tensor: torch.Tensor, name: str, origin: str) -> torch.Tensor:
        if id(tensor) not in made:
            shape = shapes.get(name, tuple(tensor.shape))
            if isinstance(tensor, nn.Parameter):
                new = fakes.made(shape, tensor.dtype, tensor.device, grad and _differentiable(tensor))
                new.__dict__.update(tensor.__dict__, _is_param=True)  # what nn.Parameter(new) does
            else:
                new = fakes.made(shape, tensor.dtype, tensor.device)
            made[id(tensor)] = new
            # The real one too: a forward may hold it elsewhere (a list, a closure).
            names[id(new)] = names[id(tensor)] = (name, origin)
        return made[id(tensor)]

    for path, owner in module.named_modules():
        for origin, table in (("parameter", owner._parameters), ("buffer", owner._buffers)):
            for key, tensor in list(table.items()):
                if tensor is not None:
                    table[key] = owned(tensor, f"{path}.{key}" if path else key, origin)
        if owner._parameters:
            owner.__dict__["_parameters"] = Noting(owner._parameters, owner, path, handed)
        for key, value in list(owner.__dict__.items()):
            if isinstance(value, torch.Tensor):
                name = f"{path}.{key}" if path else key
                if value.is_meta:  # the model was built there
                    owner.__dict__[key] = owned(value, name, "constant")
                else:
                    names.setdefault(id(value), (name, "constant"))
    holders = list(made.values())
    for _, tensor, _ in tensors_in((args, dict(kwargs))):
        if id(tensor) not in made:
            new = fakes.made(tuple(tensor.shape), tensor.dtype, tensor.device)
            if grad and _differentiable(tensor) and (tensor.requires_grad or not as_given):
                # Not a leaf, so that a forward may write into it.
                with fakes.mode:
                    new = new.requires_grad_().view_as(new)
            made[id(tensor)] = new
    new_args, new_kwargs = copied((tuple(args), dict(kwargs)), made)
    attributes = {id(m): dict(vars(m)) for m in module.modules()}
    yield Faked(fakes, names, holders, attributes, new_args, new_kwargs, handed)


def _differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
