"""Which layers of a model look alike: same classes, same tensors, same settings.

This is a guess of what may repeat (`trace/repeats.py`), and no more: each layer still runs in every trace,
and is recorded on its own where it does anything else than the layer it looks like.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["Layers", "look"]

_LAYERS, _MODULES = 2, 3  # with fewer layers that look alike, or modules in a layer, nothing is gained
_SETTINGS = (bool, float, str, torch.dtype, enum.Enum)


@dataclass
class Layers:
    """The layers that look alike, by their path: those of one number. `apart` are those of them that turned
    out to differ; `remember` whether ops are remembered (`trace/remembered.py`)."""

    groups: Mapping[str, int] = field(default_factory=dict)
    apart: set[str] = field(default_factory=set)
    remember: bool = True

    @classmethod
    def of(cls, module: nn.Module, marks: Mapping[str, Hashable] | None = None) -> Layers:
        """The outermost layers of `module` that look alike. `marks` are further differences, by the path of
        a module: what a plan says of it.

        >>> stack = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
        >>> Layers.of(stack).groups
        {'0': 0, '1': 0, '2': 0}
        >>> Layers.of(stack, {"1.0": "column"}).groups
        {'0': 0, '2': 0}
        """
        groups: dict[str, int] = {}
        for number, paths in enumerate(_alike(module, "", marks or {}, {id(module)})):
            groups.update(dict.fromkeys(paths, number))
        return cls(groups)


def _alike(
    module: nn.Module, path: str, marks: Mapping[str, Hashable], seen: set[int]
) -> Iterator[list[str]]:
    children: dict[str, nn.Module] = {}
    for name, child in module._modules.items():
        if child is not None and id(child) not in seen:
            seen.add(id(child))
            children[f"{path}.{name}" if path else name] = child
    classes: dict[type, int] = {}
    for child in children.values():
        classes[type(child)] = classes.get(type(child), 0) + 1
    found: dict[Any, list[str]] = {}
    for place, child in children.items():
        if classes[type(child)] >= _LAYERS and len(list(child.modules())) >= _MODULES:
            found.setdefault(look(child, place, marks), []).append(place)
    large = [places for places in found.values() if len(places) >= _LAYERS]
    yield from large
    taken = {place for places in large for place in places}
    for place, child in children.items():
        if place not in taken:
            yield from _alike(child, place, marks, seen)


def look(layer: nn.Module, place: str, marks: Mapping[str, Hashable]) -> Hashable:
    """What can be seen of a layer without running it."""
    found: list[Any] = []
    for path, module in layer.named_modules():
        tensors = (*module._parameters.items(), *module._buffers.items())
        whole = f"{place}.{path}" if path else place
        found.append((
            path, type(module), module.training, marks.get(whole),
            tuple((n, None if t is None else (tuple(t.shape), t.dtype, t.stride())) for n, t in tensors),
            tuple((n, v) for n, v in vars(module).items() if v is None or isinstance(v, _SETTINGS)),
        ))  # fmt: skip
    return tuple(found)
