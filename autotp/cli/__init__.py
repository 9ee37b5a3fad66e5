"""The command line: `autotp plan | check | explain | derive | verify | convert | merge | reshard | plans`.

`python -m autotp` is the same.

Data goes to stdout, progress and errors to stderr. Exit codes: 0 fine, 1 findings (faults of a plan),
2 usage, an unreadable file or an impossible tp, 130 interrupted. torch is imported only where a
command says so.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from autotp.cli import check, convert, derive, explain, plan, plans, verify
from autotp.cli.console import INTERRUPTED

__all__ = ["app", "main"]

app = typer.Typer(
    name="autotp",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command("plan")(plan.command)
app.command("check")(check.command)
app.command("explain")(explain.command)
app.command("derive")(derive.command)
app.command("verify")(verify.command)
app.command("convert")(convert.convert)
app.command("merge")(convert.merge)
app.command("reshard")(convert.reshard)
app.command("plans")(plans.command)


def _version(wanted: bool) -> None:
    if wanted:
        from autotp import __version__

        sys.stdout.write(f"autotp {__version__}\n")
        raise typer.Exit


@app.callback()
def autotp(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Make models tensor-parallel, and see what a plan does before anything runs.

    \b
    autotp plan  ./Llama-3.1-8B --tp 8        the dry run, from the checkpoint's headers
    autotp check my-plan.yaml ./my-model      the faults of a plan file, each with its line
    autotp convert ./Llama-3.1-8B out --tp 8  one folder a rank
    """


def main() -> None:
    """The entry point of the `autotp` script."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show
    try:
        app(prog_name="autotp")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
