"""The dry run as text for one screen."""

from __future__ import annotations

from autotp.analysis import LAYOUTS, Analysis
from autotp.cost import left_whole
from autotp.diagnostic import Diagnostic
from autotp.report.added import added_lines, branch_lines
from autotp.report.table import Row, absent, bytes_line, collective_lines, headline, rows, verdict
from autotp.report.words import bytes_words, count, shortened

__all__ = ["findings", "paint", "render"]

HEADS = ("rule", "in", "style", "how it is cut", "tensors", "a rank holds")
WIDTH = 100  # columns; longer module names lose their front
SEVERITIES = ("error", "warning", "note")
TOLD = "AT215"  # an optional rule that matches nothing: the table tells it
SHOWN = 5  # lines of what stays whole
COLOURS = {"error": "1;31", "warning": "1;33", "ok": "1;32", "refused": "1;31", "bold": "1"}


def render(analysis: Analysis, *, colour: bool = False, diff: bool = False) -> str:
    """The table, what stays whole, collectives, bytes, findings and the verdict, in that order."""
    lines = [paint(headline(analysis), "bold", colour), ""]
    lines += _table(rows(analysis))
    if absent(analysis):
        lines.append(f"not in this model, and optional: {', '.join(absent(analysis))}")
    lines += ["", *_whole(analysis)]
    added = added_lines(analysis)
    if added:
        width = max(len(name) for name, _ in added)
        lines += ["", "added by the proof", *(f"  {name.ljust(width)}  {words}" for name, words in added)]
    lines += ["", *_collectives(analysis), "", bytes_line(analysis)]
    if analysis.edits and diff:
        lines += ["", "edits of the model's own code:", analysis.edits.rstrip("\n")]
    elif analysis.edits:
        lines += ["", "edits of the model's own code (--diff, and `analysis.edits`, show them)"]
        lines += [f"  {function}  {count(n, 'line')}" for function, n in edit_lines(analysis.edits)]
    branches = branch_lines(analysis)
    if branches:
        lines += ["", "not proven: branches that no traced mode took"]
        lines += [f"  {function}  {places}" for function, places in branches]
    shown = [finding for finding in analysis.diagnostics if finding.code != TOLD]
    for finding in sorted(shown, key=lambda finding: SEVERITIES.index(finding.severity)):
        lines += ["", one_finding(finding, colour=colour)]
    closing = verdict(analysis)
    return "\n".join([*lines, "", paint(closing, closing.partition(" ")[0].rstrip(":"), colour)])


def edit_lines(diff: str) -> list[tuple[str, int]]:
    """The functions of a diff of edits, each with the number of its lines that change."""
    found: list[tuple[str, int]] = []
    for line in diff.splitlines():
        if line.startswith("+++ "):
            found.append((line.removeprefix("+++ "), 0))
        elif line.startswith("+") and found:
            found[-1] = (found[-1][0], found[-1][1] + 1)
    return found


def findings(diagnostics: tuple[Diagnostic, ...], *, colour: bool = False) -> str:
    """Findings, a blank line between two."""
    return "\n\n".join(one_finding(finding, colour=colour) for finding in diagnostics)


def one_finding(finding: Diagnostic, *, colour: bool) -> str:
    """One finding; its severity is coloured."""
    text = finding.render()
    return paint(finding.severity, finding.severity, colour) + text.removeprefix(finding.severity)


def paint(text: str, kind: str, colour: bool) -> str:
    """The text in the colour of its kind, on terminals."""
    return f"\x1b[{COLOURS[kind]}m{text}\x1b[0m" if colour and kind in COLOURS else text


def _table(found: list[Row]) -> list[str]:
    numbers = [(f"{row.tensors:,}", row.nbytes) for row in found]
    cells = [HEADS, *((r.rule, r.where, r.style, r.cut, *n) for r, n in zip(found, numbers, strict=True))]
    widths = [max(len(line[place]) for line in cells) for place in range(len(HEADS))]
    room = WIDTH - sum(widths) + widths[1] - 2 * (len(HEADS) - 1)
    cells = [(line[0], shortened(line[1], room), *line[2:]) for line in cells]
    widths[1] = max(len(line[1]) for line in cells)
    lines = []
    for line in cells:
        words = enumerate(zip(line, widths, strict=True))
        padded = [word.rjust(n) if place > 3 else word.ljust(n) for place, (word, n) in words]
        lines.append("  ".join(padded).rstrip())
    return lines


def _whole(analysis: Analysis) -> list[str]:
    reasons = left_whole(analysis.inventory, analysis.matches, analysis.layouts)
    if not reasons:
        return ["nothing stays whole"]
    tensors, nbytes = sum(r.tensors for r in reasons), sum(r.nbytes for r in reasons)
    lines = [f"whole on every rank: {count(tensors, 'tensor')}, {bytes_words(nbytes)}"]
    room = WIDTH - 16 - max(len(reason.why) for reason in reasons[:SHOWN])
    names = [shortened(reason.name, room) for reason in reasons[:SHOWN]]
    for name, reason in zip(names, reasons, strict=False):
        width = max(map(len, names))
        lines.append(f"  {name.ljust(width)}  {bytes_words(reason.nbytes):>10}  {reason.why}")
    rest = reasons[SHOWN:]
    if rest:
        more, held = sum(r.tensors for r in rest), sum(r.nbytes for r in rest)
        lines.append(f"  and {count(more, 'smaller tensor')}, {bytes_words(held)}")
    return lines


def _collectives(analysis: Analysis) -> list[str]:
    source = "from the graph" if analysis.certainty == LAYOUTS else "expected from the styles"
    cells = [(f"collectives, {source}", "forward", "backward"), *collective_lines(analysis.collectives)]
    first, second = (max(len(row[place]) + 2 * (row is not cells[0]) for row in cells) for place in (0, 1))
    return [
        f"{('  ' if place else '') + where:<{first}}  {forward:<{second}}  {backward}".rstrip()
        for place, (where, forward, backward) in enumerate(cells)
    ]
