"""`autotp check`: the faults of a plan file."""

from __future__ import annotations

from typing import Annotated

import typer

from autotp.cli.console import FINE, Format, guarded, report_findings, write
from autotp.cli.target import TARGET, analyze_target
from autotp.diagnostic import Diagnostic, PlanError

__all__ = ["command"]


@guarded
def command(
    plan: Annotated[
        str, typer.Argument(metavar="PLAN", help="A plan file or a shipped plan.", show_default=False)
    ],
    target: Annotated[
        str | None,
        typer.Argument(metavar="[TARGET]", help=f"What to match it against. {TARGET}", show_default=False),
    ] = None,
    tp: Annotated[int, typer.Option("--tp", min=1, metavar="N", help="Number of ranks, with TARGET.")] = 2,
    format: Annotated[Format, typer.Option("--format", help="Form of the findings.")] = Format.text,
) -> int:
    """Find the faults of a plan, each with its line: what cannot be read, and what TARGET contradicts.

    \b
    Examples:
      autotp check my-plan.yaml
      autotp check my-plan.yaml ./my-model --tp 8

    Exit code: 0 fine, 1 the plan has faults, 2 usage or unreadable files.
    """
    from autotp.plan import Plan
    from autotp.report.words import count

    found: tuple[Diagnostic, ...] = ()
    try:
        if target is None:
            rules = Plan.load(plan).rules
        else:
            analysis = analyze_target(target, plan=plan, tp=tp, prove=False)
            rules, found = analysis.plan.rules, analysis.diagnostics
    except PlanError as refused:
        return report_findings(refused.diagnostics, format)
    if found or format is not Format.text:
        code = report_findings(found, format)
    else:
        where = "" if target is None else f" on {target} at tp {tp}"
        write(f"ok: {plan}{where}, {count(len(rules), 'rule')}")
        code = FINE
    return code
