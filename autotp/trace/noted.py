"""Sizes that the model's own code reads off tensors, and what it compares with what.

A trace has two pairs of batch and sequence, and so two outcomes of `if x.shape[1] < h.shape[-1]`. With `h`
cut there are others at run time: a sequence that is longer than a rank's part and shorter than the whole
takes another branch on a rank than in the unsharded model, and raises nothing. No further pair of sizes
would find all of these, so what is compared is noted instead.

While the model's code runs, sizes are `int`s that know the dims they come from; what is computed of them
knows it, too. Code of torch, of Python and of helpers is given plain numbers. What leaves Python's numbers
(`math.sqrt`) is forgotten.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from autotp.diagnostic import Span
from autotp.trace.hooks import aside
from autotp.trace.source import caller_span, is_library

__all__ = ["Compared", "Dim", "Notes", "argument", "noting", "plain"]

Dim = tuple[str, int]
"""The name of a node, and one of its dims; or what `argument` gives."""

_ARGUMENT = -1


def argument(name: str) -> Dim:
    """What stands for a number that is an argument of the model's forward."""
    return f"argument {name}", _ARGUMENT


@dataclass(frozen=True)
class Compared:
    """Numbers that were compared, or hashed: the dims and arguments they come from. `bound`: a slice compared
    its bound with a size. `equal`: it was asked whether they are equal, and they are."""

    dims: frozenset[Dim]
    source: Span | None
    bound: bool = False
    equal: bool = False


class Notes:
    """What one recording compares; a number that outlives it notes nothing more."""

    def __init__(self) -> None:
        self.open = True
        self.compares: list[Compared] = []
        self._known: set[tuple[Any, ...]] = set()

    def argument(self, name: str, value: Any) -> Any:
        """A number that is an argument of the model's forward, noted; anything else as it is."""
        if type(value) not in (int, float):
            return value
        return _noted(value, frozenset([argument(name)]), self)

    def arguments(
        self, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the model's forward, whose parameters have these names."""
        named = itertools.zip_longest(names[: len(args)], args, fillvalue="")
        return (
            tuple(self.argument(name, value) for name, value in named),
            {name: self.argument(name, value) for name, value in kwargs.items()},
        )

    def compared(self, dims: frozenset[Dim], *, bound: bool = False, equal: bool = False) -> None:
        frame = sys._getframe(2)
        if not self.open or is_library(frame.f_code.co_filename):
            return
        if len(dims) < 2 and not any(dim == _ARGUMENT for _, dim in dims):
            return  # one number of the model
        key = (id(frame.f_code), frame.f_lasti, dims, equal)
        if key not in self._known:
            self._known.add(key)
            self.compares.append(Compared(dims, caller_span(3), bound, equal))


class _Noted:
    """What a noted int and a noted float have in common: `dims`, and whether it is a `product` of sizes,
    so that it is zero only where one of them is."""

    dims: frozenset[Dim]
    log: Notes
    product: bool

    __slots__ = ()


class _Int(int, _Noted):
    pass


class _Float(float, _Noted):
    pass


def _noted(value: Any, dims: frozenset[Dim], log: Notes, product: bool = False) -> Any:
    kind = {int: _Int, float: _Float}.get(type(value))
    if kind is None:
        return tuple(_noted(v, dims, log) for v in value) if type(value) is tuple else value
    made = kind(value)
    made.dims, made.log, made.product = dims, log, product
    return made


def plain(value: Any) -> Any:
    """The number itself.

    >>> type(plain(_noted(3, frozenset(), Notes())))
    <class 'int'>
    """
    return int(value) if isinstance(value, _Int) else float(value) if isinstance(value, _Float) else value


def _dims(value: Any) -> frozenset[Dim]:
    return value.dims if isinstance(value, _Noted) else frozenset()


_COMPUTED = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "truediv", "rtruediv", "mod"),
    *("rmod", "divmod", "rdivmod", "pow", "rpow", "neg", "abs", "lshift", "rlshift", "rshift", "rrshift"),
    *("and", "rand", "or", "ror", "xor", "rxor"),
)
_COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")


def _computes(base: type, name: str) -> Callable[..., Any]:
    function = getattr(base, f"__{name}__")

    def compute(self: Any, *others: Any) -> Any:
        result = function(self, *others)
        if result is NotImplemented and others and isinstance(others[0], float):
            result = getattr(float, f"__{name}__")(float(plain(self)), *others)
        if result is NotImplemented or not self.log.open:
            return result
        dims = self.dims.union(*map(_dims, others))
        product = name in ("mul", "rmul") and self.product and all(_positive(o) for o in others)
        return _noted(result, dims, self.log, product)

    return compute


def _positive(value: Any) -> bool:
    return value.product if isinstance(value, _Noted) else value > 0


def _compares(base: type, name: str) -> Callable[..., Any]:
    function = getattr(base, f"__{name}__")

    def compare(self: Any, other: Any) -> Any:
        if not (self.product and type(other) is int and other == 0):  # zero, if a size is
            equal = name in ("eq", "ne") and function(self, other) is (name == "eq")
            self.log.compared(self.dims | _dims(other), equal=equal)
        return function(self, other)

    return compare


def _truth(base: type) -> Callable[..., bool]:
    def truth(self: Any) -> bool:
        if not self.product:
            self.log.compared(self.dims)
        return bool(base(self))

    return truth


def _hash(base: Any) -> Callable[..., int]:
    def hashed(self: Any) -> int:  # a key of a table
        self.log.compared(self.dims)
        return int(base.__hash__(self))

    return hashed


def _equip(kind: Any, base: Any) -> None:
    """Give a kind of noted number the methods of the number."""
    for name in _COMPUTED:
        if hasattr(base, f"__{name}__"):
            setattr(kind, f"__{name}__", _computes(base, name))
    for name in _COMPARED:
        setattr(kind, f"__{name}__", _compares(base, name))
    kind.__bool__, kind.__hash__ = _truth(base), _hash(base)
    kind.__reduce__ = lambda self: (base, (plain(self),))


_equip(_Int, int)
_equip(_Float, float)


def _bounds(key: Any, dims: int) -> Iterator[tuple[int, _Noted]]:
    """The noted bounds of slices in `tensor[key]`, each with its dim."""
    parts = list(key) if isinstance(key, tuple) else [key]
    left = dims - sum(part is not None and part is not ... for part in parts)
    dim = 0
    for part in parts:
        if isinstance(part, slice):
            yield from ((dim, b) for b in (part.start, part.stop) if isinstance(b, _Noted))
        dim += left if part is ... else part is not None


@contextlib.contextmanager
def noting(name_of: Callable[[torch.Tensor], str | None]) -> Iterator[Notes]:
    """While it lasts, the model's code is given sizes that note what they are compared with; `name_of` gives
    the name of a tensor's node."""
    log = Notes()
    base: Any = torch._C.TensorBase

    def own() -> bool:
        return not is_library(sys._getframe(2).f_code.co_filename)

    def sized(tensor: torch.Tensor, shape: Any) -> Any:
        name = name_of(tensor)
        if name is None:
            return shape
        return torch.Size(
            [
                _noted(n, frozenset([(name, d)]), log, True) if type(n) is int else n
                for d, n in enumerate(shape)
            ]
        )

    def read_shape(tensor: torch.Tensor) -> Any:
        shape = base.shape.__get__(tensor)
        return sized(tensor, shape) if own() else shape

    def read_size(tensor: torch.Tensor, dim: Any = None) -> Any:
        found = base.size(tensor) if dim is None else base.size(tensor, dim)
        if not own():
            return found
        whole = sized(tensor, base.shape.__get__(tensor))
        return whole if dim is None else whole[dim] if isinstance(dim, int) else found

    def count(tensor: torch.Tensor) -> Any:
        number = base.numel(tensor)
        if not own() or type(number) is not int:
            return number
        name = name_of(tensor)
        with aside():  # a layer that is compared has no name, and calls the same functions
            dims = frozenset((name, d) for d in range(tensor.dim())) if name is not None else frozenset()
        return _noted(number, dims, log, True)

    def taken(tensor: torch.Tensor, key: Any) -> Any:
        if own():
            with aside():
                bounds = list(_bounds(key, tensor.dim()))
            for dim, bound in bounds:
                name = name_of(tensor)
                log.compared(bound.dims | ({(name, dim)} if name is not None else frozenset()), bound=True)
        return base.__getitem__(tensor, key)

    replaced = {
        "shape": property(read_shape), "size": read_size, "numel": count, "nelement": count,
        "__getitem__": taken,
    }  # fmt: skip
    try:
        for name, reader in replaced.items():
            setattr(torch.Tensor, name, reader)
        yield log
    finally:
        for name in replaced:
            delattr(torch.Tensor, name)
        log.open = False
