"""The dry run on names and shapes: a plan against an inventory, without a graph and without torch."""

from __future__ import annotations

from pathlib import Path

from autotp.analysis import NAMES_AND_SHAPES, Analysis
from autotp.cost import cost_findings, expected_collectives
from autotp.diagnostic import UsageError, errors
from autotp.inventory import Inventory
from autotp.match import match
from autotp.plan import Plan

__all__ = ["analyze_headers", "analyze_shapes", "checked_tp"]


def checked_tp(tp: int) -> int:
    """The number of ranks, when it is one. Raises UsageError otherwise."""
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise UsageError(f"tp must be a whole number of ranks, at least 1, not {tp!r}")
    return tp


def analyze_shapes(inventory: Inventory, plan: Plan, *, tp: int, plan_name: str = "") -> Analysis:
    """What `plan` does to the modules of `inventory` on `tp` ranks, as far as names and shapes tell.

    Never raises for a bad plan: the findings are in `diagnostics`. Raises UsageError for an impossible
    tp. Layouts are not proven, and collectives are those that the styles imply.
    """
    matches = match(plan, inventory, checked_tp(tp))
    findings = matches.diagnostics
    if matches.layouts or not errors(findings):  # a plan without one right rule has its errors already
        findings += cost_findings(inventory, matches, matches.layouts)
    return Analysis(
        tp=tp,
        plan=plan,
        inventory=inventory,
        matches=matches,
        layouts=matches.layouts,
        diagnostics=findings,
        certainty=NAMES_AND_SHAPES,
        collectives=expected_collectives(inventory, matches),
        plan_name=plan_name,
    )


def analyze_headers(path: str | Path, plan: Plan, *, tp: int, plan_name: str = "") -> Analysis:
    """`analyze_shapes` of a checkpoint folder, one `.safetensors` file or a config.json.

    Reads headers only. Raises CheckpointError, which names the file, for what cannot be read.
    """
    from autotp.checkpoint.inventory import inventory

    return analyze_shapes(inventory(path), plan, tp=tp, plan_name=plan_name)
