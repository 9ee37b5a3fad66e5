"""What the code of a forward reads that hangs on no instance of a module: globals, what functions close over,
attributes of classes, variables of the environment.

Looked at are the plain values (and the functions that stand for others) whose names the code has, on the way
through settings that are modules, classes or objects of a person's.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from types import BuiltinFunctionType, CellType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, Protocol

import numpy
import torch
from torch import nn

from autotp.trace.consulted import Consulted
from autotp.trace.signature import described

__all__ = [
    "MISSING", "Seen", "Table", "around", "has_number", "holds", "is_plain", "kept", "objects_in", "same",
    "table_of", "word_of",
]  # fmt: skip


class MISSING:
    """Stands for a value where there is none."""


_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CALLED = (
    FunctionType, BuiltinFunctionType, MethodType, functools.partial, type, Enum, range, slice,
    torch.dtype, torch.device, torch.Size, numpy.generic,
)  # fmt: skip
_HELD = (list, dict, set, tuple, frozenset)
_MOST, _MANY, _DEEP = 64, 1024, 3  # parts of a container, of one of objects, and objects on the way


class Table(Protocol):
    """Where a value stands, by a key."""

    def get(self, key: str, default: Any, /) -> Any:
        """The value, or another one where there is none."""


def around(
    kinds: Iterable[type], read: Consulted, held: Iterable[tuple[str, Table, str]] = ()
) -> Iterator[tuple[str, Table, str]]:
    """Every place that the code of a model reads, whose modules are of these classes and hold something in
    these places, with where it stands now; each once."""
    seen: set[int] = set()
    todo: list[tuple[str, Any, int]] = []
    classes: dict[type, None] = {}
    for place, table, key in held:
        value = _given(table.get(key, MISSING))
        if has_objects(value):
            yield place, table, key
        if holds(value):
            classes[type(value)] = None  # its own attributes are looked at anyhow
        else:
            todo.append((place, value, 1))
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
        if holds(value):
            classes[type(value)] = None
        for name, table, key in _inside(value, read):
            yield f"{place}.{name}", table, key
            todo.append((f"{place}.{name}", table.get(key, None), depth + 1))
    yield from _of_classes(classes, read)
    for name in sorted(read.variables):
        yield f"os.environ[{name!r}]", os.environ, name


def _given(value: Any) -> Any:
    """A value as the model has it, without the guard of calls around it."""
    is_guard = type(value).__module__ == "autotp.rewrite.called"
    return vars(value)["own"] if is_guard else value


def name_of(kind: type) -> str:
    """A class, by its full name."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _inside(value: Any, read: Consulted, deep: int = 2) -> Iterator[tuple[str, Table, str]]:
    if isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            if not _is_own(_Cell(cell).get("", None)):
                yield f"<{name}>", _Cell(cell), name
        yield from ((key, vars(value), key) for key in list(vars(value)) if key in read.names)
        for name in _defaults(value):
            yield f"<{name}>", _Defaults(value), name
        return
    if isinstance(value, (staticmethod, classmethod, property, functools.partial, MethodType)):
        inner = (
            getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "func", None)
        )
        yield from _inside(inner, read)
        if isinstance(value, functools.partial):
            yield from ((key, value.keywords, key) for key in list(value.keywords))
            value = value.args
    if isinstance(value, (ModuleType, type)):
        of_modules = isinstance(value, type) and issubclass(value, nn.Module)  # they are looked at anyhow
        for key in () if of_modules or _is_others(value) else list(vars(value)):
            if key in read.names and not key.startswith("__"):
                yield key, vars(value), key
        return
    if _is_held(value) and len(value) <= _MOST and deep:
        for number, part in enumerate(list(value.values() if isinstance(value, dict) else value)):
            for name, table, key in (
                () if isinstance(part, (ModuleType, type)) else _inside(part, read, deep - 1)
            ):
                yield f"[{number}].{name}", table, key
    if holds(value):
        table = table_of(value)
        for key in list(table):
            if (key in read.names or key in read.asked) and not key.startswith("__"):
                yield key, table, key


def _of_classes(kinds: Iterable[type], read: Consulted) -> Iterator[tuple[str, Table, str]]:
    """What stands on the classes of objects, and not on each."""
    bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__ if not _is_others(base))
    for base in bases:
        for key in sorted(vars(base).keys() & (read.names | read.asked)):
            if has_number(base, key) and not key.startswith("__"):
                yield f"{name_of(base)}.{key}", vars(base), key


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


class _Defaults:
    """The defaults of a function."""

    def __init__(self, function: FunctionType) -> None:
        self._function = function

    def get(self, key: str, default: Any, /) -> Any:
        """The default of an argument."""
        return _defaults(self._function).get(key, default)


def _defaults(function: FunctionType) -> dict[str, Any]:
    """Those defaults by name that may become others: no number does."""
    code, given = function.__code__, function.__defaults__ or ()
    names = reversed(code.co_varnames[: code.co_argcount])  # a wrapper may have more defaults than names
    found = {**dict(zip(names, reversed(given), strict=False)), **(function.__kwdefaults__ or {})}
    return {name: value for name, value in found.items() if has_objects(value) or _is_held(value)}


class _Slots(Mapping[str, Any]):
    """The attributes of an object that has no table of them."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._names = [name for base in type(value).__mro__ for name in _slots(base)]

    def __getitem__(self, key: str) -> Any:
        if key not in self._names or not hasattr(self._value, key):
            raise KeyError(key)
        return getattr(self._value, key)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if hasattr(self._value, name))

    def __len__(self) -> int:
        return len(list(iter(self)))


def _slots(kind: type) -> tuple[str, ...]:
    """The names of a class's own slots."""
    found = vars(kind).get("__slots__", ())
    names = (found,) if isinstance(found, str) else tuple(found)
    return tuple(f"_{kind.__name__.lstrip('_')}{n}" if _is_private(n) else n for n in names)


def _is_private(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")


def table_of(value: Any) -> Mapping[str, Any]:
    """The attributes of an object, by name."""
    return vars(value) if hasattr(value, "__dict__") else _Slots(value)


def holds(value: Any) -> bool:
    """Whether it is an object of a person's class: a config, or something that is called."""
    if isinstance(value, (nn.Module, torch.Tensor, ModuleType, *_CALLED)):
        return False
    kind = type(value)
    has_any = hasattr(value, "__dict__") or any(map(_slots, kind.__mro__))
    return has_any and (kind.__module__ == "types" or not _is_others(kind))


def has_objects(value: Any) -> bool:
    """Whether it is an object of a person's class, or a container of such, and of no tensor or module."""
    if holds(value):
        return True
    if not _is_held(value) or len(value) > _MANY:
        return False
    parts = list(value.values() if isinstance(value, dict) else value)
    plain = not any(isinstance(part, (torch.Tensor, nn.Module, *_HELD)) for part in parts)
    return plain and not is_plain(value)


def objects_in(value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The objects of a person's classes that a value is, or that a container has, and the way to each."""
    if holds(value):
        yield (), value
    elif _is_held(value) and len(value) <= _MANY:
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        yield from (((str(name),), part) for name, part in parts if holds(part))


def _is_others(value: Any) -> bool:
    """Whether it is code of torch, numpy or Python itself."""
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    package = str(name).partition(".")[0]
    return package in _FOREIGN or (package in sys.stdlib_module_names and package != "__main__")


def _is_own(value: Any) -> bool:
    """Whether it is a function that autotp wrote into an edited one, whatever it calls itself."""
    return isinstance(value, FunctionType) and str(value.__globals__.get("__name__")).startswith(_WRAPPERS)


_WRAPPERS = "autotp.rewrite.edits."
_FOREIGN = ("torch", "numpy", "autotp", "einops", "builtins")


def has_number(kind: type, key: str) -> bool:
    """Whether a class has a value by this name, and no function or class."""
    value = next((vars(base)[key] for base in kind.__mro__ if key in vars(base)), MISSING)
    return is_plain(value) and not callable(value)


def _is_held(value: Any) -> bool:
    """Whether it is a list, a dict and so on, or of a class above one that reads it in no way of its own."""
    kind: Any = type(value)
    return _is_container(kind)


@functools.lru_cache(maxsize=1024)
def _is_container(kind: Any) -> bool:
    own = [base for base in kind.__mro__ if base.__module__ not in ("builtins", "collections")]
    as_one = not any(_READING & vars(base).keys() for base in own)
    return issubclass(kind, _HELD) and not issubclass(kind, _CALLED) and as_one


_READING = frozenset(["__getitem__", "__iter__", "__len__", "__eq__", "values", "items"])


def is_plain(value: Any, deep: int = 2) -> bool:
    """Whether a value is compared: it is what it is, or its parts are."""
    if type(value) in _PLAIN or isinstance(value, _CALLED):
        return True
    if not _is_held(value) or len(value) > _MOST or not deep:
        return False
    inside = (*value, *value.values()) if isinstance(value, dict) else value
    return all(is_plain(part, deep - 1) for part in inside)


def kept(value: Any) -> Any:
    """A value as it is now; of an object which one it is."""
    if not _is_held(value) or not (is_plain(value) or has_objects(value)):
        return value
    kind = next(kind for kind in _HELD if isinstance(value, kind))
    return kind(map(kept, value)) if not isinstance(value, dict) else {k: kept(v) for k, v in value.items()}


def same(now: Any, value: Any) -> bool:
    """Whether a value is as it was."""
    kind = type(value)
    if kind in _HELD:
        if not isinstance(now, kind):
            return False
    elif type(now) is not kind or isinstance(now, torch.Tensor) or holds(value):
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
    if isinstance(value, (staticmethod, classmethod)):
        return f"{type(value).__name__} {word_of(value.__func__, deep)}"
    if isinstance(value, (property, functools.cached_property)):
        return f"property {word_of(getattr(value, 'fget', None) or getattr(value, 'func', None), deep)}"
    if isinstance(value, functools.partial) and deep:
        held = [value.func, *value.args, *value.keywords, *value.keywords.values()]
        return " ".join(["partial", *(word_of(part, deep - 1) for part in held)])
    if is_plain(value) or isinstance(value, torch.Tensor):
        return " ".join(described(value, "").values())
    if has_objects(value) and not holds(value) and deep:
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        return " ".join([type(value).__name__, *(f"{k}: {word_of(part, deep - 1)}" for k, part in parts)])
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
