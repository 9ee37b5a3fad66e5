"""What fills a parameter by random numbers or by its sizes would fill a rank's part as if it were whole.

Ranks that draw alike would all hold the same numbers, and `xavier_uniform_` and its kin would scale by the
part's sizes. So `torch.nn.init` refuses parts, however its functions were imported: the check stands before
the helpers that they call (`trace/hooks.py`), and before those that call none. Constants are the same in a
part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autotp.diagnostic import UsageError
from autotp.trace.hooks import FILLING

__all__ = ["watch_filling"]

_ALONE = ("dirac_", "eye_", "orthogonal_", "sparse_")  # they call no helper


def watch_filling(part: Callable[[Tensor], Any]) -> None:
    """Refuse to fill a tensor that `part` knows as a rank's part; once."""
    helpers = vars(torch.nn.init)
    for name in (*FILLING, *_ALONE):
        original = helpers.get(name)
        if original is not None and not hasattr(original, "checks_parts"):
            helpers[name] = _checked(original, part)


def _checked(original: Callable[..., Any], part: Callable[[Tensor], Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def checked(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = part(tensor)
        if found is not None:
            raise UsageError(
                f"torch.nn.init is given this rank's part of {found.name}, {list(tensor.shape)} of "
                f"{list(found.shape)}: the ranks would draw the same numbers, or scale them by a part's sizes"
                "\n  = help: fill the model before it is sharded; autotp.load_state_dict(model, state) takes "
                "whole tensors"
            )
        return original(tensor, *args, **kwargs)

    checked.checks_parts = True  # type: ignore[attr-defined]
    return checked
