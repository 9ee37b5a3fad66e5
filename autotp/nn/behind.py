"""Parallel layers behind a subclass of torch's, in a class of its own, where `super()` finds them."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["behind"]

_MADE: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def behind(kind: type[nn.Module], layer: type[nn.Module]) -> Any:
    """`kind`, a subclass of a torch layer, with the parallel `layer` behind it; one class for all instances.

    Its instances keep the name, the methods and the attributes of `kind`, and can be copied and pickled.
    """
    if (kind, layer) not in _MADE:
        body: dict[str, Any] = {
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__doc__": kind.__doc__,
            "__reduce_ex__": _reduce,
        }
        _MADE[kind, layer] = type(kind.__name__, (kind, layer), body)
    return _MADE[kind, layer]


def _reduce(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    kind, layer = type(module).__bases__
    return _made_again, (kind, layer), module.__dict__


def _made_again(kind: type[nn.Module], layer: type[nn.Module]) -> nn.Module:
    made = behind(kind, layer)
    new: nn.Module = made.__new__(made)
    return new
