"""The norm of all gradients of a model whose parameters are partly cut, partly whole on every rank.

    ‖g‖ᵖ = Σ over whole parameters ‖g‖ᵖ  +  Σ over ranks Σ over cut parameters ‖own part of g‖ᵖ

A whole parameter counts once, an element that several ranks hold counts for its first holder. torch's
own clip_grad_norm_ sees one rank's parts only, and would scale each rank differently.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from autotp.comm import Group
from autotp.diagnostic import UsageError
from autotp.mappings import owned
from autotp.placement import Shard
from autotp.rewrite.apply import sharded

__all__ = ["clip_grad_norm_"]


def _cut_parameters(model: nn.Module) -> Iterator[tuple[nn.Parameter, Shard, Group]]:
    """Every cut parameter of parallel layers and of what `autotp.shard` has cut, with its shard and group."""
    for module in model.modules():
        remembered = sharded(module)
        if remembered is not None:
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if name in remembered.layouts:
                    yield parameter, remembered.layouts[name], remembered.group
        layouts, group = getattr(module, "layouts", None), getattr(module, "group", None)
        if isinstance(layouts, dict) and isinstance(group, Group):
            for name, shard in layouts.items():
                own = module._parameters.get(name)
                if own is not None:
                    yield own, shard, group


def _combined(norms: list[Tensor], norm_type: float) -> Tensor:
    """The norm of the whole, from the norms of its parts."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return norm


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale the gradients of `model` in place to a norm of at most `max_norm`; returns the norm before.

    `model` is one that `autotp.shard` made, or is built from autotp.nn's layers, or both; every rank of
    the group calls it. `norm_type` is p of the p-norm, or inf. The norm and the scale are those of the
    unsharded model, the same on all ranks; as in torch, the scale is max_norm / (norm + 1e-6), at most 1.

    Raises UsageError for a norm_type that is no p-norm with p > 0.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> model.weight.grad = torch.tensor([[3.0, 4.0]])
    >>> clip_grad_norm_(model, 1.0).item()
    5.0
    >>> model.weight.grad.norm().item() < 1.0001
    True
    """
    if not norm_type > 0:
        raise UsageError(f"clip_grad_norm_: norm_type={norm_type} is not a p-norm with p > 0")
    cut = {id(parameter): (shard, group) for parameter, shard, group in _cut_parameters(model)}
    with torch.no_grad():
        norms: list[Tensor] = []
        parts: dict[Group, list[Tensor]] = {group: [] for _, group in cut.values()}
        gradients = []
        for parameter in model.parameters():
            if parameter.grad is None:
                continue
            gradients.append(parameter.grad)
            gradient = parameter.grad
            if gradient.is_sparse:
                gradient = gradient.coalesce().values()
            if id(parameter) not in cut:
                norms.append(torch.linalg.vector_norm(gradient, norm_type))
                continue
            shard, group = cut[id(parameter)]
            if not parameter.grad.is_sparse:
                gradient = owned(gradient, group, shard=shard)
            parts[group].append(torch.linalg.vector_norm(gradient, norm_type))
        device = gradients[0].device if gradients else torch.device("cpu")
        dtype = torch.promote_types(gradients[0].dtype, torch.float32) if gradients else torch.float32
        for group, found in parts.items():
            zero = torch.zeros((), device=device, dtype=dtype)  # a rank without gradients takes part too
            local = _combined([zero, *(norm.to(dtype) for norm in found)], norm_type)
            every = group.all_gather(local.reshape(1), 0, [1] * group.size)
            norms.append(torch.linalg.vector_norm(every, norm_type))
        if not norms:
            return torch.zeros((), device=device)
        total = _combined([norm.to(dtype) for norm in norms], norm_type)
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(scale.to(gradient.dtype))
    return total
