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
    from autotp.shapes import checked_tp

    checked_tp(tp)
    if Path(target).exists():
        return _prove_checkpoint(target, plan, tp) if prove else _read_headers(target, plan, tp)
    if _FACTORY.fullmatch(target):
        return _prove_factory(target, plan, tp)
    raise UsageError(f"{target}: no such file or folder\n  = help: TARGET is {TARGET[0].lower()}{TARGET[1:]}")


def choose_plan(wanted: str | None, config: Mapping[str, Any]) -> tuple[Plan, str]:
    """The plan that --plan names, or else the shipped one of the config's model_type, and its name."""
    from autotp.plan import Plan
    from autotp.shipped import plans_folder

    if wanted not in (None, "auto"):
        assert wanted is not None
        return Plan.load(wanted), wanted
    model_type = config.get("model_type")
    shipped = sorted(path.stem for path in plans_folder().glob("*.yaml"))
    if model_type in shipped:
        return Plan.load(str(model_type)), f"{model_type} (shipped)"
    why = f"no plan is shipped for model_type {model_type!r}" if model_type else "nothing tells its model_type"
    raise UsageError(f"{why}\n  = help: give one by --plan: a file, or one of {', '.join(shipped)}")


def _read_headers(target: str, plan: str | None, tp: int) -> Analysis:
    from autotp.checkpoint.inventory import inventory
    from autotp.shapes import analyze_shapes

    found = inventory(target)
    chosen, name = choose_plan(plan, found.config)
    return analyze_shapes(found, chosen, tp=tp, plan_name=name)


def _prove_checkpoint(target: str, plan: str | None, tp: int) -> Analysis:
    from autotp.checkpoint.inventory import inventory
    from autotp.hf import prove

    chosen, name = choose_plan(plan, inventory(target).config)
    analysis = prove(target, chosen, tp=tp)
    analysis.plan_name = name
    return analysis


def _prove_factory(target: str, plan: str | None, tp: int) -> Analysis:
    from autotp.cli.factory import build

    model, inputs = build(target)
    from autotp.api import analyze

    config = getattr(model, "config", None)
    chosen, name = choose_plan(plan, {"model_type": getattr(config, "model_type", None)})
    analysis = analyze(model, chosen, tp=tp, inputs=inputs)
    analysis.plan_name = name
    return analysis
