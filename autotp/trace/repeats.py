"""Layers that repeat each other are recorded once, and found to repeat each other by running every one.

The first layer of each look (`trace/layers.py`) is recorded op by op, and besides, the torch functions that
it calls are noted: each with its arguments, its result, and the state that it reads (gradients, autocast).
Every other layer of that look runs as well, all of its Python. But each torch function that it calls is only
compared with the noted one. Is it the same, on the same values, then so is its result: a fake tensor is
made that is like the noted one, in a fraction of the time. What a layer does with flags, callables, counters
or its number shows in the functions that it calls, or has no effect on the graph.

Where a layer does anything else, `Different` ends the recording, and it begins anew with that layer recorded
on its own. What cannot be noted (a function that is given a callable, an op that no torch function calls,
code of its own in backward) makes a layer that is not repeated.

    record layer 0 ──► its functions ──► follow layer 1, 2, 3, … ──► Trace.repeats

The graph then has the ops of layer 0 alone. Where another op reads what layer 3 gave, a `REPEATED` node says
so: (the node of layer 0, the number of the repetition).
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.overrides
from torch import fx
from torch.overrides import TorchFunctionMode

from autotp.trace.branches import unwatched
from autotp.trace.graph import Repeat, tensors_in
from autotp.trace.layers import Layers

__all__ = ["GHOST", "Different", "Ghost", "Recorder", "Repeats"]

_INT = {int}
_DEVICES = ("cpu", "cuda")
GHOST = "_repeated"  # the attribute of a tensor that a repetition made
_PLAIN = frozenset([
    bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout,
    torch.memory_format, type,
])  # fmt: skip


class Different(BaseException):
    """The layer at `path` is not what it looks like. No Exception: a model might catch it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class Recorder(Protocol):
    """What is asked of the recorder."""

    recording: bool
    stack: list[tuple[str, int]]

    def node(self, tensor: torch.Tensor) -> fx.Node:
        """The node of a tensor."""

    def name(self, tensor: torch.Tensor) -> str | None:
        """The name of a parameter, a buffer, or another tensor of the model."""

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether it is a fake tensor of which is known where it comes from."""

    def memories(self, tensors: list[torch.Tensor]) -> set[Any]:
        """The memory of these tensors, views and what they view alike."""

    def template(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """How to make fake tensors like this one."""


class Ghost:
    """Which value of which repetition a tensor is; it hangs on the tensor."""

    __slots__ = ("repeat", "source", "stack")

    def __init__(self, repeat: int, source: fx.Node, stack: tuple[tuple[str, int], ...]) -> None:
        self.repeat, self.source, self.stack = repeat, source, stack


class _Ref(int):
    """The number of a tensor among those of a layer's call, in the order in which they turn up."""


class _New(_Ref):
    """A tensor that a function makes."""


class _Unsound(Exception):
    """Something that cannot be compared."""


@dataclass(frozen=True)
class _Line:
    function: Any
    args: Any
    kwargs: Any
    state: tuple[Any, ...]
    result: Any
    grads: tuple[tuple[int, bool], ...]  # the tensors whose requires_grad it changes
    acts: bool  # on torch's state alone: no tensor goes in or out


@dataclass(frozen=True)
class _Border:
    kind: str
    path: str  # from the layer's on
    call: int
    places: tuple[tuple[str, int], ...]


@dataclass
class _Kind:
    """What one layer did."""

    path: str
    call: int
    lines: list[_Line | _Border] = field(default_factory=list)
    # Tensors that it did not make: the suffix of its own one's name, or the node; and what they are.
    outer: dict[int, tuple[str | fx.Node, tuple[Any, ...]]] = field(default_factory=dict)
    made: dict[int, Callable[[], torch.Tensor]] = field(default_factory=dict)
    nodes: dict[int, fx.Node] = field(default_factory=dict)
    sound: bool = True
    followed: bool = False


class _Run:
    """The tensors of one layer's call, by number."""

    def __init__(self, kind: _Kind, path: str) -> None:
        self.kind, self.path = kind, path
        self.numbers: dict[int, int] = {}
        self.tensors: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> int:
        self.numbers[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        return len(self.tensors) - 1


class Repeats:
    """Notes and follows the layers of one recording."""

    def __init__(self, recorder: Recorder, layers: Layers) -> None:
        self.recorder, self.layers = recorder, layers
        self.found: list[Repeat] = []
        self.noting: _Run | None = None
        self.following: _Run | None = None
        self.inside = False  # a function that is noted
        self._kinds: dict[Any, _Kind] = {}
        self._aside = False  # what is asked of tensors here is no part of the model
        self._position = 0
        self._outside: tuple[tuple[str, int], ...] = ()
        self._given: dict[fx.Node, fx.Node] = {}

    # -- around a layer

    def around(self, path: str, call: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One call of a module: noted, followed, or only run."""
        group = self.layers.groups.get(path)
        if group is None or path in self.layers.apart or self.noting or self.following:
            return run(*args, **kwargs)
        key = (group, call, tuple(p for p, _ in self.recorder.stack[:-1]), _told((args, kwargs)), _state())
        kind = self._kinds.get(key)
        if kind is None:
            return self._note(key, path, call, run, *args, **kwargs)
        if not kind.sound:
            return run(*args, **kwargs)
        return self._follow(kind, path, call, run, *args, **kwargs)

    def _note(
        self, key: Any, path: str, call: int, run: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        kind = self._kinds[key] = _Kind(path, call)
        self.noting = _Run(kind, path)
        try:
            with _Functions(self), _plain_tensors():
                return run(*args, **kwargs)
        finally:
            if kind.sound:
                self._keep_nodes(self.noting)
            self.noting = None

    def _keep_nodes(self, run: _Run) -> None:
        for number, tensor in enumerate(run.tensors):
            if number not in run.kind.outer:
                run.kind.nodes[number] = self.recorder.node(tensor)

    def _follow(
        self, kind: _Kind, path: str, call: int, run: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        self.following, self._position, self._given = _Run(kind, path), 0, {}
        self._outside = tuple(self.recorder.stack[:-1])
        try:
            # Which lines run is noted of two layers, the one that is noted and one that follows it.
            with (
                unwatched() if kind.followed else contextlib.nullcontext(),
                _Functions(self),
                _plain_tensors(),
            ):
                kind.followed = True
                out = run(*args, **kwargs)
            if self._position != len(kind.lines):
                raise Different(path)
        except Exception as error:
            raise Different(path) from error  # what it is given may be a part of the trouble
        finally:
            self.following = None
        self.found.append(Repeat(path, kind.path, call, tuple(self._given.items())))
        return out

    def break_off(self) -> None:
        """Something happened that cannot be compared: a layer's noted functions are no longer all of it."""
        if self.noting is not None:
            self.noting.kind.sound = False
        if self.following is not None:
            raise Different(self.following.path)

    def written(self, tensors: list[torch.Tensor]) -> None:
        """An op writes into these. What a layer is given may be a view of anything, and is left alone."""
        run = self.noting
        if run is None:
            return
        given = [run.tensors[n] for n, (source, _) in run.kind.outer.items() if isinstance(source, fx.Node)]
        if not self.recorder.memories(given).isdisjoint(self.recorder.memories(tensors)):
            run.kind.sound = False

    # -- what is noted, and compared

    def border(self, kind: str, path: str, call: int, value: Any) -> bool:
        """What goes into or comes out of a module inside of a layer; True where it need not be recorded."""
        run = self.noting or self.following
        if run is None or not self.recorder.recording:
            return False
        self._aside = True
        try:
            tensors = list(tensors_in(value, caches=False))
            return self._border(run, kind, path[len(run.path) :], call, tensors)
        finally:
            self._aside = False

    def _border(
        self, run: _Run, kind: str, inner: str, call: int, tensors: list[tuple[str, torch.Tensor, bool]]
    ) -> bool:
        if self.noting is not None:
            if run.kind.sound:
                self._guarded(run, lambda: self._note_border(run, kind, inner, call, tensors))
            return False
        line = self._next(run)
        if (
            not isinstance(line, _Border)
            or (line.kind, line.path, line.call) != (kind, inner, call)
            or len(line.places) != len(tensors)
        ):
            raise Different(run.path)
        for (place, number), (here, tensor, _) in zip(line.places, tensors, strict=True):
            if place != here or self._number(run, tensor) != number:
                raise Different(run.path)
        return True

    def _note_border(
        self, run: _Run, kind: str, inner: str, call: int, tensors: list[tuple[str, torch.Tensor, bool]]
    ) -> None:
        places = tuple((place, self._noted(run, tensor)) for place, tensor, _ in tensors)
        run.kind.lines.append(_Border(kind, inner, call, places))

    def _guarded(self, run: _Run, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except _Unsound:
            run.kind.sound = False
            return None

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch function that a layer calls."""
        if self._aside or not self.recorder.recording:
            return function(*args, **kwargs)
        if self.following is not None:
            return self._compare(self.following, function, args, kwargs)
        run = self.noting
        if run is None or not run.kind.sound:
            return function(*args, **kwargs)
        state = _state()
        if isinstance(function, types.FunctionType) and not function.__module__.startswith("torch"):
            run.kind.sound = False  # a person's own function, which may read anything
        given = self._guarded(run, lambda: (self._spec(run, args), self._spec(run, kwargs)))
        before = [_like(t) for t in run.tensors] if given is not None else []
        was, self.inside = self.inside, True
        try:
            out = function(*args, **kwargs)
        finally:
            self.inside = was
        if given is not None:
            self._guarded(run, lambda: self._note_line(run, function, given, state, before, out))
        return out

    def _note_line(
        self, run: _Run, function: Any, given: Any, state: Any, before: list[tuple[Any, ...]], out: Any
    ) -> None:
        grads = []
        for number, (was, tensor) in enumerate(zip(before, run.tensors, strict=False)):
            now = _like(tensor)
            if now[:-1] != was[:-1] or (now != was and number in run.kind.outer):
                raise _Unsound
            if now != was:
                grads.append((number, now[-1]))
        result = self._result(run, out)
        acts = not (_has_tensor(given) or _has_tensor(result))
        args, kwargs = given
        run.kind.lines.append(_Line(function, args, kwargs, state, result, tuple(grads), acts))

    def _compare(self, run: _Run, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        line = self._next(run)
        if (
            not isinstance(line, _Line)
            or not (function is line.function or function == line.function)
            or _state() != line.state
            or len(args) != len(line.args)
            or ((line.kwargs or kwargs) and not self._same(run, line.kwargs, kwargs))
        ):
            raise Different(run.path)
        numbers = run.numbers
        for spec, value in zip(line.args, args, strict=True):
            if type(spec) is _Ref and numbers.get(id(value)) == spec:
                continue
            if not self._same(run, spec, value):
                raise Different(run.path)
        if line.acts:
            out = function(*args, **kwargs)
            if not self._same(run, line.result, out):
                raise Different(run.path)
            return out
        out = self._made(run, line.result)
        for number, needs in line.grads:
            run.tensors[number].requires_grad = needs
        return out

    def _next(self, run: _Run) -> _Line | _Border | None:
        position, self._position = self._position, self._position + 1
        return run.kind.lines[position] if position < len(run.kind.lines) else None

    # -- values

    def _noted(self, run: _Run, tensor: torch.Tensor) -> int:
        """The number of a tensor that goes in; what the layer did not make is named."""
        known = run.numbers.get(id(tensor))
        if known is not None:
            return known
        number = run.add(tensor)
        name = self.recorder.name(tensor)
        own = name is not None and name.startswith(f"{run.path}.")
        if not self.recorder.knows(tensor):
            raise _Unsound
        source: str | fx.Node = (
            name[len(run.path) :] if own and name is not None else self.recorder.node(tensor)
        )
        run.kind.outer[number] = (source, _like(tensor))
        return number

    def _number(self, run: _Run, tensor: torch.Tensor) -> int | None:
        """The number of a tensor in the layer that follows, if it is what stands there in the noted one."""
        known = run.numbers.get(id(tensor))
        if known is not None:
            return known
        outer = run.kind.outer.get(len(run.tensors))
        if outer is None or outer[1] != _like(tensor):
            return None
        source = outer[0]
        name = self.recorder.name(tensor)
        if not self.recorder.knows(tensor):
            return None
        if isinstance(source, str):
            if name != f"{run.path}{source}":
                return None
        else:
            if name is not None and name.startswith(f"{run.path}."):
                return None
            here = self.recorder.node(tensor)
            if source in self._given or here in self._given.values():
                return None
            self._given[source] = here
        return run.add(tensor)

    def _spec(self, run: _Run, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _Ref(self._noted(run, value))
        kind = type(value)
        if kind in (tuple, list, torch.Size):
            return kind([self._spec(run, v) for v in value]) if kind is not torch.Size else value
        if kind is dict:
            return {k: self._spec(run, v) for k, v in value.items()}
        if kind is slice:
            return slice(*(self._spec(run, v) for v in (value.start, value.stop, value.step)))
        if kind in _PLAIN:
            return value
        raise _Unsound

    def _result(self, run: _Run, out: Any) -> Any:
        if isinstance(out, torch.Tensor):
            known = run.numbers.get(id(out))
            if known is not None:
                return _Ref(known)
            if self.recorder.name(out) is not None:  # `tensor.data` and the like
                return _Ref(self._noted(run, out))
            if not self.recorder.knows(out):
                raise _Unsound
            number = run.add(out)
            run.kind.made[number] = self.recorder.template(out)
            return _New(number)
        if type(out) in (tuple, list) or type(out).__module__ == "torch.return_types":
            return (type(out), [self._result(run, o) for o in out])
        if type(out) in _PLAIN or type(out) is torch.Size:
            return out
        raise _Unsound

    def _made(self, run: _Run, result: Any) -> Any:
        if type(result) is _New:
            tensor = run.kind.made[result]()
            tensor.__dict__[GHOST] = Ghost(len(self.found), run.kind.nodes[int(result)], self._outside)
            run.add(tensor)
            return tensor
        if type(result) is _Ref:
            return run.tensors[result]
        if type(result) is tuple:
            made = [self._made(run, r) for r in result[1]]
            return made if result[0] is list else result[0](made)
        return result

    def _same(self, run: _Run, spec: Any, value: Any) -> bool:
        kind = type(value)
        if kind is not type(spec):
            is_tensor = isinstance(spec, _Ref) and isinstance(value, torch.Tensor)
            return is_tensor and self._number(run, value) == spec
        if kind in (tuple, list):
            if len(spec) != len(value):
                return False
            return all(self._same(run, part, own) for part, own in zip(spec, value, strict=True))
        if kind is dict:
            return list(spec) == list(value) and all(self._same(run, spec[k], v) for k, v in value.items())
        if kind is slice:
            return all(
                self._same(run, s, v)
                for s, v in ((spec.start, value.start), (spec.stop, value.stop), (spec.step, value.step))
            )
        if kind is float:
            return bool(spec == value) and (value != 0.0 or str(spec) == str(value))
        return (kind in _PLAIN or kind is torch.Size) and bool(spec == value)


class _Functions(TorchFunctionMode):
    def __init__(self, repeats: Repeats) -> None:
        super().__init__()
        self.repeats = repeats

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with unwatched():
            return self.repeats.call(func, args, kwargs or {})


def _state() -> tuple[Any, ...]:
    """What an op reads besides its arguments."""
    casts = tuple((t, torch.get_autocast_dtype(t)) for t in _DEVICES if torch.is_autocast_enabled(t))
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), casts


def _like(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What an op's result depends on of a tensor."""
    shape, strides, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
    if not set(map(type, (*shape, *strides, offset))) <= _INT:
        raise _Unsound  # a size that depends on values
    constant = getattr(tensor, "constant", None) is None
    return shape, strides, offset, tensor.dtype, tensor.device, constant, tensor.requires_grad


def _has_tensor(spec: Any) -> bool:
    if isinstance(spec, dict):
        return any(map(_has_tensor, spec.values()))
    if isinstance(spec, slice):
        return any(map(_has_tensor, (spec.start, spec.stop, spec.step)))
    return isinstance(spec, _Ref) or (isinstance(spec, (list, tuple)) and any(map(_has_tensor, spec)))


def _told(value: Any, depth: int = 0) -> Any:
    """What a layer is given, as far as it can be told apart quickly."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, (tuple, list)) and depth < 4:
        return tuple(_told(v, depth + 1) for v in value)
    if isinstance(value, Mapping) and depth < 4:
        return tuple((k, _told(v, depth + 1)) for k, v in value.items())
    if type(value) in _PLAIN:
        return type(value), value
    return type(value)


@contextlib.contextmanager
def _plain_tensors() -> Iterator[None]:
    """Modules of torch take another path where they find a mode like `_Functions`; they shall not."""
    asked = torch.overrides.has_torch_function
    torch.overrides.has_torch_function = lambda args: False
    try:
        yield
    finally:
        torch.overrides.has_torch_function = asked
