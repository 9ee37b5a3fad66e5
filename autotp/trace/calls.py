"""The modules of a recording: which runs, what goes in and comes out, and what takes its place."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autotp.trace.graph import GRADIENT, OPAQUE, TraceError, parameters_of, said, tensors_in
from autotp.trace.hooks import asks_values
from autotp.trace.layers import Layers
from autotp.trace.repeats import Different, Repeats
from autotp.trace.seeds import DRAWS
from autotp.trace.signature import signature, told_of
from autotp.trace.source import error_span, is_installed
from autotp.trace.untouched import Saved
from autotp.trace.values import Known, Values, val_of
from autotp.trace.ways import Way, Ways, ways

__all__ = ["RUNNING", "Boundary", "Calls", "in_place_of"]

Boundary = Callable[[str, Any], Any]


class Calls(Values):
    """Follows the modules of `root`."""

    def __init__(self, root: nn.Module, layers: Layers, known: Known) -> None:
        Values.__init__(self, known)
        self.recording = True
        self.running = False  # an op, or what the recorder asks of autograd
        self.repeats = Repeats(self, layers)
        self._modules = list(root.named_modules())
        self._counts: dict[str, int] = {}
        self.way: Way | None = None  # through an opaque module
        self.given_on: set[Any] = (
            set()
        )  # memory that one may have given on: two names in truth, one in no trace
        self._failed: tuple[BaseException, str] | None = None
        self._raised: list[tuple[BaseException, str]] = []  # what no run raises, and in which module
        self._signatures: dict[int, tuple[tuple[str, Any], ...]] = {}  # by function: layers share theirs

    def watch(self, before: Boundary | None, after: Boundary | None, opaque: frozenset[str]) -> None:
        """Follow which module runs, by its `forward`: users' hooks run outside of it, as they will
        run outside of a parallel layer's, and belong to the module that calls."""
        self.trace.opaque = tuple(sorted(opaque))
        for path, module in self._modules:
            inner = self._opaque_forward(path, module) if path in opaque else module.forward
            module.__dict__["forward"] = self._watched(path, inner, before, after)

    def _watched(
        self, path: str, inner: Callable[..., Any], before: Boundary | None, after: Boundary | None
    ) -> Callable[..., Any]:
        parameters = self._parameters(inner)

        def body(*args: Any, **kwargs: Any) -> Any:
            call = self._counts[path]
            self._border(self.trace.entered, "entered", path, call, (args, kwargs))
            if before is not None:
                args = self.replaced(args, self.paused(before, path, args))
            out = inner(*args, **kwargs)
            if after is not None:
                (out,) = self.replaced((out,), (self.paused(after, path, out),))
            self._border(self.trace.left, "left", path, call, out)
            return out

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.way is not None:
                return inner(*args, **kwargs)
            self.trace.calls[path] = self.trace.calls.get(path, 0) + 1
            call = self._counts[path] = self._counts.get(path, -1) + 1
            self.trace.given.setdefault(path, []).append(self.paused(signature, parameters, args, kwargs))
            self.stack.append((path, call))
            try:
                return self.repeats.around(path, call, body, *args, **kwargs)
            except Exception as error:
                if self._failed is None or self._failed[0] is not error:
                    self._failed = (error, path)
                raise
            finally:
                self.stack.pop()

        forward.__wrapped__ = inner  # type: ignore[attr-defined]  # whose signature it has
        return forward

    def _parameters(self, forward: Callable[..., Any]) -> tuple[tuple[str, Any], ...]:
        if type(forward) is not types.MethodType:
            return parameters_of(forward)
        function = id(forward.__func__)
        if function not in self._signatures:
            self._signatures[function] = parameters_of(forward)
        return self._signatures[function]

    def _border(
        self,
        table: dict[str, list[list[tuple[str, fx.Node]]]],
        kind: str,
        path: str,
        call: int,
        value: Any,
    ) -> None:
        if not self.repeats.border(kind, path, call, value):
            table.setdefault(path, []).append(self._tensors(value))

    def _tensors(self, value: Any) -> list[tuple[str, fx.Node]]:
        found = tensors_in(value, caches=False)
        return [(name, self.node(tensor)) for name, tensor, _ in found]

    def replaced(self, old: tuple[Any, ...], new: tuple[Any, ...] | None) -> tuple[Any, ...]:
        """What a boundary put in the place of tensors takes their place in the graph."""
        if new is None:
            return old
        for was, now in zip(old, new, strict=True):
            if now is not None and now is not was:
                if not self.repeats.inside:
                    self.repeats.break_off()
                self._keep.append(now)
                self._nodes[id(now)] = self.node(was)
        return tuple(was if now is None else now for was, now in zip(old, new, strict=True))

    def note_backward(self, name: str, values: Any) -> None:
        """Code of its own runs in the backward of these values."""
        if not self.repeats.inside:
            self.repeats.break_off()
        if self.recording and torch.is_grad_enabled():
            for _, tensor, _ in tensors_in(values):
                if tensor.requires_grad:
                    self.node(tensor).meta.setdefault("backward", []).append(name)

    def ran_backward(self, name: str, given: Any, out: Any, before: int) -> bool:
        """Whether the backward of an `autograd.Function` was recorded, which ran since the graph had
        `before` nodes: of one tensor to one tensor, on a gradient of which only the shape is known."""
        if not self.recording or not torch.is_grad_enabled() or self.custom is not None:
            return False
        into = {id(t): t for _, t, _ in tensors_in(given) if t.requires_grad}
        if len(into) != 1 or not isinstance(out, torch.Tensor) or not out.requires_grad:
            return False
        (value,) = into.values()
        if out is value or self.paused(lambda: out.grad_fn is value.grad_fn):
            return False  # written in place: what the gradient goes to is no more
        here, raised = len(self.trace.graph.nodes), len(self._raised)
        node = self.create(GRADIENT, (self.node(out),), {}, [])
        gradient: torch.Tensor = self.paused(lambda: torch.empty_like(out, requires_grad=False))
        node.meta["val"] = val_of(gradient)
        self.bind(gradient, node)
        was, self.running = self.running, True
        try:
            (found,) = torch.autograd.grad(out, value, gradient, retain_graph=True)
            for error, _ in self._raised[raised:]:  # and caught
                raise error
        except Exception:
            for late in reversed(list(self.trace.graph.nodes)[here:]):
                self.trace.graph.erase_node(late)
            del self._raised[raised:]
            return False  # it cannot be recorded, so that it stays unknown
        finally:
            self.running = was
        self.trace.gradients.append((name, self.node(value), self.node(found)))
        for inside in list(self.trace.graph.nodes)[before:]:
            inside.meta["custom"] = None
        return True

    def raised(self, error: BaseException) -> None:
        """Note what is raised in a recording and in no run: the model's code may catch it, and go on."""
        if self.way is not None:
            self.way.failed = True
        elif self.recording:
            self._raised.append((error, self.stack[-1][0]))

    def check(self) -> None:
        """Raise Different or TraceError where the forward ended well, but caught what no run raises."""
        if self._raised and isinstance(self._raised[0][0], Different):
            raise self._raised[0][0]
        if self._raised:
            raise self.error(None)

    def error(self, error: Exception | None) -> TraceError:
        """Where the forward failed, in the words of the exception: of the first that no run raises, where it
        was caught."""
        path = self._failed[1] if self._failed is not None and self._failed[0] is error else ""
        first, within = self._raised[0] if self._raised else (error, path)
        caught = first is not error
        assert first is not None
        return TraceError(
            said(first, caught=caught), within if caught else path, error_span(first),
            dynamic=caught or asks_values(first), ops=len(self.trace.ops()), trace=self.trace,
        )  # fmt: skip

    def paused(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run what is no part of the model's forward."""
        was, self.recording = self.recording, False
        try:
            return function(*args)
        finally:
            self.recording = was

    def _opaque_forward(self, path: str, module: nn.Module) -> Callable[..., Any]:
        inner = module.forward

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.way is not None:
                return inner(*args, **kwargs)
            self.repeats.break_off()
            try:
                return self._result_of(path, module, inner, args, kwargs)
            except Exception as error:
                self.raised(error)
                raise

        return forward

    def _result_of(
        self,
        path: str,
        module: nn.Module,
        inner: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """One node. Its results are those of the ways through the module, where they can be told. Else
        one is guessed to be like the first floating tensor that goes in: of installed code, as experts
        are that loop over their tokens; of a user's own code the proof refuses it."""
        given = [t for _, t, _ in tensors_in((args, kwargs))]
        run = self._way_of(inner, args, kwargs)
        found = self.paused(ways, module, (args, kwargs), run)
        guess = next((t for t in given if _differentiable(t)), None)
        if found is None and guess is None:
            raise RuntimeError("an opaque module is given no floating tensor, so its result is not known")
        own = [*given, *module.parameters(), *module.buffers()]
        if found is not None:
            results, left = found.results, found.left
            own += filter(self.knows, found.used)
        elif is_installed(type(module)):
            if any(type(value) in (dict, list, set) for value in (*args, *kwargs.values())):
                raise RuntimeError("an opaque module is given what it may change, and autotp cannot tell")
            results, left = [guess], self.paused(_may_change, module)
        else:
            results, left = [guess], set()
            self.trace.guessed.add(path)
        self.trace.changed.setdefault(path, set()).update(left)
        if left or found is None:  # by which a later call may go another way
            own += [t for other in self._held_by(module) for t in other.parameters()]
        out = self._opaque(results, list({id(t): t for t in own}.values()), found)
        self.trace.gives.setdefault(path, set()).add(self.paused(told_of, out))
        return out

    def _held_by(self, module: nn.Module) -> list[nn.Module]:
        """The modules of the model that a module may reach besides its own."""
        held, own = Saved(), {id(part) for part in module.modules()}
        held.all_of(module)
        return [other for _, other in self._modules if id(other) in held.seen - own]

    def _way_of(
        self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[Way], Any]:
        def run(way: Way) -> Any:
            self.way = way
            try:
                return inner(*args, **kwargs)
            finally:
                self.way = None

        return run

    def _opaque(self, results: list[Any], inside: list[torch.Tensor], found: Ways | None) -> Any:
        """The node of an opaque call that takes these tensors, and new tensors like its results."""
        first, spec = pytree.tree_flatten(results[0])
        every = [pytree.tree_leaves(result) for result in results]
        grad = torch.is_grad_enabled()
        into = found is None and any(t.requires_grad for t in inside)
        made: dict[int, torch.Tensor] = {}
        entered = {key[0] for t in inside if (key := self._key(t)) is not None}
        for place, leaf in enumerate(first):
            if isinstance(leaf, torch.Tensor):
                needs = grad and (into or any(leaves[place].requires_grad for leaves in every))
                if (again := next((n for n in made if first[n] is leaf), None)) is not None:
                    made[place] = made[again]
                    continue
                made[place] = self.paused(_new_like, leaf, needs)
                keys = [self._key(leaves[place]) for leaves in every] if found is not None else []
                given_on = {key[0] for key in keys if key is not None} & entered
                if given_on and (key := self._key(made[place])) is not None:
                    self.given_on |= {*given_on, key[0]}
        needed = any(t.requires_grad for t in made.values())
        ops = {} if found is None else {"ops": repr(found.ops)}
        node = self.create(OPAQUE, tuple(map(self.node, inside)), ops, inside if needed else [])
        node.meta[DRAWS] = None if found is None else found.draws
        new = list({id(tensor): tensor for tensor in made.values()}.values())
        if len(new) == 1:
            (tensor,) = new
            node.meta["val"] = val_of(tensor)
            self.bind(tensor, node)
        else:
            node.meta["val"] = list(map(val_of, new)) or None
            for number, tensor in enumerate(new):
                part = self.trace.graph.create_node("call_function", operator.getitem, (node, number))
                part.meta.update(node.meta, val=val_of(tensor), grads=set(), mutates=[])
                self.bind(tensor, part)
        return pytree.tree_unflatten([made.get(place, leaf) for place, leaf in enumerate(first)], spec)


def _new_like(tensor: torch.Tensor, needs: bool) -> torch.Tensor:
    return torch.empty_like(tensor, requires_grad=False).requires_grad_(needs).view_as(tensor)


def _may_change(module: nn.Module) -> set[str]:
    saved = Saved()
    saved.all_of(module)
    return set(saved.may_change())


def _differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


RUNNING: list[Calls] = []
"""The recordings that go on, the innermost last."""


def in_place_of(tensor: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`make(tensor)`, which in a recording takes the tensor's place: no op is recorded."""
    if not RUNNING:
        return make(tensor)
    recorder = RUNNING[-1]
    (new,) = recorder.replaced((tensor,), (recorder.paused(make, tensor),))
    assert isinstance(new, torch.Tensor)
    return new
