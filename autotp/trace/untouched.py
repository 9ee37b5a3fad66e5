"""Leave no trace: whatever a forward stores while it runs on fake tensors is taken back.

Restored are the attributes of every module, of every plain object that a module holds (configs, caches),
their lists, dicts and sets, the class attributes of the modules' classes, the module-level numbers,
tables and `lru_cache`s of the files that define them: a table of masks must not keep fake tensors. What other
code keeps that a forward may reach (`reached.py`) is restored where a tensor came into it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import re
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

import torch
from torch import nn

from autotp.trace.carried import stored_in
from autotp.trace.consulted import names_in
from autotp.trace.reached import Reached

__all__ = ["CLOSED_OVER", "Saved", "code_around", "only_forward_is_new", "untouched"]

_CONTAINERS = (dict, list, set, deque)
_LEAVES = (
    str, bytes, int, float, complex, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType,
    torch.Tensor, torch.dtype, torch.device, torch.Generator,
)  # fmt: skip
_CODE = frozenset([types.FunctionType, types.MethodType, functools.partial])
_PLAIN = frozenset([type(None), bool, int, float, str])  # most of what there is
_NUMBERS = frozenset([type(None), bool, int, float, str])
_EMPTY = frozenset([dict, OrderedDict, list, set])


CLOSED_OVER = "what a function closes over"
_EMPTY_CELL = types.CellType()
_OPEN: dict[int, Saved] = {}


@contextlib.contextmanager
def untouched(root: nn.Module) -> Iterator[None]:
    """Restore, at the end and after an exception, all that hangs on `root`.

    >>> layer = nn.Linear(2, 2)
    >>> with untouched(layer):
    ...     layer.cache = {"mask": 1}
    >>> hasattr(layer, "cache")
    False

    Inside of another `untouched` of the same module nothing is looked at anew; it restores what that one
    does, but for the train or eval mode of the modules, which a trace is made in.
    """
    outer = _OPEN.get(id(root))
    if outer is not None:
        flags = [(module, module.training) for module in root.modules()]
        try:
            yield
        finally:
            outer.restore()
            for module, flag in flags:
                module.training = flag
        return
    saved = _OPEN[id(root)] = Saved()
    try:
        saved.all_of(root)
        yield
    finally:
        del _OPEN[id(root)]
        saved.restore()


def _foreign(kind: type) -> bool:
    """Classes whose attributes no model changes: torch's own, Python's own."""
    package = kind.__module__.partition(".")[0]
    return package in ("torch", "numpy") or (package in sys.stdlib_module_names and package != "__main__")


def code_around(root: nn.Module, paths: Iterable[str]) -> list[tuple[types.CodeType, dict[str, Any]]]:
    """The code that a forward may run, but for that of the modules at `paths`; with its globals."""
    hidden = {type(module) for path in paths for module in root.get_submodule(path).modules()}
    reached = Reached(_foreign)
    reached.begin(
        {kind for module in root.modules() if type(module) not in hidden for kind in type(module).__mro__
         if not _foreign(kind)}
    )  # fmt: skip
    return [(function.__code__, function.__globals__) for function in reached.functions]


class Saved:
    """How attributes and containers were: `restore` puts them back."""

    def __init__(self) -> None:
        self.attributes: list[tuple[Any, dict[str, Any], bool]] = []
        self.containers: list[tuple[Any, Any, bool]] = []
        self.always = True  # whether what is noted is restored whatever came into it
        self.kinds: list[tuple[type, dict[str, Any]]] = []
        self.cached: list[tuple[Any, int]] = []
        self.globals: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.named: list[tuple[dict[str, Any], str, Any]] = []
        self.cells: list[tuple[types.CellType, Any]] = []
        self.absent: list[tuple[dict[str, Any], frozenset[str]]] = []
        self.loose: list[Any] = []
        self.seen: set[int] = set()
        self.reached = Reached(_foreign)

    def all_of(self, root: nn.Module) -> None:
        """Everything that `untouched` speaks of."""
        kinds = {kind for module in root.modules() for kind in type(module).__mro__ if not _foreign(kind)}
        self.objects([root, *root.modules()])
        for kind in kinds:
            self.kind(kind)
        for name in {kind.__module__ for kind in kinds}:
            if name in sys.modules and name != "builtins":
                self.file(sys.modules[name])
        self.reached = Reached(_foreign)
        self.reached.begin(kinds, self.loose)
        self.code(self.reached)

    def code(self, reached: Reached) -> None:
        """What functions keep: defaults, what they close over, caches, and the globals that they name."""
        self.always = False
        self.absent = reached.absent
        self.cached += [(cache, cache.cache_info().misses) for cache in reached.caches]
        for kind in reached.kinds:
            self.kind(kind)
        for function in reached.functions:
            self.objects((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()))
            self.objects((vars(function),))
            for cell in function.__closure__ or ():
                with contextlib.suppress(ValueError):  # not filled yet
                    self.cells.append((cell, cell.cell_contents))
        self.objects(value for _, value in self.cells)
        for table, name in reached.globals:
            if type(table[name]) in _NUMBERS or isinstance(table[name], torch.Tensor):
                self.named.append((table, name, table[name]))
        self.objects(table[name] for table, name in reached.globals)

    def objects(self, roots: Iterable[Any]) -> None:
        """The attributes of every object that can be reached, and the contents of every container."""
        todo = list(roots)
        while todo:
            value = todo.pop()
            kind = type(value)
            if kind in _CODE:
                self.loose.append(value)
                if kind is types.MethodType:
                    todo.append(value.__self__)
                elif kind is functools.partial:
                    todo += (*value.args, *value.keywords.values())
                continue
            if kind in _PLAIN or id(value) in self.seen or issubclass(kind, _LEAVES):
                continue
            self.seen.add(id(value))
            if kind in _EMPTY and not value:
                self.containers.append((value, (), self.always))
                continue
            if isinstance(value, _CONTAINERS):
                copy = _raw(value) if isinstance(value, dict) else value.copy()
                self.containers.append((value, copy, self.always))
                todo += list(copy.values()) if isinstance(copy, dict) else list(copy)
            elif isinstance(value, tuple):
                todo += value
            attributes = getattr(value, "__dict__", None)
            if isinstance(attributes, dict) and (isinstance(value, nn.Module) or not _foreign(type(value))):
                self.attributes.append((attributes, dict(attributes), self.always))
                todo += attributes.values()

    def kind(self, kind: type) -> None:
        self.kinds.append((kind, dict(vars(kind))))
        self.objects(v for v in vars(kind).values() if isinstance(v, _CONTAINERS))

    def file(self, module: types.ModuleType) -> None:
        numbers: dict[str, Any] = {}
        for name, value in list(vars(module).items()):
            if name.startswith("__"):
                continue
            if type(value) in _NUMBERS:
                numbers[name] = value
            elif type(value) in (dict, list, set) and id(value) not in self.seen:
                self.seen.add(id(value))
                self.containers.append((value, value.copy(), True))
            elif hasattr(value, "cache_info") and hasattr(value, "cache_clear"):
                self.cached.append((value, value.cache_info().misses))
        self.globals.append((vars(module), numbers))

    def has_changed(self) -> bool:
        """Whether any container is another than it was."""
        return bool(self._changed_containers())

    def changed(self) -> set[str]:
        """The names of the attributes, keys and globals that are others than they were, or that hold a
        container that is; `CLOSED_OVER` of what functions close over."""
        inside = self._changed_containers()
        tables = [(table, held) for table, held, _ in self.attributes]
        tables += [(_raw(live), held or {}) for live, held, _ in self.containers if isinstance(live, dict)]
        tables += [(dict(vars(kind)), held) for kind, held in self.kinds]
        tables += [(table, {**table, **numbers}) for table, numbers in self.globals]
        found = {
            name
            for table, held in tables
            for name in table.keys() | held.keys()
            if isinstance(name, str)
            and (table.get(name) is not held.get(name) or _holds(table.get(name), inside))
        }
        found |= {name for table, name, value in self.named if table.get(name) is not value}
        found |= {name for table, names in self.absent for name in names & table.keys()}
        closed = [(c.cell_contents, value) for c, value in self.cells if c != _EMPTY_CELL]
        if any(now is not value or _holds(now, inside) for now, value in closed):
            found.add(CLOSED_OVER)
        return found

    def may_change(self) -> frozenset[str]:
        """The names of what the code may change and `changed` cannot tell of: attributes of what is not
        looked at (tensors, objects with slots), and what keeps its state where no one sees it."""
        codes = [function.__code__ for function in self.reached.functions]
        names = names_in(codes)
        tables = [table for table, _, _ in self.attributes] + [table for table, _ in self.reached.globals]
        return stored_in(codes) | {n for table in tables for n in names & table.keys() if _hides(table[n])}

    def _changed_containers(self) -> set[int]:
        """The ids of the containers that are others than they were, or hold one that is."""
        live = [(c, _raw(c) if isinstance(c, dict) else c, held) for c, held, _ in self.containers]
        found = {id(container) for container, now, held in live if _other(now, held or type(now)())}
        while True:
            around = {
                id(container) for container, now, _ in live
                if any(_holds(v, found) for v in (now.values() if isinstance(now, dict) else now))
            }  # fmt: skip
            if not found or around <= found:
                return found
            found |= around

    def restore(self) -> None:
        for attributes, before, always in self.attributes:
            if _differs(attributes, before) and (always or _tensor_came(attributes, before)):
                attributes.clear()
                attributes.update(before)
        for live, copy, always in self.containers:
            if not live and not copy:
                continue
            now = live if type(live) in _EMPTY or not isinstance(live, dict) else _raw(live)
            if always or _tensor_came(now, copy):
                _put_back(live, now, copy or type(now)())
        for kind, held in self.kinds:
            for name in vars(kind).keys() - held.keys():
                delattr(kind, name)
            for name, value in held.items():
                if vars(kind).get(name) is not value:
                    setattr(kind, name, value)
        for table, numbers in self.globals:
            for name, value in numbers.items():
                if table.get(name) is not value:
                    table[name] = value
        for table, name, value in self.named:
            if table.get(name) is not value and _tensor_came([table.get(name)], ()):
                table[name] = value
        for table, names in self.absent:
            for name in names & table.keys():
                if _tensor_came([table[name]], ()):
                    del table[name]
        for cell, value in self.cells:
            with contextlib.suppress(ValueError):  # emptied
                if cell.cell_contents is not value and _tensor_came([cell.cell_contents], ()):
                    cell.cell_contents = value
        for function, misses in self.cached:
            if function.cache_info().misses != misses:
                function.cache_clear()


def _hides(value: Any) -> bool:
    """Whether an object of another's class may keep what is no attribute that is looked at."""
    kind = type(value)
    if kind in _PLAIN or kind in _CODE or isinstance(value, (*_LEAVES, *_CONTAINERS, *_UNCHANGED)):
        return False
    return not isinstance(value, nn.Module) and not hasattr(value, "cache_info") and _foreign(kind)


_UNCHANGED = (
    tuple, frozenset, range, slice, Enum, re.Pattern, logging.Logger, torch.layout, torch.memory_format,
)  # fmt: skip


def _put_back(live: Any, now: Any, before: Any) -> None:
    if isinstance(live, dict):
        if _differs(now, before):
            own: Any = OrderedDict if isinstance(live, OrderedDict) else dict
            own.clear(live)
            for key, value in before.items():
                own.__setitem__(live, key, value)
    elif isinstance(live, (list, deque)) and [*map(id, live)] != [*map(id, before)]:
        live.clear()
        live.extend(before)
    elif isinstance(live, set) and live != before:
        live.clear()
        live.update(before)


def _tensor_came(now: Iterable[Any], before: Iterable[Any], deep: int = 3) -> bool:
    """Whether there is a tensor now, also inside of what is new, that was not there before."""
    if isinstance(before, dict):
        before = before.values()
    known = {id(value) for value in before}
    for value in now.values() if isinstance(now, dict) else now:
        if id(value) in known or type(value) in _PLAIN:
            continue
        if isinstance(value, torch.Tensor):
            return True
        inside = value if isinstance(value, (*_CONTAINERS, tuple)) else getattr(value, "__dict__", ())
        if deep and not isinstance(value, _LEAVES) and _tensor_came(inside, (), deep - 1):
            return True
    return False


def _raw(table: dict[Any, Any]) -> dict[Any, Any]:
    """What stands in a dict, or a copy of it: a class may make what it gives anew."""
    return table.copy() if type(table) in _EMPTY else dict(dict.items(table))


def _differs(live: dict[Any, Any], before: dict[Any, Any]) -> bool:
    same = len(live) == len(before) and all(map(operator.is_, live, before))
    return not same or not all(map(operator.is_, live.values(), before.values()))


def _other(live: Any, before: Any) -> bool:
    if isinstance(live, dict):
        return _differs(live, before)
    if isinstance(live, set):
        return bool(live != before)
    return [*map(id, live)] != [*map(id, before)]


def _holds(value: Any, ids: set[int]) -> bool:
    return id(value) in ids or (isinstance(value, tuple) and any(id(part) in ids for part in value))


def only_forward_is_new(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether a module's attributes are those before, and the watched `forward` behind them."""
    return (
        len(now) == len(before) + 1
        and next(reversed(now)) == "forward"
        and all(map(operator.is_, now, before))
        and all(map(operator.is_, now.values(), before.values()))
    )
