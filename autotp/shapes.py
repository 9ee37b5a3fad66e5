"""The dry run on names and shapes: a plan against an inventory, without a graph and without torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autotp.agreement import disagreeing
from autotp.analysis import NAMES_AND_SHAPES, Analysis
from autotp.collectives import expected_collectives
from autotp.cost import cost_findings
from autotp.diagnostic import Diagnostic, errors
from autotp.inventory import Inventory, ModuleInfo, TensorInfo
from autotp.match import match
from autotp.plan import Plan

__all__ = ["analyze_headers", "analyze_shapes", "as_stored"]


def analyze_shapes(
    inventory: Inventory, plan: Plan, *, tp: int, plan_name: str = "", before_proof: bool = False
) -> Analysis:
    """What `plan` does to the modules of `inventory` on `tp` ranks, as far as names and shapes tell.

    With `before_proof` it is not judged what feeds a row layer: the graph will say it, and give a rule
    without heads its units. Never raises for a bad plan: the findings are in `diagnostics`. Raises UsageError
    for an impossible tp. Layouts are not proven, and collectives are those that the styles imply.
    """
    matches = match(plan, inventory, tp)
    findings = (*matches.diagnostics, *(() if before_proof else disagreeing(matches, inventory)))
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

    return analyze_shapes(inventory(path, plan=plan), plan, tp=tp, plan_name=plan_name)


def as_stored(analysis: Analysis, stored: Inventory) -> Analysis:
    """The analysis of a model that config.json describes, with the dtypes that its checkpoint stores.

    A tensor whose shape is another one in the checkpoint than by config.json is an error, AT420.
    """
    headers = stored.tensors()
    findings: list[Diagnostic] = []

    def told(tensor: TensorInfo) -> TensorInfo:
        header = headers.get(tensor.name)
        if header is None:
            return tensor
        if header.shape != tensor.shape:
            findings.append(_disagreement(header, tensor))
        return replace(tensor, dtype=header.dtype, itemsize=header.itemsize)

    def told_module(module: ModuleInfo) -> ModuleInfo:
        return replace(module, tensors={name: told(tensor) for name, tensor in module.tensors.items()})

    modules = {path: told_module(module) for path, module in analysis.inventory.modules.items()}
    inventory = replace(analysis.inventory, modules=modules, name=stored.name)
    return replace(analysis, inventory=inventory, diagnostics=(*analysis.diagnostics, *findings))


def _disagreement(header: TensorInfo, tensor: TensorInfo) -> Diagnostic:
    shapes = [list(header.shape), list(tensor.shape)]
    return Diagnostic(
        "AT420",
        f"{shapes[0]} in the checkpoint, and {shapes[1]} by its config.json",
        module=tensor.name,
        help=("config.json belongs to other weights; get both from one place",),
    )
