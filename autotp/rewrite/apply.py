"""Carry out an analysis on a model, in place: swap the layers of the plan, cut every tensor.

There is nothing to decide here. The model keeps its class, its forward, its hooks and the names in its
state_dict; a module becomes a parallel layer by its class, a parameter object stays the same object and
holds this rank's part, so that an optimizer built before still holds the right ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autotp.analysis import LAYOUTS, Analysis
from autotp.comm import Group
from autotp.diagnostic import UnprovenPath, UsageError
from autotp.match import Placed
from autotp.nn import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from autotp.nn.norm import ParallelLayerNorm, ParallelRMSNorm
from autotp.nn.shared import SharedCopy
from autotp.part_guard import watch
from autotp.placement import Shard
from autotp.plan import Plan
from autotp.random import use_common_stream, use_rank_stream
from autotp.rewrite.called import guard_calls
from autotp.rewrite.own_state import watch_state
from autotp.rewrite.parts_of_sums import watch_parts
from autotp.rewrite.rates import watch_rates
from autotp.rewrite.results import watch_results
from autotp.rewrite.same_inputs import compare_inputs
from autotp.rewrite.specialise import specialise
from autotp.rewrite.undo import Change, changes, snapshot
from autotp.slicing import take

__all__ = ["Sharded", "apply", "forget_graphs", "forget_sharding", "refuse_sharded", "remember", "sharded"]

_KEY = "_autotp"


@dataclass(frozen=True)
class Sharded:
    """What a sharded model remembers: how each tensor is cut, by name, over which group, from which plan.

    It lives on the model and not on the parameters, where deepcopy and `fully_shard` lose attributes.
    `shapes` are the global shapes of the cut tensors, `aliases` further names of tied tensors, `changes` what
    was done to the modules.
    """

    plan: Plan
    group: Group
    layouts: Mapping[str, Shard]
    shapes: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]
    certainty: str
    modes: tuple[str, ...]
    changes: Mapping[str, Change] = field(default_factory=dict)


def sharded(model: nn.Module) -> Sharded | None:
    """What is remembered of a model's sharding; None for a model that is whole."""
    found = model.__dict__.get(_KEY)
    return found if isinstance(found, Sharded) else None


def remember(model: nn.Module, memory: Sharded) -> None:
    """Keep on a model how it is sharded."""
    model.__dict__[_KEY] = memory
    if memory.layouts and memory.group.size > 1:
        watch(model)


def refuse_sharded(model: nn.Module) -> None:
    """Raises UsageError when the model or a part of it is sharded already."""
    for path, module in model.named_modules():
        remembered = sharded(module)
        if remembered is not None:
            what = f"its {path}" if path else "it"
            raise UsageError(
                f"{type(model).__name__}: {what} is sharded already, over "
                f"tp={remembered.group.size}; a model is sharded once, as a whole"
            )
        if isinstance(module.__dict__.get("shard"), Shard):  # every parallel layer has one
            raise UsageError(
                f"{type(model).__name__}: {path or 'it'} is a {type(module).__name__} already; shard takes "
                "models of whole layers"
            )


def apply(
    model: nn.Module,
    analysis: Analysis,
    group: Group,
    *,
    cut: bool = True,
    check_inputs: int | None = 0,
    guarded: bool = True,
) -> nn.Module:
    """Make `model` this rank's part of itself. `analysis.ok` holds, for `group.size` ranks.

    Without `cut` its tensors are this rank's parts already. The ranks' inputs are compared in the first
    `check_inputs` forwards. Unless `guarded` it takes any call, proven or not.
    """
    assert analysis.ok and analysis.tp == group.size
    shapes = {n: t.shape for n, t in analysis.inventory.tensors().items() if n in analysis.layouts}
    remembered = Sharded(
        analysis.plan, group, dict(analysis.layouts), shapes, dict(analysis.inventory.aliases),
        analysis.certainty, analysis.modes,
    )  # fmt: skip
    before = snapshot(model)
    if group.size > 1:
        copies = {path: SharedCopy(group, len(paths)) for paths in analysis.shared for path in paths[:1]}
        copies |= {path: copies[paths[0]] for paths in analysis.shared for path in paths[1:]}
        adopted: set[int] = set()  # a module may stand under two names
        for placed in analysis.matches.placed.values():
            if placed.target == "module" and placed.layouts:
                module = model.get_submodule(placed.path)
                copied = copies.get(placed.path, placed.path not in analysis.uncopied)
                if id(module) not in adopted:
                    reduced = placed.path not in analysis.unreduced
                    _adopt(module, placed, analysis.layouts, group, copied, reduced)
                adopted.add(id(module))
        if cut:
            _cut(model, analysis.layouts, group.rank)
        specialise(
            model,
            analysis.reads,
            analysis.regions,
            analysis.layouts,
            analysis.inventory.aliases,
            group,
            analysis.code,
            analysis.handed,
        )
        for path in analysis.random:
            use_rank_stream(model.get_submodule(path), group, always=path in analysis.random_in_eval)
        for path in analysis.random_common:
            around = min((p for p in analysis.random if not p or path.startswith(f"{p}.")), key=len)
            use_common_stream(model.get_submodule(path), model.get_submodule(around))
        for path in analysis.resting:
            watch_rates(model, path)
        for path, gives in analysis.gives.items():
            watch_results(model, path, gives)
        watch_parts(model, analysis.unreduced, analysis.code)
        if analysis.certainty == LAYOUTS and "train" not in analysis.modes:
            model.register_forward_pre_hook(_refuse_training)
        compare_inputs(model, group, check_inputs, analysis.draws)
        if analysis.layouts:
            watch_state(model)
        if cut and guarded:
            guard_calls(model, analysis)
        if callable(getattr(model, "save_pretrained", None)):
            model.__dict__["save_pretrained"] = _refuse_save
    remember(model, replace(remembered, changes=changes(model, before)))
    return model


def forget_sharding(model: nn.Module) -> None:
    """The model is whole again, and may be sharded anew."""
    del model.__dict__[_KEY]


def _adopt(
    module: nn.Module,
    placed: Placed,
    layouts: Mapping[str, Shard],
    group: Group,
    copied: bool | SharedCopy,
    reduced: bool,
) -> None:
    shard = layouts[f"{placed.path}.weight" if placed.path else "weight"]
    if placed.style == "vocab":
        assert isinstance(module, nn.Embedding)
        VocabParallelEmbedding.adopt(module, shard=shard, group=group)
        return
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        norm = ParallelLayerNorm if isinstance(module, nn.LayerNorm) else ParallelRMSNorm
        norm.adopt(module, shard=shard, group=group)
        return
    column, row = _layers(module)
    if placed.style == "column":
        column.adopt(
            module, shard=shard, group=group, gather_output=placed.rule.gather_output, copy_input=copied
        )
    else:
        row.adopt(
            module,
            shard=shard,
            group=group,
            input_is_parallel=not placed.rule.split_input,
            reduce_output=reduced,
        )


def _layers(module: nn.Module) -> tuple[Any, Any]:
    """The column and the row form of a layer."""
    if isinstance(module, nn.Linear):
        return ColumnParallelLinear, RowParallelLinear
    from autotp.nn.conv1d import ColumnParallelConv1D, RowParallelConv1D  # it needs transformers

    return ColumnParallelConv1D, RowParallelConv1D


def _cut(model: nn.Module, layouts: Mapping[str, Shard], rank: int) -> None:
    """Each cut tensor, once, becomes its part; the whole storage is freed."""
    done: set[int] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                shard = layouts.get(f"{path}.{key}" if path else key)
                if tensor is None or shard is None or id(tensor) in done:
                    continue
                done.add(id(tensor))
                gradient = tensor.grad
                tensor.grad = None
                with torch.no_grad():
                    part = take(tensor.data, shard, rank)
                    forget_graphs(tensor)
                    tensor.data = part
                    if gradient is not None:
                        tensor.grad = take(gradient, shard, rank)


def _refuse_save(*args: Any, **kwargs: Any) -> None:
    raise UsageError(
        "this model is sharded, and its own save_pretrained would write one rank's parts as if they were "
        "whole; call autotp.save_pretrained(model, folder) on every rank"
    )


def forget_graphs(tensor: torch.Tensor) -> None:
    """A graph of a forward before now keeps the tensor's accumulator, which knows its whole shape, and later
    backward passes would meet it. Another dtype makes torch drop it; the old graph's backward then raises."""
    if tensor.is_floating_point():
        other = torch.float32 if tensor.dtype != torch.float32 else torch.float64
        tensor.data = torch.empty(0, dtype=other, device=tensor.device)


def _refuse_training(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    if model.training:
        raise UnprovenPath(
            f"{type(model).__name__}: its forward could not be traced in train mode when it was sharded, so "
            "nothing is proven about it; call model.eval(), or shard with inputs= with which the train "
            "forward runs"
        )
