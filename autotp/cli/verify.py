"""`autotp verify`: the numbers of every rank against the whole model, or the integrity of a rank folder."""

from __future__ import annotations

import contextlib
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotp.cli.console import FINDINGS, FINE, Format, Plain, colourful, guarded, report_findings, write
from autotp.cli.options import PlanFile
from autotp.cli.progress import progress
from autotp.cli.target import TARGET, is_factory, no_target
from autotp.diagnostic import AutotpError, PlanError, UsageError

if TYPE_CHECKING:
    from torch import nn

    from autotp.cli.model import Live
    from autotp.plan import Plan
    from autotp.verification import Verification

__all__ = ["LIMIT", "command"]

LIMIT = 4 * 1024**3  # bytes of all copies of a checkpoint's model; a factory has no limit
COPIES = 4  # beside one for each rank: the model, the one that is cast, the whole run and its gradients


class Weights(StrEnum):
    """What the model is compared with."""

    random = "random"
    own = "own"


class Dtype(StrEnum):
    """What the comparison runs in."""

    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@guarded
def command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help=f"{TARGET} Or a folder that `convert` wrote.", show_default=False
        ),
    ],
    tp: Annotated[
        int | None, typer.Option("--tp", min=1, metavar="N", help="Number of ranks.", show_default=False)
    ] = None,
    plan: PlanFile = None,
    weights: Annotated[
        Weights, typer.Option("--weights", help="Drawn anew, which hides nothing, or the model's own.")
    ] = Weights.random,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            "--dtype", help="Default: float64 where the model runs in it, else its own.", show_default=False
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--source",
            metavar="SRC",
            help="Of a converted folder: the checkpoint that it must still equal.",
            show_default=False,
        ),
    ] = None,
    format: Annotated[Plain, typer.Option("--format", help="Form of the result.")] = Plain.text,
) -> int:
    """Check a converted folder, or run every rank here and compare outputs, gradients and weights with the
    whole model.

    The plan is proven first. Of a checkpoint only the architecture is taken, unless --weights own; it must
    be small. A folder that `autotp convert` wrote is read in full and compared with its digests.

    \b
    Examples:
      autotp verify my_package.models:make_mlp --plan mlp.yaml --tp 2
      autotp verify ./all-MiniLM-L6-v2 --tp 4 --weights own
      autotp verify ./llama-tp8 --source ./Llama-3.1-8B

    Exit code: 0 fine, 1 wrong numbers, damage or a refused plan, 2 usage or unreadable files.
    """
    from autotp.checkpoint.folder import MANIFEST

    if target and (Path(target) / MANIFEST).is_file():
        if plan is not None or tp is not None:
            raise UsageError(
                f"{target}: is converted, by the plan and for the tp that its {MANIFEST} holds: leave out "
                "--plan and --tp"
            )
        return _integrity(Path(target), source, format)
    if source is not None:
        raise UsageError(f"{target}: --source goes with a folder that `autotp convert` wrote")
    if tp is None:
        if not is_factory(target) and not Path(target or "?").exists():
            raise no_target(target)
        raise UsageError("say the number of ranks: --tp N")
    return _numbers(target, plan, tp, weights.value, dtype, format)


def _integrity(folder: Path, source: Path | None, format: Plain) -> int:
    from autotp.checkpoint.integrity import check_shards
    from autotp.report.verified import integrity_json, integrity_text

    with progress("checked") as tell:
        found = check_shards(folder, source=source, progress=tell)
    if format is Plain.json:
        write(integrity_json(found, source=source))
    else:
        write(integrity_text(found, source=source, colour=colourful(sys.stdout)))
    return FINE if found.ok else FINDINGS


def _numbers(target: str, plan: str | None, tp: int, weights: str, dtype: Dtype | None, format: Plain) -> int:
    try:
        from autotp.cli.model import live_model, plan_of

        live = live_model(target, plan)
        chosen = plan_of(live, tp)
        from autotp.report.verified import verification_json, verification_text

        with contextlib.redirect_stdout(sys.stderr):  # what the user's forward prints
            model = _with_weights(live, target, tp, weights) if live.stored else live.model
            found = _verified(model, chosen, live.inputs, target, tp, weights, dtype)
    except PlanError as refused:
        return report_findings(refused.diagnostics, Format(format.value))
    if format is Plain.json:
        write(verification_json(found, target=target, plan=chosen, tp=tp, weights=weights))
    else:
        colour = colourful(sys.stdout)
        write(verification_text(found, target=target, plan=chosen, tp=tp, weights=weights, colour=colour))
    return FINE if found.ok else FINDINGS


def _verified(
    model: nn.Module, plan: Plan, inputs: Any, target: str, tp: int, weights: str, dtype: Dtype | None
) -> Verification:
    import torch

    from autotp.api import verify
    from autotp.cli.factory import said

    wanted = None if dtype is None else getattr(torch, dtype.value)
    try:
        return verify(model, plan, tp=tp, inputs=inputs, weights=weights, dtype=wanted)
    except (AutotpError, AssertionError):
        raise
    except Exception as raised:
        raise UsageError(said(f"running {target} raised", raised)) from None


def _with_weights(live: Live, target: str, tp: int, weights: str) -> nn.Module:
    """A checkpoint's model with weights, if all its copies are small enough to run here."""
    from autotp.report.words import bytes_words

    number = sum(parameter.numel() for parameter in live.model.parameters())
    needed = (tp + COPIES) * number * 8
    if needed > LIMIT:
        raise UsageError(
            f"{target}: verify runs {tp} ranks and the whole model in this process, in float64: "
            f"{bytes_words(needed)} for {number:,} parameters, and a checkpoint may take "
            f"{bytes_words(LIMIT)}\n"
            "  = help: verify a config.json with fewer layers and smaller sizes: the same plan fits it\n"
            f"  = help: or prove the layouts without running it: autotp plan {target} --tp {tp} --prove\n"
            "  = help: or name a factory, package.module:factory, which has no limit"
        )
    if weights == "own":
        if Path(target).name == "config.json":
            raise UsageError(f"{target}: holds no weights: name its folder, or leave out --weights own")
        folder = Path(target) if Path(target).is_dir() else Path(target).parent
        loaded: nn.Module = type(live.model).from_pretrained(folder, local_files_only=True)  # type: ignore[attr-defined]
        return loaded.eval()
    return _filled(live.model)


def _filled(model: nn.Module) -> nn.Module:
    """The model with its parameters in memory, for weights to be drawn into: tied ones stay tied."""
    import torch
    from torch import nn

    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                # A vector named weight is a norm's: it starts at one, and is drawn around it.
                fill = torch.ones if name == "weight" and parameter.dim() == 1 else torch.zeros
                made[id(parameter)] = nn.Parameter(fill(parameter.shape, dtype=parameter.dtype))
            module._parameters[name] = made[id(parameter)]
    return model
