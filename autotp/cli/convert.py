"""`autotp convert`, `merge` and `reshard`: a checkpoint to one folder a rank, back, and to other ranks."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotp.cli.console import FINE, guarded, write
from autotp.cli.progress import progress

if TYPE_CHECKING:
    from autotp.checkpoint.written import Written

__all__ = ["convert", "merge", "reshard"]


class Check(StrEnum):
    """How a plan is checked before anything is written."""

    layouts = "layouts"
    shapes = "shapes"


class Digest(StrEnum):
    """The digest of each tensor's bytes."""

    xxh3 = "xxh3"
    sha256 = "sha256"
    none = "none"


HowChecked = Annotated[
    Check, typer.Option("--check", help="Prove the layouts on the model, or check names and shapes alone.")
]
Ranks = Annotated[int, typer.Option("--tp", min=1, metavar="N", help="Number of ranks.", show_default=False)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, list the files, write nothing.")]


@guarded
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A checkpoint folder, or one .safetensors file.")
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The new folder.")],
    tp: Ranks,
    plan: Annotated[
        str | None,
        typer.Option(
            "--plan",
            metavar="PLAN",
            help="A plan file, a shipped plan, or auto. Default: the shipped plan of the model_type.",
            show_default=False,
        ),
    ] = None,
    check: HowChecked = Check.layouts,
    digest: Annotated[Digest, typer.Option("--digest", help="Of each tensor's bytes.")] = Digest.xxh3,
    dry_run: DryRun = False,
) -> int:
    """Cut a checkpoint into one folder a rank. The plan is proven before the first byte is written.

    DST appears whole or not at all; a run that was killed goes on where it stopped. What is written is
    read by `autotp.from_pretrained` on each rank, and put back together by `autotp merge`.

    \b
    Examples:
      autotp convert ./Llama-3.1-8B ./llama-tp8 --tp 8
      autotp convert ./my-model ./out --plan my-plan.yaml --tp 4 --check shapes --dry-run

    Exit code: 0 fine, 1 the plan is refused, 2 usage or unreadable files.
    """
    from autotp.checkpoint.convert import convert as run

    with progress("converted") as tell:
        written = run(
            source,
            target,
            plan=plan,
            tp=tp,
            check=check.value,
            digest=digest.value,
            progress=tell,
            dry_run=dry_run,
        )
    write(f"{_headline(source, written)}\n{_summary(written)}")
    return FINE


@guarded
def merge(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A folder that `autotp convert` wrote.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The new folder.")],
    dry_run: DryRun = False,
) -> int:
    """Put a converted checkpoint back together: the original's files, byte for byte.

    Every byte is checked against the digests that were written, and what several ranks hold is compared.

    \b
    Example:
      autotp merge ./llama-tp8 ./Llama-3.1-8B-again

    Exit code: 0 fine, 2 usage, or shards that are missing, damaged or unequal.
    """
    from autotp.checkpoint.merge import merge as run

    with progress("merged") as tell:
        written = run(source, target, progress=tell, dry_run=dry_run)
    write(_summary(written))
    return FINE


@guarded
def reshard(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A folder that `autotp convert` wrote.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The new folder.")],
    tp: Ranks,
    check: HowChecked = Check.layouts,
    dry_run: DryRun = False,
) -> int:
    """Write a converted checkpoint again for another number of ranks, in one pass and without a merge.

    The plan is the folder's own, proven for the new number of ranks before the first byte is written.
    Every byte is checked against the digests that were written.

    \b
    Examples:
      autotp reshard ./llama-tp8 ./llama-tp4 --tp 4
      autotp reshard ./llama-tp8 ./llama-tp2 --tp 2 --dry-run

    Exit code: 0 fine, 1 the plan is refused, 2 usage, or shards that are missing, damaged or unequal.
    """
    from autotp.checkpoint.reshard import reshard as run

    with progress("resharded") as tell:
        written = run(source, target, tp=tp, check=check.value, progress=tell, dry_run=dry_run)
    write(f"{_headline(source, written, again=True)}\n{_summary(written)}")
    return FINE


def _headline(source: Path, written: Written, *, again: bool = False) -> str:
    """Source, plan, tp and how much of the plan is proven."""
    from autotp.report.table import plan_name, written_plan_name

    name = written_plan_name if again else plan_name
    proof = "layouts proven" if written.proof == "layouts" else "layouts not proven: names and shapes only"
    return f"{source}: plan {name(written.plan)}, tp {written.tp}, {proof}"


def _summary(written: Written) -> str:
    """Each rank's folder with its bytes, and the total."""
    from autotp.report.words import bytes_words, count

    folders: dict[str, int] = {}
    for name, size in written.files:
        first, *rest = Path(name).parts
        if rest and written.tp > 1:
            folders[first] = folders.get(first, 0) + size
    lines = [f"  {name}  {bytes_words(size):>10}" for name, size in folders.items()]
    verb = "would write" if written.dry_run else "wrote"
    total = f"{count(len(written.files), 'file')}, {bytes_words(written.nbytes)}"
    free = f" ({bytes_words(written.free)} are free)" if written.dry_run else ""
    return "\n".join([*lines, f"{verb} {written.target}: {total}{free}"])
