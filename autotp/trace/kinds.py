"""Layers of one kind are traced once.

Two elements of an `nn.ModuleList` are of one kind if they have the same classes, tensors and settings, and
the caller's marks (what a plan says of them) agree. Of each list the shortest prefix stays in which every
kind, every kind after every other that it follows, and at the end the kind of the last element stand: what
one layer hands to the next is traced for each pair. It is a prefix because models index lists of their
config by the layer's number.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from autotp.trace.indexed import decides_by_attribute, decides_by_position

__all__ = ["Shortened", "kinds", "prefix", "shorten"]

_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
_SKIPPED = frozenset(["_parameters", "_buffers", "_modules", "training"])


@dataclass(frozen=True)
class Shortened:
    """What was left out: `kept` is how many elements of each list stay, by its path; `twins` says for each
    element left out which kept one is of its kind."""

    kept: Mapping[str, int] = field(default_factory=dict)
    twins: Mapping[str, str] = field(default_factory=dict)

    def twin(self, name: str) -> str:
        """The module or tensor that stands for `name`: itself, where it is kept.

        >>> Shortened({"layers": 2}, {"layers.5": "layers.1"}).twin("layers.5.mlp.weight")
        'layers.1.mlp.weight'
        """
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            found = self.twins.get(".".join(parts[:end]))
            if found is not None:
                return self.twin(".".join([found, *parts[end:]]))
        return name


@contextlib.contextmanager
def shorten(module: nn.Module, marks: Mapping[str, Hashable] | None = None) -> Iterator[Shortened]:
    """Leave only the prefix of each list of layers in `module` while the context lasts.

    `marks` are further differences, by the path of a module or the name of a tensor.

    >>> class Stack(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(9))
    >>> with shorten(Stack()) as short:
    ...     short.kept, short.twin("layers.8.bias")
    ({'layers': 2}, 'layers.1.bias')
    """
    kept: dict[str, int] = {}
    twins: dict[str, str] = {}
    removed: list[tuple[nn.ModuleList, dict[str, Any]]] = []
    first = _first_names(module)
    try:
        for path, owner, name, layers in _lists(module):
            if any(path.startswith(f"{gone}.") for gone in twins) or decides_by_position(type(owner), name):
                continue
            found = kinds(module, path, layers, marks or {}, first)
            length = prefix(found)
            if length == len(layers):
                continue
            kept[path] = length
            for index in range(length, len(layers)):
                # The last one: what it is given has been through a layer, as what the others are given.
                twin = max(i for i in range(length) if found[i] == found[index])
                twins[f"{path}.{index}"] = f"{path}.{twin}"
            removed.append((layers, dict(layers._modules)))
            for index in range(length, len(layers)):
                del layers._modules[str(index)]
        yield Shortened(kept, twins)
    finally:
        for layers, before in reversed(removed):
            layers._modules.clear()
            layers._modules.update(before)


def prefix(found: list[int]) -> int:
    """The length of the shortest prefix with every kind, every pair of neighbours, and the last kind last.

    >>> prefix([0, 0, 0, 0]), prefix([0, 0, 1, 1, 1]), prefix([0, 1, 0, 1, 0, 1])
    (2, 4, 4)
    """
    pairs = set(pairwise(found))
    for length in range(1, len(found)):
        part = found[:length]
        if set(pairwise(part)) == pairs and part[-1] == found[-1]:
            return length
    return len(found)


def kinds(
    root: nn.Module,
    path: str,
    layers: nn.ModuleList,
    marks: Mapping[str, Hashable],
    first: Mapping[str, str],
) -> list[int]:
    """The kind of each element, numbered in the order of their appearance."""
    counting = _counting(layers)
    lists = _config_lists(root, layers, len(layers))
    numbers: dict[Any, int] = {}
    found = []
    for index, layer in enumerate(layers):
        place = f"{path}.{index}"
        told = (
            tuple(_signature(layer, counting)),
            tuple(values[index] for values in lists),
            tuple(_shared(layer, place, first)),
            tuple(
                sorted(
                    (k[len(place) :], repr(v)) for k, v in marks.items() if f"{k}.".startswith(f"{place}.")
                )
            ),
        )
        found.append(numbers.setdefault(told, len(numbers)))
    return found


def _lists(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.ModuleList]]:
    """Every list of layers, the outer ones first, with its owner and its name there."""
    for path, owner in list(module.named_modules()):
        for name, child in list(owner._modules.items()):
            if type(child) is nn.ModuleList and len(child) > 2:
                yield f"{path}.{name}" if path else name, owner, name, child


def _counting(layers: nn.ModuleList) -> set[tuple[str, str]]:
    """The attributes that only number the layers, (path inside of a layer, name): nothing decides by them."""
    found: set[tuple[str, str]] = set()
    for path, module in layers[0].named_modules():
        for name, value in vars(module).items():
            if type(value) is not int:
                continue
            values = [_attribute(layer, path, name) for layer in layers]
            numbered = all(type(v) is int and v == value + i for i, v in enumerate(values))
            if numbered and not decides_by_attribute(type(module), name):
                found.add((path, name))
    return found


def _attribute(layer: nn.Module, path: str, name: str) -> Any:
    try:
        return vars(layer.get_submodule(path)).get(name)
    except AttributeError:
        return None


def _config_lists(root: nn.Module, layers: nn.ModuleList, length: int) -> list[list[str]]:
    """Lists of the configs in reach with an entry for each layer: `layer_types`, `no_rope_layers`."""
    configs = {id(c): c for m in (root, *root.modules()) if (c := getattr(m, "config", None)) is not None}
    values = [v for config in configs.values() for v in getattr(config, "__dict__", {}).values()]
    return [[repr(x) for x in v] for v in values if isinstance(v, (list, tuple)) and len(v) == length]


def _signature(layer: nn.Module, counting: set[tuple[str, str]]) -> Iterator[Any]:
    for path, module in layer.named_modules():
        yield path, type(module)
        for table in (module._parameters, module._buffers):
            yield tuple((n, t if t is None else (tuple(t.shape), str(t.dtype))) for n, t in table.items())
        for name, value in vars(module).items():
            if name not in _SKIPPED and (path, name) not in counting:
                yield name, _told(value, 0)


def _told(value: Any, depth: int) -> Hashable:
    """What can be compared of a setting."""
    if isinstance(value, _SCALARS):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype)
    if depth > 3 or isinstance(value, nn.Module):
        return type(value).__qualname__
    if isinstance(value, Mapping):
        return tuple((repr(k), _told(v, depth + 1)) for k, v in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return tuple(_told(v, depth + 1) for v in value)
    if callable(value) and not isinstance(value, nn.Module):
        return _called(value)
    if type(value).__module__.partition(".")[0] == "transformers":
        return type(value).__qualname__, id(value)  # a config; shared by all layers, or each its own
    return type(value).__qualname__, _told(vars(value), depth + 1) if hasattr(value, "__dict__") else repr(
        value
    )


def _called(value: Callable[..., Any]) -> Hashable:
    function = getattr(value, "__func__", value)
    return getattr(function, "__module__", ""), getattr(function, "__qualname__", type(value).__qualname__)


def _first_names(module: nn.Module) -> dict[str, str]:
    """The further names of shared tensors, and their first."""
    seen: dict[int, str] = {}
    found: dict[str, str] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        for key, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                name = f"{path}.{key}" if path else key
                if seen.setdefault(id(tensor), name) != name:
                    found[name] = seen[id(tensor)]
    return found


def _shared(layer: nn.Module, place: str, first: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The tensors that a layer shares, with what."""
    shared = {*first, *first.values()}
    for path, owner in layer.named_modules():
        for key in (*owner._parameters, *owner._buffers):
            inside = f"{path}.{key}" if path else key
            if f"{place}.{inside}" in shared:
                yield inside, first.get(f"{place}.{inside}", f"{place}.{inside}")
