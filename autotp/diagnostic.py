"""Findings for people: what is wrong, where, the numbers, and the remedy.

    error[AT203]: self_attn.q_proj: 3 attention heads over tp=4: fewer heads than ranks
      --> plan.yaml:6:3
       |
     6 |   q_proj: {style: column, heads: 3}
       |   ^^^^^^
      = note: ...
      = help: ...

Codes: 1xx plan file, 2xx match and shape, 3xx layout and cost, 4xx checkpoint, 5xx run time.

    AutotpError
    ├── PlanError         .diagnostics   the plan is refused
    ├── CheckpointError                  a checkpoint cannot be read or written
    ├── UnprovenPath                     a sharded model left the paths that were proven
    └── UsageError                       a call that cannot mean anything (wrong tp, sharded twice)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "AutotpError",
    "CheckpointError",
    "Diagnostic",
    "PlanError",
    "Span",
    "UnprovenPath",
    "UsageError",
    "errors",
    "render",
]


@dataclass(frozen=True)
class Span:
    """A piece of one line of a text: file, 1-based line and column, length, and the line itself."""

    file: str
    line: int
    column: int = 1
    length: int = 1
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"

    def drawn(self) -> list[str]:
        """The arrow line, the source line and its carets."""
        head = f"  --> {self}"
        if not self.text.strip():
            return [head]
        gutter = " " * len(str(self.line))
        indent = "".join("\t" if c == "\t" else " " for c in self.text[: self.column - 1])
        room = max(1, len(self.text) - self.column + 1)
        carets = indent + "^" * max(1, min(self.length, room))
        return [head, f" {gutter} |", f" {self.line} | {self.text}", f" {gutter} | {carets}"]


@dataclass(frozen=True)
class Diagnostic:
    """One finding. `plan` is the line of the plan, `source` the line of the model."""

    code: str
    message: str
    severity: str = "error"
    module: str | None = None
    plan: Span | None = None
    source: Span | None = None
    notes: tuple[str, ...] = ()
    help: tuple[str, ...] = ()

    def render(self) -> str:
        """The finding as text, without colour."""
        where = f"{self.module}: " if self.module else ""
        lines = [f"{self.severity}[{self.code}]: {where}{self.message}"]
        for span in (self.plan, self.source):
            if span is not None:
                lines += span.drawn()
        lines += [f"  = note: {note}" for note in self.notes]
        lines += [f"  = help: {line}" for line in self.help]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.render()


def errors(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """The findings that refuse a plan."""
    return [d for d in diagnostics if d.severity == "error"]


def render(diagnostics: Iterable[Diagnostic]) -> str:
    """All findings as text, a blank line between two."""
    return "\n\n".join(d.render() for d in diagnostics)


class AutotpError(Exception):
    """The root of all errors that autotp raises for its users."""


class PlanError(AutotpError):
    """A plan that is refused; `diagnostics` holds every finding, errors first."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(sorted(diagnostics, key=lambda d: d.severity != "error"))
        super().__init__(render(self.diagnostics))

    def __reduce__(self) -> tuple[type[PlanError], tuple[tuple[Diagnostic, ...]]]:
        return PlanError, (self.diagnostics,)


class CheckpointError(AutotpError):
    """A checkpoint that cannot be read, trusted or written; the message names the file."""


class UnprovenPath(AutotpError):
    """A sharded model was about to do what no proof covers."""


class UsageError(AutotpError):
    """A call that cannot mean anything: a wrong tp, a model that is sharded already."""
