"""`autotp plan`: the dry run."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from autotp.cli.console import FINDINGS, FINE, Format, colourful, guarded, report_findings, write
from autotp.cli.options import PlanFile, RankCount, Target
from autotp.cli.target import analyze_target
from autotp.diagnostic import PlanError

__all__ = ["command"]


@guarded
def command(
    target: Target,
    tp: RankCount,
    plan: PlanFile = None,
    prove: Annotated[
        bool,
        typer.Option("--prove", help="Prove the layouts of a checkpoint on its traced graph. Imports torch."),
    ] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="Show the edits of the model's own code as a diff; with --prove.")
    ] = False,
    format: Annotated[Format, typer.Option("--format", help="Form of the report.")] = Format.text,
) -> int:
    """Show what a plan does to a model: layouts, collectives and bytes a rank. Nothing is changed.

    A checkpoint is read by its headers, in a moment and without torch; names and shapes are then all
    that is certain. Of a factory, and with --prove, the layouts are proven on the traced graph.

    \b
    Examples:
      autotp plan ./Llama-3.1-8B --tp 8
      autotp plan ./my-model --plan my-plan.yaml --tp 4 --prove
      autotp plan my_package.models:make_mlp --plan mlp.yaml --tp 2
      autotp plan ./my-model --tp 2 --format json > report.json

    Exit code: 0 fine, 1 the plan is refused or shards next to nothing, 2 usage or unreadable files.
    """
    try:
        analysis = analyze_target(target, plan=plan, tp=tp, prove=prove or diff)
    except PlanError as refused:
        return report_findings(refused.diagnostics, format)
    if format is Format.json:
        write(analysis.to_json())
    elif format is Format.html:
        write(analysis.to_html())
    else:
        from autotp.report.text import render

        write(render(analysis, colour=colourful(sys.stdout), diff=diff))
    from autotp.cost import LOW

    little = any(finding.code == LOW for finding in analysis.diagnostics)
    return FINE if analysis.ok and not little else FINDINGS
