"""Sizes that the model's own code reads off tensors, and what it compares with what.

A trace has two pairs of batch and sequence, and so two outcomes of `if x.shape[1] < h.shape[-1]`. With `h`
cut there are others at run time: a sequence that is longer than a rank's part and shorter than the whole
takes another branch on a rank than in the unsharded model, and raises nothing. No further pair of sizes
would find all of these, so what is compared is noted instead.

While the model's code runs, sizes are `int`s that know the dims they come from; what is computed of them
knows it, too. Code of torch, of Python and of helpers is given plain numbers. Python's own functions give
plain numbers back (`int(n)`, `len(t)`, `range(n)`): that a size went into one is noted, too.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch

from autotp.diagnostic import Span
from autotp.trace.formulas import Dim, Formula, result_of, step_of
from autotp.trace.source import caller_span, is_library, shown

__all__ = [
    "Asked", "Compared", "Notes", "argument", "arguments_in", "formula_of", "is_noted", "noted", "noted_dims",
    "plain",
]  # fmt: skip

_ARGUMENT = -1


def argument(name: str) -> Dim:
    """What stands for a number that is an argument of the model's forward."""
    return f"argument {name}", _ARGUMENT


@dataclass(frozen=True)
class Compared:
    """Numbers that were compared, or hashed: the dims and arguments they come from, and the numbers. `bound`:
    a slice compared its bound with a size. `equal`: it was asked whether they are equal, and they are.
    `sizes`: all of them are sizes as they were read. `escaped`: nothing was compared, but from there on
    nobody can say what it is compared with."""

    dims: frozenset[Dim]
    source: Span | None
    bound: bool = False
    equal: bool = False
    sizes: bool = False
    escaped: bool = False
    values: tuple[int | float | str, ...] = ()

    @property
    def place(self) -> tuple[str, int]:
        """The line; the text of an edited function keeps its lines."""
        return ("", 0) if self.source is None else (self.source.file, self.source.line)


@dataclass(frozen=True)
class Asked:
    """What the code asked of sizes, and what came out: another outcome may take another way. `inside`: the
    file and the lines of the function; `unseen`: it may ask these sizes something, since it names what takes
    numbers unseen. `dims` are those of all the sizes."""

    formula: Formula
    outcome: Any
    dims: frozenset[Dim]
    inside: tuple[str, int, int]
    line: int
    unseen: bool = False


class Notes:
    """What one recording compares; a number that outlives it notes nothing more. `asked` holds what comes out
    of what the code asks of sizes, of each forward of the recording."""

    def __init__(self) -> None:
        self.open = True
        self.compares: list[Compared] = []
        self.asked: list[dict[Asked, None]] = [{}]
        self._known: set[tuple[Any, ...]] = set()
        self._inside: dict[int, tuple[CodeType, tuple[str, int, int]]] = {}  # a code keeps its id

    def ask(
        self, formula: Formula, outcome: Any, dims: frozenset[Dim], *, unseen: bool = False, depth: int = 0
    ) -> None:
        """The code that called the caller, or `depth` callers further, gets this outcome."""
        if not self.open or not dims or any(dim == _ARGUMENT for _, dim in dims):
            return
        frame = sys._getframe(2 + depth)
        code = frame.f_code
        if is_library(code.co_filename):
            return
        known = self._inside.get(id(code))
        if known is None:
            lines = [line for _, _, line in code.co_lines() if line is not None]
            known = self._inside[id(code)] = code, (shown(code.co_filename), min(lines), max(lines))
        inside = known[1]
        self.asked[-1][Asked(formula, outcome, dims, inside, frame.f_lineno, unseen)] = None

    def argument(self, name: str, value: Any) -> Any:
        """A number that is an argument of the model's forward, noted; anything else as it is."""
        if type(value) not in (int, float):
            return value
        return noted(value, frozenset([argument(name)]), self)

    def arguments(
        self, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the model's forward, whose parameters have these names."""
        named = itertools.zip_longest(names[: len(args)], args, fillvalue="")
        return (
            tuple(self.argument(name, value) for name, value in named),
            {name: self.argument(name, value) for name, value in kwargs.items()},
        )

    def compared(
        self,
        dims: frozenset[Dim],
        *values: Any,
        bound: bool = False,
        equal: bool = False,
        sizes: bool = False,
        depth: int = 0,
    ) -> None:
        """A comparison of these values in the code that called the caller, or `depth` callers further."""
        if self.open and dims:
            told = tuple(v if isinstance(v, (int, float)) else type(v).__name__ for v in map(plain, values))
            self._note(Compared(dims, None, bound, equal, sizes, False, told), depth)

    def escaped(self, dims: frozenset[Dim]) -> None:
        """Numbers left for where nothing is noted, in the code that called the caller."""
        if self.open and dims:
            self._note(Compared(dims, None, escaped=True))

    def read(self, dims: frozenset[Dim], *values: Any, float: bool = False) -> None:
        """The code that called the caller has sizes, or what is a `float` of them. They escape where it names
        what takes numbers unseen."""
        names = _TAKE_FLOATS if float else _TAKE_INTS
        if self.open and dims and not names.isdisjoint(sys._getframe(2).f_code.co_names):
            self._note(Compared(dims, None, escaped=True))
            for value in values:
                if isinstance(value, _Noted):
                    self.ask(value.formula, plain(value), value.dims, unseen=True)

    def _note(self, what: Compared, depth: int = 0) -> None:
        frame = sys._getframe(3 + depth)
        if is_library(frame.f_code.co_filename):
            return
        key = (id(frame.f_code), frame.f_lasti, what)
        if key not in self._known:
            self._known.add(key)
            self.compares.append(replace(what, source=caller_span(4 + depth)))


# Functions of Python and numpy to which a number says nothing: they read what is in it.
_TAKE_INTS = frozenset([
    "islice", "index", "numpy", "np", "log", "log2", "log10", "gcd", "lcm", "isqrt", "comb",
])  # fmt: skip
_TAKE_FLOATS = frozenset(["math", "sqrt", "exp", "log", "log2", "log10", "numpy", "np"])


class _Noted:
    """What a noted int and a noted float have in common: `dims`, whether it is a `product` of sizes, so that
    it is zero only where one of them is, and whether it is a `size` as it was read."""

    dims: frozenset[Dim]
    log: Notes
    product: bool
    size: bool
    formula: Formula

    __slots__ = ()


class _Int(int, _Noted):
    pass


class _Float(float, _Noted):
    pass


def noted(
    value: Any,
    dims: frozenset[Dim],
    log: Notes,
    product: bool = False,
    *,
    size: bool = False,
    formula: Formula = None,
) -> Any:
    """A number that knows the dims it comes from, and by which formula; what is no number, as it is."""
    kind = {int: _Int, float: _Float}.get(type(value))
    if kind is None:
        if type(value) is not tuple:
            return value
        parts = [None if formula is None else (f"({{0}})[{i}]", formula) for i in range(len(value))]
        return tuple(noted(v, dims, log, formula=f) for v, f in zip(value, parts, strict=True))
    made = kind(value)
    made.dims, made.log, made.product, made.size, made.formula = dims, log, product, size, formula
    return made


def formula_of(value: Any) -> Formula:
    """How a number was computed; a plain number is itself."""
    if isinstance(value, _Noted):
        return value.formula
    return value if type(value) in (int, float, bool) else None


def _formula(name: str, *values: Any) -> Formula:
    return result_of(name, [formula_of(value) for value in values])


def is_noted(value: Any) -> bool:
    """Whether a number knows what it comes from."""
    return isinstance(value, _Noted)


def arguments_in(value: Any) -> frozenset[str]:
    """The arguments of the model's forward that a number comes from."""
    return frozenset(name.removeprefix("argument ") for name, dim in noted_dims(value) if dim == _ARGUMENT)


def plain(value: Any) -> Any:
    """The number itself.

    >>> type(plain(noted(3, frozenset(), Notes())))
    <class 'int'>
    """
    if isinstance(value, _Int):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, _Float) else value


def noted_dims(value: Any) -> frozenset[Dim]:
    """The dims that a number comes from."""
    return value.dims if isinstance(value, _Noted) else frozenset()


_OPERATORS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "truediv", "rtruediv", "mod"),
    *("rmod", "divmod", "rdivmod", "pow", "rpow", "neg", "abs", "lshift", "rlshift", "rshift", "rrshift"),
    *("and", "rand", "or", "ror", "xor", "rxor", "pos", "invert", "floor", "ceil", "trunc", "round"),
)
_METHODS = ("bit_length", "bit_count", "conjugate", "as_integer_ratio", "is_integer")
_ATTRIBUTES = ("real", "numerator")
_COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")
_REFLECTED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
_SYMBOLIC = (torch.SymInt, torch.SymFloat)
_LEFT = ("int", "float", "index", "str", "repr", "format")


def _reflected(self: Any, name: str, other: Any) -> Any:
    """What a number that a tensor's value decides makes of the plain number: it knows ints alone, and says
    what it cannot tell."""
    turned = _REFLECTED.get(name) or (name[1:] if name[1:] in _OPERATORS else f"r{name}")
    return getattr(other, f"__{turned}__", lambda _: NotImplemented)(plain(self))


def _computes(base: type, name: str) -> Callable[..., Any]:
    function = getattr(base, name)

    def compute(self: Any, *others: Any) -> Any:
        result = function(self, *others)
        if result is NotImplemented and others and isinstance(others[0], float):
            result = getattr(float, name)(float(plain(self)), *others)
        if result is NotImplemented and others and isinstance(others[0], _SYMBOLIC):
            self.log.escaped(self.dims)
            return _reflected(self, name.strip("_"), others[0])
        if all(isinstance(other, (int, float, complex, list, tuple, str)) for other in others):
            # What is computed of an argument may be asked anything.
            self.log.escaped(frozenset(dim for dim in self.dims if dim[1] == _ARGUMENT))
        if result is NotImplemented or not self.log.open:
            if others and isinstance(others[0], (list, tuple, str)):
                self.log.escaped(self.dims)  # a length
            return result
        dims = self.dims.union(*map(noted_dims, others))
        product = name in ("__mul__", "__rmul__") and self.product and all(map(_positive, others))
        formula = _formula(name, self, *others)
        made = noted(result, dims, self.log, product, formula=formula)
        if type(result) is float:
            self.log.read(dims, made, float=True)
        if name in _STEPS:
            for index, part in enumerate(result if type(result) is tuple else (result,)):
                number = (f"({{0}})[{index}]", formula) if type(result) is tuple and formula else formula
                step = None if number is None else ("step({0})", number)
                self.log.ask(step, step_of(part), dims)
        return made

    return compute


# What takes few values for many sizes may stand for a dim, or for a place in a table.
_STEPS = frozenset(
    f"__{name}__"
    for name in (
        *("floordiv", "rfloordiv", "mod", "rmod", "divmod", "rdivmod", "rshift", "rrshift"),
        *("and", "rand", "xor", "rxor"),
    )
)


def _positive(value: Any) -> bool:
    return value.product if isinstance(value, _Noted) else value > 0


def _compares(base: type, name: str) -> Callable[..., Any]:
    function = getattr(base, f"__{name}__")

    def compare(self: Any, other: Any) -> Any:
        if not (self.product and type(other) is int and other == 0):  # zero, if a size is
            equal = name in ("eq", "ne") and function(self, other) is (name == "eq")
            sizes = self.size and isinstance(other, _Noted) and other.size
            dims = self.dims | noted_dims(other)
            self.log.compared(dims, self, other, equal=equal, sizes=sizes)
            if isinstance(other, (int, float)):
                self.log.ask(_formula(name, self, other), function(plain(self), plain(other)), dims)
        return _reflected(self, name, other) if isinstance(other, _SYMBOLIC) else function(self, other)

    return compare


def _truth(base: Any) -> Callable[..., bool]:
    def truth(self: Any) -> bool:
        if not self.product:
            self.log.compared(self.dims, self)
            self.log.ask(_formula("bool", self), bool(plain(self)), self.dims)
        return bool(base.__bool__(self))

    return truth


def _hash(base: Any) -> Callable[..., int]:
    def hashed(self: Any) -> int:  # a key of a table
        self.log.compared(self.dims, self)
        self.log.ask(self.formula, plain(self), self.dims)
        return int(base.__hash__(self))

    return hashed


def _left(value: Any, kept: bool) -> Any:
    return plain(value) if kept else int(plain(value))


def _leaves(base: Any, name: str) -> Callable[..., Any]:
    function = getattr(base, name)

    def leave(self: Any, *given: Any) -> Any:
        self.log.escaped(self.dims)
        kept = name not in ("__int__", "__index__")
        self.log.ask(self.formula if kept else _formula("int", self), _left(self, kept), self.dims)
        return function(self, *given)

    return leave


def _equip(kind: Any, base: Any) -> None:
    """Give a kind of noted number the methods of the number."""
    for name in (*(f"__{name}__" for name in _OPERATORS), *_METHODS):
        if hasattr(base, name):
            setattr(kind, name, _computes(base, name))
    for name in _ATTRIBUTES:
        if hasattr(base, name):
            setattr(kind, name, property(lambda self: self))
    for name in _COMPARED:
        setattr(kind, f"__{name}__", _compares(base, name))
    for name in (f"__{name}__" for name in _LEFT):
        if hasattr(base, name):
            setattr(kind, name, _leaves(base, name))
    kind.__bool__, kind.__hash__ = _truth(base), _hash(base)
    kind.__reduce__ = lambda self: (base, (plain(self),))


_equip(_Int, int)
_equip(_Float, float)
