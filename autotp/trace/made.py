"""How an op's result is made anew without a run: in memory of its own, or as a view of an argument."""

from __future__ import annotations

import torch

from autotp.trace import hooks

__all__ = ["Made", "made_like"]


class Made:
    """How an op's result is made anew, in its own memory, or as a view of `viewed`, an argument of the op."""

    __slots__ = ("dtype", "needs", "offset", "on", "shape", "strides", "viewed")

    def __init__(self, tensor: torch.Tensor, viewed: int | None) -> None:
        self.shape, self.strides = tuple(tensor.shape), tensor.stride()
        self.offset, self.dtype = int(tensor.storage_offset()), tensor.dtype
        self.on, self.needs, self.viewed = hooks.device(tensor), tensor.requires_grad, viewed

    def __call__(self, fakes: hooks.Fakes, tensors: list[torch.Tensor], needs: bool | None) -> torch.Tensor:
        """The result, of an op on these tensors; `needs`, if given, says whether a gradient is required of
        what may have one."""
        of = None if self.viewed is None else tensors[self.viewed]
        data = hooks.data_like(self.shape, self.strides, self.offset, self.dtype, of)
        needed = self.needs if needs is None else needs and self.dtype.is_floating_point
        return hooks.wrapped(data, fakes.attributes(self.on), needed)


def made_like(out: torch.Tensor, tensors: list[torch.Tensor], fakes: hooks.Fakes) -> Made | int | None:
    """How `out`, the result of an op on `tensors`, is made anew: the number of the tensor that it is, or as
    `Made` says; None where it cannot be."""
    same = [number for number, tensor in enumerate(tensors) if tensor is out]
    if same:
        return same[0] if len(same) == 1 else None
    if type(out) is not hooks.FAKE or out.dtype.is_complex or hooks.symbolic(out):
        return None
    if (
        out.layout is not torch.strided
        or out.is_quantized
        or out.__dict__ != fakes.attributes(hooks.device(out))
    ):
        return None
    storage = hooks.storage(out)
    seen = [number for number, tensor in enumerate(tensors) if hooks.storage(tensor) == storage]
    if len(seen) > 1 or (not seen and out.storage_offset()):
        return None
    return Made(out, seen[0] if seen else None)
