"""What a call is given, in words: two calls with the same words take the same way through a forward.

A tensor is its dtype, its number of dims, whether it requires a gradient, and which sizes are 1 (a size of 1
is broadcast and squeezed; other sizes stand for any). A plain value is itself. A container or an object is
its class and its parts; a function its code and what it holds. What cannot be told, such as the state of an
object that is written in C, is `UNKNOWN`, and like nothing else.
"""

from __future__ import annotations

import functools
import hashlib
import marshal
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Set
from enum import Enum
from typing import Any, Generic

import numpy
import torch

from autotp.trace.graph import called, is_cache, parts_of, tensors_in
from autotp.trace.hooks import FAKE, sizes
from autotp.trace.noted import arguments_in, is_noted, plain

__all__ = [
    "GRADIENT", "UNKNOWN", "FromInput", "Words", "coarse", "described", "is_filled", "is_tensor", "pattern",
    "signature", "told_of", "with_gradient",
]  # fmt: skip

Words = dict[str, str]
"""Place -> what stands there."""
UNKNOWN = "something that cannot be told apart"
_TENSOR = "a tensor"
GRADIENT = " with gradient"
_FLOATING = tuple(f"{_TENSOR} {kind}" for kind in ("float", "bfloat", "complex"))
_MOST = 1024  # parts of one argument
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented))
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, range, slice, numpy.dtype)


class FromInput(str):
    """The word of a number that is computed from sizes of the input, and from these arguments."""

    arguments: frozenset[str] = frozenset()


def signature(
    parameters: tuple[tuple[str, Any], ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Words:
    """The words of a call, by the names of the parameters.

    >>> signature((("x", 0), ("mask", None)), (torch.zeros(3, 1),), {"causal": True})
    {'x': 'a tensor float32 [n, 1]', 'mask': 'None', 'causal': 'True'}
    """
    found: Words = {}
    for name, value in called(parameters, args, kwargs).items():
        word = _word(value)
        if word is None:
            found |= described(value, name)
        else:
            found[name] = word
    return found


def described(value: Any, name: str) -> Words:
    """The words of one argument and its parts.

    >>> described([1, "a", {2.5}], "given")
    {'given': 'list of 3', 'given[0]': '1', 'given[1]': "'a'", 'given[2]': 'set {2.5}'}
    """
    found: Words = {}
    seen: dict[int, str] = {}
    todo = [(name, value)]
    while todo:
        place, part = todo.pop()
        word = _word(part)
        if word is None and id(part) in seen:
            word = f"the same as {seen[id(part)]}"
        elif word is None:
            seen[id(part)] = place
            word, inside = _opened(part)
            todo += [(f"{place}{step}", each) for step, each in reversed(inside)]
        while place in found:  # of two keys that are written alike
            place += "'"
        found[place] = word
        if len(found) > _MOST:
            return {name: UNKNOWN}
    return found


def is_filled(cache: Any) -> bool:
    """Whether a cache holds any keys or states; counters are none. A filled one stays so."""
    if cache in _FILLED:
        return True
    filled = any(tensor.dim() > 2 and tensor.numel() for _, tensor, _ in tensors_in(cache))
    if filled:
        _FILLED.add(cache)
    return filled


_FILLED: weakref.WeakSet[Any] = weakref.WeakSet()


def pattern(tensor: torch.Tensor) -> tuple[int, ...]:
    """A tensor's sizes, as far as they matter: 0, 1, or 2 for any other."""
    return tuple([n if type(n) is int and n < 2 else 2 for n in sizes(tensor)])


def coarse(word: str) -> str:
    """The word of a value inside of a forward, where dtypes and sizes follow from the model's own inputs."""
    return f"{_TENSOR} of {word.count(',') + 1} dims" if is_tensor(word) and "[" in word else word


def told_of(result: Any) -> frozenset[tuple[str, str]]:
    """The coarse words of what a module gives, with which tensors require a gradient, or are of a class of
    their own.

    >>> sorted(told_of((torch.zeros(2, 3), 1.5)))
    [('', 'tuple of 2'), ('[0]', 'a tensor of 2 dims'), ('[1]', '1.5')]
    """
    words = described(result, "").items()
    told = {(p, coarse(w) + (GRADIENT if w.endswith(GRADIENT) else "")) for p, w in words}
    kinds = ((p, type(t)) for p, t, _ in tensors_in(result))
    return frozenset(told | {(p, f"a {_class(kind)}") for p, kind in kinds if kind not in _TENSORS})


_TENSORS = (torch.Tensor, torch.nn.Parameter, FAKE)


def with_gradient(word: str) -> str:
    """The word of a tensor that requires a gradient, if it can."""
    floating = word.startswith(_FLOATING) and not word.endswith(GRADIENT)
    return f"{word}{GRADIENT}" if floating else word


def is_tensor(word: str) -> bool:
    """Whether a word is that of a tensor."""
    return word.startswith(_TENSOR)


def _word(value: Any) -> str | None:
    """The word of what has no parts; None for what may have some."""
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if is_noted(value):
        word = FromInput(repr(plain(value)))
        word.arguments = arguments_in(value)
        return word
    if isinstance(value, _SYMBOLIC):
        return FromInput("a size")
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, Enum):
        return f"{_class(type(value))}.{value.name} {value.value!r}"
    if isinstance(value, _NAMED):
        return f"{type(value).__name__} {value!r}" if isinstance(value, numpy.dtype) else repr(value)
    if isinstance(value, numpy.ndarray):
        if value.dtype.hasobject:
            return UNKNOWN
        content = hashlib.sha256(numpy.ascontiguousarray(value).tobytes()).hexdigest()[:16]
        return f"numpy {value.dtype} {list(value.shape)} {content}"
    if isinstance(value, numpy.generic):
        return f"numpy {value.dtype} {value!r}"
    if isinstance(value, type):
        return f"class {_class(value)}"
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, torch.Generator):
        return f"a generator on {value.device}"
    if is_cache(type(value)):
        return f"{'a filled' if is_filled(value) else 'an empty'} {_class(type(value))}"
    return None


def _tensor(value: torch.Tensor) -> str:
    if value.layout is not torch.strided:
        return f"{_TENSOR} {value.layout} {value.dtype}"
    return _strided(value.dtype, pattern(value), value.requires_grad and torch.is_grad_enabled())


@functools.lru_cache(maxsize=4096)
def _strided(dtype: torch.dtype, pattern: tuple[int, ...], gradient: bool) -> str:
    told = ", ".join("n" if n == 2 else str(n) for n in pattern)
    word = f"{_TENSOR} {str(dtype).removeprefix('torch.')} [{told}]"
    return f"{word}{GRADIENT}" if gradient else word


def _opened(value: Any) -> tuple[str, list[tuple[str, Any]]]:
    """The word of what has parts, and its parts, each with the step to it."""
    kind = type(value)
    if isinstance(value, Set):
        return f"{_class(kind)} {{{', '.join(sorted(map(_whole, value)))}}}", []
    if isinstance(value, (list, tuple)) and not getattr(value, "__dict__", None):
        return f"{_class(kind)} of {len(value)}", [(f"[{index}]", part) for index, part in enumerate(value)]
    if isinstance(value, types.FunctionType):
        held = (value.__defaults__, value.__kwdefaults__, [_content(c) for c in value.__closure__ or ()])
        where = f"function {value.__module__}.{value.__qualname__} {_digest(value.__code__)}"
        return where, [(f".<{name}>", each) for name, each in zip(_HELD, held, strict=True) if each]
    if isinstance(value, types.BuiltinFunctionType):
        own = value.__self__
        inside = [] if own is None or isinstance(own, types.ModuleType) else [(".__self__", own)]
        return f"function {value.__module__}.{value.__qualname__}", inside
    if isinstance(value, types.MethodType):
        return "method", [(".__func__", value.__func__), (".__self__", value.__self__)]
    if _hides(kind):
        return (f"{_class(kind)} {value!r}" if kind.__module__ in _SAYS_ALL else UNKNOWN), []
    base = next((b for b in _BASES if isinstance(value, b)), None)
    inside = [] if base is None else [(".<value>", base(value))]
    if isinstance(value, functools.partial):
        inside = [(".<function>", value.func)]
    keys = f" {list(map(_whole, value))}" if isinstance(value, Mapping) else ""
    inside += [(step if step.startswith("[") else f".{step}", part) for step, part in parts_of(value)]
    return f"{_class(kind)} of {len(inside)}{keys}", inside


_HELD = ("defaults", "keyword defaults", "closure")
_BASES: tuple[Any, ...] = (bool, int, float, complex, str, bytes)  # of which a class may be derived
_OPEN = (object, dict, list, tuple, OrderedDict, defaultdict, deque, functools.partial, *_BASES, Generic)
_SAYS_ALL = ("datetime", "decimal", "uuid")  # whose texts say all of their values


def _whole(value: Any) -> str:
    """One word for a value and all of its parts."""
    return "; ".join(f"{place}: {word}" if place else word for place, word in described(value, "").items())


def _hides(kind: type) -> bool:
    """Whether a class keeps what cannot be looked at: a base is written in C, and not known here."""
    return any(
        base not in _OPEN and not (base.__dictoffset__ or "__slots__" in vars(base)) for base in kind.__mro__
    )


def _class(kind: type) -> str:
    where = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    local = f" {id(kind):x}" if "<locals>" in kind.__qualname__ else ""
    return f"{where}{kind.__qualname__}{local}"


@functools.lru_cache(maxsize=1024)
def _digest(code: types.CodeType) -> str:
    return hashlib.sha256(marshal.dumps(code)).hexdigest()[:16]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
