"""What every command shares: exit codes, colour, and errors without a traceback."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from typing import ParamSpec, TextIO

import typer

from autotp.diagnostic import AutotpError, Diagnostic, PlanError, errors

__all__ = [
    "BROKEN_PIPE",
    "FINDINGS",
    "FINE",
    "INTERRUPTED",
    "USAGE",
    "Format",
    "Plain",
    "colourful",
    "guarded",
    "report_findings",
    "write",
]

UNREADABLE = "AT101"  # no plan file of that name, or one that cannot be read
FINE, FINDINGS, USAGE, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141

OPTIONS = (("check", "shapes"), ("biases", "summed"))  # that errors advise, spelled as in Python

Arguments = ParamSpec("Arguments")


class Format(StrEnum):
    """The forms of a report."""

    text = "text"
    json = "json"
    html = "html"


class Plain(StrEnum):
    """The forms of what needs no page of its own."""

    text = "text"
    json = "json"


def colourful(stream: TextIO) -> bool:
    """Whether to write colours: on a terminal that can show them, unless NO_COLOR is set
    (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def write(text: str) -> None:
    """Write data to stdout, with one line feed at its end."""
    sys.stdout.write(text.rstrip("\n") + "\n")


def complain(message: str) -> None:
    """Write an error to stderr."""
    from autotp.report.text import paint

    label = paint("error", "error", colourful(sys.stderr))
    text = message.removeprefix("error")
    print(label + (text if text.startswith("[") else f": {text.removeprefix(': ')}"), file=sys.stderr)


def report_findings(diagnostics: tuple[Diagnostic, ...], format: Format = Format.text) -> int:
    """Write findings alone, in the wanted form; returns the exit code that they mean.

    A plan file that cannot be read is no finding about a plan: it is said on stderr.
    """
    from autotp.report import findings

    if any(finding.code == UNREADABLE for finding in diagnostics):
        complain("\n\n".join(finding.render() for finding in diagnostics))
        return USAGE
    if format is Format.json:
        write(findings.as_json(diagnostics))
    elif format is Format.html:
        write(findings.as_html(diagnostics))
    else:
        write(findings.as_text(diagnostics, colour=colourful(sys.stdout)))
    return FINDINGS if errors(diagnostics) else FINE


def guarded(command: Callable[Arguments, int]) -> Callable[Arguments, None]:
    """A command that returns its exit code, turned into one that exits with it.

    What a user can cause is said in one message, never a traceback: findings of a plan on stdout
    (exit 1), every other error of autotp or of the file system on stderr (exit 2). Ctrl-C and a
    reader that went away are silent.
    """

    options = inspect.signature(command).parameters

    def spelled(text: str) -> str:
        for option, value in OPTIONS if "check" in options else ():
            text = text.replace(f'{option}="{value}"', f"--{option} {value}")
        return text

    @functools.wraps(command)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            code = command(*args, **kwargs)
            sys.stdout.flush()
        except PlanError as refused:
            found = (replace(one, help=tuple(map(spelled, one.help))) for one in refused.diagnostics)
            code = report_findings(tuple(found))
        except AutotpError as error:
            complain(spelled(str(error)))
            code = USAGE
        except KeyboardInterrupt:
            code = INTERRUPTED
        except BrokenPipeError:
            # what is still buffered has no reader; without this the interpreter complains at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = BROKEN_PIPE
        except OSError as error:
            name = f"{error.filename}: " if error.filename else ""
            complain(f"{name}{error.strerror or error}")
            code = USAGE
        except typer.Exit:
            raise
        except Exception as error:
            if os.environ.get("AUTOTP_TRACEBACK"):
                raise
            complain(
                f"{type(error).__name__}: {error}\n"
                "  = note: raised by the model's own code, or a fault of autotp\n"
                "  = help: AUTOTP_TRACEBACK=1 shows where"
            )
            code = USAGE
        raise typer.Exit(code)

    return run
