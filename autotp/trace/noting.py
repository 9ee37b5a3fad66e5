"""Tensors that give noted sizes (`trace/noted.py`) to the model's code, while it is recorded."""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch

from autotp.trace.formulas import Dim, Formula, Size
from autotp.trace.hooks import aside, sizes
from autotp.trace.noted import Notes, formula_of, is_noted, noted, noted_dims, plain
from autotp.trace.source import is_library

__all__ = ["by_shape", "noting", "shape_name"]

Name = Callable[[torch.Tensor], str | None]


@contextlib.contextmanager
def noting(name_of: Name) -> Iterator[Notes]:
    """While it lasts, the model's code is given sizes that note what they are compared with; `name_of` gives
    the name of a tensor's node."""
    log = Notes()
    replaced = _readers(name_of, log)
    before = {name: vars(torch.Tensor).get(name, _INHERITED) for name in replaced}
    functions: dict[tuple[Any, str], Any] = {(builtins, "range"): _counting(log)}
    functions |= {(torch, name): replaced[name] for name in ("numel", *_PARTS)}
    functions |= {(math, name): _read_by(getattr(math, name), log) for name in _WHOLE}
    were = {place: getattr(*place) for place in functions}
    try:
        for name, reader in replaced.items():
            setattr(torch.Tensor, name, reader)
        for (module, name), function in functions.items():
            setattr(module, name, function)
        yield log
    finally:
        for (module, name), was in were.items():
            setattr(module, name, was)
        for name, was in before.items():
            if was is _INHERITED:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, was)
        log.open = False


_INHERITED = object()


def by_shape(shape: Sequence[int]) -> str:
    """What stands for the tensors of a shape, where nothing else is known of them."""
    return f"a tensor of {list(shape)}"


def shape_name(tensor: torch.Tensor) -> str:
    """The name of a tensor by its shape."""
    return by_shape(sizes(tensor))


def _counting(log: Notes) -> Any:
    """What stands in the place of `range`, which reads a number unseen."""

    class Kind(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, _RANGE)

    class Range(metaclass=Kind):
        def __new__(cls, *numbers: Any) -> Any:
            for number in numbers:
                if is_noted(number):
                    log.escaped(noted_dims(number))
                    log.ask(formula_of(number), plain(number), noted_dims(number))
            return _RANGE(*map(plain, numbers))

    return Range


_RANGE = range


_WHOLE = ("gcd", "lcm", "isqrt", "comb", "perm", "factorial", "log", "log2", "log10")
"""Functions of `math` that read whole numbers unseen."""


def _read_by(function: Any, log: Notes) -> Any:
    @functools.wraps(function)
    def read(*numbers: Any) -> Any:
        for number in numbers:
            if is_noted(number):
                log.escaped(noted_dims(number))
                log.ask(formula_of(number), plain(number), noted_dims(number))
        return function(*map(plain, numbers))

    return read


_PARTS = {
    "split": "-(-{0} // max(1, {1}))",
    "chunk": "-(-{0} // max(1, -(-{0} // {1})))",
    "unbind": "{0}",
}
"""How many parts these make of a dim's size, by the number that they are given."""


def _own() -> bool:
    """Whether the code that called the caller is the model's."""
    return not is_library(sys._getframe(2).f_code.co_filename)


def _readers(name_of: Name, log: Notes) -> dict[str, Any]:
    """What stands in the place of the methods of tensors that tell sizes, or compare with them."""
    base: Any = torch._C.TensorBase
    measured: Any = torch.Tensor.__len__
    iterated: Any = torch.Tensor.__iter__

    def dims_of(tensor: torch.Tensor) -> frozenset[Dim]:
        name = name_of(tensor)
        with aside():  # a layer that is compared has no name, and calls the same functions
            return frozenset((name, d) for d in range(tensor.dim())) if name is not None else frozenset()

    known: dict[tuple[str, Any], Any] = {}

    def sized(tensor: torch.Tensor, shape: Any) -> Any:
        name = name_of(tensor)
        if name is None:
            return shape
        fixed = all(type(n) is int for n in shape)  # else values decide them, and they have no hash
        if fixed and (name, shape) in known:
            return known[name, shape]
        dims = [frozenset([(name, d)]) for d in range(len(shape))]
        found = torch.Size(
            [
                noted(n, d, log, True, size=True, formula=Size(next(iter(d)), n)) if type(n) is int else n
                for n, d in zip(shape, dims, strict=True)
            ]
        )
        if fixed:
            known[name, shape] = found
        return found

    def counted(tensor: torch.Tensor) -> Any:
        """The formula of the number of elements."""
        name = name_of(tensor)
        formula: Formula = 1
        shape = base.shape.__get__(tensor)
        if name is None or any(type(n) is not int for n in shape):
            return None
        for d, n in enumerate(shape):
            formula = ("({0} * {1})", formula, Size((name, d), n))
        return formula

    def read_shape(tensor: torch.Tensor) -> Any:
        shape = base.shape.__get__(tensor)
        if not _own():
            return shape
        found = sized(tensor, shape)
        log.read(frozenset().union(*map(noted_dims, found)), *found)
        multiplied(tensor)
        return found

    def multiplied(tensor: torch.Tensor) -> None:
        """`x.shape.numel()` is computed unseen."""
        frame = sys._getframe(2)
        if "numel" in frame.f_code.co_names and _next(frame) == "numel":
            log.ask(counted(tensor), base.numel(tensor), dims_of(tensor), depth=1)

    def read_size(tensor: torch.Tensor, dim: Any = None) -> Any:
        found = base.size(tensor) if dim is None else base.size(tensor, dim)
        if not _own():
            return found
        whole = sized(tensor, base.shape.__get__(tensor))
        found = whole if dim is None else whole[dim] if isinstance(dim, int) else found
        each = found if dim is None else [found]
        log.read(frozenset().union(*map(noted_dims, each)), *each)
        multiplied(tensor)
        return found

    def count(tensor: torch.Tensor) -> Any:
        number = base.numel(tensor)
        return noted(number, dims_of(tensor), log, True, formula=counted(tensor)) if _own() else number

    def read_bytes(tensor: torch.Tensor) -> Any:
        number = base.nbytes.__get__(tensor)
        return noted(number, dims_of(tensor), log, True) if _own() else number

    def read_stride(tensor: torch.Tensor, dim: Any = None) -> Any:
        found = base.stride(tensor) if dim is None else base.stride(tensor, dim)
        return noted(found, dims_of(tensor), log) if _own() else found

    def length(tensor: torch.Tensor) -> Any:
        number = measured(tensor)
        known = type(plain(number)) is int  # else values decide it
        if known and _own() and (name := name_of(tensor)) is not None:
            log.escaped(frozenset([(name, 0)]))
            log.ask(Size((name, 0), number), number, frozenset([(name, 0)]))
        return number

    def iterate(tensor: torch.Tensor) -> Any:
        shape = base.shape.__get__(tensor)
        known = bool(shape) and type(shape[0]) is int  # else values decide it
        if known and _own() and (name := name_of(tensor)) is not None:
            log.ask(Size((name, 0), shape[0]), shape[0], frozenset([(name, 0)]))
        return iterated(tensor)

    def parting(name: str, text: str) -> Any:
        # The tensor's own `split` takes sizes by another op than the one of its base.
        function = vars(torch.Tensor).get(name) or getattr(base, name)

        def part(tensor: torch.Tensor, *given: Any, **named: Any) -> Any:
            parts = function(tensor, *given, **named)
            number, dim = _parted(name, given, named)
            known = isinstance(number, int) and isinstance(dim, int) and _own()
            if known and (of := name_of(tensor)) is not None:
                shape = base.shape.__get__(tensor)
                place = (of, plain(dim) % max(1, len(shape)))
                if shape and type(shape[place[1]]) is int:
                    formula = (text, Size(place, shape[place[1]]), formula_of(number))
                    dims = frozenset([place]) | noted_dims(number)
                    log.ask(formula if formula[2] is not None else None, len(parts), dims)
            return parts

        return part

    def bounded(tensor: torch.Tensor, key: Any) -> None:
        """Note the bounds of slices in `tensor[key]`, each compared with its dim."""
        with aside():
            bounds = list(_bounds(key, tensor.dim()))
        for dim, bound in bounds:
            name = name_of(tensor)
            here = frozenset([(name, dim)]) if name is not None else frozenset()
            log.compared(noted_dims(bound) | here, bound, bound=True, depth=1)

    def taken(tensor: torch.Tensor, key: Any) -> Any:
        if _own():
            bounded(tensor, key)
        return base.__getitem__(tensor, key)

    def put(tensor: torch.Tensor, key: Any, value: Any) -> None:
        if _own():
            bounded(tensor, key)
        base.__setitem__(tensor, key, value)

    return {
        "shape": property(read_shape), "size": read_size, "numel": count, "nelement": count,
        "nbytes": property(read_bytes), "stride": read_stride, "__len__": length,
        "__iter__": iterate, **{name: parting(name, text) for name, text in _PARTS.items()},
        "__getitem__": taken, "__setitem__": put,
    }  # fmt: skip


def _parted(name: str, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
    """The number that a tensor is parted by, and the dim."""
    first = () if name == "unbind" else (named.get("split_size", named.get("chunks")),)
    if name != "unbind" and given:
        first, given = given[:1], given[1:]
    return (first[0] if first else 1), (given[0] if given else named.get("dim", 0))


def _next(frame: FrameType) -> Any:
    """The name that the code of a frame asks for next."""
    later = (one for one in dis.get_instructions(frame.f_code) if one.offset > frame.f_lasti)
    return next((one.argval for one in later if one.opname != "CACHE"), None)


def _bounds(key: Any, dims: int) -> Iterator[tuple[int, Any]]:
    """The bounds of slices in `tensor[key]`, each with its dim."""
    parts = list(key) if isinstance(key, tuple) else [key]
    left = dims - sum(part is not None and part is not ... for part in parts)
    dim = 0
    for part in parts:
        if isinstance(part, slice):
            yield from ((dim, b) for b in (part.start, part.stop) if isinstance(b, int))
        dim += left if part is ... else part is not None
