"""The other form of a sharded model: one `torch.fx` graph in which every mapping is a node.

A copy of the model that holds this rank's parts is made parallel as `apply` does it, and exported with
`torch.export`; the mappings of its layers are marks in the exported graph (autotp/marks.py), which become
calls of `autotp.mappings` (graph_nodes.py). Batch and sequence stay open: a first export finds out which
sizes are open and what bounds they have, a second one proves that nothing else was taken for granted.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, export

from autotp.analysis import Analysis
from autotp.comm import Group
from autotp.diagnostic import UsageError
from autotp.marks import marking
from autotp.proof import Proof
from autotp.rewrite.apply import apply
from autotp.rewrite.graph_module import Check, Sizes
from autotp.rewrite.graph_nodes import build
from autotp.slicing import take
from autotp.trace.inputs import Samples

__all__ = ["graph_form"]

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def graph_form(
    model: nn.Module, analysis: Analysis, proof: Proof, group: Group, samples: Samples
) -> fx.GraphModule:
    """A GraphModule that computes what `model`, sharded on this rank, computes; `model` is untouched.

    Raises UsageError for what one graph cannot express.
    """
    _refuse_own_backward(model, proof)
    given = _given(model, samples)
    given |= {name: _contiguous(value) for name, value in given.items() if isinstance(value, Tensor)}
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    _refuse_random(model, analysis, group)
    twin = _twin(model, analysis, group)
    with torch.enable_grad(), marking() as calls:
        every = {name: tuple(Dim.AUTO for _ in value.shape) for name, value in tensors.items()}
        sizes, bounds = _sizes(twin, _exported(twin, given, every), given)
        calls.clear()
        dims = {size: Dim(size, **bound) for size, bound in bounds.items()}
        named = {name: tuple(dims.get(str(size), Dim.STATIC) for size in sizes[name]) for name in tensors}
        program = _exported(twin, given, named)
        check = Check(sizes, bounds, {n: t.dtype for n, t in tensors.items()}, twin.training)
        made = build(program, twin, calls, check, group, originals=model)
        made.takes = tuple(tensors)
        made.fixed = {name: value for name, value in given.items() if name not in tensors}
        return made


def _refuse(model: nn.Module, what: str, help: str) -> UsageError:
    return UsageError(f'shard(form="graph"): {type(model).__name__}: {what}\n  = help: {help}')


def _given(model: nn.Module, samples: Samples) -> dict[str, Any]:
    """The arguments of the forward by name, in its order: tensors and plain values."""
    signature = inspect.signature(model.forward)
    kwargs = dict(samples.kwargs)
    if samples.origin == "config" and "use_cache" in signature.parameters:
        kwargs.setdefault("use_cache", False)
    bound = signature.bind(*samples.args, **kwargs).arguments
    found: dict[str, Any] = {}
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            found |= value
        elif kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL):
            raise _refuse(model, f"its forward takes {name!r} by position alone", "give the argument a name")
        else:
            found[name] = value
    for name, value in found.items():
        if not isinstance(value, (Tensor, *_PLAIN)):
            raise _refuse(
                model,
                f"its forward is called with {name}, a {type(value).__name__}; a graph takes tensors, and "
                "numbers and flags that stay as they are",
                "pass inputs= without it, or shard in place",
            )
    return found


def _contiguous(x: Tensor) -> Tensor:
    """As `x`: the strides of a slice hold a size that is not its own, and that no open size may equal."""
    return x if x.is_contiguous() else x.detach().contiguous().requires_grad_(x.requires_grad)


def _refuse_own_backward(model: nn.Module, proof: Proof) -> None:
    """An exported graph has the backward that follows from its forward: no autograd.Function's, no hook."""
    for propagation in proof.propagations.values():
        trace = propagation.trace
        found = [(name, value) for name, value, _ in trace.gradients]  # recorded, and proven in place only
        for node in trace.graph.nodes:
            custom = node.meta.get("custom")
            found += [(name, node) for name in ([custom] if custom else node.meta.get("backward", ()))]
        for name, node in found:
            raise _refuse(
                model,
                f"{node.meta.get('module') or 'it'} has {name} in its backward, code of its own that "
                "would be lost in a graph",
                "shard in place",
            )


def _refuse_random(model: nn.Module, analysis: Analysis, group: Group) -> None:
    """A module that draws on each rank's own stream changes torch's random state around its forward."""
    modules = {path: model.get_submodule(path) for path in analysis.random if group.size > 1}
    drawing = [
        path
        for path, module in modules.items()
        if path in analysis.random_in_eval or (module.training and type(module) is not nn.Dropout)
    ]
    if drawing:
        raise _refuse(
            model,
            f"{drawing[0]} draws random numbers on a sharded value, from each rank's own stream, which is no "
            "node of a graph",
            "call model.eval() before, or shard in place",
        )


def _twin(model: nn.Module, analysis: Analysis, group: Group) -> nn.Module:
    """A copy of the model, made parallel, that holds this rank's parts; no cut weight is copied whole."""
    memo: dict[int, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or id(tensor) in memo:
                continue
            if tensor.is_meta:
                raise _refuse(model, f"{path}.{key} is on the meta device", "load the weights before")
            shard = analysis.layouts.get(f"{path}.{key}" if path else key)
            if shard is not None and group.size > 1:
                part = take(tensor.detach(), shard, group.rank)
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(part, tensor.requires_grad) if is_parameter else part
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as error:
        reason = f"it cannot be copied: {type(error).__name__}: {error}"
        raise _refuse(model, reason, "shard in place") from error
    return apply(twin, analysis, group, cut=False)


def _exported(twin: nn.Module, given: Mapping[str, Any], dims: Mapping[str, Any]) -> ExportedProgram:
    try:
        return export(
            twin, (), dict(given), dynamic_shapes={name: dims.get(name) for name in given}, strict=False
        )
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".strip()
        raise _refuse(
            twin,
            "torch.export cannot make one graph of its forward, of any batch and sequence:\n"
            + "\n".join(f"    {line}" for line in reason.splitlines()[:12]),
            "what depends on values, on caches or on a fixed size is no graph; shard in place",
        ) from error


def _sizes(
    twin: nn.Module, program: ExportedProgram, given: Mapping[str, Any]
) -> tuple[Sizes, dict[str, dict[str, int]]]:
    """Each input's sizes, a number or the name of an open size; and the bounds of the open sizes."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    limits = {str(symbol): limit for symbol, limit in program.range_constraints.items()}
    names: dict[str, str] = {}
    sizes: Sizes = {}
    bounds: dict[str, dict[str, int]] = {}
    for (name, value), placeholder in zip(given.items(), program.graph_signature.user_inputs, strict=True):
        if not isinstance(value, Tensor):
            continue
        found: list[int | str] = []
        for at, size in enumerate(nodes[str(placeholder)].meta["val"].shape):
            symbol = str(size)
            if symbol.isdigit():
                found.append(int(symbol))
                continue
            if not symbol.isidentifier():
                raise _refuse(twin, f"dim {at} of {name} must be {symbol}", "shard in place")
            found.append(names.setdefault(symbol, f"{name}_{at}"))
            upper = str(limits[symbol].upper) if symbol in limits else ""
            bounds[names[symbol]] = {"max": int(upper)} if upper.isdigit() else {}
        sizes[name] = tuple(found)
    return sizes, bounds
