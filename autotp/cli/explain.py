"""`autotp explain`: the values along one module, with placement, mapping and reason."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer

from autotp.cli.console import FINDINGS, FINE, Format, Plain, colourful, guarded, report_findings, write
from autotp.cli.options import PlanFile, RankCount, Target
from autotp.diagnostic import PlanError

__all__ = ["command"]


@guarded
def command(
    target: Target,
    module: Annotated[
        str,
        typer.Argument(
            metavar="MODULE",
            help="The path of a module, or the end of one: layers.0.mlp.",
            show_default=False,
        ),
    ],
    tp: RankCount,
    plan: PlanFile = None,
    mode: Annotated[
        str | None,
        typer.Option(
            "--mode",
            metavar="MODE",
            help="Such as train. Default: the first that runs the module.",
            show_default=False,
        ),
    ] = None,
    format: Annotated[Plain, typer.Option("--format", help="Form of the explanation.")] = Plain.text,
) -> int:
    """Show each op of one module: its line, shape, placement, the mapping that stands there, and why.

    Of a refused plan the values up to the conflict are shown, and the conflict. No weight is read.

    \b
    Examples:
      autotp explain ./Llama-3.1-8B layers.0.self_attn --tp 8
      autotp explain my_package.models:make_mlp fc2 --plan mlp.yaml --tp 2 --mode train

    Exit code: 0 fine, 1 the plan is refused, 2 usage or unreadable files.
    """
    try:
        from autotp.cli.model import live_model

        live = live_model(target, plan)
        from autotp.explanation import explain

        with contextlib.redirect_stdout(sys.stderr):  # what the user's forward prints
            found = explain(live.model, module, live.plan, tp=tp, inputs=live.inputs, mode=mode)
    except PlanError as refused:
        return report_findings(refused.diagnostics, Format(format.value))
    if format is Plain.json:
        write(found.to_json())
    else:
        from autotp.report.explanation import as_text

        write(as_text(found, colour=colourful(sys.stdout)))
    return FINE if found.ok else FINDINGS
