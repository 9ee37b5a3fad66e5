"""What an op gives, from its kernel alone: torch's kernel for tensors without memory is called directly.

A run on fake tensors goes through decompositions, autograd and the fake tensors' mode, which at their end ask
this kernel; it takes many times longer. The ops here give the same either way, which tests show for every one
of them: sizes, strides, dtype, and of which argument it is a view. A gradient is required of what they give
where one is required of any argument. What a run refuses is left to a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autotp.trace import hooks
from autotp.trace.made import Made, seen
from autotp.trace.sameness import state

__all__ = ["KERNELS", "by_kernel"]

KERNELS = frozenset(
    [
        *("linear", "embedding", "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "slice"),
        *("select", "expand", "t", "alias", "cat", "add", "sub", "mul", "div", "neg", "pow", "rsqrt", "sqrt"),
        *("cos", "sin", "mean", "sum", "silu", "gelu", "relu", "tanh", "sigmoid", "rsub", "le", "lt", "ge"),
        *("gt", "eq", "ne", "__and__", "__or__", "softmax", "layer_norm", "matmul", "bmm", "where"),
    ]
)
"""The names of the ops, without their overloads."""
_PRODUCTS = frozenset(["linear", "matmul", "bmm"])
_LAID_OUT = frozenset(["view", "reshape"])


def by_kernel(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: Sequence[torch.Tensor]
) -> Made | int | None:
    """How what the op gives of these arguments is made; `tensors` are those among them. None where only a run
    tells."""
    name = func.__name__.partition(".")[0]
    if name not in KERNELS or state()[-1]:  # nothing is cast
        return None
    devices = {hooks.device(tensor) for tensor in tensors}
    if len(devices) != 1:
        return None
    if name in _PRODUCTS and (len({t.dtype for t in tensors}) != 1 or not tensors[0].is_floating_point()):
        return None  # the kernel alone does not refuse it
    data = [_bare(tensor) for tensor in tensors]
    if name in _LAID_OUT and not _dense(data[0]):
        return None  # strides of dims of size 1, which no element has, come out otherwise
    bare = {id(tensor): plain for tensor, plain in zip(tensors, data, strict=True)}
    try:
        out = hooks.kernel(func, _with(args, bare), _with(kwargs, bare))
    except Exception:  # a run says what is wrong
        return None
    if not isinstance(out, torch.Tensor) or out.dtype.is_complex:
        return None
    grad, asked = torch.is_grad_enabled(), any(t.requires_grad for t in tensors)
    made = seen(out, data, devices.pop(), grad and asked and out.is_floating_point())
    if asked and not grad and isinstance(made, Made) and made.viewed is not None:
        return None  # a view may require a gradient there
    return made


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that is like a fake one, and a view of it."""
    shape, offset = hooks.sizes(tensor), int(tensor.storage_offset())
    return hooks.data_like(shape, tensor.stride(), offset, tensor.dtype, tensor)


def _dense(tensor: torch.Tensor) -> bool:
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != step:
            return False
        step *= size
    return step != 0


def _with(value: Any, bare: Mapping[int, torch.Tensor]) -> Any:
    """An op's arguments, with tensors without memory in the place of the fake ones."""
    if isinstance(value, torch.Tensor):
        return bare[id(value)]
    if isinstance(value, (tuple, list)):
        return type(value)([_with(part, bare) for part in value])
    return {key: _with(part, bare) for key, part in value.items()} if isinstance(value, dict) else value
