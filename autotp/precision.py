"""The precision in which a model is compared: float64 throughout, where the model can be run so.

Norms, routers and rotary angles compute in float32 by hand (`x.float()`), and a comparison could then be no
closer than float32 rounds, which a real fault may hide behind. So the float32 that a forward asks for is
made float64, in the unsharded model and on every rank alike: the same ops, without the rounding. Experts of
transformers run as batched products, since the grouped one has no float64.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autotp.diagnostic import UsageError
from autotp.trace.capture import capture
from autotp.trace.graph import Trace, TraceError
from autotp.trace.inputs import Samples
from autotp.trace.recorder import Val

__all__ = ["TOLERANCE", "Compared", "compared_in"]

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 5e-2}


class _Wide(TorchFunctionMode):
    """float64 wherever a torch function is asked for float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        named = {name: _wider(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wider, args), **named)


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@dataclass(frozen=True)
class Compared:
    """A model and its inputs as they are compared, and the mode that every forward runs in."""

    model: nn.Module
    samples: Samples
    running: Callable[[], contextlib.AbstractContextManager[Any]]

    def traced(self) -> Trace | None:
        """The forward that is compared; None where it cannot be traced."""
        try:
            with self.running():
                return capture(self.model, self.samples.args, self.samples.kwargs)
        except TraceError:
            return None

    def tolerance(self) -> float:
        """By the least precise floating dtype that the forward computes in."""
        floats = {p.dtype for p in self.model.parameters() if p.is_floating_point()}
        trace = self.traced()
        floats |= set(_dtypes(trace)) if trace is not None else set()
        return max((TOLERANCE.get(d, 1e-5) for d in floats), default=1e-9)


def _dtypes(trace: Trace) -> Iterable[torch.dtype]:
    for node in trace.ops():
        vals = node.meta["val"]
        for val in vals if isinstance(vals, list) else [vals]:
            if isinstance(val, Val) and val.dtype in TOLERANCE:
                yield val.dtype


def compared_in(base: nn.Module, samples: Samples, dtype: torch.dtype | None) -> Compared:
    """The model in `dtype`. If none is named: float64 throughout, else where it is not asked for float32,
    else as the model is. Raises UsageError for a dtype in which the model does not run."""
    if dtype is not None:
        found = Compared(_cast_model(base, dtype), _cast(samples, dtype), contextlib.nullcontext)
        if (error := _fails(found)) is not None:
            raise UsageError(
                f"{type(base).__name__} does not run in {str(dtype).removeprefix('torch.')}: {error}"
            ) from error
        return found
    wide = _cast(samples, torch.float64)
    for running in (_Wide, contextlib.nullcontext):
        found = Compared(_cast_model(base, torch.float64), wide, running)
        if running is _Wide:
            _batched(found.model)
        if _fails(found) is None:
            return found
    return Compared(base, _cast(samples, None), contextlib.nullcontext)


def _fails(one: Compared) -> Exception | None:
    try:
        with torch.no_grad(), one.running():
            copy.deepcopy(one.model)(*one.samples.args, **one.samples.kwargs)
    except Exception as error:
        return error
    return None


def _cast_model(base: nn.Module, dtype: torch.dtype) -> nn.Module:
    return copy.deepcopy(base).to(dtype)


def _batched(model: nn.Module) -> None:
    choose = getattr(model, "set_experts_implementation", None)
    if callable(choose):
        with contextlib.suppress(Exception):  # a model without experts
            choose("batched_mm")


def _cast(samples: Samples, dtype: torch.dtype | None) -> Samples:
    def cast(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.detach().to(dtype or value.dtype)
        return value

    args, kwargs = pytree.tree_map(cast, (tuple(samples.args), dict(samples.kwargs)))
    return Samples(args, kwargs, samples.origin)
