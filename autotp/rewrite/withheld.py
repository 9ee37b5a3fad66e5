"""What code gets that reads a cut weight where no trace saw an op on it: a stand-in.

The function that was given the weight in a trace did nothing with it; another one, a kernel that is
installed later, might multiply one rank's part of it as if it were the whole, past every mapping. So the
stand-in cannot be computed with. What the tensor is like (its dtype, its device, its local shape) it tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from autotp.diagnostic import UnprovenPath

__all__ = ["withheld"]

_LIKE = frozenset(
    getattr(Tensor, name).__get__
    for name in ("device", "dtype", "is_cuda", "is_meta", "layout", "ndim", "requires_grad", "shape")
) | {
    Tensor.__len__, Tensor.dim, Tensor.element_size, Tensor.ndimension, Tensor.numel, Tensor.size,
    Tensor.stride,
}  # fmt: skip


class _Withheld(Tensor):
    _autotp_name: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _LIKE:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        name = next((a._autotp_name for a in args if isinstance(a, cls)), "a cut weight")
        raise UnprovenPath(
            f"{name} is cut, and {getattr(func, '__name__', func)} is computed with it outside of its layer, "
            "where no traced forward did: a kernel that takes whole weights would give other numbers on each "
            "rank; have it installed when the model is sharded, or switch it off"
        )


def withheld(tensor: Tensor, name: str) -> Tensor:
    """A stand-in for a cut tensor, known as `name`.

    >>> import torch
    >>> withheld(torch.zeros(2, 3), "fc.weight").shape
    torch.Size([2, 3])
    """
    made = tensor.detach().as_subclass(_Withheld)
    made._autotp_name = name
    return made
