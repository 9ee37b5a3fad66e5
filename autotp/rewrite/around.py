"""What the code of a forward reads that hangs on no instance of a module: globals, what functions close over,
attributes of classes, variables of the environment.

Looked at are the plain values (and the functions that stand for others) whose names the code has, on the way
through settings that are modules, classes or objects of a person's.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Iterator
from enum import Enum
from types import BuiltinFunctionType, CellType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, Protocol

import numpy
import torch
from torch import nn

from autotp.trace.consulted import Consulted
from autotp.trace.signature import described

__all__ = ["MISSING", "Seen", "Table", "around", "has_number", "holds", "is_plain", "kept", "same", "word_of"]


class MISSING:
    """Stands for a value where there is none."""


_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CALLED = (
    FunctionType, BuiltinFunctionType, MethodType, functools.partial, type, Enum, range, slice,
    torch.dtype, torch.device, torch.Size, numpy.generic,
)  # fmt: skip
_HELD = (list, dict, set, tuple, frozenset)
_MOST, _DEEP = 64, 3  # parts of a container, and objects on the way to a value


class Table(Protocol):
    """Where a value stands, by a key."""

    def get(self, key: str, default: Any, /) -> Any:
        """The value, or another one where there is none."""


def around(kinds: Iterable[type], read: Consulted) -> Iterator[tuple[str, Table, str]]:
    """Every place that the code of a model reads, whose modules are of these classes, with where it stands
    now; each once."""
    seen: set[int] = set()
    todo: list[tuple[str, Any, int]] = []
    for space, names in read.globals:
        for name in sorted(names):
            value = space.table.get(name, MISSING)
            if isinstance(value, (ModuleType, FunctionType, type)) and _is_others(value):
                continue
            place = f"{space.name}.{name}"
            yield place, space.table, name
            todo.append((place, value, 0))
    of_modules: dict[tuple[type, str], None] = {}
    for kind in dict.fromkeys(kinds):
        bases = [base for base in kind.__mro__ if not _is_others(base)]
        keys = {key for base in bases for key in vars(base) if key in read.names or key == "forward"}
        for key in sorted(keys - _OF_MODULES):
            number = has_number(kind, key)  # what one base has, another may come to have
            of_modules |= {(base, key): None for base in bases if number or key in vars(base)}
    for base, key in of_modules:
        yield f"{name_of(base)}.{key}", vars(base), key
        todo.append((f"{name_of(base)}.{key}", vars(base).get(key), 1))
    while todo:
        place, value, depth = todo.pop()
        if id(value) in seen or depth > _DEEP:
            continue
        seen.add(id(value))
        for name, table, key in _inside(value, read):
            yield f"{place}.{name}", table, key
            todo.append((f"{place}.{name}", table.get(key, None), depth + 1))
    for name in sorted(read.variables):
        yield f"os.environ[{name!r}]", os.environ, name


def name_of(kind: type) -> str:
    """A class, by its full name."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _inside(value: Any, read: Consulted) -> Iterator[tuple[str, Table, str]]:
    if isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            if not _is_own(_Cell(cell).get("", None)):
                yield f"<{name}>", _Cell(cell), name
        return
    if isinstance(value, (staticmethod, classmethod, property, functools.partial, MethodType)):
        inner = (
            getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "func", None)
        )
        yield from _inside(inner, read)
        return
    if isinstance(value, (ModuleType, type)):
        of_modules = isinstance(value, type) and issubclass(value, nn.Module)  # they are looked at anyhow
        for key in () if of_modules or _is_others(value) else list(vars(value)):
            if key in read.names and not key.startswith("__"):
                yield key, vars(value), key
        return
    if holds(value):
        for key in list(vars(value)):
            if (key in read.names or key in read.asked) and not key.startswith("__"):
                yield key, vars(value), key


_OF_MODULES = frozenset(dir(nn.Module)) - {"forward"}


class _Cell:
    """What a function closes over."""

    def __init__(self, cell: CellType) -> None:
        self.cell = cell

    def get(self, key: str, default: Any, /) -> Any:
        """What stands in it."""
        try:
            return self.cell.cell_contents
        except ValueError:
            return default


def holds(value: Any) -> bool:
    """Whether it is an object of a person's class: a config."""
    if isinstance(value, (nn.Module, torch.Tensor, type, FunctionType, ModuleType)) or callable(value):
        return False
    kind = type(value)
    return hasattr(value, "__dict__") and (kind.__module__ == "types" or not _is_others(kind))


def _is_others(value: Any) -> bool:
    """Whether it is code of torch, numpy or Python itself."""
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    package = str(name).partition(".")[0]
    return package in _FOREIGN or (package in sys.stdlib_module_names and package != "__main__")


def _is_own(value: Any) -> bool:
    """Whether it is a function that autotp wrote into an edited one."""
    return isinstance(value, FunctionType) and value.__module__.partition(".")[0] == "autotp"


_FOREIGN = ("torch", "numpy", "autotp", "einops", "builtins")


def has_number(kind: type, key: str) -> bool:
    """Whether a class has a value by this name, and no function or class."""
    value = next((vars(base)[key] for base in kind.__mro__ if key in vars(base)), MISSING)
    return is_plain(value) and not callable(value)


def is_plain(value: Any, deep: int = 2) -> bool:
    """Whether a value is compared: it is what it is, or its parts are."""
    if type(value) in _PLAIN or isinstance(value, _CALLED):
        return True
    if type(value) not in _HELD or len(value) > _MOST or not deep:
        return False
    inside = (*value, *value.values()) if isinstance(value, dict) else value
    return all(is_plain(part, deep - 1) for part in inside)


def kept(value: Any) -> Any:
    """A value as it is now."""
    if type(value) not in _HELD or not is_plain(value):
        return value
    return (
        type(value)(map(kept, value)) if type(value) is not dict else {k: kept(v) for k, v in value.items()}
    )


def same(now: Any, value: Any) -> bool:
    """Whether a value is as it was."""
    if type(now) is not type(value) or isinstance(now, torch.Tensor):
        return False
    try:
        return bool(now == value)
    except Exception:  # of tensors in a container
        return False


def word_of(value: Any, deep: int = 3) -> str:
    """What stands somewhere, in words; of an object that is looked into, or not at all, its class."""
    if value is MISSING:
        return "gone"
    if isinstance(value, FunctionType):
        words = list(described(value, "").values())[:1]
        held = [cell.get("", MISSING) for cell in map(_Cell, value.__closure__ or ())]
        held += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return " ".join([*words, *(word_of(part, deep - 1) for part in held)]) if deep else words[0]
    if isinstance(value, MethodType):
        return f"{word_of(value.__func__, deep)} of {type(value.__self__).__name__}"
    if isinstance(value, functools.partial) and deep:
        held = [value.func, *value.args, *value.keywords, *value.keywords.values()]
        return " ".join(["partial", *(word_of(part, deep - 1) for part in held)])
    if is_plain(value) or isinstance(value, torch.Tensor):
        return " ".join(described(value, "").values())
    return type(value).__name__


class Seen:
    """What stood in some places."""

    def __init__(self, places: Iterable[tuple[Table, str]]) -> None:
        self._values: list[tuple[Any, str, Any]] = []  # in dicts, where most stay the same objects
        self._cells: list[tuple[CellType, Any]] = []
        self._others: list[tuple[Table, str, Any]] = []
        for table, key in places:
            value = table.get(key, MISSING)
            if value is not MISSING and isinstance(table, _Cell):
                self._cells.append((table.cell, kept(value)))
            elif value is not MISSING and isinstance(table, (dict, MappingProxyType)):
                self._values.append((table, key, kept(value)))
            else:
                self._others.append((table, key, kept(value)))

    def is_other(self) -> bool:
        """Whether anything else stands there now."""
        try:
            for table, key, value in self._values:
                if table[key] is not value and not same(table[key], value):
                    return True
            for cell, value in self._cells:
                if cell.cell_contents is not value and not same(cell.cell_contents, value):
                    return True
        except (KeyError, ValueError):  # nothing stands there
            return True
        for place, key, value in self._others:
            now = place.get(key, MISSING)
            if now is not value and not same(now, value):
                return True
        return False
