"""What fills a parameter by random numbers, places or sizes would fill a rank's part as if it were whole.

Ranks that draw alike would all hold the same numbers, `xavier_uniform_` and its kin would scale by the part's
sizes, and `eye_` would put ones where there are none. So torch's functions that do so are refused for parts,
in `torch.nn.init` and in transformers' own table of them. Constants are the same in a part.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autotp.diagnostic import UsageError

__all__ = ["watch_filling"]

_FILLING = (
    "dirac_", "eye_", "kaiming_normal_", "kaiming_uniform_", "normal_", "orthogonal_", "sparse_",
    "trunc_normal_", "uniform_", "xavier_normal_", "xavier_uniform_",
)  # fmt: skip


def watch_filling(part: Callable[[Tensor], Any]) -> None:
    """Refuse these functions where `part` knows the tensor as a rank's part."""
    tables = [vars(torch.nn.init)]
    theirs = vars(sys.modules.get("transformers.initialization", object)).get("TORCH_INIT_FUNCTIONS")
    tables += [theirs] if isinstance(theirs, dict) else []
    for table in tables:
        for name in _FILLING:
            original = table.get(name)
            if callable(original) and not hasattr(original, "checks_parts"):
                table[name] = _checked(name, original, part)


def _checked(name: str, original: Callable[..., Any], part: Callable[[Tensor], Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def checked(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = part(tensor)
        if found is not None:
            raise UsageError(
                f"nn.init.{name} is given this rank's part of {found.name}, {list(tensor.shape)} of "
                f"{list(found.shape)}: the ranks would draw the same numbers, or scale them by a part's sizes"
                "\n  = help: fill the model before it is sharded; autotp.load_state_dict(model, state) takes "
                "whole tensors"
            )
        return original(tensor, *args, **kwargs)

    checked.checks_parts = True  # type: ignore[attr-defined]
    return checked
