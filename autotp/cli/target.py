"""TARGET and --plan: what a plan is tried on, and which plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotp.diagnostic import UsageError

if TYPE_CHECKING:
    from autotp.analysis import Analysis
    from autotp.plan import Plan

__all__ = ["TARGET", "analyze_target", "choose_plan"]

TARGET = "A checkpoint folder, one .safetensors file, a config.json, or package.module:factory."

_FACTORY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def analyze_target(target: str, *, plan: str | None, tp: int, prove: bool) -> Analysis:
    """The dry run of a target: from headers, or with the layouts proven where that is asked for.

    Raises UsageError for a target or a tp that cannot be, CheckpointError for a file that cannot be
    read, PlanError for a plan file with faults.
    """
    if Path(target).name == "config.json":
        return _prove_checkpoint(target, plan, tp)
    if Path(target).exists():
        return _prove_checkpoint(target, plan, tp) if prove else _read_headers(target, plan, tp)
    if _FACTORY.fullmatch(target):
        return _prove_factory(target, plan, tp)
    raise UsageError(f"{target}: no such file or folder\n  = help: TARGET is {TARGET[0].lower()}{TARGET[1:]}")


def choose_plan(wanted: str | None, config: Mapping[str, Any]) -> tuple[Plan, str]:
    """The plan that --plan names, or else the shipped one of the config's model_type, and its name."""
    from autotp.plan import Plan, plan_for, shipped_plans

    if wanted is not None and wanted != "auto":
        return Plan.load(wanted), wanted
    model_type = config.get("model_type")
    found = plan_for(model_type) if isinstance(model_type, str) else None
    if found is not None:
        return found, f"{model_type} (shipped)"
    why = f"no plan is shipped for model_type {model_type!r}" if model_type else "the model has no model_type"
    shipped = ", ".join(shipped_plans())
    raise UsageError(f"{why}\n  = help: say --plan with a plan file, or with a shipped one: {shipped}")


def _read_headers(target: str, plan: str | None, tp: int) -> Analysis:
    from autotp.checkpoint.inventory import inventory
    from autotp.shapes import analyze_shapes

    found = inventory(target)
    chosen, name = choose_plan(plan, found.config)
    return analyze_shapes(found, chosen, tp=tp, plan_name=name)


def _prove_checkpoint(target: str, plan: str | None, tp: int) -> Analysis:
    from autotp.checkpoint.inventory import inventory
    from autotp.hf import model_type, prove
    from autotp.shapes import as_stored

    chosen, name = choose_plan(plan, {"model_type": model_type(target)})
    stored = None if Path(target).name == "config.json" else inventory(target)
    analysis = prove(target, chosen, tp)
    analysis.plan_name = name
    return analysis if stored is None else as_stored(analysis, stored)


def _prove_factory(target: str, plan: str | None, tp: int) -> Analysis:
    from autotp.cli.factory import build

    model, inputs = build(target)
    from autotp.api import analyze

    config = getattr(model, "config", None)
    chosen, name = choose_plan(plan, {"model_type": getattr(config, "model_type", None)})
    analysis = analyze(model, chosen, tp=tp, inputs=inputs)
    analysis.plan_name = name
    return analysis
