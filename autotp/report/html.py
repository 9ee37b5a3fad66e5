"""The dry run as one self-contained HTML page: no script, nothing fetched, every text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from autotp.analysis import Analysis
from autotp.cost import left_whole
from autotp.report.added import added_lines, branch_lines
from autotp.report.table import bytes_line, collective_lines, headline, rows, verdict
from autotp.report.words import bytes_words

__all__ = ["render"]

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
table { border-collapse: collapse; margin: 0 0 1.5rem; }
th, td { border-bottom: 1px solid #8884; padding: .2rem .9rem .2rem 0; text-align: left; }
td.number, th.number { text-align: right; }
td, pre { font-family: ui-monospace, monospace; font-size: 13px; }
pre { border-left: 4px solid #888; overflow-x: auto; padding: .4rem .8rem; }
pre.error { border-color: #c22; }
pre.warning { border-color: #c80; }
""".strip()


def render(analysis: Analysis) -> str:
    """The page: headline, table, what stays whole, collectives, bytes, findings, verdict."""
    title = escape(headline(analysis))
    body = [
        f"<h1>{title}</h1>",
        _table(
            ("rule", "in", "style", "how it is cut", "tensors", "a rank holds"),
            ((r.rule, r.where, r.style, r.cut, f"{r.tensors:,}", r.nbytes) for r in rows(analysis)),
            numbers=(4, 5),
        ),
        "<h2>Whole on every rank</h2>",
        _table(
            ("tensors", "number", "bytes", "why"),
            (
                (r.name, f"{r.tensors:,}", bytes_words(r.nbytes), r.why)
                for r in left_whole(analysis.inventory, analysis.matches, analysis.layouts)
            ),
            numbers=(1, 2),
        ),
        "<h2>Added by the proof</h2>",
        _table(("tensors or modules", "what is added"), added_lines(analysis), numbers=()),
        "<h2>Collectives</h2>",
        _table(("where", "forward", "backward"), collective_lines(analysis.collectives), numbers=()),
        f"<p>{escape(bytes_line(analysis))}</p>",
    ]
    if analysis.branches:
        body.append("<h2>Not proven: branches that no traced mode took</h2>")
        body.append(_table(("function", "where"), branch_lines(analysis), numbers=()))
    if analysis.edits:
        body.append(f"<h2>Edits</h2>\n<pre>{escape(analysis.edits)}</pre>")
    body += [f'<pre class="{escape(d.severity)}">{escape(d.render())}</pre>' for d in analysis.diagnostics]
    body.append(f"<p><strong>{escape(verdict(analysis))}</strong></p>")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>\n{STYLE}\n</style>\n</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]], *, numbers: Sequence[int]) -> str:
    def cells(tag: str, line: Sequence[str]) -> str:
        right = ' class="number"'
        return "".join(
            f"<{tag}{right if place in numbers else ''}>{escape(cell)}</{tag}>"
            for place, cell in enumerate(line)
        )

    head = f"<tr>{cells('th', heads)}</tr>"
    return "\n".join(["<table>", head, *(f"<tr>{cells('td', line)}</tr>" for line in lines), "</table>"])
