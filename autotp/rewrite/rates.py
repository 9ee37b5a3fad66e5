"""Dropout rates that were zero when a plan was proven, on values that are cut.

Dropout of rate zero draws nothing, and so its module has no random numbers of its own on each rank. With the
rate raised later (`module.p = 0.1`, `config.attention_dropout = 0.1`) every rank would drop the same elements
of its own part. The rates are looked at before each train forward of such a module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from autotp.diagnostic import UnprovenPath

__all__ = ["watch_rates"]


def watch_rates(model: nn.Module, path: str) -> None:
    """Let the module at `path` raise in a train forward whose dropout is no longer of rate zero."""
    module = model.get_submodule(path)
    found = tuple(name for name, rate in _rates(module) if rate == 0)
    if found:
        module.register_forward_pre_hook(_Rates(path or type(model).__name__, found))


@dataclass
class _Rates:
    """A forward pre-hook."""

    path: str
    zero: tuple[str, ...]

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not module.training:
            return
        for name, rate in _rates(module):
            if rate and name in self.zero:
                raise UnprovenPath(
                    f"{self.path}: {name} is {rate}, and was 0.0 when the plan was proven: every rank would "
                    "drop the same elements of its own part; set the rate before the model is sharded"
                )


def _rates(module: nn.Module) -> Iterator[tuple[str, float]]:
    """The numbers that a forward may take for its rate: a dropout's own, else the fractions among the
    attributes of the module and of its config."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        yield "p", module.p
        return
    for name, value in vars(module).items():
        if isinstance(value, float):
            yield name, value
    for name, value in vars(getattr(module, "config", module)).items():
        if isinstance(value, float):
            yield f"config.{name}", value
