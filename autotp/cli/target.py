"""TARGET and --plan: what a plan is tried on, and which plan."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotp.diagnostic import UsageError

if TYPE_CHECKING:
    from autotp.analysis import Analysis
    from autotp.plan import Plan

__all__ = ["TARGET", "analyze_target", "choose_plan", "is_factory", "no_target", "refuse_code"]

TARGET = (
    "A checkpoint folder, one .safetensors file, a config.json, or package.module:factory: what makes "
    "the model, or (model, sample inputs)."
)

_STORED = (
    "transformers stores some models under other names than they have: `autotp plan TARGET --tp N --prove` "
    "takes the model's own"
)
_FACTORY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def analyze_target(target: str, *, plan: str | None, tp: int, prove: bool) -> Analysis:
    """The dry run of a target: from headers, or with the layouts proven where that is asked for.

    Raises UsageError for a target or a tp that cannot be, CheckpointError for a file that cannot be
    read, PlanError for a plan file with faults.
    """
    refuse_code(target)
    if target and _describes_alone(Path(target)):
        target = str(Path(target) / "config.json")
    if plan == "auto":
        return _derive(target, tp)
    if target and Path(target).exists():
        if Path(target).name == "config.json":
            return _prove_config(target, plan, tp)
        return _prove_checkpoint(target, plan, tp) if prove else _read_headers(target, plan, tp)
    if is_factory(target):
        return _prove_factory(target, plan, tp)
    raise no_target(target)


def _derive(target: str, tp: int) -> Analysis:
    """The analysis of the derived plan: a checkpoint's model is built on the meta device, and proven."""
    from autotp.cli.model import live_model
    from autotp.dry_run import analyze

    live = live_model(target, "auto")
    analysis = analyze(live.model, "auto", tp=tp, inputs=live.inputs)
    if not live.stored or Path(target).name == "config.json":
        return analysis
    from autotp.checkpoint.inventory import inventory
    from autotp.shapes import as_stored

    return as_stored(analysis, inventory(target))


def _describes_alone(path: Path) -> bool:
    """Whether a folder has a config.json, and nothing that could be weights."""
    if not (path / "config.json").is_file():
        return False
    from autotp.checkpoint.folder import WEIGHTS

    return not any(entry.is_dir() or entry.name.endswith(WEIGHTS) for entry in path.iterdir())


def is_factory(target: str) -> bool:
    """Whether a target reads as package.module:factory."""
    return _FACTORY.fullmatch(target) is not None


def refuse_code(target: str) -> None:
    """Raises UsageError for a file of Python, which is named by what makes the model in it."""
    path = Path(target)
    if path.suffix != ".py":
        return
    module = path.stem if path.is_absolute() else ".".join(path.with_suffix("").parts)
    raise UsageError(
        f"{target}: a file of Python is no target\n"
        f"  = help: name what makes the model in it, such as {module}:make_model"
        + (f", from the folder {path.parent}" if path.is_absolute() else "")
    )


def no_target(target: str) -> UsageError:
    """The error for a target that is neither a file nor a factory."""
    what = TARGET[0].lower() + TARGET[1:].rstrip(".")
    from autotp.checkpoint.unfinished import absent

    says = "no such file or folder"
    said = absent(Path(target), says) if target else f"{target!r}: {says}"
    return UsageError(f"{said}\n  = help: TARGET is {what}")


def choose_plan(wanted: str | None, config: Mapping[str, Any]) -> Plan:
    """The plan that --plan names, or else the shipped one of the config's model_type."""
    from autotp.plan import Plan, plan_for, shipped_plans

    if wanted is not None:
        return Plan.load(wanted)
    model_type = config.get("model_type")
    found = plan_for(model_type) if isinstance(model_type, str) else None
    if found is not None:
        return found
    why = f"no plan is shipped for model_type {model_type!r}" if model_type else "no model_type is known"
    near = difflib.get_close_matches(str(model_type), shipped_plans(), n=3)
    example = f", such as {' or '.join(near)}" if near else ""
    raise UsageError(
        f"{why}\n  = help: say --plan with a plan file, or with a shipped plan{example}: "
        "`autotp plans` lists them\n  = help: or let one be derived from the model: --plan auto"
    )


def _read_headers(target: str, plan: str | None, tp: int) -> Analysis:
    from autotp.checkpoint.inventory import inventory
    from autotp.shapes import analyze_shapes

    found = inventory(target, plan=plan)
    chosen = choose_plan(plan, found.config)
    analysis = analyze_shapes(found, chosen, tp=tp)
    if not chosen.model_type or chosen.model_type != found.config.get("model_type"):
        return analysis
    told = tuple(
        replace(one, help=(*one.help, _STORED)) if one.code == "AT201" else one
        for one in analysis.diagnostics
    )
    return replace(analysis, diagnostics=told)


def _prove_checkpoint(target: str, plan: str | None, tp: int) -> Analysis:
    from autotp.checkpoint.inventory import inventory
    from autotp.checkpoint.layouts import check_depth, described_model
    from autotp.match import match
    from autotp.shapes import as_stored

    stored = inventory(target, plan=plan)
    chosen = choose_plan(plan, stored.config)
    there = stored.tensors()
    check_depth(Path(target), stored.config, len(there))
    from autotp.checkpoint.assembled import assembled, under_the_models_names
    from autotp.checkpoint.fit import check_complete, check_known  # only now torch
    from autotp.checkpoint.names import resolve
    from autotp.decide import decide
    from autotp.header import Entry

    model = described_model(Path(target), stored.config, None)
    analysis = decide(model, chosen, tp=tp)
    entries = {name: Entry(name, t.dtype, t.shape, 0, t.nbytes) for name, t in there.items()}
    view, _ = under_the_models_names(entries, assembled(model, entries))
    names = resolve(analysis.inventory.tensors(), view, str(getattr(model, "base_model_prefix", "") or ""))
    check_complete(Path(target), model, view, names)
    check_known(Path(target), model, view, match(chosen, stored, tp).layouts)
    return as_stored(analysis, stored)


def _prove_config(target: str, plan: str | None, tp: int) -> Analysis:
    """What a config.json describes; there are no headers to read."""
    from autotp.checkpoint.folder import read_config

    chosen = choose_plan(plan, read_config(Path(target).parent))
    from autotp.hf import prove

    return prove(target, chosen, tp)


def _prove_factory(target: str, plan: str | None, tp: int) -> Analysis:
    from autotp.cli.model import live_model

    live = live_model(target, plan)
    from autotp.dry_run import analyze

    return analyze(live.model, live.plan, tp=tp, inputs=live.inputs)
