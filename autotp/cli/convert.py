"""`autotp convert`, `merge` and `reshard`: a checkpoint to one folder a rank, back, and to other ranks."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotp.cli.console import FINDINGS, FINE, guarded, write
from autotp.cli.options import PlanFile, RankCount
from autotp.cli.progress import progress
from autotp.diagnostic import UsageError

if TYPE_CHECKING:
    from torch import nn

    from autotp.checkpoint.written import Written

__all__ = ["convert", "merge", "reshard"]

LISTED = 4  # files that a line names


class Check(StrEnum):
    """How a plan is checked before anything is written."""

    layouts = "layouts"
    shapes = "shapes"


class Digest(StrEnum):
    """The digest of each tensor's bytes."""

    xxh3 = "xxh3"
    sha256 = "sha256"
    none = "none"


class Biases(StrEnum):
    """What other trainers keep of a row layer's bias on each rank."""

    equal = "equal"
    summed = "summed"


HowChecked = Annotated[
    Check, typer.Option("--check", help="Prove the layouts on the model, or check names and shapes alone.")
]
OnlyRanks = Annotated[
    str | None,
    typer.Option(
        "--ranks",
        metavar="LIST",
        help="Write the folders of these ranks alone, as in 0-3 or 0,2,5.",
        show_default=False,
    ),
]
Architecture = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="FACTORY",
        help="package.module:factory of the model to prove the plan on, where no config.json tells it.",
        show_default=False,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check plan, headers and room, and write nothing. No tensor's bytes are read, so damage and "
        "copies that differ are not found; of a converted folder `autotp verify` finds them.",
    ),
]


@guarded
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A checkpoint folder, or one .safetensors file.")
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The new folder.")],
    tp: RankCount,
    plan: PlanFile = None,
    check: HowChecked = Check.layouts,
    digest: Annotated[Digest, typer.Option("--digest", help="Of each tensor's bytes.")] = Digest.xxh3,
    ranks: OnlyRanks = None,
    model: Architecture = None,
    biases: Annotated[
        Biases,
        typer.Option(
            "--biases", help="Of row layers in other trainers' rank files: copies, or parts of a sum."
        ),
    ] = Biases.equal,
    dry_run: DryRun = False,
) -> int:
    """Cut a checkpoint into one folder a rank. The plan is proven before the first byte is written.

    DST appears whole or not at all; a run that was killed goes on where it stopped. What is written is
    read by `autotp.from_pretrained` on each rank, and put back together by `autotp merge`.

    \b
    Examples:
      autotp convert ./Llama-3.1-8B ./llama-tp8 --tp 8
      autotp convert ./my-model ./out --plan my-plan.yaml --tp 4 --check shapes --dry-run
      autotp convert ./my-model ./out --plan my-plan.yaml --tp 4 --model my_package.models:make
      autotp convert ./Llama-3.1-8B ./llama-tp8 --tp 8 --ranks 0-3

    Exit code: 0 fine, 1 the plan is refused or a dry run does not fit the disk, 2 usage or unreadable files.
    """
    from autotp.checkpoint.convert import convert as run

    wanted, (live, inputs) = _ranks(ranks), _model(model)

    with progress("converted") as tell:
        written = run(
            source,
            target,
            plan=plan,
            tp=tp,
            check=check.value,
            digest=digest.value,
            ranks=wanted,
            model=live,
            inputs=inputs,
            biases=biases.value,
            progress=tell,
            dry_run=dry_run,
        )
    write(f"{_headline(source, written)}\n{_summary(written)}")
    return FINE if written.fits or not dry_run else FINDINGS


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

    Exit code: 0 fine, 1 a dry run does not fit the disk, 2 usage, or shards that are missing, damaged or
    unequal.
    """
    from autotp.checkpoint.merge import merge as run

    with progress("merged") as tell:
        written = run(source, target, progress=tell, dry_run=dry_run)
    write(_summary(written))
    return FINE if written.fits or not dry_run else FINDINGS


@guarded
def reshard(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A folder that `autotp convert` wrote.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The new folder.")],
    tp: RankCount,
    check: HowChecked = Check.layouts,
    ranks: OnlyRanks = None,
    model: Architecture = None,
    dry_run: DryRun = False,
) -> int:
    """Write a converted checkpoint again for another number of ranks, in one pass and without a merge.

    The plan is the folder's own, proven for the new number of ranks before the first byte is written.
    Every byte is checked against the digests that were written.

    \b
    Examples:
      autotp reshard ./llama-tp8 ./llama-tp4 --tp 4
      autotp reshard ./llama-tp8 ./llama-tp2 --tp 2 --dry-run

    Exit code: 0 fine, 1 the plan is refused or a dry run does not fit the disk, 2 usage, or shards that are
    missing, damaged or unequal.
    """
    from autotp.checkpoint.reshard import reshard as run

    wanted, (live, inputs) = _ranks(ranks), _model(model)
    with progress("resharded") as tell:
        written = run(
            source,
            target,
            tp=tp,
            check=check.value,
            ranks=wanted,
            model=live,
            inputs=inputs,
            progress=tell,
            dry_run=dry_run,
        )
    write(f"{_headline(source, written, again=True)}\n{_summary(written)}")
    return FINE if written.fits or not dry_run else FINDINGS


def _ranks(text: str | None) -> list[int] | None:
    """The ranks that a list such as 0-3,6 names; None for all of them."""
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        if ends is None or int(ends[2] or ends[1]) < int(ends[1]):
            raise UsageError(f"--ranks is a list such as 0-3 or 0,2,5, not {text!r}")
        found += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    return sorted(set(found))


def _model(target: str | None) -> tuple[nn.Module | None, Any]:
    """The model of a factory, and sample inputs if it gave any."""
    if target is None:
        return None, None
    from autotp.cli.target import is_factory

    if not is_factory(target):
        raise UsageError(f"--model is package.module:factory, not {target!r}")
    from autotp.cli.factory import build

    return build(target)


def _headline(source: Path, written: Written, *, again: bool = False) -> str:
    """Source, plan, tp and how much of the plan is proven."""
    from autotp.report.table import plan_name, written_plan_name

    name = written_plan_name if again else plan_name
    proof = "layouts proven" if written.proof == "layouts" else "layouts not proven: names and shapes only"
    return f"{source}: plan {name(written.plan)}, tp {written.tp}, {proof}"


def _summary(written: Written) -> str:
    """Each rank's folder with its bytes, and the total."""
    from autotp.checkpoint.written import kept_words
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
    short = (
        []
        if written.fits
        else [f"it does not fit: {bytes_words(written.nbytes - written.free)} more are needed"]
    )
    names = written.left_out
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    left = [f"left out: {', '.join(names[:LISTED])}{more}"] if names else []
    notes = [f"note: {note}" for note in written.notes]
    if written.dry_run:
        notes.append("checked: plan, headers and room; the bytes of the tensors are not read in a dry run")
    if written.kept:
        notes.append(f"resumed: {kept_words(written.kept)}")
    return "\n".join([*lines, f"{verb} {written.target}: {total}{free}", *left, *short, *notes])
