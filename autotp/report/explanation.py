"""An explanation as one screen of text, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import PurePath

from autotp.explanation import Explanation, Step
from autotp.report.json import FORM, diagnostic_data, dumps, place_data
from autotp.report.text import one_finding, paint
from autotp.report.words import count, findings_words, shortened

__all__ = ["as_json", "as_text"]

SCREEN = 36  # rows of ops; a module with more has its quiet stretches folded
NAMES = 24  # columns for the name of a module; longer ones lose their front
QUIET = ("replicate", "unknown")
Row = tuple[str, str, str, str, str]


def as_text(found: Explanation, *, colour: bool = False) -> str:
    """The headline, what goes in, the ops by source line, what comes out, the findings and the verdict."""
    lines = [paint(_headline(found), "bold", colour)]
    lines += [f"  {note}" for note in _notes(found)]
    if found.mode:
        lines += ["", *_table(found)]
    if found.unknown:
        verb = "follows" if found.unknown == 1 else "follow"
        lines.append(f"  {count(found.unknown, 'op')} {verb} that cannot be told")
    refused = [finding for finding in found.diagnostics if finding.severity == "error"]
    for finding in refused:
        lines += ["", one_finding(finding, colour=colour)]
    closing = findings_words(refused) if refused else "ok: layouts are proven"
    return "\n".join([*lines, "", paint(closing, closing.partition(":")[0], colour)])


def _headline(found: Explanation) -> str:
    where = f"{found.module} ({found.kind})" if found.module else found.kind
    mode = f", in {found.mode} mode" if found.mode else ""
    return f"{where}: plan {found.plan_name}, tp {found.tp}{mode}"


def _notes(found: Explanation) -> list[str]:
    notes = []
    if found.covers:
        notes.append(f"the same in {', '.join(found.covers)}")
    if found.calls > 1:
        notes.append(f"it runs {found.calls} times; this is the first")
    if not found.mode:
        notes.append("no value has a layout: the plan is refused before the model is traced")
    return notes


def _table(found: Explanation) -> list[str]:
    """The rows, under the file that their lines are of."""
    given = [("in", _value(step)) for step in found.entered]
    taken = [("out", _value(step)) for step in found.left]
    rows = _folded(list(found.steps))
    ops = [(str(step.source.line) if step.source else "", _op(step)) for step in rows]
    cells: list[tuple[str, Row]] = [*given, *ops, *taken]
    heads: Row = ("op", "shape", "on each rank", "mapping", "why")
    first = max(len(place) for place, _ in [("line", heads), *cells])
    widths = [max(len(row[n]) for _, row in [("", heads), *cells]) for n in range(len(heads))]

    def line(place: str, row: Row) -> str:
        padded = "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True))
        return f"{place.rjust(first)}  {padded}".rstrip()

    lines, file = [line("line", heads), *(line(*cell) for cell in given)], None
    for step, cell in zip(rows, ops, strict=True):
        if step.source is not None and step.source.file != file:
            file = step.source.file
            lines.append(f"{PurePath(file).name}")
        lines.append(line(*cell))
    return [*lines, *(line(*cell) for cell in taken)]


def _value(step: Step) -> Row:
    return step.op, _shape(step), step.placement, "", step.why


def _op(step: Step) -> Row:
    name = f"{shortened(step.module, NAMES)}: {step.op}" if step.module else step.op
    at: dict[tuple[str, str], list[str]] = {}
    for mapped in step.mappings:
        at.setdefault((mapped.of, mapped.when), []).append(mapped.mapping)
    said = ", ".join(_mapped(" and ".join(kinds), of, when) for (of, when), kinds in at.items())
    return name, _shape(step), step.placement, said, step.why


def _mapped(kinds: str, of: str, when: str) -> str:
    if when == "shared":
        return f"the {kinds} of {shortened(of, NAMES)}"
    return f"{kinds} of {shortened(of, NAMES)} {when}" if of else f"{kinds} {when}"


def _shape(step: Step) -> str:
    return str(list(step.shape)) + (f" x {step.results}" if step.results > 1 else "")


# -- folding: what says nothing new is told in one row


def _folded(steps: list[Step]) -> list[Step]:
    """The steps in at most a screen, if that can be: ops of one line together, then quiet stretches."""
    rows = _joined(steps, _of_one_line, _together)
    for alike in (_whole, _as_before, _silent):
        if len(rows) <= SCREEN:
            break
        rows = _joined(rows, alike, _counted)
    return rows


def _joined(
    steps: Sequence[Step], alike: Callable[[Step, Step], bool], join: Callable[[list[Step]], Step]
) -> list[Step]:
    runs: list[list[Step]] = []
    for step in steps:
        if runs and alike(runs[-1][-1], step):
            runs[-1].append(step)
        else:
            runs.append([step])
    return [run[0] if len(run) == 1 else join(run) for run in runs]


def _quiet(step: Step) -> bool:
    return not step.mappings and not step.code


def _of_one_line(one: Step, two: Step) -> bool:
    """Ops of one line and module, one after the other, with the same placement."""
    keys = [(s.source and (s.source.file, s.source.line), s.module, s.placement) for s in (one, two)]
    return keys[0] == keys[1] and _quiet(one) and _quiet(two)


def _whole(one: Step, two: Step) -> bool:
    return all(_quiet(step) and step.placement in QUIET for step in (one, two))


def _as_before(one: Step, two: Step) -> bool:
    return all(map(_quiet, (one, two))) and one.placement == two.placement


def _silent(one: Step, two: Step) -> bool:
    return all(map(_quiet, (one, two)))


def _together(run: list[Step]) -> Step:
    return replace(run[-1], op=", ".join(step.op for step in run), why=run[0].why)


def _counted(run: list[Step]) -> Step:
    number = sum(_ops(step) for step in run)
    return replace(run[-1], op=f"… {count(number, 'op')}", module="", source=None, why="")


def _ops(step: Step) -> int:
    """How many ops a row stands for."""
    return int(step.op.split()[1]) if step.op.startswith("… ") else step.op.count(", ") + 1


# -- JSON


def as_json(found: Explanation) -> str:
    """Every op, none folded."""
    return dumps(
        {
            "report": FORM,
            "model": found.model,
            "module": found.module,
            "kind": found.kind,
            "plan_name": found.plan_name,
            "tp": found.tp,
            "ok": found.ok,
            "mode": found.mode or None,
            "modes": list(found.modes),
            "covers": list(found.covers),
            "calls": found.calls,
            "in": [_data(step) for step in found.entered],
            "ops": [_data(step) for step in found.steps],
            "out": [_data(step) for step in found.left],
            "unknown": found.unknown,
            "diagnostics": [diagnostic_data(finding) for finding in found.diagnostics],
        }
    )


def _data(step: Step) -> dict[str, object]:
    return {
        "op": step.op,
        "module": step.module,
        "source": place_data(step.source),
        "shape": list(step.shape),
        "results": step.results,
        "placement": step.placement,
        "mappings": [{"mapping": m.mapping, "when": m.when, "of": m.of or None} for m in step.mappings],
        "why": step.why,
        "finding": step.code or None,
    }
