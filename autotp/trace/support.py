"""Models that cannot be rewritten safely are refused by name, before anything else is looked at."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils.prune import BasePruningMethod

from autotp.diagnostic import Diagnostic
from autotp.trace.consulted import names_in

__all__ = ["hooked", "unsupported"]

_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")
_QUANTISED = ("bitsandbytes", "auto_gptq", "gptqmodel", "awq", "torchao", "hqq", "quanto")


def unsupported(module: nn.Module) -> Iterator[Diagnostic]:
    """A finding for each module whose weights are no plain tensors, or whose forward is patched."""
    if isinstance(module, torch.jit.ScriptModule):
        yield Diagnostic(
            "AT221", f"{type(module).__name__} is a ScriptModule: its forward cannot be traced or rewritten",
            help=("shard the module before it is scripted",),
        )  # fmt: skip
        return
    if hasattr(module, "_orig_mod") and type(module).__name__ == "OptimizedModule":
        yield Diagnostic(
            "AT221", "the model is compiled", help=("shard the model first, then call torch.compile on it",)
        )
    past = _past_forward(type(module))
    if past:
        yield Diagnostic(
            "AT225",
            f"{type(module).__name__} {past}, so none of its calls could be compared with the proven ones",
            help=("let forward be a method that computes what a call gives",),
        )  # fmt: skip
    for path, owner in module.named_modules():
        if "parametrizations" in owner._modules:
            yield Diagnostic(
                "AT222", "its weight is parametrized, so it is no tensor of its own", module=path,
                help=("call torch.nn.utils.parametrize.remove_parametrizations first",),
            )  # fmt: skip
        if any(type(h).__name__ in ("WeightNorm", "SpectralNorm") for h in owner._forward_pre_hooks.values()):
            yield Diagnostic(
                "AT222", "its weight is computed by a weight norm hook", module=path,
                help=("call torch.nn.utils.remove_weight_norm first",),
            )  # fmt: skip
        if hasattr(owner, "_hf_hook"):
            yield Diagnostic(
                "AT223", "it is hooked by accelerate (device_map)", module=path,
                help=("load the model without device_map",),
            )  # fmt: skip
        if type(owner).__module__.partition(".")[0] in _QUANTISED:
            yield Diagnostic(
                "AT224", f"{type(owner).__name__} holds quantised weights, which autotp cannot cut yet",
                module=path, help=("shard the model before it is quantised",),
            )  # fmt: skip
        if type(owner).__name__ in _WRAPPERS and type(owner).__module__.startswith("torch."):
            yield Diagnostic(
                "AT223", f"it is wrapped by {type(owner).__name__}", module=path or None,
                help=("shard the model first, then wrap it",),
            )  # fmt: skip
        if any(isinstance(h, BasePruningMethod) for h in owner._forward_pre_hooks.values()):
            yield Diagnostic(
                "AT222", "its weight is computed by a pruning hook", module=path,
                help=("call torch.nn.utils.prune.remove first",),
            )  # fmt: skip
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
                yield Diagnostic(
                    "AT224", f"{name} is not yet a tensor: its shape is set by the first forward",
                    module=path, help=("run the model once, then shard it",),
                )  # fmt: skip
                continue
            plain = (torch.Tensor, nn.Parameter, nn.Buffer)
            if tensor is not None and type(tensor) not in plain:
                yield Diagnostic(
                    "AT224", f"{name} is a {type(tensor).__name__}, not a plain tensor", module=path,
                    help=("autotp shards plain tensors; shard first, then wrap",),
                )  # fmt: skip


def _past_forward(kind: type) -> str:
    """How calls of a model come past what stands in the place of its `forward`; "" where they do not."""
    if isinstance(inspect.getattr_static(kind, "forward"), property):
        return "has a property as its forward"
    todo: list[Any] = [kind.__call__]
    names: set[str] = set()
    for call in todo:
        code = getattr(inspect.unwrap(call), "__code__", None)
        if code is None or call is nn.Module.__call__ or names_in([code]) & _ON:
            return ""
        new = names_in([code]) - names
        names |= new
        todo += [
            getattr(kind, name) for name in sorted(new) if isinstance(vars(kind).get(name), FunctionType)
        ]
    return "has a __call__ that does not call forward"


_ON = {"forward", "super", "__call__", "_call_impl", "_wrapped_call_impl"}


def hooked(module: nn.Module, cut: Container[str]) -> Iterator[Diagnostic]:
    """A finding for each parameter of `cut` with hooks on its gradient: they would see a rank's part."""
    seen: set[int] = set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        hooks = getattr(parameter, "_backward_hooks", None) or getattr(
            parameter, "_post_accumulate_grad_hooks", None
        )
        if hooks and name in cut and id(parameter) not in seen:
            seen.add(id(parameter))
            hook = next(iter(hooks.values()))
            called = getattr(hook, "__qualname__", type(hook).__name__)
            yield Diagnostic(
                "AT226",
                f"{called} hooks the gradient of {name}, of which each rank would have a part: a norm or a "
                "maximum of it would be a part's",
                help=("register the hook after shard, where it is written for a rank's part",),
            )
