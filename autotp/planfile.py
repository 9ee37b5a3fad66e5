"""Plan files: found by path or by the name of a shipped plan, and read as text.

A file that is no readable text is refused here (AT101); what stands in it is for `autotp.plantext`.
This file knows nothing of torch.
"""

from __future__ import annotations

import os
from pathlib import Path

from autotp.diagnostic import Diagnostic, PlanError
from autotp.planfault import Source, did_you_mean, named
from autotp.plantext import read
from autotp.shipped import plans_folder

__all__ = ["open_plan", "shipped_names"]

LARGEST_FILE = 1 << 20  # bytes
TEXT = "the text of a plan is read by `Plan.loads(text)`"
SUFFIXES = (".yaml", ".yml", ".json")


def shipped_names() -> tuple[str, ...]:
    """The names of the shipped plans, in order."""
    return tuple(sorted(path.stem for path in plans_folder().glob("*.yaml")))


def _refused(message: str, *, notes: tuple[str, ...] = (), help: tuple[str, ...] = ()) -> PlanError:
    return PlanError([Diagnostic("AT101", message, notes=notes, help=help)])


def open_plan(source: str | Path) -> Source:
    """Reads a plan file, or a shipped plan by name. Raises PlanError (AT101) when there is none."""
    name = str(source)
    try:
        path = Path(source)
    except TypeError:
        kind = type(source).__name__
        raise _refused(f"a plan is a Plan, a dict, a path or a name, not {kind}") from None
    there = os.path.exists(path)  # also for what is too long to be a name
    if not there and "\n" in name:
        raise _refused(f"no plan is named {named(name)}", help=(TEXT,))
    is_name = isinstance(source, str) and not {"/", "\\"} & set(name) and path.suffix not in SUFFIXES
    if is_name and name in shipped_names():
        return read(_text(plans_folder() / f"{name}.yaml"), f"plans/{name}.yaml")
    if is_name and not there:
        shipped = shipped_names()
        note = f"shipped plans: {', '.join(shipped)}"
        near = did_you_mean(name, shipped)
        help = near if near else ("a path to a plan file ends in .yaml or .json",)
        raise _refused(f"no plan is named {named(name)}", notes=(note,), help=help)
    return read(_text(path), str(path))


def _text(path: Path) -> str:
    """The text of a file. Raises PlanError (AT101) for what is no readable text file."""
    if not os.path.exists(path):
        beside = path.parent.iterdir() if path.parent.is_dir() else ()
        near = did_you_mean(path.name, [other.name for other in beside if other.suffix in SUFFIXES])
        raise _refused(f"{path}: no such file", help=near)
    if not path.is_file():
        raise _refused(f"{path}: is a {'folder' if path.is_dir() else 'device'}, not a plan file")
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise _refused(f"{path}: cannot be read: {error.strerror}") from None
    if len(raw) > LARGEST_FILE:
        raise _refused(f"{path}: larger than 1 MiB; a plan has some lines")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        byte = raw[error.start]
        raise _refused(f"{path}: not UTF-8 text: byte 0x{byte:02x} in line {line}") from None
