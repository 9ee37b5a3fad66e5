"""The arguments and options that several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

from autotp.cli.target import TARGET

__all__ = ["PlanFile", "RankCount", "Target"]

Target = Annotated[str, typer.Argument(metavar="TARGET", help=TARGET, show_default=False)]
RankCount = Annotated[
    int, typer.Option("--tp", min=1, metavar="N", help="Number of ranks.", show_default=False)
]
PlanFile = Annotated[
    str | None,
    typer.Option(
        "--plan",
        metavar="PLAN",
        help="A plan file, a shipped plan, or auto. Default: the shipped plan of the model_type.",
        show_default=False,
    ),
]
