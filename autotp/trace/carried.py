"""Attributes that code reads before it writes them: what a forward leaves in one is read by the next call.

    if self.kept is not None: h = h + self.kept        carried
    self.kept = h
    self.hidden = self.fc1(x); self.fc2(self.hidden)   not carried: written first, whatever way is taken
    self.step += 1                                     not carried, if nothing else reads it

Read off the bytecode of each function by itself. What one function writes and another one reads counts as
carried, since nobody knows which runs first.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn

__all__ = ["carried_in", "functions_of", "methods_of", "stored_in"]


def carried_in(codes: Iterable[CodeType]) -> frozenset[str]:
    """The names of attributes of which these functions may read what an earlier call left."""
    return frozenset[str]().union(*map(_carried, codes))


def functions_of(module: nn.Module) -> Iterator[FunctionType]:
    """The methods of the classes of a model's modules, but for those of torch."""
    kinds: set[Any] = {type(part) for part in module.modules()}
    for kind in kinds:
        for base, function in methods_of(kind):
            if base.__module__.partition(".")[0] not in ("torch", "autotp"):
                yield function


@lru_cache(maxsize=1024)
def methods_of(kind: Any) -> tuple[tuple[type, FunctionType], ...]:
    """The methods of a module's class, each with the class that has it, but for those of every module and
    those that run in no forward."""
    functions = (
        (base, inspect.unwrap(value))
        for base in kind.__mro__[: kind.__mro__.index(nn.Module)]
        for name, value in vars(base).items()
        if isinstance(value, FunctionType) and not name.startswith("__") and name not in _ASIDE
    )
    return tuple((base, f) for base, f in functions if isinstance(f, FunctionType))


def stored_in(codes: Iterable[CodeType]) -> frozenset[str]:
    """The names of attributes and globals that these codes, and those inside of them, may set or delete."""
    return frozenset[str]().union(*map(_stored, codes))


@lru_cache(maxsize=4096)
def _stored(code: CodeType) -> frozenset[str]:
    found = {each.argval for each in dis.get_instructions(code) if each.opname in _STORING}
    if not _SETTING.isdisjoint(code.co_names):
        found |= {word for word in code.co_consts if type(word) is str}
    return frozenset(found).union(*(_stored(c) for c in code.co_consts if isinstance(c, CodeType)))


_STORING = ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL")
_SETTING = frozenset(["setattr", "delattr", "__setattr__", "__dict__", "vars", "globals", "setitem"])
_ASIDE = ("extra_repr", "reset_parameters")


@lru_cache(maxsize=4096)
def _carried(code: CodeType) -> frozenset[str]:
    written, counted, found = set[str](), set[str](), set[str]()
    skipped = 0  # up to where a jump may pass instructions by
    last = ""
    for each in dis.get_instructions(code):
        if each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
            skipped = max(skipped, each.argval)
        if each.opname == "STORE_ATTR" and each.offset >= skipped:
            written.add(each.argval)
        elif each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if last == "COPY":  # `x.step += 1` copies x first
                counted.add(each.argval)
            elif each.argval not in written or each.argval in counted:
                found.add(each.argval)
        last = each.opname if each.opname != "CACHE" else last
    return frozenset(found).union(*(_carried(c) for c in code.co_consts if isinstance(c, CodeType)))
