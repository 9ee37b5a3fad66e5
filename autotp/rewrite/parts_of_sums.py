"""Modules whose output is a part of a sum, since one reduce after the sum of branches serves them all.

What they give is whole on no rank. A hook that looks at it would see one rank's part without a word, so it is
refused; where hooks are there before the model is sharded, each layer reduces.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from autotp.diagnostic import UsageError
from autotp.rewrite.edits.edit import Edits, Mapped

__all__ = ["is_looked_at", "watch_parts"]


def is_looked_at(model: nn.Module, rows: Iterable[str]) -> bool:
    """Whether a forward hook stands on any of these layers, or on a module around them."""
    around = {".".join(path.split(".")[:n]) for path in rows for n in range(1, path.count(".") + 2)}
    return any(model.get_submodule(path)._forward_hooks for path in around)


def watch_parts(model: nn.Module, rows: Iterable[str], edits: Edits) -> None:
    """Let the row layers whose output stays partial, and the modules around them within the one that sums,
    raise in a forward in which a hook would see a part."""
    sums = {e.module for e in edits.edits if isinstance(e.wrapper, Mapped)}
    for path in rows:
        while path and path not in sums:
            module = model.get_submodule(path)
            if not any(isinstance(hook, _Parts) for hook in module._forward_pre_hooks.values()):
                module.register_forward_pre_hook(_Parts(path))
            path = path.rpartition(".")[0]


@dataclass
class _Parts:
    """A forward pre-hook."""

    path: str

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if any(map(_looks, module._forward_hooks.values())):
            raise UsageError(
                f"{self.path}: a forward hook would see this rank's part of a sum, which is reduced after it "
                "is added to another branch's\n  = help: register the hook before the model is sharded, and "
                "each layer reduces by itself; or put it on the module that adds them"
            )


def _looks(hook: Any) -> bool:
    """autotp's own, by which a module leaves the rank's random stream, looks at nothing."""
    return not str(getattr(hook, "__module__", "")).startswith("autotp.")
