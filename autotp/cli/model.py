"""TARGET as a live model: what `verify` computes with and `explain` looks into. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autotp.cli.target import choose_plan, is_factory, no_target, refuse_code
from autotp.diagnostic import PlanError

if TYPE_CHECKING:
    from torch import nn

    from autotp.plan import Plan

__all__ = ["Live", "live_model", "plan_of"]


@dataclass(frozen=True)
class Live:
    """A target's model, its sample inputs if it gave any, and the plan that is meant for it, or "auto".

    The parameters of a checkpoint's model are on the meta device: no weight is read.
    """

    model: nn.Module
    inputs: Any
    plan: Plan | Literal["auto"]
    stored: bool


def live_model(target: str, plan: str | None) -> Live:
    """The model of a factory, or the one that a checkpoint's config.json describes.

    Raises UsageError for a target that cannot be, CheckpointError for a model that cannot be built,
    PlanError for a plan file with faults.
    """
    refuse_code(target)
    if target and Path(target).exists():
        from autotp.checkpoint.folder import read_config

        path = Path(target)
        config = read_config(path if path.is_dir() else path.parent)
        chosen = _chosen(plan, config)
        from autotp import hf

        return Live(hf.build(path), None, chosen, True)
    if not is_factory(target):
        raise no_target(target)
    from autotp.cli.factory import build

    model, inputs = build(target)
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return Live(model, inputs, _chosen(plan, {"model_type": kind}), False)


def plan_of(live: Live, tp: int) -> Plan:
    """The plan that is meant: for "auto" the one that is derived for `tp` ranks.

    Raises PlanError when nothing can be sharded.
    """
    if live.plan != "auto":
        return live.plan
    from autotp.decide import decide

    analysis = decide(live.model, "auto", tp=tp, inputs=live.inputs)
    if not analysis.ok:
        raise PlanError(analysis.diagnostics)
    return analysis.plan


def _chosen(plan: str | None, config: Mapping[str, Any]) -> Plan | Literal["auto"]:
    return "auto" if plan == "auto" else choose_plan(plan, config)
