"""The second way to a trace: `torch.export`, which is public, and slower.

The module is exported on the meta device, without strict mode (`trace/exporting.py` notes what runs), and the
exported program is turned into the form that the recorder gives (`trace/exported.py`). It takes no cache
objects, gives no second forward, and always tells the model that it is being exported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autotp.trace.calls import Boundary
from autotp.trace.copies import copied
from autotp.trace.exported import Converted
from autotp.trace.exporting import Watch
from autotp.trace.graph import Trace, TraceError, said, tensors_in
from autotp.trace.hooks import told
from autotp.trace.noting import noting, shape_name
from autotp.trace.source import error_span
from autotp.trace.unknown import unknown
from autotp.trace.untouched import untouched

__all__ = ["export"]


def export(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    grad: bool = True,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    before: Boundary | None = None,
    after: Boundary | None = None,
) -> Trace:
    """The trace of one forward of `module`, made with `torch.export`; the arguments are those of `record`.

    Raises TraceError when torch.export cannot export the module.
    """
    with untouched(module):
        new_args, new_kwargs = _to_meta(module, args, kwargs, grad=grad, shapes=shapes or {})
        watch = Watch(module, before, after)
        try:
            with (
                torch.device("meta"),
                torch.set_grad_enabled(grad),
                noting(shape_name) as notes,
                unknown(watch.told),
                told(watch.told),
            ):
                program = torch.export.export(module, new_args, new_kwargs, strict=False)
        except Exception as error:
            raise TraceError(said(error), watch.failed, error_span(error)) from error
        for caught, path in watch.raised:
            raise TraceError(said(caught, caught=True), path, error_span(caught)) from caught
        first = _first_names(module)
    trace = Converted(program, watch, first, grad=grad, inputs=(args, dict(kwargs))).trace
    trace.compared, trace.asked = notes.compares, notes.asked
    return trace


def _first_names(module: nn.Module) -> dict[str, str]:
    """Each name of a tensor, and the first name of the same tensor."""
    by_id: dict[int, str] = {}
    found: dict[str, str] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        for key, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                name = f"{path}.{key}" if path else key
                found[name] = by_id.setdefault(id(tensor), name)
    return found


def _to_meta(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    grad: bool,
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Meta tensors in the place of every tensor of the module; the inputs, as meta tensors."""
    made: dict[int, Any] = {}

    def meta(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        if id(tensor) not in made:
            new = torch.empty(shape, dtype=tensor.dtype, device="meta")
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=grad and (new.is_floating_point() or new.is_complex()))
                new.__dict__.update(tensor.__dict__)
            made[id(tensor)] = new
        found: torch.Tensor = made[id(tensor)]
        return found

    for path, owner in module.named_modules():
        dot = f"{path}." if path else ""
        for table in (owner._parameters, owner._buffers):
            for key, tensor in list(table.items()):
                if tensor is not None:
                    new = meta(tensor, shapes.get(dot + key, tuple(tensor.shape)))
                    table[key] = new
        for key, value in list(owner.__dict__.items()):
            if isinstance(value, torch.Tensor):
                owner.__dict__[key] = meta(value, tuple(value.shape))
    for _, tensor, _ in tensors_in((args, dict(kwargs))):
        meta(tensor, tuple(tensor.shape))
    return copied((tuple(args), dict(kwargs)), made)
