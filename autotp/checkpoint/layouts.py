"""How the tensors of a checkpoint are cut: by the headers alone, or as proven on the model they belong to."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotp.agreement import disagreeing
from autotp.checkpoint.folder import read_config
from autotp.checkpoint.inventory import describe_tensors
from autotp.checkpoint.names import resolve
from autotp.diagnostic import CheckpointError, PlanError, UsageError, errors
from autotp.header import Entry
from autotp.match import Matches, match
from autotp.placement import Shard
from autotp.plan import Plan, as_plan, plan_for, shipped_plans

if TYPE_CHECKING:
    from torch import nn

__all__ = ["CHECKS", "check_depth", "choose_plan", "decide_layouts", "described_model"]

CHECKS = ("layouts", "shapes")
DEEP = (
    1000  # layers that a model may have more than ten times as many as there are tensors: some share theirs
)


def choose_plan(
    plan: Any,
    config: Mapping[str, Any],
    source: Path,
    *,
    tp: int,
    check: str,
    model: nn.Module | None = None,
    inputs: Any = None,
) -> tuple[Plan, str]:
    """The plan that is given, one derived for "auto", or the shipped one of the model_type; and its name.

    `model` (and sample `inputs` for it) stands in for the one that the config describes.

    Raises PlanError for a plan that cannot be read and for a model of which nothing can be sharded,
    UsageError when none is given and none is shipped.
    """
    if isinstance(plan, str) and plan == "auto":
        return _derived(source, config, tp, check, model, inputs), "auto"
    if plan is not None:
        return as_plan(plan), ""
    kind = config.get("model_type")
    found = plan_for(kind) if isinstance(kind, str) else None
    if found is None:
        why = f"no plan is shipped for model_type {kind!r}" if kind else "no config tells a model_type"
        raise UsageError(f"{source}: {why}; give a plan, or one of {', '.join(shipped_plans())}")
    return found, str(kind)


def _derived(
    source: Path, config: Mapping[str, Any], tp: int, check: str, model: nn.Module | None, inputs: Any
) -> Plan:
    """The plan that is derived from the graph of the model."""
    if check != "layouts":
        raise UsageError('plan "auto" is derived from the traced graph, which check="shapes" leaves out')
    from autotp.decide import decide

    analysis = decide(described_model(source, config, model), "auto", tp=tp, inputs=inputs)
    if not analysis.ok:
        raise PlanError(analysis.diagnostics)
    return analysis.plan


def described_model(source: Path, config: Mapping[str, Any], model: nn.Module | None) -> nn.Module:
    """The model that is given, or the one that the config describes."""
    if model is not None:
        return model
    from autotp.hf import build

    with _described(source, config) as described:
        return build(described)


def check_depth(source: Path, config: Mapping[str, Any], tensors: int) -> None:
    """Refuse a config of so many layers that building its model would not end, beside so few tensors.

    Raises CheckpointError naming the entry and both numbers.
    """
    most = DEEP + 10 * tensors
    for where, table in (("", config), *((f"{key}.", sub) for key, sub in config.items())):
        for key, value in table.items() if isinstance(table, Mapping) else ():
            counts = str(key).endswith(("layers", "layer", "blocks")) and type(value) is int
            if counts and value > most:
                raise CheckpointError(
                    f"{source}: config.json says {where}{key} {value}, and the checkpoint holds {tensors} "
                    f"tensors: a model of more than {most} layers is not built for them; correct config.json"
                )


@contextmanager
def _described(source: Path, config: Mapping[str, Any]) -> Iterator[Path]:
    """The place of a checkpoint's config.json; of one made with Meta's params.json, a folder of its own."""
    home = source if source.is_dir() else source.parent
    if not config or ((home / "config.json").exists() and read_config(home) == dict(config)):
        yield source
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield Path(folder)


def decide_layouts(
    source: Path,
    entries: Sequence[Entry],
    config: Mapping[str, Any],
    plan: Plan,
    tp: int,
    check: str,
    *,
    model: nn.Module | None = None,
    inputs: Any = None,
) -> dict[str, Shard]:
    """{tensor name: how it is cut}; tensors that are not in it are whole.

    `source` is the checkpoint, for messages; `config` what its config.json says. With `check` "shapes"
    names and shapes are matched; with "layouts" the plan is proven on `model`, else on the one that the
    config describes, and where the headers tell a cut too, it must be the same. Raises PlanError (every
    finding), CheckpointError, UsageError.
    """
    if check not in CHECKS:
        raise UsageError(f"check is 'layouts' or 'shapes', not {check!r}")
    if model is not None and check != "layouts":
        raise UsageError('a model is given to prove the plan on, which check="shapes" leaves out')
    stored = describe_tensors(entries, config, name=source.name)
    matches = match(plan, stored, tp)
    there = {entry.name: entry for entry in entries}
    if check == "layouts":
        layouts = _proven(source, there, described_model(source, config, model), inputs, matches)
    elif errors(found := (*matches.diagnostics, *disagreeing(matches, stored))):
        raise PlanError(found)
    else:
        layouts = {name: shard for name, shard in matches.layouts.items() if name in there}
    for name in layouts:
        if there[name].itemsize < 1:
            raise CheckpointError(
                f"{source}: tensor {name!r} has elements of {there[name].itemsize:g} bytes "
                f"({there[name].dtype}), which cannot be cut; leave it whole with `replicate`"
            )
    return layouts


def _proven(
    source: Path, there: Mapping[str, Entry], model: nn.Module, inputs: Any, matches: Matches
) -> dict[str, Shard]:
    """The layouts as they are proven on the model, under the checkpoint's names.

    Only a row rule without heads leaves its units to the proof; of tensors that the model has otherwise than
    they are stored (assembled.py) the headers say nothing. Tensors that the model has not are carried
    whole; one that it has in another shape is an error, and so is one that the checkpoint lacks.
    """
    from autotp.checkpoint.assembled import assembled, parts_of_layout, under_the_models_names
    from autotp.checkpoint.fit import check_complete, check_known
    from autotp.decide import decide

    analysis = decide(model, matches.plan, tp=matches.tp, inputs=inputs)
    if not analysis.ok:
        raise PlanError(analysis.diagnostics)
    known = analysis.inventory.tensors()
    view, made = under_the_models_names(there, assembled(model, there))
    names = resolve(known, view, str(getattr(model, "base_model_prefix", "") or ""))
    check_complete(source, model, view, names)
    check_known(source, model, view, matches.layouts)
    for name, spelled in names.items():
        if known[name].shape != view[spelled].shape:
            held, needed = list(view[spelled].shape), list(known[name].shape)
            raise CheckpointError(
                f"{source}: tensor {spelled!r} is {held}, and {needed} in {type(model).__name__}, the model "
                "that the plan is proven on"
            )
    layouts = {names[name]: shard for name, shard in analysis.layouts.items() if name in names}
    shapes = {name: entry.shape for name, entry in there.items()}
    for name, one in made.items():
        cuts = parts_of_layout(layout := layouts.pop(name, None), one, shapes)
        if cuts is None:
            raise CheckpointError(
                f"{source}: {name!r} of {type(model).__name__} is {layout}, and is stored in parts, "
                f"{one.parts[0][0]!r} and others, that cannot be cut so; cut it along another dim, or leave "
                "it whole with `replicate`"
            )
        layouts |= {
            spelled: cut for part, cut in zip(one.parts, cuts, strict=True) if cut for spelled in part
        }
    left_to_the_proof = {
        name
        for placed in matches.placed.values()
        if placed.style == "row" and not placed.declared
        for name in placed.layouts
    }
    for name in sorted(set(names.values()) - made.keys()):
        cut, proven = matches.layouts.get(name), layouts.get(name)
        if cut == proven or (cut and proven and cut.dim == proven.dim and name in left_to_the_proof):
            continue
        if errors(matches.diagnostics) and cut is None:
            continue  # the headers alone could not place it; the model could
        says, proves = (str(one) if one else "whole" for one in (cut, proven))
        raise CheckpointError(
            f"{source}: tensor {name!r} is {says} by the headers, and {proves} by the proof"
        )
    return layouts
