"""Plain attributes of a model's modules and of their configs that were set since the model was sharded.

A flag that the forward reads (`model.causal = True`, `model.config.use_cache = False`) may take another way
as an argument does. So before each call those attributes are looked at whose names stand in the code that
the traces ran; comparing one takes some 40 ns. What the forward itself writes, and no later call reads, is
left out, and submodules, tensors and hooks that were put in place of others are not looked at. What the code
asks of torch itself (`torch.is_inference_mode_enabled()`) is looked at likewise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from autotp.trace.carried import methods_of
from autotp.trace.signature import described

__all__ = ["Attributes", "names_in"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_CALLED = (FunctionType, BuiltinFunctionType, type)
_HELD = (list, dict, set, tuple)
_MOST = 64  # elements of a container that is looked into
_MISSING = object()
_SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "is_inference_mode_enabled": torch.is_inference_mode_enabled,
    "get_default_dtype": torch.get_default_dtype,
}
_Place = tuple[str, tuple[str, ...]]
"""The path of a module, and the attributes on the way to an object that it holds."""


class Attributes:
    """The attributes of one model. `state` says which are others than when it was sharded: "" for none."""

    def __init__(
        self, model: nn.Module, names: frozenset[str], written: frozenset[str], left: frozenset[str]
    ) -> None:
        self.state = ""
        self.values: dict[_Place, dict[str, Any]] = {}
        self.dtype = _dtype(model)
        self.asked = {name: ask() for name, ask in _SURROUNDINGS.items() if name in names}
        self._around = self.asked
        self._seen: list[tuple[dict[str, Any], str, Any]] | None = None
        for place, held in _holders(model):
            path = place[0]
            if not place[1] and _has_one_way(model.get_submodule(path)):
                continue
            read = names | _read_by(_class(model, path))
            names_of = {key: ".".join(filter(None, (path, *place[1], key))) for key in held}
            kept = {
                key: _kept(value)
                for key, value in held.items()
                if (key in read and _is_plain(value) and (place[1] or key not in _OF_MODULES))
                or names_of[key] in left
                if names_of[key] not in written
            }
            if kept:
                self.values[place] = kept

    def look(self, model: nn.Module) -> str:
        """The state now."""
        if self._seen is None or self._is_other():
            holders = dict(_holders(model))
            self._first, self._now = _first(model), _dtype(model)
            self._seen = [
                (held, key, _kept(held.get(key, _MISSING)))
                for place, kept in self.values.items()
                if (held := holders.get(place)) is not None
                for key in kept
            ]
            self._around = {name: _SURROUNDINGS[name]() for name in self.asked}
            self.state = ", ".join(self._told(holders))
        return self.state

    def _is_other(self) -> bool:
        """Whether anything is another than when it was last looked at."""
        assert self._seen is not None
        if self._first is not None and self._first[0][self._first[1]].dtype != self._now:
            return True
        if any(_SURROUNDINGS[name]() != was for name, was in self._around.items()):
            return True
        for held, key, value in self._seen:
            now = held.get(key, _MISSING)
            if now is not value and not _same(now, value):
                return True
        return False

    def _told(self, holders: dict[_Place, dict[str, Any]]) -> Iterator[str]:
        """The attributes that are others than when the model was sharded, in words."""
        if self._now != self.dtype:
            yield f"parameters={self._now}"
        for name, was in self.asked.items():
            if self._around[name] != was:
                yield f"torch.{name}()={self._around[name]}"
        for (path, steps), kept in self.values.items():
            held = holders.get((path, steps), {})
            for key, value in kept.items():
                now = held.get(key, _MISSING)
                if now is not value and not _same(now, value):
                    word = "gone" if now is _MISSING else " ".join(described(now, "").values())
                    yield f"{'.'.join(filter(None, (path, *steps, key)))}={word}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Attributes:
        new = Attributes.__new__(Attributes)
        new.__dict__.update(self.__getstate__())
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {
            "state": "", "values": self.values, "dtype": self.dtype, "asked": self.asked,
            "_around": self.asked, "_seen": None,
        }  # fmt: skip


def names_in(codes: Iterator[CodeType]) -> frozenset[str]:
    """The names of attributes and globals in these codes and in those inside of them."""
    found: set[str] = set()
    todo = list(codes)
    while todo:
        code = todo.pop()
        found |= {*code.co_names}
        todo += [c for c in code.co_consts if isinstance(c, CodeType)]
    return frozenset(found)


@lru_cache(maxsize=1024)
def _read_by(kind: Any) -> frozenset[str]:
    """The names in a module's own methods, but for those that do not run in a forward."""
    return names_in(code for _, code in methods_of(kind))


def _class(model: nn.Module, path: str) -> Any:
    return type(model.get_submodule(path))


_ONE_WAY = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.modules.dropout._DropoutNd, nn.Identity)
"""Layers with one way through them; of dropouts see `rewrite/rates.py`."""


def _has_one_way(module: nn.Module) -> bool:
    own = type(module).forward.__module__.partition(".")[0] not in ("torch", "autotp")
    return isinstance(module, _ONE_WAY) and not own


_OF_MODULES = frozenset(vars(nn.Module()))


def _is_plain(value: Any) -> bool:
    if isinstance(value, _CALLED) or type(value) in _PLAIN:
        return True
    if type(value) not in _HELD or len(value) > _MOST:
        return False
    inside = (*value, *value.values()) if isinstance(value, dict) else value
    return all(type(part) in _PLAIN for part in inside)


def _holders(model: nn.Module) -> Iterator[tuple[_Place, dict[str, Any]]]:
    """The tables of attributes of each module, and of the plain objects that it holds; each once."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        todo: list[tuple[tuple[str, ...], Any]] = [((), module)]
        while todo:
            steps, value = todo.pop()
            held = vars(value)
            if id(held) in seen:
                continue
            seen.add(id(held))
            yield (path, steps), held
            if len(steps) < 2:
                todo += [((*steps, key), part) for key, part in held.items() if _holds(part)]


def _holds(value: Any) -> bool:
    """Whether it is an object of a person's class: a config."""
    kind = type(value)
    if isinstance(value, (nn.Module, torch.Tensor, type, FunctionType)) or callable(value):
        return False
    return hasattr(value, "__dict__") and kind.__module__.partition(".")[0] not in _OTHERS


_OTHERS = ("torch", "autotp", "builtins")


def _kept(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, _HELD) else value


def _same(now: Any, value: Any) -> bool:
    if type(now) is not type(value) or isinstance(now, torch.Tensor):
        return False
    try:
        return bool(now == value)
    except Exception:  # of tensors in a container
        return False


def _first(model: nn.Module) -> tuple[dict[str, Any], str] | None:
    """Where the first parameter of floats stands: its dtype is the model's."""
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                return module._parameters, key
    return None


def _dtype(model: nn.Module) -> torch.dtype | None:
    first = _first(model)
    return None if first is None else first[0][first[1]].dtype
