"""What a module gives that the proof did not look into, as its forward asks for values.

The proof holds for results of as many dims as on the ways through the module that were traced
(`trace/ways.py`). What the module has kept may show another way later, so its results are looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autotp.diagnostic import UnprovenPath
from autotp.trace.signature import GRADIENT, told_of

__all__ = ["watch_results"]


def watch_results(model: nn.Module, path: str, gives: frozenset[frozenset[tuple[str, str]]]) -> None:
    """Let the module at `path` raise where it gives another result than one of `gives`."""
    model.get_submodule(path).register_forward_hook(_Results(path, gives))


@dataclass
class _Results:
    """A forward hook."""

    path: str
    gives: frozenset[frozenset[tuple[str, str]]]

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], out: Any) -> None:
        if torch.compiler.is_compiling() or (found := told_of(out)) in self.gives:
            return
        if any(_within(found, known) for known in self.gives):
            return
        every = frozenset[tuple[str, str]]().union(*self.gives)
        place, word = min(found - every or found)
        raise UnprovenPath(
            f"{self.path}: it gives {word}{f' at {place}' if place else ''}, which it gave in no traced "
            "forward; autotp did not look into it, since it asks tensors for their values"
        )


def _within(found: frozenset[tuple[str, str]], known: frozenset[tuple[str, str]]) -> bool:
    """Whether it is as it was traced, but for tensors that lack the gradient that they had there."""
    return len(found) == len(known) and all(
        (place, word) in known or (place, word + GRADIENT) in known for place, word in found
    )
