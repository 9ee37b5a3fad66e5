"""The dry run of a live model or of a checkpoint. What needs no torch does not import it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotp.analysis import Analysis
from autotp.diagnostic import UsageError
from autotp.plan import Plan, as_plan, plan_for, shipped_plans
from autotp.shapes import analyze_shapes

if TYPE_CHECKING:
    from torch import nn

__all__ = ["CHECKS", "PlanLike", "analyze", "named_plan"]

PlanLike = Plan | Mapping[str, Any] | str | Path
CHECKS = ("layouts", "shapes")


def named_plan(plan: PlanLike | None, model_type: object) -> tuple[Plan, str]:
    """The plan that is meant, and its name; None means the shipped plan of the model type.

    Raises PlanError for a plan that cannot be read, UsageError when there is no shipped plan, and for "auto",
    which names no plan but is derived from a model's graph.
    """
    if plan == "auto":
        raise UsageError('plan "auto" is derived from the traced graph, which check="shapes" leaves out')
    if plan is not None:
        return as_plan(plan), str(plan) if isinstance(plan, (str, Path)) else ""
    found = plan_for(str(model_type)) if model_type else None
    if found is None:
        of = f"model type {model_type!r}" if model_type else "a model without a model_type"
        raise UsageError(
            f"there is no shipped plan for {of} (shipped: {', '.join(shipped_plans())}); pass plan= with "
            'its rules, or plan="auto" to derive one'
        )
    return found, str(model_type)


def check_name(check: str) -> None:
    """Raises UsageError for a check that there is not."""
    if check not in CHECKS:
        raise UsageError(f"check is one of {', '.join(CHECKS)}, not {check!r}")


def analyze(
    source: nn.Module | str | Path,
    plan: PlanLike | None = None,
    *,
    tp: int,
    inputs: Any = None,
    check: str = "layouts",
) -> Analysis:
    """The dry run: what `plan` does to a model on `tp` ranks, and whether it is right. Touches nothing.

    - `source`: a module (on any device, the meta device too), or a checkpoint folder, `.safetensors` file
      or config.json. With `check="shapes"` a checkpoint is read by its headers alone.
    - `plan`: a Plan, its rules as a dict, a path, the name of a shipped plan, or "auto": a plan that
      is derived from the model's graph, as `autotp derive` prints it. None: the shipped plan of the
      model's type.
    - `inputs`: samples for the trace: a tensor, a tuple of arguments, a dict of keyword arguments. Without
      them they are made from the config, or found by trying what the layers take.

    A bad plan is not raised, it is in `Analysis.diagnostics`. Raises PlanError for a plan that cannot be
    read, CheckpointError for a checkpoint that cannot, UsageError for a call that cannot mean anything.

    >>> from torch import nn
    >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> analysis = analyze(mlp, {"0": "column", "2": "row"}, tp=2)
    >>> analysis.ok, analysis.certainty
    (True, 'layouts')
    >>> analyze(mlp, {"0": "column"}, tp=2).diagnostics[0].code
    'AT301'
    """
    check_name(check)
    if not isinstance(source, (str, Path)):
        from autotp.decide import decide

        return decide(source, plan, tp=tp, inputs=inputs, check=check)
    if check == "layouts":
        from autotp import hf

        return hf.prove(source, plan, tp=tp, inputs=inputs)
    from autotp.checkpoint.inventory import inventory

    stock = inventory(source, plan=plan)
    chosen, name = named_plan(plan, stock.config.get("model_type"))
    return analyze_shapes(stock, chosen, tp=tp, plan_name=name)
