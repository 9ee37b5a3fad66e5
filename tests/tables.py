"""Tables that code makes once and keeps where no module holds them, each way that people have."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor

STORE: dict[str, dict[int, Tensor]] = {"inner": {}}
LATEST: Tensor | None = None


def made(size: int) -> Tensor:
    return torch.arange(size, dtype=torch.float64)


def in_a_global(size: int) -> Tensor:
    return STORE["inner"].setdefault(size, made(size))


def in_a_name(size: int) -> Tensor:
    global LATEST
    if LATEST is None or len(LATEST) != size:
        LATEST = made(size)
    return LATEST


def in_a_new_name(size: int) -> Tensor:
    global NEW
    try:
        return NEW
    except NameError:
        NEW = made(size)
    return NEW


def in_a_default(size: int, *, kept: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006
    return kept.setdefault(size, made(size))


def on_a_function(size: int) -> Tensor:
    known: Any = on_a_function
    if not hasattr(known, "table"):
        known.table = made(size)
    return known.table


def closed_over() -> Any:
    kept: Tensor | None = None

    def inside(size: int) -> Tensor:
        nonlocal kept
        if kept is None or len(kept) != size:
            kept = made(size)
        return kept

    return inside


in_a_cell = closed_over()


def once(function: Any) -> Any:
    kept: dict[int, Tensor] = {}

    @functools.wraps(function)
    def wrapper(size: int) -> Tensor:
        if size not in kept:
            kept[size] = function(size)
        return kept[size]

    return wrapper


by_a_decorator = once(made)
by_a_cache = functools.lru_cache(made)


class Holder:
    shared: ClassVar[dict[int, Tensor]] = {}

    def __init__(self) -> None:
        self.own: dict[int, Tensor] = {}

    @classmethod
    def on_the_class(cls, size: int) -> Tensor:
        return cls.shared.setdefault(size, made(size))

    def on_the_object(self, size: int) -> Tensor:
        return self.own.setdefault(size, made(size))

    @staticmethod
    @functools.lru_cache
    def by_a_method(size: int) -> Tensor:
        return made(size)


HOLDER = Holder()


class Remade(dict[str, Tensor]):
    """What it gives is not what it holds."""

    def __getitem__(self, key: str) -> Tensor:
        raise KeyError(key)


REMADE = Remade(first=torch.ones(2))


def in_a_subclass(size: int) -> Tensor:
    REMADE["later"] = made(size)
    return made(size)


WAYS = {
    "a global": in_a_global,
    "a name": in_a_name,
    "a new name": in_a_new_name,
    "a default": in_a_default,
    "a function": lambda size: on_a_function(size),
    "a cell": in_a_cell,
    "a decorator": by_a_decorator,
    "a cache": lambda size: by_a_cache(size),
    "a class": Holder.on_the_class,
    "an object": HOLDER.on_the_object,
    "a method": lambda size: Holder.by_a_method(size),
    "a subclass": in_a_subclass,
}
