"""The code that a forward may run, found by names alone: what functions keep from call to call hangs on them.

    def mask(n, made={}): ...          a default that is filled
    def once(f): made = {}; ...        what a decorator closes over
    from tables import angles          a file of another's, with its own caches

It begins with the `forward` of each class and goes on to every method and global whose name the code has. A
name may lead to more than what runs, which costs a look; code that a computed name calls is not found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from autotp.trace.consulted import names_in
from autotp.trace.source import is_library

__all__ = ["Reached"]

_BOUND = (staticmethod, classmethod, MethodType)


class Reached:
    """`functions`, `caches` (of `lru_cache`), `globals` (a table and a name in it), `absent` (a table and the
    names of the code that are not in it) and `kinds` (classes that are no modules).

    >>> def once(function, made={}):
    ...     return lambda self, x: made.setdefault("y", function(self, x))
    >>> class Layer(nn.Module):
    ...     forward = once(lambda self, x: x)
    >>> reached = Reached(lambda kind: kind is nn.Module)
    >>> reached.begin([Layer])
    >>> len(reached.functions)
    2
    """

    def __init__(self, foreign: Callable[[type], bool]) -> None:
        self.functions: list[FunctionType] = []
        self.caches: list[Any] = []
        self.globals: list[tuple[dict[str, Any], str]] = []
        self.absent: list[tuple[dict[str, Any], frozenset[str]]] = []
        self.kinds: list[type] = []
        self._foreign = foreign
        self._members: dict[str, list[Any]] = {}
        self._names: set[str] = set()
        self._seen: dict[int, Any] = {}
        self._todo: list[Any] = []

    def begin(self, kinds: Iterable[type], functions: Iterable[Any] = ()) -> None:
        """Follow the forwards of classes, and functions that hang elsewhere."""
        for kind in kinds:
            self._class(kind)
        self._named({"forward"})
        self._todo += functions
        while self._todo:
            self._look(self._todo.pop())

    def _class(self, kind: type) -> None:
        for name, value in vars(kind).items():
            if isinstance(value, (FunctionType, *_BOUND, property, functools.cached_property)) or _caches(
                value
            ):
                self._members.setdefault(name, []).append(value)
                if name in self._names or (name.startswith("__") and name != "__init__"):
                    self._todo.append(value)

    def _named(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._names:
                self._names.add(name)
                self._todo += self._members.get(name, ())

    def _look(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, FunctionType):
            if not is_library(value.__code__.co_filename):
                self._function(value)
        elif isinstance(value, type):
            if not issubclass(value, nn.Module) and not self._foreign(value):
                self.kinds.append(value)
                self._named({"__init__"})
                self._class(value)
        elif isinstance(value, property):
            self._todo += (value.fget, value.fset)
        elif isinstance(value, functools.partial):
            self._todo += (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, _BOUND):
            self._todo += (value.__func__, getattr(value, "__self__", None))
        elif isinstance(value, functools.cached_property):
            self._todo.append(value.func)
        elif _caches(value):
            self.caches.append(value)
            self._todo.append(getattr(value, "__wrapped__", None))

    def _function(self, function: FunctionType) -> None:
        self.functions.append(function)
        names, table = names_in([function.__code__]), function.__globals__
        self.absent.append((table, names - table.keys()))
        for name in names:
            if name not in table:
                continue
            value = table[name]
            if isinstance(value, ModuleType):
                for inner in names & vars(value).keys():
                    self._global(vars(value), inner)
            else:
                self._global(table, name)
        self._named(names)
        for cell in function.__closure__ or ():
            try:
                self._todo.append(cell.cell_contents)
            except ValueError:  # not filled yet
                continue

    def _global(self, table: dict[str, Any], name: str) -> None:
        if not name.startswith("__"):
            self.globals.append((table, name))
            self._todo.append(table[name])


def _caches(value: Any) -> bool:
    """Whether it is a function that `lru_cache` made."""
    return type(value) is _LRU


_LRU = type(functools.lru_cache(abs))
