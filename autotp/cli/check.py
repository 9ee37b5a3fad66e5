"""`autotp check`: the faults of a plan file."""

from __future__ import annotations

import difflib
from typing import Annotated

import typer

from autotp.cli.console import FINE, Format, guarded, report_findings, write
from autotp.cli.target import TARGET, analyze_target
from autotp.diagnostic import Diagnostic, PlanError

__all__ = ["command"]


def _explained(code: str | None) -> None:
    """What a code means; nothing else is done then."""
    if code is None:
        return
    from autotp.codes import CODES, meaning

    if code.upper() not in CODES:
        near = difflib.get_close_matches(code.upper(), CODES, n=3)
        raise typer.BadParameter(f"there is no code {code}; near are {', '.join(near) or 'none'}")
    write(meaning(code.upper()))
    raise typer.Exit


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
    explain: Annotated[
        str | None,
        typer.Option(
            "--explain",
            metavar="CODE",
            callback=_explained,
            is_eager=True,
            help="Say what the code of a finding means, and exit.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Find the faults of a plan, each with its line: what cannot be read, and what TARGET contradicts.

    \b
    Examples:
      autotp check my-plan.yaml
      autotp check my-plan.yaml ./my-model --tp 8
      autotp check --explain AT203

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
