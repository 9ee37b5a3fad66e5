"""Run a module's real forward on fake tensors and record every aten op into a `torch.fx.Graph`.

The recorder is a dispatch mode on the PreDispatch key, above autograd and above decompositions, so it
sees the same op sequence as `torch.export` (a test holds the two equal), for any Python forward, any
input and output types, with caches, in train mode. This is the only file that uses private hooks of
torch: `SchemaCheckMode` (the one kind of mode that the PreDispatch key accepts besides torch's own),
the python dispatcher, the fake tensor mode, and the flags that tell models that they are being exported.
Where a hook is missing, `MISSING` says so and `capture` takes another route.

After a recording, succeeded or failed, the module is as it was.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import operator
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autotp.trace.branches import unwatched
from autotp.trace.graph import (
    OPAQUE,
    REPEATED,
    Output,
    Trace,
    TraceError,
    Val,
    called,
    given_in,
    numbers_in,
    parameters_of,
    tensors_in,
)
from autotp.trace.layers import Layers
from autotp.trace.repeats import GHOST, Different, Ghost, Repeats
from autotp.trace.source import caller_span, error_span
from autotp.trace.untouched import untouched

MISSING: str | None = None
"""The private hook that this torch lacks; None when the recorder can run."""
try:
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch._subclasses.schema_check_mode import SchemaCheckMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
except ImportError as error:  # pragma: no cover - the tested torch has them all
    MISSING = str(error)

_TRIES = 6  # recordings in which layers are found not to be what they look like
DRAWN = 0.5
"""What a forward that draws one random number is given."""

__all__ = [
    "MISSING", "Guide", "Output", "Step", "Trace", "TraceError", "Val", "in_place_of", "record", "tensors_in",
]  # fmt: skip

Boundary = Callable[[str, Any], Any]
Guide = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], tuple[Any, tuple[Any, ...], Mapping[str, Any]]]
Step = Callable[[Any], tuple[tuple[Any, ...], Mapping[str, Any]]]


def record(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    grad: bool = True,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    before: Boundary | None = None,
    after: Boundary | None = None,
    exporting: bool = True,
    compiling: bool | None = None,
    then: Step | None = None,
    opaque: frozenset[str] = frozenset(),
    guide: Guide | None = None,
    layers: Layers | None = None,
) -> Trace:
    """Record one forward of `module` on `args` and `kwargs`, whose tensors only give shapes and dtypes.

    `shapes` replaces the shapes of named parameters and buffers (a rank's local ones). `before(path,
    args)` and `after(path, output)` may replace what goes into and comes out of a module (the mappings of
    parallel layers). With `grad`, every floating parameter and input counts as requiring a gradient.
    `exporting` tells the model that it is being exported, so that it takes its trace-safe branches;
    `compiling` (by default the same) that it is being compiled.
    `then(output)` gives the arguments of a second forward in the same trace (a decode step on the cache
    that the first one filled). The modules named in `opaque` are not looked into: each call is one node.
    `guide(op, args, kwargs)` sees each op call before it runs, and gives the one that runs in its place.
    `layers` are those that may repeat each other, and are recorded once where they do (`Trace.repeats`).

    Raises TraceError when the forward raises.
    """
    if MISSING is not None:
        raise TraceError(f"this torch lacks a hook that the recorder needs ({MISSING})", "", None)

    def once(alike: Layers) -> Trace:
        return _record(
            module, args, kwargs, grad=grad, shapes=shapes or {}, before=before, after=after,
            flags=(exporting if compiling is None else compiling, exporting), then=then, opaque=opaque,
            guide=guide, layers=alike,
        )  # fmt: skip

    # A guide is to see every op.
    for _ in range(_TRIES if layers is not None and layers.groups and guide is None else 0):
        assert layers is not None
        try:
            trace = once(layers)
        except Different as different:
            if not different.path:
                break
            layers.apart.add(different.path)
            continue
        except TraceError:
            break  # what is said of it comes from the whole model
        if not trace.repeats or not any(n.meta.get("origin") == "unknown" for n in trace.graph.nodes):
            return trace
        break
    return once(Layers())


def _record(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    grad: bool,
    shapes: Mapping[str, tuple[int, ...]],
    before: Boundary | None,
    after: Boundary | None,
    flags: tuple[bool, bool],
    then: Step | None,
    opaque: frozenset[str],
    guide: Guide | None,
    layers: Layers,
) -> Trace:
    with untouched(module), _faked(module, args, kwargs, grad=grad, shapes=shapes) as fakes:
        recorder = _Recorder(module, fakes, guide, layers)
        with contextlib.ExitStack() as stack:
            stack.callback(recorder.give_back)
            _RUNNING.append(recorder)
            stack.callback(_RUNNING.pop)
            stack.enter_context(_quiet())
            stack.enter_context(_same_draws())
            # What the model compiles runs as it is written.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(fakes.mode)
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(_flags(*flags))
            recorder.watch(before, after, opaque)
            recorder.place(fakes.args, fakes.kwargs)
            stack.enter_context(_functions(recorder))
            stack.enter_context(enable_python_dispatcher())
            stack.enter_context(recorder)
            try:
                out = module(*fakes.args, **fakes.kwargs)
                if then is not None:
                    recorder.finish(out)
                    recorder.trace.calls = {}
                    args, kwargs = recorder.paused(then, out)
                    recorder.place(args, kwargs, "step ")
                    out = module(*args, **kwargs)
            except TraceError:
                raise
            except Exception as error:
                raise recorder.error(error) from error
        recorder.finish(out)
        recorder.close_graph()
        return recorder.trace


if MISSING is None:

    class _Recorder(SchemaCheckMode):  # type: ignore[no-untyped-call]
        def __init__(self, root: nn.Module, fakes: _Fakes, guide: Guide | None, layers: Layers) -> None:
            # SchemaCheckMode's own set-up takes no dispatch key.
            TorchDispatchMode.__init__(  # type: ignore[no-untyped-call]
                self, _dispatch_key=torch._C.DispatchKey.PreDispatch
            )
            self.trace = Trace()
            self.recording = True
            self.stack: list[tuple[str, int]] = [("", 0)]
            self.custom: str | None = None  # the autograd.Function whose forward runs
            self.repeats = Repeats(self, layers)
            self._root = root
            self._fakes = fakes
            self._guide = guide
            self._nodes: dict[int, fx.Node] = {}  # id(tensor) -> node
            # The same memory, seen through another object: `x.data`, or what a factory function hands out.
            self._memory: dict[tuple[Any, ...], fx.Node] = {}
            self._named_memory = {_memory_key(t): t for t in fakes.owned}
            self._keep: list[Any] = []  # ids stay unique while their objects live
            self._constants = 0
            self._counts: dict[str, int] = {}
            self._failed: tuple[BaseException, str] | None = None
            self._written: list[tuple[torch.Tensor, torch.Tensor]] = []
            self._paths: dict[int, str] = {}
            for path, module in root.named_modules():
                self._paths.setdefault(id(module), path)

        # -- modules

        def watch(self, before: Boundary | None, after: Boundary | None, opaque: frozenset[str]) -> None:
            """Follow which module runs, by its `forward`: users' hooks run outside of it, as they will
            run outside of a parallel layer's, and belong to the module that calls."""
            self.trace.opaque = tuple(sorted(opaque))
            for module in self._root.modules():
                path = self._paths[id(module)]
                inner = self._opaque_forward(module) if path in opaque else module.forward
                module.__dict__["forward"] = self._watched(path, inner, before, after)

        def _watched(
            self, path: str, inner: Callable[..., Any], before: Boundary | None, after: Boundary | None
        ) -> Callable[..., Any]:
            parameters = parameters_of(inner)

            def body(*args: Any, **kwargs: Any) -> Any:
                call = self._counts[path]
                self._border(self.trace.entered, "entered", path, call, (args, kwargs))
                if before is not None:
                    args = self._replaced(args, self.paused(before, path, args))
                out = inner(*args, **kwargs)
                if after is not None:
                    (out,) = self._replaced((out,), (self.paused(after, path, out),))
                self._border(self.trace.left, "left", path, call, out)
                return out

            def forward(*args: Any, **kwargs: Any) -> Any:
                self.trace.calls[path] = self.trace.calls.get(path, 0) + 1
                call = self._counts[path] = self._counts.get(path, -1) + 1
                self.trace.given.setdefault(path, []).append(given_in(called(parameters, args, kwargs)))
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
            return [(name, self._node(tensor)) for name, tensor, _ in found]

        def _replaced(self, old: tuple[Any, ...], new: tuple[Any, ...] | None) -> tuple[Any, ...]:
            """What a boundary put in the place of tensors takes their place in the graph."""
            if new is None:
                return old
            for was, now in zip(old, new, strict=True):
                if now is not None and now is not was:
                    self.repeats.break_off()
                    self._keep.append(now)
                    self._nodes[id(now)] = self._node(was)
            return tuple(was if now is None else now for was, now in zip(old, new, strict=True))

        def note_backward(self, name: str, values: Any) -> None:
            """Code of its own runs in the backward of these values."""
            self.repeats.break_off()
            if self.recording and torch.is_grad_enabled():
                for _, tensor, _ in tensors_in(values):
                    if tensor.requires_grad:
                        self._node(tensor).meta.setdefault("backward", []).append(name)

        def error(self, error: Exception) -> TraceError:
            """Where the forward failed, in the words of the exception."""
            path = self._failed[1] if self._failed is not None and self._failed[0] is error else ""
            text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            return TraceError(
                text, path, error_span(error),
                dynamic=_is_dynamic(error), ops=len(self.trace.ops()), trace=self.trace,
            )  # fmt: skip

        def paused(self, function: Callable[..., Any], *args: Any) -> Any:
            """Run what is no part of the model's forward."""
            was, self.recording = self.recording, False
            try:
                return function(*args)
            finally:
                self.recording = was

        def _opaque_forward(self, module: nn.Module) -> Callable[..., Any]:
            @functools.wraps(module.forward)
            def forward(*args: Any, **kwargs: Any) -> Any:
                """One node, whose result is guessed to be like the first floating tensor that goes in."""
                self.repeats.break_off()
                given = [t for _, t, _ in tensors_in((args, kwargs))]
                like = next((t for t in given if _differentiable(t)), None)
                if like is None:
                    raise RuntimeError(
                        "an opaque module is given no floating tensor, so its result is not known"
                    )
                inside = [*given, *module.parameters(), *module.buffers()]
                needs = torch.is_grad_enabled() and any(t.requires_grad for t in inside)
                out: torch.Tensor = self.paused(
                    lambda: torch.empty_like(like).requires_grad_(needs).view_as(like)
                )
                node = self._create(OPAQUE, tuple(self._node(t) for t in inside), {}, inside)
                node.meta["val"] = _val(out)
                self._bind(out, node)
                return out

            return forward

        # -- tensors

        def place(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], of: str = "") -> None:
            """A placeholder for every tensor among the inputs that is not known yet."""
            for name, leaf, _ in tensors_in((args, dict(kwargs))):
                if id(leaf) in self._nodes or id(leaf) in self._fakes.names:
                    continue
                if isinstance(leaf, FakeTensor) and _memory_key(leaf) in self._memory:
                    continue
                with _before_others(self.trace.graph):
                    node = self.trace.graph.placeholder("input" + str(len(self._nodes)))
                node.meta.update(val=_val(leaf), name=of + name, module="", source=None)
                self._bind(leaf, node)

        def _bind(self, tensor: torch.Tensor, node: fx.Node) -> None:
            self._nodes[id(tensor)] = node
            self._keep.append(tensor)
            key = _memory_key(tensor)
            if key is not None:
                self._memory[key] = node

        def _node(self, tensor: torch.Tensor) -> fx.Node:
            found = self._nodes.get(id(tensor))
            if found is not None:
                return found
            ghost = tensor.__dict__.get(GHOST)
            if ghost is not None:
                return self._repeated(tensor, ghost)
            named = self._fakes.names.get(id(tensor))
            if named is None:
                key = _memory_key(tensor)
                if key is not None and key not in self._memory and key in self._named_memory:
                    self._node(self._named_memory[key])
                if key is not None and key in self._memory:
                    self._nodes[id(tensor)] = self._memory[key]
                    self._keep.append(tensor)
                    return self._memory[key]
                origin = "unknown" if isinstance(tensor, FakeTensor) else "constant"
                named = (f"_constant{self._constants}", origin)
                self._constants += 1
            name, origin = named
            node = self.trace.graph.create_node("get_attr", name)
            if origin == "constant":
                with _disable_current_modes(), torch.no_grad():
                    node.meta["constant"] = tensor.detach().clone()
            node.meta.update(
                val=_val(tensor), origin=origin, name=name, module=self.stack[-1][0], source=caller_span(3)
            )
            self._bind(tensor, node)
            return node

        def _repeated(self, tensor: torch.Tensor, ghost: Ghost) -> fx.Node:
            node = self.trace.graph.create_node("call_function", REPEATED, (ghost.source, ghost.repeat))
            path, call = ghost.stack[-1]
            node.meta.update(
                module=path, call=call, stack=ghost.stack, source=ghost.source.meta.get("source"),
                custom=None, grads=set(), mutates=[], val=_val(tensor),
            )  # fmt: skip
            self._bind(tensor, node)
            return node

        # -- what `repeats` asks

        def node(self, tensor: torch.Tensor) -> fx.Node:
            """The node of a tensor."""
            return self._node(tensor)

        def name(self, tensor: torch.Tensor) -> str | None:
            """The name of a tensor of the model; None for any other."""
            named = self._fakes.names.get(id(tensor))
            return None if named is None else named[0]

        def knows(self, tensor: torch.Tensor) -> bool:
            """Whether it is a fake tensor of which is known where it comes from."""
            if not isinstance(tensor, FakeTensor):
                return False
            if id(tensor) in self._nodes or id(tensor) in self._fakes.names or GHOST in tensor.__dict__:
                return True
            key = _memory_key(tensor)
            return key is not None and (key in self._memory or key in self._named_memory)

        def memories(self, tensors: list[torch.Tensor]) -> set[Any]:
            """The memory of these tensors, views and what they view alike."""
            return {key[0] for key in map(_memory_key, tensors) if key is not None}

        def template(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
            """How to make fake tensors like this one, without a run through torch."""
            shape, strides, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
            held = offset + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            with _disable_current_modes():
                like = torch.empty(max(held, 0), dtype=tensor.dtype, device="meta")
                like = like.as_strided(shape, strides, offset)
            attributes, needs, device = dict(tensor.__dict__), tensor.requires_grad, tensor.device

            def made() -> torch.Tensor:
                new: torch.Tensor = torch.Tensor._make_subclass(
                    FakeTensor, like, needs, dispatch_device=True, device_for_backend_keys=device
                )
                new.__dict__.update(attributes)
                return new

            return made

        def _argument(self, value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return self._node(value)
            if isinstance(value, (list, tuple)):
                parts = [self._argument(v) for v in value]
                return tuple(parts) if type(value) is tuple else parts
            if isinstance(value, dict):
                return {k: self._argument(v) for k, v in value.items()}
            if value is None or isinstance(value, _PLAIN):
                return value
            return repr(value)

        def _create(
            self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor]
        ) -> fx.Node:
            grad = torch.is_grad_enabled()
            needs = {self._node(t) for t in inputs if grad and t.requires_grad}
            node = self.trace.graph.create_node("call_function", target, args, kwargs)
            path, call = self.stack[-1]
            node.meta.update(
                module=path,
                call=call,
                stack=tuple(self.stack),
                source=caller_span(3),
                custom=self.custom,
                grads=needs,
                mutates=[],
            )
            return node

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            with unwatched():
                return self._op(func, args, kwargs or {})

        def _op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self.recording:
                return func(*args, **kwargs)
            if self._guide is not None:
                func, args, kwargs = self.paused(self._guide, func, args, kwargs)
            if not self.repeats.inside:
                self.repeats.break_off()
            inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            placed = self._argument(tuple(args)), self._argument(dict(kwargs))
            written = _mutated(func, args, kwargs)
            mutated = [self._node(t) for t in written]
            if any(node.target is REPEATED for node in mutated):
                raise Different("")
            if written:
                self.repeats.written(written)
            # An input that is written gets its gradient from what is written, so this is asked before.
            node = self._create(func, *placed, inputs)
            self._keep_values(written)
            try:
                out = self._run(func, args, kwargs)
            except BaseException:
                self.trace.graph.erase_node(node)
                raise
            results = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
            if not results and not mutated and not _gives_number(func, out, inputs):
                self.trace.graph.erase_node(node)
                return out
            node.meta["mutates"] = mutated
            if isinstance(out, torch.Tensor):
                node.meta["val"] = _val(out)
                self._bind(out, node)
            elif not results and not mutated:
                node.meta["val"] = None
            else:
                self._several(node, out)
                for tensor in args if not results else ():
                    if isinstance(tensor, torch.Tensor) and self._node(tensor) in mutated:
                        self._nodes[id(tensor)] = node
            return out

        def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            """The op's results. A single random number is drawn to decide something by it, as layer drop
            does: it has a value then, so that the forward can go on."""
            if func is torch.ops.aten.rand.default and math.prod(args[0]) == 1:
                dtype = kwargs.get("dtype") or torch.get_default_dtype()
                return self.paused(lambda: torch.tensor(DRAWN, dtype=dtype).reshape(args[0]))
            return func(*args, **kwargs)

        def _keep_values(self, written: list[torch.Tensor]) -> None:
            """Tensors that are plain attributes of a module are real, and so is what is written into them."""
            for tensor in written:
                if not isinstance(tensor, FakeTensor) and not tensor.is_meta:
                    self._keep.append(tensor)
                    with _disable_current_modes(), torch.no_grad():
                        self._written.append((tensor, tensor.clone()))

        def give_back(self) -> None:
            """Undo what the forward wrote into real tensors, the last write first."""
            with torch.no_grad():
                for tensor, before in reversed(self._written):
                    tensor.copy_(before)

        def _several(self, node: fx.Node, out: Any) -> None:
            items = list(out) if isinstance(out, (list, tuple)) else []
            node.meta["val"] = [_val(o) if isinstance(o, torch.Tensor) else None for o in items]
            for index, item in enumerate(items):
                if isinstance(item, torch.Tensor):
                    part = self.trace.graph.create_node("call_function", operator.getitem, (node, index))
                    part.meta.update(node.meta, val=_val(item), grads=set(), mutates=[])
                    self._bind(item, part)

        # -- the end

        def finish(self, out: Any) -> None:
            """Note the tensors that a forward returned."""
            if isinstance(out, Iterator):
                raise TraceError("the forward is a generator, which runs after it has returned", "", None)
            for name, tensor, cached in tensors_in(out):
                self.trace.outputs.append(Output(name, self._node(tensor), cached))
            self.trace.returned |= numbers_in(out)
            self.trace.repeats = self.repeats.found

        def close_graph(self) -> None:
            """Note what the forward left on modules, and close the graph."""
            for path, module in self._root.named_modules():
                before = self._fakes.attributes.get(id(module), {})
                left = {k: v for k, v in vars(module).items() if k not in _TABLES and before.get(k) is not v}
                self.trace.kept |= numbers_in(left, path)
                for name, tensor, _ in tensors_in(left, path):
                    if isinstance(tensor, FakeTensor) and id(tensor) not in self._fakes.names:
                        self.trace.stored.append(Output(name, self._node(tensor), True))
            self.trace.graph.output(tuple(o.node for o in self.trace.outputs))


_TABLES = ("_parameters", "_buffers", "_modules", "forward")
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _is_dynamic(error: BaseException) -> bool:
    """Did the forward ask for a value that a recording does not have?"""
    names = ("DataDependent", "DynamicOutputShape", "UnsupportedMutationAliasing")
    text = f"{type(error).__name__}: {error}"
    return any(n in text for n in names) or "non-nested SymInt" in text or "data-dependent" in text.lower()


_RUNNING: list[Any] = []


def in_place_of(tensor: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`make(tensor)`, which in a recording takes the tensor's place: no op is recorded."""
    if not _RUNNING:
        return make(tensor)
    recorder = _RUNNING[-1]
    (new,) = recorder._replaced((tensor,), (recorder.paused(make, tensor),))
    assert isinstance(new, torch.Tensor)
    return new


def _gives_number(func: Any, out: Any, inputs: list[torch.Tensor]) -> bool:
    """`x.item()`: a value leaves the tensors; a sharded one must not lose its trace there. Its sizes do:
    what is made of them is compared."""
    numbers = (torch.SymInt, torch.SymFloat, torch.SymBool, bool, int, float, complex)
    of_shape = func in (torch.ops.aten.size.int, torch.ops.aten.sym_size.int)
    return bool(inputs) and isinstance(out, numbers) and not of_shape


def _mutated(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    found = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
    return found


def _val(tensor: torch.Tensor) -> Val:
    shape = tuple(int(n) if isinstance(n, int) else -1 for n in tensor.shape)
    return Val(shape, tensor.dtype, tensor.requires_grad)


def _memory_key(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    try:
        storage = tensor.untyped_storage()._cdata
        # Sizes that depend on values are symbols, which have no hash.
        return (
            storage,
            str(tuple(tensor.shape)),
            str(tensor.stride()),
            str(tensor.storage_offset()),
            tensor.dtype,
        )
    except (RuntimeError, NotImplementedError):
        return None


# -- fakes and flags


@dataclass
class _Fakes:
    mode: FakeTensorMode
    names: dict[int, tuple[str, str]]  # id(fake) -> (name, origin)
    owned: list[torch.Tensor]
    attributes: dict[int, dict[str, Any]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextlib.contextmanager
def _faked(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    grad: bool,
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[_Fakes]:
    """Put fake tensors in the place of every parameter, buffer and input (shared ones stay shared)."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    names: dict[int, tuple[str, str]] = {}
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor, shape: tuple[int, ...], requires_grad: bool = False) -> torch.Tensor:
        device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
        like = torch.empty(shape, dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, like, device, requires_grad=requires_grad)

    def owned(tensor: torch.Tensor, name: str, origin: str) -> torch.Tensor:
        if id(tensor) not in made:
            shape = shapes.get(name, tuple(tensor.shape))
            if isinstance(tensor, nn.Parameter):
                new = fake(tensor, shape, requires_grad=grad and _differentiable(tensor))
                new.__dict__.update(tensor.__dict__, _is_param=True)  # what nn.Parameter(new) does
            else:
                new = fake(tensor, shape)
            made[id(tensor)] = new
            # The real one too: a forward may hold it elsewhere (a list, a closure).
            names[id(new)] = names[id(tensor)] = (name, origin)
        return made[id(tensor)]

    for path, owner in module.named_modules():
        for origin, table in (("parameter", owner._parameters), ("buffer", owner._buffers)):
            for key, tensor in list(table.items()):
                if tensor is not None:
                    table[key] = owned(tensor, f"{path}.{key}" if path else key, origin)
        for key, value in list(owner.__dict__.items()):
            if isinstance(value, torch.Tensor):
                name = f"{path}.{key}" if path else key
                if value.is_meta:  # the model was built there
                    owner.__dict__[key] = owned(value, name, "constant")
                else:
                    names.setdefault(id(value), (name, "constant"))
    holders = list(made.values())
    for _, tensor, _ in tensors_in((args, dict(kwargs))):
        if id(tensor) not in made:
            new = fake(tensor, tuple(tensor.shape))
            if grad and _differentiable(tensor):
                # Not a leaf, so that a forward may write into it.
                with mode:
                    new = new.requires_grad_().view_as(new)
            made[id(tensor)] = new
    # What holds the inputs is copied: a cache object of the caller must not be filled with fakes.
    new_args, new_kwargs = copy.deepcopy((tuple(args), dict(kwargs)), _Memo(made))
    attributes = {id(m): dict(vars(m)) for m in module.modules()}
    yield _Fakes(mode, names, holders, attributes, new_args, new_kwargs)


class _Memo(dict[int, Any]):
    """deepcopy's memory, in which every tensor has its fake already."""

    def __init__(self, made: Mapping[int, torch.Tensor]) -> None:
        super().__init__(made)


def _differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A forward that fails is told by its TraceError; torch would print its own traceback besides."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was


@contextlib.contextmanager
def _same_draws() -> Iterator[None]:
    """Python's and numpy's random numbers are the same in every trace, and go on afterwards as before."""
    states = random.getstate(), numpy.random.get_state()
    random.seed(0)
    numpy.random.seed(0)
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])


@contextlib.contextmanager
def _before_others(graph: fx.Graph) -> Iterator[None]:
    """Placeholders stand before everything else."""
    first = next((n for n in graph.nodes if n.op != "placeholder"), None)
    if first is None:
        yield
    else:
        with graph.inserting_before(first):
            yield


@contextlib.contextmanager
def _flags(compiling: bool, exporting: bool) -> Iterator[None]:
    """Tell models that they are being compiled or exported, as torch.export does."""
    wanted = {"_is_compiling_flag": compiling, "_is_exporting_flag": exporting}
    saved = {flag: getattr(torch.compiler, flag) for flag in wanted if hasattr(torch.compiler, flag)}
    try:
        for flag in saved:
            setattr(torch.compiler, flag, wanted[flag])
        yield
    finally:
        for flag, value in saved.items():
            setattr(torch.compiler, flag, value)


@contextlib.contextmanager
def _functions(recorder: _Recorder) -> Iterator[None]:
    """Note which `autograd.Function` runs. Reentrant checkpointing is one that only runs its argument."""
    function = torch.autograd.Function
    original = function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__ == "torch.utils.checkpoint" and cls.__name__ == "CheckpointFunction":
            return args[0](*args[2:])
        recorder.repeats.break_off()
        if not cls.__module__.startswith("torch._library"):  # the backward that a custom op registers
            recorder.note_backward(cls.__name__, (args, kwargs))
        was, recorder.custom = recorder.custom, cls.__name__
        try:
            return original.__get__(None, cls)(*args, **kwargs)
        finally:
            recorder.custom = was

    hooked = torch.Tensor.register_hook

    def register_hook(self: torch.Tensor, hook: Any) -> Any:
        recorder.note_backward("a gradient hook", self)
        return hooked(self, hook)  # type: ignore[no-untyped-call]

    try:
        function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
        torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
        yield
    finally:
        function.apply = original  # type: ignore[method-assign]
        torch.Tensor.register_hook = hooked  # type: ignore[method-assign]
