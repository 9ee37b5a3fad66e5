"""How an op's result is made anew without a run: in memory of its own, or as a view of an argument."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autotp.trace import hooks

__all__ = ["Made", "made_like", "seen"]


class Made:
    """How an op's result is made anew, in its own memory, or as a view of `viewed`, an argument of the op."""

    __slots__ = ("dtype", "needs", "offset", "on", "shape", "strides", "viewed")

    def __init__(self, tensor: torch.Tensor, viewed: int | None, on: torch.device, needs: bool) -> None:
        self.shape, self.strides = tuple(hooks.sizes(tensor)), tensor.stride()
        self.offset, self.dtype = int(tensor.storage_offset()), tensor.dtype
        self.on, self.needs, self.viewed = on, needs, viewed

    def __call__(self, fakes: hooks.Fakes, tensors: list[torch.Tensor], needs: bool | None) -> torch.Tensor:
        """The result, of an op on these tensors; `needs`, if given, says whether a gradient is required of
        what may have one."""
        of = None if self.viewed is None else tensors[self.viewed]
        data = hooks.data_like(self.shape, self.strides, self.offset, self.dtype, of)
        needed = self.needs if needs is None else needs and self.dtype.is_floating_point
        return hooks.wrapped(data, fakes.attributes(self.on), needed)


def made_like(out: torch.Tensor, tensors: Sequence[torch.Tensor], fakes: hooks.Fakes) -> Made | int | None:
    """How `out`, the result of an op on `tensors`, is made anew: the number of the tensor that it is, or as
    `Made` says; None where it cannot be."""
    if any(tensor is out for tensor in tensors):
        return seen(out, tensors, hooks.device(out), out.requires_grad)
    if type(out) is not hooks.FAKE or out.dtype.is_complex or hooks.symbolic(out):
        return None
    if (
        out.layout is not torch.strided
        or out.is_quantized
        or out.__dict__ != fakes.attributes(hooks.device(out))
    ):
        return None
    return seen(out, tensors, hooks.device(out), out.requires_grad)


def seen(
    out: torch.Tensor, tensors: Sequence[torch.Tensor], on: torch.device, needs: bool
) -> Made | int | None:
    """The same of a result that is on a device and of which a gradient is required, by the memory it sees."""
    same = [number for number, tensor in enumerate(tensors) if tensor is out]
    if same:
        return same[0] if len(same) == 1 else None
    storage = hooks.storage(out)
    viewed = [number for number, tensor in enumerate(tensors) if hooks.storage(tensor) == storage]
    if len(viewed) > 1 or (not viewed and out.storage_offset()):
        return None
    return Made(out, viewed[0] if viewed else None, on, needs)
