"""`autotp plans`: the plans that autotp ships, and the form of a plan file."""

from __future__ import annotations

import difflib
import json
from typing import Annotated

import typer

from autotp.cli.console import FINE, guarded, write
from autotp.diagnostic import UsageError

__all__ = ["command"]


@guarded
def command(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Print this shipped plan.", show_default=False)
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of a plan file.")] = False,
) -> int:
    """List the shipped plans, or print one of them, to copy and change.

    \b
    Examples:
      autotp plans
      autotp plans llama > my-plan.yaml
      autotp plans --schema > plan.schema.json
    """
    from autotp.plan import Plan, shipped_plans
    from autotp.report.words import count
    from autotp.shipped import plans_folder

    if schema and name is not None:
        raise UsageError("--schema describes every plan: leave out the name")
    names = shipped_plans()
    if schema:
        write(json.dumps(Plan.json_schema(), indent=2))
    elif name is None:
        width = max(map(len, names), default=0)
        for shipped in names:
            write(f"{shipped.ljust(width)}  {count(len(Plan.load(shipped).rules), 'rule')}")
    elif name in names:
        write((plans_folder() / f"{name}.yaml").read_text(encoding="utf-8"))
    else:
        near = difflib.get_close_matches(name, names, n=3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise UsageError(f"no plan {name!r} is shipped\n  = help: {hint}`autotp plans` lists them")
    return FINE
