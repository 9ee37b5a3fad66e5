"""TARGET as a live model: what `verify` computes with and `explain` looks into. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotp.cli.target import choose_plan, is_factory, no_target

if TYPE_CHECKING:
    from torch import nn

    from autotp.plan import Plan

__all__ = ["Live", "live_model"]


@dataclass(frozen=True)
class Live:
    """A target's model, its sample inputs if it gave any, and the plan that is meant for it.

    The parameters of a checkpoint's model are on the meta device: no weight is read.
    """

    model: nn.Module
    inputs: Any
    plan: Plan
    stored: bool


def live_model(target: str, plan: str | None) -> Live:
    """The model of a factory, or the one that a checkpoint's config.json describes.

    Raises UsageError for a target that cannot be, CheckpointError for a model that cannot be built,
    PlanError for a plan file with faults.
    """
    if target and Path(target).exists():
        from autotp.checkpoint.folder import read_config

        path = Path(target)
        chosen = choose_plan(plan, read_config(path if path.is_dir() else path.parent))
        from autotp import hf

        return Live(hf.build(path), None, chosen, True)
    if not is_factory(target):
        raise no_target(target)
    from autotp.cli.factory import build

    model, inputs = build(target)
    config = getattr(model, "config", None)
    return Live(model, inputs, choose_plan(plan, {"model_type": getattr(config, "model_type", None)}), False)
