"""A model from `package.module:factory`. This file imports torch, and runs the user's code."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from autotp.diagnostic import UsageError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["build", "said"]

HELP = "  = help: a factory takes no arguments and returns an nn.Module, or (module, inputs)"


def build(target: str) -> tuple[nn.Module, Any]:
    """Call the factory that `target` names; returns the model and its sample inputs, if it gave any.

    The current folder can be imported from. What the user's code prints goes to stderr. Raises
    UsageError, with the line of the user's code, for whatever goes wrong there.
    """
    from autotp.versions import check_torch

    check_torch()
    from torch import nn

    module_name, _, attribute = target.partition(":")
    with contextlib.redirect_stdout(sys.stderr):
        factory = _find(target, module_name, attribute)
        if isinstance(factory, nn.Module):
            return factory, None
        if not callable(factory):
            raise UsageError(f"{target} is of type {type(factory).__name__}, not a factory\n{HELP}")
        made = _run(target, f"{target} raised", factory)
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{target} returned a value of type {type(made).__name__}, not an nn.Module\n{HELP}")
    return model, inputs


def _find(target: str, module_name: str, attribute: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = _run(target, f"importing {module_name} raised", importlib.import_module, module_name)
    except ModuleNotFoundError as missing:
        raise UsageError(
            f"{target}: there is no module {missing.name}\n"
            f"  = help: modules are looked for in {os.getcwd()} and in the installed packages"
        ) from None
    for place, name in enumerate(attribute.split(".")):
        if not hasattr(found, name):
            owner = ".".join([module_name, *attribute.split(".")[:place]])
            near = difflib.get_close_matches(name, dir(found), n=3)
            hint = f"\n  = help: did you mean {' or '.join(near)}?" if near else ""
            raise UsageError(f"{target}: {owner} has no {name}{hint}")
        found = getattr(found, name)
    return found


def _run(target: str, doing: str, function: Callable[..., Any], *args: object) -> Any:
    """Call the user's code; whatever it raises becomes one UsageError with file and line."""
    try:
        return function(*args)
    except ModuleNotFoundError as missing:
        wanted = target.partition(":")[0]
        if args and missing.name and (wanted + ".").startswith(missing.name + "."):
            raise
        raise UsageError(said(doing, missing)) from None
    except (Exception, SystemExit) as raised:
        raise UsageError(said(doing, raised)) from None


def said(doing: str, raised: BaseException) -> str:
    """What the user's code raised, on one line, and the line of that code."""
    first = (str(raised).strip().splitlines() or [""])[0]
    name = type(raised).__name__
    return "\n".join([f"{doing} {name}" + (f": {first}" if first else ""), *_place(raised)])


def _place(raised: BaseException) -> Iterator[str]:
    """The innermost line outside of the import machinery and of this file."""
    if isinstance(raised, SyntaxError) and raised.filename:
        yield f"  --> {raised.filename}:{raised.lineno}"
        return
    frames = traceback.extract_tb(raised.__traceback__)
    mine = [f for f in frames if not f.filename.startswith("<frozen") and f.filename not in _OWN]
    if mine:
        yield f"  --> {mine[-1].filename}:{mine[-1].lineno}"


_OWN = (__file__, importlib.__file__)
