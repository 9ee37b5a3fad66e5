"""Plain attributes of a model's modules and of their configs that were set since the model was sharded.

A flag that the forward reads (`model.causal = True`, `model.config.use_cache = False`) may take another way
as an argument does. So before each call those attributes are looked at whose names stand in the code that
the traces ran, or in what it reads (`getattr(self, self.word)`), all of an object that it reads whole, and
what else that code reads (`rewrite/around.py`); comparing one takes some 40 ns. What the
forward itself writes, and no later call reads, is left out, and tensors and hooks that were put in place of
others are not looked at. A module whose flag `training` is another than the model's counts as such an
attribute. With a module that was put in place of another, and does not hold it, no call can be proven. What
the code asks of torch itself (`torch.is_inference_mode_enabled()`) is looked at likewise.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from autotp.rewrite.around import (
    MISSING,
    Seen,
    Table,
    around,
    has_number,
    is_plain,
    kept,
    objects_in,
    same,
    table_of,
    word_of,
)
from autotp.trace.carried import methods_of
from autotp.trace.consulted import ANY, ASKING, Consulted, asked_in, names_in

__all__ = ["Attributes"]

_SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "is_inference_mode_enabled": torch.is_inference_mode_enabled,
    "get_default_dtype": torch.get_default_dtype,
    "are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled,
    "get_float32_matmul_precision": torch.get_float32_matmul_precision,
}
_Place = tuple[str, tuple[str, ...]]
"""The path of a module, and the attributes on the way to an object that it holds."""


class Attributes:
    """The attributes of one model. `state` says which are others than when it was sharded: "" for none;
    `replaced` where modules stand in place of others, so that nothing can be proven."""

    def __init__(
        self, model: nn.Module, read: Consulted, written: frozenset[str], left: frozenset[str]
    ) -> None:
        self.state, self.replaced = "", ""
        self.values: dict[_Place, dict[str, Any]] = {}
        self.whole: set[_Place] = set()  # of which the code may read every attribute
        self.read, self.written = read, written
        self.modules: dict[str, Any] = {"": model} | {place: child for place, _, _, child in _children(model)}
        self.read = replace(read, asked=read.asked | _words(self._stored(), read))
        self.dtype = _dtype(model)
        self.asked = {name: ask() for name, ask in _SURROUNDINGS.items() if name in read.names}
        self._around = self.asked
        self.words = _worded(self._outside())
        self.empty = frozenset(place for place, *_ in self._empty())
        self._seen: Seen | None = None
        self._sizes: list[tuple[Mapping[str, Any], int]] = []
        read = self.read
        for place, value in _objects(self.modules):
            path, held = place[0], table_of(value)
            module = None if place[1] else self.modules[path]
            if module is not None and _has_one_way(module):
                self.values[place] = {"forward": held.get("forward", MISSING)}
                continue
            names = read.names | read.asked | _read_by(_class(self.modules[path]), True)
            keys = {key for key in held if key in names and is_plain(held[key])}
            if self._reads_all(value):
                self.whole.add(place)
                keys |= {key for key in held if is_plain(held[key])}
            if module is None:
                keys |= (read.names | read.asked) - held.keys()
            else:
                keys -= _OF_MODULES
                keys |= _hidden(_class(module), names, read.asked) - held.keys()
                keys |= _tried(_class(module)) - held.keys()
                if path:
                    keys.add("forward")
            names_of = {key: ".".join(filter(None, (path, *place[1], key))) for key in keys | held.keys()}
            keys |= {key for key in held if names_of[key] in left}
            found = {
                key: kept(held.get(key, MISSING)) for key in sorted(keys) if names_of[key] not in written
            }
            if found or place in self.whole:
                self.values[place] = found

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def look(self) -> str:
        """The state now. The compiler asks once, and compiles anew where what the code reads is another."""
        model = self.modules[""]
        if self._seen is None or self._is_other():
            holders = dict(_holders(self.modules))
            self._first, self._now = _first(model), _dtype(model)
            self._sizes, seen = [], list[tuple[Table, str]]()
            for place, found in self.values.items():
                held = holders.get(place)
                if held is not None:
                    self._sizes.append((held, len(held)))
                    seen += [(held, key) for key in found if key in held]
            outside = list(self._outside())
            words = _worded(outside)
            seen += [(table, key) for _, table, key in outside]
            seen += [
                (vars(module), "training")
                for module in self.modules.values()
                if module is model or "training" in _read_by(_class(module))
            ]
            seen += [(table, key) for _, table, key, _ in _children(model)]
            for module in self.modules.values():
                if self._runs_all(module) or _tried(_class(module)):
                    self._sizes.append((module._modules, len(module._modules)))
                new = _hidden(_class(module), self.read.names, self.read.asked) - module._modules.keys()
                seen += [(module._modules, key) for key in new]
            seen += [(table, key) for _, table, key in self._empty()]
            self._seen = Seen(seen)
            self._around = {name: _SURROUNDINGS[name]() for name in self.asked}
            self.replaced = ", ".join(self._others(model))
            self.state = ", ".join(filter(None, (self.replaced, *self._told(model, holders, words))))
        return self.state

    def _is_other(self) -> bool:
        """Whether anything is another than when it was last looked at."""
        assert self._seen is not None
        if self._first is not None and self._first[0][self._first[1]].dtype != self._now:
            return True
        for name, was in self._around.items():
            if _SURROUNDINGS[name]() != was:
                return True
        for held, size in self._sizes:  # what came into being
            if len(held) != size:
                return True
        return self._seen.is_other()

    def _reads_all(self, value: Any) -> bool:
        if isinstance(value, nn.Module):
            return self.read.any_name and not ANY.isdisjoint(_read_by(_class(value)))
        return self.read.reads_all(type(value))

    def _stored(self) -> Iterator[Any]:
        """What stands where the code reads, in attributes and elsewhere."""
        for _, held in _holders(self.modules):
            yield from (held[key] for key in list(held) if key in self.read.names)
        for _, table, key in self._outside():
            yield table.get(key, None)

    def _outside(self) -> Iterator[tuple[str, Table, str]]:
        held = (
            (place, table, key)
            for (path, steps), table in _holders(self.modules)
            for key in list(table)
            if (key in self.read.names or key == "forward") and key not in _OF_MODULES
            if (place := ".".join(filter(None, (path, *steps, key)))) not in self.written
        )
        return around(map(type, self.modules.values()), self.read, held)

    def _empty(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """The places of tensors and modules that the code of a module reads, and where none stands."""
        for path, module in self.modules.items():
            for table in (
                () if _has_one_way(module) else (module._modules, module._parameters, module._buffers)
            ):
                for key, held in table.items():
                    if held is None and key in self.read.names:
                        yield f"{path}.{key}" if path else key, table, key

    def _others(self, model: nn.Module) -> Iterator[str]:
        """The places where another module stands than did, which does not hold that one."""
        found: list[str] = []
        held: list[str] = []  # places whose module is inside of another one now
        now = {place: child for place, _, _, child in _children(model)}
        for place in sorted((now.keys() | self.modules.keys()) - {""}):
            new, old = now.get(place), self.modules.get(place)
            if new is old or place.startswith((*held, *found)):
                continue
            if new is not None and old is not None and any(module is old for module in new.modules()):
                held.append(f"{place}.")
            elif old is not None or self._may_run(place):
                found.append(f"{place}.")
                yield place

    def _may_run(self, place: str) -> bool:
        """Whether the code may come to a module that stands at a place where there was none."""
        path, _, key = place.rpartition(".")
        around = self.modules.get(path)
        return key in self.read.names | self.read.asked or (
            isinstance(around, nn.Module) and self._runs_all(around)
        )

    def _runs_all(self, module: nn.Module) -> bool:
        """Whether the code may run whatever modules this one holds."""
        if isinstance(module, nn.ModuleDict):
            return not _PARTS.isdisjoint(self.read.names)
        loops = not _CHILDREN.isdisjoint(self.read.names & _read_by(_class(module)))
        return isinstance(module, (nn.ModuleList, nn.Sequential)) or loops

    def _told(
        self, model: nn.Module, holders: dict[_Place, Mapping[str, Any]], words: dict[str, str]
    ) -> Iterator[str]:
        """What else is other than when the model was sharded, in words."""
        for path, module in self.modules.items():
            if module.training is not model.training and "training" in _read_by(_class(module)):
                yield f"{path}.training={module.training}"
        for place in sorted(words.keys() | self.words.keys()):
            word = words.get(place, "gone")
            if word != self.words.get(place, "gone"):
                yield f"{place}={word}"
        for place in sorted(self.empty.difference(place for place, *_ in self._empty())):
            yield f"{place}={word_of(operator.attrgetter(place)(model))}"
        if self._now != self.dtype:
            yield f"parameters={self._now}"
        for name, was in self.asked.items():
            if self._around[name] != was:
                yield f"torch.{name}()={self._around[name]}"
        for (path, steps), found in self.values.items():
            held = holders.get((path, steps), {})
            for key, value in found.items():
                given = held.get(key, MISSING)
                if given is not value and not same(given, value):
                    yield f"{'.'.join(filter(None, (path, *steps, key)))}={word_of(given)}"
            for key in held.keys() - found.keys() if (path, steps) in self.whole else ():
                name = ".".join(filter(None, (path, *steps, key)))
                if is_plain(held[key]) and name not in self.written and key not in (*_OF_MODULES, "forward"):
                    yield f"{name}={word_of(held[key])}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Attributes:
        new = memo[id(self)] = Attributes.__new__(Attributes)
        new.__dict__.update(self.__getstate__())
        new.modules = {place: copy.deepcopy(module, memo) for place, module in self.modules.items()}
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {
            "state": "", "replaced": "", "values": self.values, "read": self.read,
            "written": self.written, "dtype": self.dtype,
            "asked": self.asked, "_around": self.asked, "words": self.words, "modules": self.modules,
            "empty": self.empty, "whole": self.whole, "_seen": None, "_sizes": [],
        }  # fmt: skip


@lru_cache(maxsize=1024)
def _read_by(kind: Any, of_torch: bool = False) -> frozenset[str]:
    """The names in a module's own methods, but for those that do not run in a forward; of those of torch
    alone, which no trace notes."""
    return names_in(
        function.__code__ for base, function in methods_of(kind)
        if not of_torch or base.__module__.partition(".")[0] == "torch"
    )  # fmt: skip


_CHILDREN = frozenset(["children", "named_children", "modules", "named_modules", "_modules"])
_PARTS = _CHILDREN | {"values", "items", "keys"}


@lru_cache(maxsize=1024)
def _tried(kind: Any) -> frozenset[str]:
    """The names in those of a module's own methods that may go on without what they name."""
    codes = [f.__code__ for _, f in methods_of(kind) if f.__code__.co_exceptiontable]
    return names_in(codes) - frozenset(dir(kind)) - frozenset(dir(torch.Tensor))


def _class(module: nn.Module) -> Any:
    return type(module)


_ONE_WAY = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.modules.dropout._DropoutNd, nn.Identity)
"""Layers with one way through them; of dropouts see `rewrite/rates.py`."""


def _has_one_way(module: nn.Module) -> bool:
    own = str(getattr(type(module).forward, "__module__", "")).partition(".")[0] not in ("torch", "autotp")
    return isinstance(module, _ONE_WAY) and not own


_OF_MODULES = frozenset(vars(nn.Module()))


@lru_cache(maxsize=1024)
def _hidden(kind: Any, names: frozenset[str], asked: frozenset[str]) -> frozenset[str]:
    """The attributes that a class has, or that its code may ask for, and an instance may come to have."""
    of_class = {key for base in kind.__mro__[: kind.__mro__.index(nn.Module)] for key in vars(base)}
    plain = frozenset(key for key in of_class & names if has_number(kind, key))
    return plain | (asked & asked_in(function.__code__ for _, function in methods_of(kind)))


def _children(model: nn.Module) -> Iterator[tuple[str, Any, str, nn.Module]]:
    """Every module by its place, and where it stands."""
    for path, module in model.named_modules():
        for key, child in module._modules.items():
            if child is not None:
                yield f"{path}.{key}" if path else key, module._modules, key, child


def _words(values: Iterable[Any], read: Consulted) -> frozenset[str]:
    """The words among these values, and in containers, by which code may ask attributes:
    `getattr(self, self.word)`."""
    if ASKING.isdisjoint(read.names):
        return frozenset()
    tables = (list, tuple, set, frozenset)
    flat = ([*value, *value.values()] if type(value) is dict else value for value in values)
    parts = (part for value in flat for part in (value if type(value) in tables else (value,)))
    return frozenset(part for part in parts if type(part) is str and part.isidentifier())


def _worded(places: Iterable[tuple[str, Table, str]]) -> dict[str, str]:
    """What stands in places, in words. A class and its edited copy have one name, and both count."""
    words: dict[str, dict[str, None]] = {}
    for place, table, key in places:
        words.setdefault(place, {})[word_of(table.get(key, MISSING))] = None
    return {place: " and ".join(found) for place, found in words.items()}


def _holders(modules: Mapping[str, nn.Module]) -> Iterator[tuple[_Place, Mapping[str, Any]]]:
    """The tables of attributes of each module, and of the objects that it holds; each once."""
    yield from ((place, table_of(value)) for place, value in _objects(modules))


def _objects(modules: Mapping[str, nn.Module]) -> Iterator[tuple[_Place, Any]]:
    """Each module, and the objects that it holds; each once."""
    seen: set[int] = set()
    for path, module in modules.items():
        todo: list[tuple[int, tuple[str, ...], Any]] = [(0, (), module)]
        while todo:
            depth, steps, value = todo.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            held = table_of(value)
            yield (path, steps), value
            if depth < 2:
                todo += [
                    (depth + 1, (*steps, key, *way), part)
                    for key, inside in held.items()
                    if value is not module or key not in _OF_MODULES
                    for way, part in objects_in(inside)
                ]


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
