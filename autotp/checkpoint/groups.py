"""What an optimizer tells of its groups of parameters: the names, and the settings as plain data."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autotp.diagnostic import UsageError

__all__ = ["checked_names", "like", "settings"]


def checked_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """The names of the parameters; raises UsageError for an optimizer that has others, or that is none."""
    if not hasattr(optimizer, "param_groups"):
        raise UsageError(f"an optimizer is one of torch.optim, not {type(optimizer).__name__}")
    names = _names(model)
    if any(id(parameter) not in names for entry in optimizer.param_groups for parameter in entry["params"]):
        raise UsageError("the optimizer holds a parameter that is none of the model's")
    return names


def _names(model: nn.Module) -> dict[int, str]:
    """The name of each parameter, by its identity; of tied ones the first."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    return names


def settings(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Each group's settings and the names of its parameters, as JSON data."""
    names, told = _names(model), list[dict[str, Any]]()
    for group in optimizer.param_groups:
        plain = {
            key: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            for key, value in group.items()
            if key != "params"
        }
        odd = next((key for key, value in plain.items() if not _is_data(value)), None)
        if odd is not None:
            raise UsageError(
                f"the optimizer's setting {odd!r} is {_kind(plain[odd])}: numbers, strings, None and lists "
                "of them can be saved; take it out of the group"
            )
        told.append({**plain, "names": [names[id(parameter)] for parameter in group["params"]]})
    return told


def like(now: Any, value: Any) -> Any:
    """A setting as the optimizer has it now: JSON has no tuples (AdamW's betas) and no tensors (its lr)."""
    if isinstance(now, torch.Tensor) and isinstance(value, int | float):
        return torch.full_like(now, value)
    return tuple(value) if isinstance(now, tuple) and isinstance(value, list) else value


def _is_data(value: Any) -> bool:
    """Whether JSON gives a value back as it was."""
    if isinstance(value, list | tuple):
        return all(_is_data(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_data(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, str)


def _kind(value: Any) -> str:
    """What a value is, for a message."""
    return f"a tensor of {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
