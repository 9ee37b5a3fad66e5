"""torch's own `clip_grad_norm_` sees one rank's parts alone: where it is given any, it is refused.

Called with a sharded model's parameters it would give every rank a norm of its own, scale their gradients
differently, and let the ranks drift apart without a word. The first cut layer puts a check before it, in
`torch.nn.utils`, where training loops and trainers call it; a name that was imported from there before is
the function without the check.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from autotp.diagnostic import UsageError

__all__ = ["watch"]

_OWNERS: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def watch(module: nn.Module) -> None:
    """Refuse torch's clipping for the parameters that `module` holds parts of."""
    if not _OWNERS:
        checked = _checked(torch.nn.utils.clip_grad.clip_grad_norm_)
        torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad.clip_grad_norm_ = checked
    _OWNERS.add(module)


def _checked(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, with the check before it; once."""
    if hasattr(original, "checks_parts"):
        return original

    @functools.wraps(original)
    def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        cut = _cut() & {id(parameter) for parameter in given}
        if cut:
            raise UsageError(
                f"torch's clip_grad_norm_ is given {len(given)} parameters, {len(cut)} of which are this "
                "rank's parts: each rank would take another norm, and scale its gradients differently\n"
                "  = help: autotp.clip_grad_norm_(model, max_norm) takes the norm of the whole model"
            )
        return original(given, *args, **kwargs)

    clip_grad_norm_.checks_parts = True  # type: ignore[attr-defined]
    return clip_grad_norm_


def _cut() -> set[int]:
    """The cut parameters of everything that is watched and alive."""
    from autotp.parts import parts_of

    return {i for owner in list(_OWNERS) for i, part in parts_of(owner).items() if part.group.size > 1}
