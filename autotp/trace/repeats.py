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
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.overrides
from torch import fx
from torch.overrides import TorchFunctionMode

from autotp.trace.branches import unwatched
from autotp.trace.graph import Repeat, tensors_in
from autotp.trace.hooks import Symbolic, aside
from autotp.trace.layers import Layers
from autotp.trace.noted import plain
from autotp.trace.sameness import (
    PLAIN,
    Border,
    Different,
    Following,
    Kind,
    Line,
    Noting,
    Recorder,
    Ref,
    Unsound,
    has_tensor,
    state,
)  # fmt: skip

__all__ = ["Different", "Repeats"]


_OWN = ("torch", "autotp.trace.")  # where functions are that read nothing but what they are given


class Repeats:
    """Notes and follows the layers of one recording."""

    def __init__(self, recorder: Recorder, layers: Layers) -> None:
        self.recorder, self.layers = recorder, layers
        self.found: list[Repeat] = []
        self.noting: Noting | None = None
        self.following: Following | None = None
        self.inside = False  # a function that is noted
        self._kinds: dict[Any, Kind] = {}
        self._position = 0

    # -- around a layer

    def around(self, path: str, call: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One call of a module: noted, followed, or only run."""
        group = self.layers.groups.get(path)
        if group is None or path in self.layers.apart or self.noting or self.following:
            return run(*args, **kwargs)
        key = (group, call, tuple(p for p, _ in self.recorder.stack[:-1]), _told((args, kwargs)), state())
        kind = self._kinds.get(key)
        if kind is None:
            return self._note(key, path, call, run, *args, **kwargs)
        if not kind.sound:
            return run(*args, **kwargs)
        return self._follow(kind, path, call, run, *args, **kwargs)

    def _note(
        self, key: Any, path: str, call: int, run: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        kind = self._kinds[key] = Kind(path, call)
        self.noting = Noting(self.recorder, kind, path)
        try:
            with _Functions(self), _plain_tensors():
                return run(*args, **kwargs)
        finally:
            if kind.sound:
                self._keep_nodes(self.noting)
            self.noting = None

    def _keep_nodes(self, run: Noting) -> None:
        for number, tensor in enumerate(run.tensors):
            if number not in run.kind.outer:
                run.kind.nodes[number] = self.recorder.node(tensor)

    def _follow(
        self, kind: Kind, path: str, call: int, run: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        outside, number = tuple(self.recorder.stack[:-1]), len(self.found)
        following = Following(self.recorder, kind, path, number, outside)
        self.following, self._position = following, 0
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
        self.found.append(Repeat(path, kind.path, call, tuple(following.given.items())))
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
        run.wrote = True
        given = [run.tensors[n] for n, (source, _) in run.kind.outer.items() if isinstance(source, fx.Node)]
        if not self.recorder.memories(given).isdisjoint(self.recorder.memories(tensors)):
            run.kind.sound = False

    # -- what is noted, and compared

    def border(self, kind: str, path: str, call: int, value: Any) -> bool:
        """What goes into or comes out of a module inside of a layer; True where it need not be recorded."""
        run = self.noting or self.following
        if run is None or not self.recorder.recording:
            return False
        with aside():
            tensors = list(tensors_in(value, caches=False))
            return self._border(run, kind, path[len(run.path) :], call, tensors)

    def _border(
        self,
        run: Noting | Following,
        kind: str,
        inner: str,
        call: int,
        tensors: list[tuple[str, torch.Tensor, bool]],
    ) -> bool:
        if isinstance(run, Noting):
            noting = run
            if run.kind.sound:
                self._guarded(run, lambda: self._note_border(noting, kind, inner, call, tensors))
            return False
        line = self._next(run)
        if (
            not isinstance(line, Border)
            or (line.kind, line.path, line.call) != (kind, inner, call)
            or len(line.places) != len(tensors)
        ):
            raise Different(run.path)
        for (place, number), (here, tensor, _) in zip(line.places, tensors, strict=True):
            if place != here or run.number(tensor) != number:
                raise Different(run.path)
        return True

    def _note_border(
        self, run: Noting, kind: str, inner: str, call: int, tensors: list[tuple[str, torch.Tensor, bool]]
    ) -> None:
        places = tuple((place, run.noted(tensor)) for place, tensor, _ in tensors)
        run.kind.lines.append(Border(kind, inner, call, places))

    def _guarded(self, run: Noting, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except (Unsound, Symbolic):
            run.kind.sound = False
            return None

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch function that a layer calls."""
        if not self.recorder.recording:
            return function(*args, **kwargs)
        if self.following is not None:
            return self._compare(self.following, function, args, kwargs)
        run = self.noting
        if run is None or not run.kind.sound:
            return function(*args, **kwargs)
        now = state()
        if isinstance(function, types.FunctionType) and not function.__module__.startswith(_OWN):
            run.kind.sound = False  # a person's own function, which may read anything
        run.given.clear()
        run.wrote = False
        given = self._guarded(run, lambda: (run.spec(args), run.spec(kwargs)))
        was, self.inside = self.inside, True
        try:
            out = function(*args, **kwargs)
        finally:
            self.inside = was
        if given is not None:
            self._guarded(run, lambda: self._note_line(run, function, given, now, out))
        return out

    def _note_line(self, run: Noting, function: Any, given: tuple[Any, Any], state: Any, out: Any) -> None:
        args, kwargs = given
        grads = run.changed()
        result = run.result(out)
        acts = not any(map(has_tensor, (args, kwargs, result)))
        run.kind.lines.append(Line(function, args, kwargs, state, result, tuple(grads), acts))

    def _compare(self, run: Following, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        line = self._next(run)
        if (
            not isinstance(line, Line)
            or not (function is line.function or function == line.function)
            or state() != line.state
            or len(args) != len(line.args)
            or ((line.kwargs or kwargs) and not run.same(line.kwargs, kwargs))
        ):
            raise Different(run.path)
        numbers = run.numbers
        for spec, value in zip(line.args, args, strict=True):
            if type(spec) is Ref and numbers.get(id(value)) == spec:
                continue
            if not run.same(spec, value):
                raise Different(run.path)
        if line.acts:
            out = function(*args, **kwargs)
            if not run.same(line.result, out):
                raise Different(run.path)
            return out
        out = run.made(line.result)
        for number, needs in line.grads:
            run.tensors[number].requires_grad = needs
        return out

    def _next(self, run: Following) -> Line | Border | None:
        position, self._position = self._position, self._position + 1
        return run.kind.lines[position] if position < len(run.kind.lines) else None


class _Functions(TorchFunctionMode):
    def __init__(self, repeats: Repeats) -> None:
        super().__init__()
        self.repeats = repeats

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if sys.gettrace() is None:
            return self.repeats.call(func, args, kwargs or {})
        with unwatched():
            return self.repeats.call(func, args, kwargs or {})


def _told(value: Any, depth: int = 0) -> Any:
    """What a layer is given, as far as it can be told apart quickly."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, (tuple, list)) and depth < 4:
        return tuple(_told(v, depth + 1) for v in value)
    if isinstance(value, Mapping) and depth < 4:
        return tuple((k, _told(v, depth + 1)) for k, v in value.items())
    number = plain(value)
    if type(number) in PLAIN:
        return type(number), number
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
