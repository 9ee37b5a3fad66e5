"""Findings alone, for a plan that could not be matched at all: text, JSON, HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from autotp.diagnostic import Diagnostic, errors
from autotp.report.json import FORM, diagnostic_data, dumps
from autotp.report.text import one_finding, paint
from autotp.report.words import findings_words

__all__ = ["as_html", "as_json", "as_text"]


def as_text(diagnostics: Sequence[Diagnostic], *, colour: bool = False) -> str:
    """Each finding, a blank line between two, and the closing line."""
    last = findings_words(diagnostics)
    texts = [one_finding(finding, colour=colour) for finding in diagnostics]
    return "\n\n".join([*texts, paint(last, last.partition(" ")[0].rstrip(":"), colour)])


def as_json(diagnostics: Sequence[Diagnostic]) -> str:
    """The keys of a report that need no match: report, ok, diagnostics."""
    found = [diagnostic_data(finding) for finding in diagnostics]
    return dumps({"report": FORM, "ok": not errors(diagnostics), "diagnostics": found})


def as_html(diagnostics: Sequence[Diagnostic]) -> str:
    """One page with the findings."""
    body = "\n".join(f"<pre>{escape(finding.render())}</pre>" for finding in diagnostics)
    head = '<!doctype html>\n<meta charset="utf-8">\n<title>autotp</title>'
    return f"{head}\n{body}\n<p>{findings_words(diagnostics)}</p>"
