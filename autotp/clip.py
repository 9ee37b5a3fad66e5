"""The norm of all gradients of a model whose parameters are partly cut, partly whole on every rank.

    ‖g‖ᵖ = Σ over whole parameters ‖g‖ᵖ  +  Σ over ranks Σ over cut parameters ‖own part of g‖ᵖ

A whole parameter counts once, an element that several ranks hold counts for its first holder. torch's
own clip_grad_norm_ sees one rank's parts only, and would scale each rank differently.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autotp.comm import Group
from autotp.diagnostic import UsageError
from autotp.mappings import owned
from autotp.parts import parts_of

__all__ = ["clip_grad_norm_"]


def _combined(norms: list[Tensor], norm_type: float) -> Tensor:
    """The norm of the whole, from the norms of its parts."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return norm


def _norm(gradient: Tensor, norm_type: float) -> Tensor:
    """The norm of a gradient, over the ranks of `fully_shard`, too, when it is sharded by that."""
    norm: Any = torch.linalg.vector_norm(gradient, norm_type)
    found: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return found


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale the gradients of `model` in place to a norm of at most `max_norm`; returns the norm before.

    `model` is one that `autotp.shard` made, or is built from autotp.nn's layers, or both; every rank of
    the group calls it, and of `fully_shard`, which may shard it besides. `norm_type` is p of the p-norm, or
    inf. The norm and the scale are those of the unsharded model, the same on all ranks; as in torch, the
    scale is max_norm / (norm + 1e-6), at most 1.

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
    cut = parts_of(model)
    with torch.no_grad():
        norms: list[Tensor] = []
        parts: dict[Group, list[Tensor]] = {part.group: [] for part in cut.values()}
        gradients = []
        for parameter in model.parameters():
            if parameter.grad is None:
                continue
            gradients.append(parameter.grad)
            gradient = parameter.grad
            if gradient.is_sparse:
                gradient = gradient.coalesce().values()
            if id(parameter) not in cut:
                norms.append(_norm(gradient, norm_type))
                continue
            part = cut[id(parameter)]
            if not parameter.grad.is_sparse:
                gradient = owned(gradient, part.group, shard=part.shard)
            parts[part.group].append(_norm(gradient, norm_type))
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
            own: Any = gradient
            here: Tensor = own.to_local() if hasattr(own, "to_local") else own
            here.mul_(scale.to(here.dtype))
    return total
