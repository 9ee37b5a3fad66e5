"""What a report shows, decided once for text and HTML: rows, collectives, bytes and the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autotp.analysis import LAYOUTS, Analysis
from autotp.collectives import Collective
from autotp.cost import collapsed, held_bytes
from autotp.inventory import TensorInfo
from autotp.pattern import matches
from autotp.report.words import bytes_words, findings_words, shard_words
from autotp.units import unit_name

if TYPE_CHECKING:
    from autotp.match import Placed
    from autotp.plan import Plan

__all__ = [
    "Row",
    "absent",
    "bytes_line",
    "collective_lines",
    "headline",
    "plan_name",
    "rows",
    "unmatched",
    "verdict",
    "written_plan_name",
]

MANIFEST_PLAN = "in autotp.json"  # a plan that was read from a converted folder


@dataclass(frozen=True)
class Row:
    """One line of the table: what one rule does to modules of one kind, layers taken together."""

    rule: str
    where: str
    style: str
    cut: str
    tensors: int
    nbytes: str


def plan_name(plan: Plan, given: str = "") -> str:
    """The plan as users know it: by its shipped name or its file, else as it was `given`.

    >>> from autotp.plan import Plan
    >>> plan_name(Plan.load("bert")), plan_name(Plan(rules={"fc1": "column"}))
    ('bert (shipped)', 'given in code')
    """
    from autotp.plan import Plan, shipped_plans

    span = next(filter(None, map(plan.span, plan.rules)), None)
    if span is None:
        return given or "given in code"
    name = Path(span.file).stem
    if span.file == f"plans/{name}.yaml" and name in shipped_plans() and Plan.load(name) == plan:
        return f"{name} (shipped)"  # a shipped plan bears its place in the project
    return span.file


def written_plan_name(plan: Plan) -> str:
    """The plan of a converted folder as users know it: by its shipped name, if it is that one still.

    >>> from autotp.plan import Plan
    >>> written_plan_name(Plan.load("bert")), written_plan_name(Plan(rules={"fc1": "column"}))
    ('bert (shipped)', 'in autotp.json')
    """
    from autotp.plan import plan_for

    shipped = plan_for(plan.model_type) if plan.model_type else None
    return plan_name(shipped) if shipped is not None and shipped == plan else plan_name(plan, MANIFEST_PLAN)


def headline(analysis: Analysis) -> str:
    """Target, plan, tp and how much is certain."""
    if analysis.certainty == LAYOUTS:
        certain = "layouts proven" + (f" ({', '.join(analysis.modes)})" if analysis.modes else "")
    else:
        certain = "names and shapes only"
    plan = plan_name(analysis.plan, analysis.plan_name)
    return f"{analysis.inventory.name}: plan {plan}, tp {analysis.tp}, {certain}"


def rows(analysis: Analysis) -> list[Row]:
    """The table, in the plan's order; a rule that decides nothing has a row that says so."""
    tensors = analysis.inventory.tensors()
    names = _unit_names(analysis)
    groups: dict[tuple[str, str, str, str], list[TensorInfo]] = {}
    for placed in analysis.matches.placed.values():
        where = collapsed(placed.path).removesuffix(placed.pattern).rstrip(".")
        cut = [tensors[n] for n in _names(analysis, placed) if n in tensors and n in analysis.layouts]
        if not cut:
            key = (placed.pattern, where, placed.style, "whole")
            groups.setdefault(key, []).extend(tensors[n] for n in _names(analysis, placed) if n in tensors)
        for tensor in cut:
            key = (placed.pattern, where, placed.style, _words(analysis, placed, tensor, names))
            groups.setdefault(key, []).append(tensor)
    found = {
        pattern: [
            Row(*key, len(members), _held(analysis, members))
            for key, members in groups.items()
            if key[0] == pattern
        ]
        for pattern in analysis.plan.rules
    }
    return [
        row
        for pattern, rule in analysis.plan.rules.items()
        for row in found[pattern] or _unused(analysis, pattern, rule.style)
    ]


def _unused(analysis: Analysis, pattern: str, style: str) -> list[Row]:
    """The row of a rule that decides nothing, unless the plan says that it may match nothing."""
    if pattern in absent(analysis):
        return []
    return [
        Row(pattern, "", style, "matches nothing" if pattern in unmatched(analysis) else "refused", 0, "-")
    ]


def unmatched(analysis: Analysis) -> list[str]:
    """The rules that are for no module and no tensor of the model."""
    names = [*analysis.inventory.modules, *analysis.inventory.tensors()]
    used = {placed.pattern for placed in analysis.matches.placed.values()}
    rest = [pattern for pattern in analysis.plan.rules if pattern not in used]
    return [pattern for pattern in rest if not any(matches(pattern, name) for name in names if name)]


def absent(analysis: Analysis) -> list[str]:
    """The optional rules among them, which is nothing to complain of."""
    return [pattern for pattern in unmatched(analysis) if pattern in analysis.plan.optional]


def _names(analysis: Analysis, placed: Placed) -> Iterable[str]:
    """The full names of the tensors that a rule speaks of, tied ones under their first name."""
    module = analysis.inventory.modules.get(placed.path)
    if placed.target == "tensor" or module is None:
        return (placed.path,)
    return (tensor.name for tensor in module.tensors.values())


def _unit_names(analysis: Analysis) -> Mapping[int, str]:
    """What a number of declared units is called by the rules that declare it: {32: "attention heads"}."""
    found: dict[int, str] = {}
    for placed in analysis.matches.placed.values():
        for shard in placed.layouts.values() if placed.rule.heads is not None else ():
            if shard.deal is not None:
                found.setdefault(shard.deal.declared, unit_name(placed.rule.heads, ""))
    return found


def _words(analysis: Analysis, placed: Placed, tensor: TensorInfo, names: Mapping[int, str]) -> str:
    """How a tensor is cut. A row without heads of its own may have those of its input."""
    shard = analysis.layouts[tensor.name]
    size = tensor.shape[shard.dim]
    units = 0 if shard.deal is None else shard.deal.declared or shard.deal.units
    if placed.rule.heads is not None:
        noun = unit_name(placed.rule.heads, "")
    elif units == size // shard.groups:
        noun = "rows" if placed.style == "vocab" else "features"
    else:
        noun = names.get(units, "units")
    return shard_words(shard, size, noun)


def _held(analysis: Analysis, members: Iterable[TensorInfo]) -> str:
    """The bytes that a rank holds of some tensors: one figure, or the range over the ranks."""
    held = held_bytes(members, analysis.layouts, analysis.tp)
    least, most = bytes_words(min(held)), bytes_words(max(held))
    figure, unit = least.split()
    return most if least == most else f"{figure if most.endswith(f' {unit}') else least} - {most}"


def _layer(path: str) -> tuple[str, str] | None:
    """The first numbered ancestor of a path, as (collapsed name, number): ("layers.*", "3")."""
    parts = path.split(".")
    for place, part in enumerate(parts):
        if part.isdecimal():
            return ".".join([*parts[:place], "*"]), part
    return None


def collective_lines(collectives: Iterable[Collective]) -> list[tuple[str, str, str]]:
    """Lines (where, forward, backward): one for each stack of layers, the rest, and the total.

    >>> from autotp.collectives import collectives_of
    >>> found = [c for n in "01" for m in ("copy", "reduce") for c in collectives_of(m, f"layers.{n}.fc")]
    >>> collective_lines(found)
    [('a layer of layers.*', '1 all-reduce', '1 all-reduce'), ('in all', '2 all-reduce', '2 all-reduce')]
    """
    total: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
    rest: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
    stacks: dict[str, dict[str, dict[str, Counter[str]]]] = {}
    for one in collectives:
        total[one.direction][one.operation] += one.calls
        layer = _layer(one.module)
        if layer is None:
            rest[one.direction][one.operation] += one.calls
        else:
            numbers = stacks.setdefault(layer[0], {})
            counts = numbers.setdefault(layer[1], {"forward": Counter(), "backward": Counter()})
            counts[one.direction][one.operation] += one.calls
    lines = [
        (
            f"a layer of {stack}",
            _spread([counts["forward"] for counts in numbers.values()]),
            _spread([counts["backward"] for counts in numbers.values()]),
        )
        for stack, numbers in stacks.items()
    ]
    if stacks and (rest["forward"] or rest["backward"]):
        lines.append(("outside the layers", _spread([rest["forward"]]), _spread([rest["backward"]])))
    return [*lines, ("in all", _spread([total["forward"]]), _spread([total["backward"]]))]


def _spread(layers: list[Counter[str]]) -> str:
    """Counts by operation; a range where layers differ."""
    words = []
    for operation in sorted({operation for counts in layers for operation in counts}):
        numbers = sorted(counts[operation] for counts in layers)
        span = str(numbers[0]) if numbers[0] == numbers[-1] else f"{numbers[0]} to {numbers[-1]}"
        words.append(f"{span} {operation}")
    return ", ".join(words) or "none"


def bytes_line(analysis: Analysis) -> str:
    """Bytes a rank, the imbalance between the ranks, and the share of the matrices that is sharded."""
    held = analysis.rank_bytes
    whole = sum(
        t.nbytes for n, t in analysis.inventory.tensors().items() if n not in analysis.inventory.aliases
    )
    most, least = max(held), min(held)
    if most == least:
        line = f"a rank holds {bytes_words(most)} ({most:,} bytes)"
    else:
        mean = sum(held) / len(held)
        line = f"a rank holds {bytes_words(least)} to {bytes_words(most)} (imbalance {most / mean - 1:.1%})"
    sharded = f"{analysis.sharded_fraction:.1%} of the matrices sharded"
    return f"{line} of {bytes_words(whole)}, {sharded}"


def verdict(analysis: Analysis) -> str:
    """The closing line: ok and how far, or refused, and how many findings there are."""
    found = findings_words(d for d in analysis.diagnostics if d.severity != "note")
    if not analysis.ok:
        return found
    proven = analysis.certainty == LAYOUTS
    line = "ok: layouts are proven" if proven else "ok by names and shapes: layouts are not proven"
    return line + found.removeprefix("ok").replace(": ", "; ")
