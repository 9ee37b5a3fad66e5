"""What a recording gives: a `torch.fx.Graph` of aten ops, its outputs, and what is known of every value."""

from __future__ import annotations

import functools
import inspect
import operator
import re
import types
from collections import deque
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from autotp.diagnostic import Span
from autotp.trace.noted import Asked, Compared, plain

__all__ = [
    "GRADIENT", "OPAQUE", "REPEATED", "Output", "Repeat", "Trace", "TraceError", "Val", "called", "is_cache",
    "named_place", "numbers_in", "parameters_of", "parts_of", "said", "tensors_in",
]  # fmt: skip


class TraceError(Exception):
    """The forward raised while it was recorded; `module` and `source` say where.

    `dynamic` is True where the forward asked for the value of a tensor, which a recording does not have;
    `ops` is how many ops had run, `trace` what was recorded of them.
    """

    def __init__(
        self,
        message: str,
        module: str,
        source: Span | None,
        *,
        dynamic: bool = False,
        ops: int = 0,
        trace: Trace | None = None,
    ) -> None:
        super().__init__(message)
        self.ops = ops
        self.trace = trace
        self.module = module
        self.source = source
        self.dynamic = dynamic


def said(error: BaseException, *, caught: bool = False) -> str:
    """An exception in a line; `caught`, though no run raises it, by the model's code.

    >>> said(ValueError("no"), caught=True)
    "ValueError: no; the model's code catches this, and goes on as no run does"
    """
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return f"{text}; the model's code catches this, and goes on as no run does" if caught else text


@dataclass(frozen=True)
class Val:
    """What is known of a tensor: its shape (-1: depends on values), dtype, whether a gradient flows to it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool


@dataclass(frozen=True)
class Output:
    """A tensor that the forward returns: its place in the result, and whether it sits in a cache object."""

    name: str
    node: fx.Node
    cached: bool


@dataclass(frozen=True)
class Repeat:
    """The call of a layer that records what the same call of an earlier layer recorded, up to names.

    `path` is the layer's path, `of` the earlier one's, `call` the call's number. `given` are the values that
    come from outside: (what the earlier layer read, what stands in its place here).
    """

    path: str
    of: str
    call: int
    given: tuple[tuple[fx.Node, fx.Node], ...]

    def renamed(self, name: str) -> str | None:
        """The name here of what is called `name` there; None for what stands outside of the layer.

        >>> Repeat("layers.7", "layers.0", 0, ()).renamed("layers.0.fc.weight")
        'layers.7.fc.weight'
        """
        inside = name == self.of or name.startswith(f"{self.of}.")
        return f"{self.path}{name[len(self.of) :]}" if inside else None


@dataclass
class Trace:
    """One recorded forward.

    Nodes: `placeholder` for tensor inputs, `get_attr` for parameters, buffers and constants,
    `call_function` for ops and for `operator.getitem` of ops with several results. An op that gives a
    number (`x.item()`) has the val None. `node.meta` holds

    - `val`: a `Val`, or a list of them
    - `module`: the path of the innermost module, and `call`: its how-manieth call in this trace; `stack`: the
      same of every module around it, from the outside in
    - `source`: a `Span` of the model's code
    - `grads`: the input nodes that required a gradient when they were used
    - `mutates`: the input nodes that the op writes
    - `custom`: the name of the `autograd.Function` whose forward the op is in, if its backward, code of its
      own, is not in the trace; inside of it `grads` is empty
    - `backward`: what code of its own sees the value's gradient: gradient hooks, `autograd.Function`s
    - on `get_attr`, `name` and `origin`: "parameter", "buffer", "constant" or "unknown".

    `entered` and `left` hold, for each module and each of its calls, the tensors that went in and came out:
    (place among the arguments or in the result, node). `given` holds the words of each call
    (`trace/signature.py`), also in the modes that this trace covers; `returned` what the forward gives back
    besides tensors, `kept` what else it left on attributes of modules, each number by its place. `calls` says
    how often each module ran in the (last) forward, `stored` what tensors the forward left on attributes of
    modules, `opaque` the modules that were not looked into, `gives` what those give, in words, `changed` the
    names of what they may leave changed, `guessed` those of which even what they give is a guess, `route` how
    the trace was made: "recorder" or "export". `repeats` are the layers whose ops are left
    out, since another layer's say the same; what they give is read through `REPEATED` nodes. `compared`
    are the sizes that the model's code compares, `asked` what comes out of what
    it asks of them, of each forward, `handed` the parameters that code reads off a module that is not its
    own, and which code (`handed.py`). `numbers_drawn`
    says whether Python's or numpy's generator was drawn from.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    outputs: list[Output] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    entered: dict[str, list[list[tuple[str, fx.Node]]]] = field(default_factory=dict)
    left: dict[str, list[list[tuple[str, fx.Node]]]] = field(default_factory=dict)
    given: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    returned: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)
    stored: list[Output] = field(default_factory=list)
    gradients: list[tuple[str, fx.Node, fx.Node]] = field(default_factory=list)
    opaque: tuple[str, ...] = ()
    changed: dict[str, set[str]] = field(default_factory=dict)
    guessed: set[str] = field(default_factory=set)
    gives: dict[str, set[frozenset[tuple[str, str]]]] = field(default_factory=dict)
    route: str = "recorder"
    repeats: list[Repeat] = field(default_factory=list)
    compared: list[Compared] = field(default_factory=list)
    handed: dict[str, set[tuple[str, str]]] = field(default_factory=dict)
    asked: list[dict[Asked, None]] = field(default_factory=list)
    numbers_drawn: bool = False

    def ops(self) -> list[fx.Node]:
        """The recorded op calls, in order."""
        return [n for n in self.graph.nodes if n.op == "call_function" and n.target not in _NO_OPS]


class _Mark:
    """The target of a node that is no op of torch."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = "autotp.trace.graph"

    def __call__(self, *tensors: Any) -> Any:
        raise RuntimeError(f"there is no op to run for {self.__name__}")

    def __repr__(self) -> str:
        return self.__name__


OPAQUE = _Mark("opaque")
"""A module that was not looked into: its tensors in, its tensors out."""
REPEATED = _Mark("repeated")
"""A value of a layer that is left out: (the value of the layer that it repeats, its number in `repeats`)."""
GRADIENT = _Mark("gradient")
"""The gradient of a value, as the backward of an `autograd.Function` is given it."""
_NO_OPS = (operator.getitem, REPEATED, GRADIENT)

_PLAIN = (str, bytes, int, float, complex, torch.dtype, torch.device, torch.layout, torch.memory_format, type)
_LEAVES = (torch.Tensor, *_PLAIN)
_NUMBERS = (str, int, float, complex, torch.dtype)
_NESTED = (Mapping, list, tuple)
_CODE = (types.ModuleType, types.BuiltinFunctionType, types.CodeType, nn.Module, torch.Generator)


def tensors_in(
    out: Any, name: str = "", cached: bool = False, *, caches: bool = True
) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Every tensor in a result, also inside objects that are no plain containers, at each of its places:
    (its place, the tensor, whether a cache object holds it). Without `caches` those are not looked into.

    >>> [name for name, _, _ in tensors_in({"a": torch.zeros(1), "b": [torch.zeros(2)]})]
    ['a', 'b[0]']
    """
    if isinstance(out, torch.Tensor):
        yield name, out, cached
        return
    for place, value, cache in _leaves(out, name, cached, caches, numbers=False):
        if isinstance(value, torch.Tensor):
            yield place, value, cache


def numbers_in(out: Any, name: str = "") -> dict[str, Any]:
    """Every number, word and None in a result, by its place; what a cache object holds is left out.

    >>> numbers_in((torch.zeros(1), {"width": 3}, None))
    {'[1].width': 3, '[2]': None}
    """
    return {
        place: plain(value)
        for place, value, _ in _leaves(out, name, False, False, numbers=True)
        if value is None or isinstance(value, _NUMBERS)
    }


def parameters_of(forward: Any) -> tuple[tuple[str, Any], ...]:
    """A bound method's parameters by name that may be given by position, each with its default."""
    try:
        found = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple((p.name, p.default) for p in found if p.kind in kinds)


def called(
    parameters: tuple[tuple[str, Any], ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by the names of the parameters, defaults too.

    >>> called((("x", inspect.Parameter.empty), ("mask", None)), (1, 2, 3), {"flag": True})
    {'mask': 2, 'x': 1, '*[2]': 3, 'flag': True}
    """
    named = {name: default for name, default in parameters if default is not inspect.Parameter.empty}
    for index, value in enumerate(args):
        named[parameters[index][0] if index < len(parameters) else f"*[{index}]"] = value
    return {**named, **kwargs}


def named_place(parameters: tuple[tuple[str, Any], ...], place: str) -> str:
    """A place among (args, kwargs), by the names of the parameters.

    >>> [named_place((("x", None),), place) for place in ("[0][0].a", "[0][1]", "[1].x[2]")]
    ['x.a', '*[1]', 'x[2]']
    """
    found = re.fullmatch(r"\[0\]\[(\d+)\](.*)", place)
    if found is None:
        return place.removeprefix("[1].")
    index = int(found[1])
    return (parameters[index][0] if index < len(parameters) else f"*[{index}]") + found[2]


def _leaves(
    out: Any, name: str, cached: bool, caches: bool, *, numbers: bool
) -> Iterator[tuple[str, Any, bool]]:
    """Tensors, with `numbers` also plain values, each with its place and whether a cache object holds it."""
    if out is None or isinstance(out, _LEAVES):
        yield name, out, cached
        return
    seen: set[int] = set()
    todo: list[tuple[str, Any, bool]] = [(name, out, cached)]
    while todo:
        where, value, cache = todo.pop()
        if value is None or isinstance(value, _LEAVES):
            yield where, value, cache
            continue
        kind = type(value)
        if issubclass(kind, _CODE) or id(value) in seen:
            continue
        seen.add(id(value))
        if kind is tuple or kind is list:
            for index in range(len(value) - 1, -1, -1):
                part = value[index]
                if numbers or not (part is None or isinstance(part, _PLAIN)):
                    todo.append((f"{where}[{index}]", part, cache))
            continue
        # transformers' caches come back into the same model: what they hold stays local on purpose.
        cache = cache or is_cache(kind)
        if cache and not caches:
            continue
        for step, part in reversed(list(parts_of(value, bool(where)))):
            if numbers or not (part is None or isinstance(part, _PLAIN)):
                todo.append((where + step, part, cache))


def is_cache(kind: Any) -> bool:
    """Whether it is one of transformers' caches."""
    return _is_cache(kind)


@functools.lru_cache(maxsize=1024)
def _is_cache(kind: Any) -> bool:
    return any(c.__module__ == "transformers.cache_utils" for c in kind.__mro__)


def parts_of(value: Any, inside: bool = False) -> Iterator[tuple[str, Any]]:
    """What a container, an object or a function holds, each with the step to it; `inside` of another one."""
    dot = "." if inside else ""
    if type(value) is dict:
        for key, part in value.items():
            yield f"{dot}{key}", part
        return
    if isinstance(value, Mapping):
        yield from ((f"{dot}{key}", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, Set, deque)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from (
            (f"[{index}]", part) for index, part in enumerate((*value.args, *value.keywords.values()))
        )
    elif isinstance(value, types.MethodType):
        yield f"{dot}__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        for index, cell in enumerate(value.__closure__ or ()):
            yield f"{dot}<closure {index}>", _content(cell)
        return
    for key, part in getattr(value, "__dict__", {}).items():
        if not isinstance(value, Mapping) or key not in value:
            yield f"{dot}{key}", part
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for key in (slots,) if isinstance(slots, str) else slots:
            if key not in ("__dict__", "__weakref__") and hasattr(value, key):
                yield f"{dot}{key}", getattr(value, key)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
