"""Run a module's real forward on fake tensors and record every aten op into a `torch.fx.Graph`.

The recorder is a dispatch mode on the PreDispatch key, above autograd and above decompositions, so it
sees the same op sequence as `torch.export` (a test holds the two equal), for any Python forward, any
input and output types, with caches, in train mode. This is the only file that uses private hooks of
torch: `SchemaCheckMode` (the one kind of mode that the PreDispatch key accepts besides torch's own),
the python dispatcher, the fake tensor mode, and the flags that tell models that they are being exported.

After a recording, succeeded or failed, the module is as it was: every module's `__dict__` is restored.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autotp.diagnostic import Span
from autotp.trace.source import caller_span

__all__ = ["Output", "Trace", "TraceError", "Val", "record", "tensors_in"]

Boundary = Callable[[str, Any], Any]


class TraceError(Exception):
    """The forward raised while it was recorded; `module` and `source` say where."""

    def __init__(self, message: str, module: str, source: Span | None) -> None:
        super().__init__(message)
        self.module = module
        self.source = source


@dataclass(frozen=True)
class Val:
    """What is known of a tensor: its shape, dtype, and whether a gradient flows to it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool


@dataclass(frozen=True)
class Output:
    """A tensor that the forward returns: its place in the result, and whether it sits in a cache object."""

    name: str
    node: fx.Node
    cached: bool


@dataclass
class Trace:
    """One recorded forward.

    Nodes: `placeholder` for tensor inputs, `get_attr` for parameters, buffers and constants,
    `call_function` for ops and for `operator.getitem` of ops with several results. `node.meta` holds
    `val` (a `Val`, or a list of them), `module` (path of the innermost module), `call` (its how-manieth
    call), `source` (a `Span`), `grads` (the input nodes that required a gradient when they were used),
    `mutates` (the input nodes that the op writes) and, on `get_attr`, `origin`: "parameter", "buffer",
    "constant" or "unknown".
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    outputs: list[Output] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)

    def ops(self) -> list[fx.Node]:
        """The recorded op calls, in order."""
        return [n for n in self.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]


def record(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    grad: bool = True,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    before: Boundary | None = None,
    after: Boundary | None = None,
) -> Trace:
    """Record one forward of `module` on `args` and `kwargs`, whose tensors only give shapes and dtypes.

    `shapes` replaces the shapes of named parameters and buffers (a rank's local ones). `before(path,
    args)` and `after(path, output)` may replace what goes into and comes out of a module (the mappings of
    parallel layers). With `grad`, every floating parameter and input counts as requiring a gradient.

    Raises TraceError when the forward raises.
    """
    with _untouched(module), _faked(module, args, kwargs, grad=grad, shapes=shapes or {}) as fakes:
        recorder = _Recorder(module, fakes.names)
        # Functions that ask "am I being exported" take their trace-safe branches.
        with contextlib.ExitStack() as stack:
            stack.enter_context(fakes.mode)
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(_exporting())
            recorder.watch(stack, module, before, after)
            recorder.place(fakes.args, fakes.kwargs)
            stack.enter_context(enable_python_dispatcher())  # type: ignore[no-untyped-call]
            stack.enter_context(recorder)
            try:
                out = module(*fakes.args, **fakes.kwargs)
            except Exception as error:
                span = _span_of(error)
                path = recorder.stack[-1][0] if len(recorder.stack) > 1 else ""
                message = f"{type(error).__name__}: {error}".strip().splitlines()[0]
                raise TraceError(message, path, span) from error
        recorder.finish(out)
        return recorder.trace


def _span_of(error: Exception) -> Span | None:
    """The innermost line of a person's code in a traceback."""
    from autotp.trace import source

    found = None
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not source._is_library(code.co_filename):
            found = source._span(code, traceback.tb_lineno, traceback.tb_lasti // 2)
        traceback = traceback.tb_next
    return found


class _Recorder(SchemaCheckMode):
    def __init__(self, root: nn.Module, names: dict[int, tuple[str, str]]) -> None:
        # SchemaCheckMode's own set-up takes no dispatch key.
        TorchDispatchMode.__init__(self, _dispatch_key=torch._C.DispatchKey.PreDispatch)
        self.trace = Trace()
        self.recording = True
        self.stack: list[tuple[str, int]] = [("", 0)]
        self._names = names  # id(fake) -> (name, origin)
        self._nodes: dict[int, fx.Node] = {}  # id(tensor) -> node
        self._memory: dict[tuple[Any, ...], fx.Node] = {}  # the same memory, seen through another object
        self._keep: list[Any] = []  # ids stay unique while their objects live
        self._constants = 0
        self._paths: dict[int, str] = {}
        for path, module in root.named_modules():
            self._paths.setdefault(id(module), path)

    # -- modules

    def watch(
        self, stack: contextlib.ExitStack, root: nn.Module, before: Boundary | None, after: Boundary | None
    ) -> None:
        """Follow which module runs, by forward hooks."""

        def enter(module: nn.Module, args: tuple[Any, ...]) -> Any:
            path = self._paths[id(module)]
            call = self.trace.calls.get(path, 0)
            self.trace.calls[path] = call + 1
            self.stack.append((path, call))
            if before is None:
                return None
            replaced = self._paused(before, path, args)
            if replaced is not None:
                for old, new in zip(args, replaced, strict=True):
                    if new is not old:
                        self._stand_in(new, old)
            return replaced

        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            path = self._paths[id(module)]
            replaced = self._paused(after, path, output) if after is not None else None
            if replaced is not None:
                self._stand_in(replaced, output)
            self.stack.pop()
            return replaced

        for module in root.modules():
            stack.enter_context(_removing(module.register_forward_pre_hook(enter)))
            stack.enter_context(_removing(module.register_forward_hook(leave)))

    def _paused(self, boundary: Boundary, path: str, value: Any) -> Any:
        self.recording = False
        try:
            return boundary(path, value)
        finally:
            self.recording = True

    def _stand_in(self, new: torch.Tensor, old: torch.Tensor) -> None:
        """`new` takes the place of `old` in the graph."""
        self._keep.append(new)
        self._nodes[id(new)] = self._node(old)

    # -- tensors

    def place(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A placeholder for every tensor among the inputs."""
        for path, leaf in pytree.tree_leaves_with_path((args, dict(kwargs))):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in self._nodes:
                name = pytree.keystr(path)
                node = self.trace.graph.placeholder("input" + str(len(self._nodes)))
                node.meta.update(val=_val(leaf), name=name, module="", source=None)
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
        named = self._names.get(id(tensor))
        if named is None:
            # Factory functions hand out another object than the mode returned; its memory is the same.
            key = _memory_key(tensor)
            if key is not None and key in self._memory:
                self._nodes[id(tensor)] = self._memory[key]
                self._keep.append(tensor)
                return self._memory[key]
            origin = "unknown" if isinstance(tensor, FakeTensor) else "constant"
            named = (f"_constant{self._constants}", origin)
            self._constants += 1
        name, origin = named
        node = self.trace.graph.create_node("get_attr", name)
        node.meta.update(
            val=_val(tensor), origin=origin, name=name, module=self.stack[-1][0], source=caller_span(3)
        )
        self._bind(tensor, node)
        return node

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._node(value)
        if isinstance(value, (list, tuple)):
            return (
                type(value)(self._argument(v) for v in value)
                if type(value) in (list, tuple)
                else list(self._argument(v) for v in value)
            )
        if isinstance(value, dict):
            return {k: self._argument(v) for k, v in value.items()}
        if value is None or isinstance(
            value,
            (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format),
        ):
            return value
        return repr(value)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.recording:
            return func(*args, **kwargs)
        inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        nodes = [(self._node(t), t.requires_grad) for t in inputs]
        placed = self._argument(tuple(args)), self._argument(dict(kwargs))
        mutated = [self._node(t) for t in _mutated(func, args, kwargs)]
        out = func(*args, **kwargs)
        results = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        if not results and not mutated:
            return out
        node = self.trace.graph.create_node("call_function", func, *placed)
        path, call = self.stack[-1]
        where = {"module": path, "call": call, "source": caller_span(2)}
        node.meta.update(where, grads={n for n, needs in nodes if needs}, mutates=mutated)
        if isinstance(out, torch.Tensor):
            node.meta["val"] = _val(out)
            self._bind(out, node)
        else:
            items = list(out) if isinstance(out, (list, tuple)) else []
            node.meta["val"] = [_val(o) if isinstance(o, torch.Tensor) else None for o in items]
            for index, item in enumerate(items):
                if isinstance(item, torch.Tensor):
                    part = self.trace.graph.create_node("call_function", operator.getitem, (node, index))
                    part.meta.update(where, val=_val(item), grads=set(), mutates=[])
                    self._bind(item, part)
            for tensor in args if not results else ():
                if isinstance(tensor, torch.Tensor) and self._node(tensor) in mutated:
                    self._nodes[id(tensor)] = node
        return out

    def finish(self, out: Any) -> None:
        """Close the graph with the tensors that the forward returned."""
        nodes = []
        for name, tensor, cached in tensors_in(out):
            node = self._node(tensor)
            nodes.append(node)
            self.trace.outputs.append(Output(name, node, cached))
        self.trace.graph.output(tuple(nodes))


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
    return Val(
        tuple(int(n) if isinstance(n, int) else -1 for n in tensor.shape), tensor.dtype, tensor.requires_grad
    )


def _memory_key(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    try:
        storage = tensor.untyped_storage()._cdata
        return (storage, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
    except (RuntimeError, NotImplementedError):
        return None


def tensors_in(
    out: Any, name: str = "", cached: bool = False, depth: int = 0
) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Every tensor in a result, also inside objects that are no plain containers."""
    if isinstance(out, torch.Tensor):
        yield name, out, cached
    elif depth > 8 or out is None or isinstance(out, (str, int, float, bool, torch.dtype, torch.device)):
        return
    elif isinstance(out, Mapping):
        for key, value in out.items():
            yield from tensors_in(value, f"{name}.{key}" if name else str(key), cached, depth + 1)
    elif isinstance(out, (list, tuple, set)):
        for index, value in enumerate(out):
            yield from tensors_in(value, f"{name}[{index}]", cached, depth + 1)
    elif hasattr(out, "__dict__") and not isinstance(out, (type, nn.Module)):
        # transformers' caches come back into the same model: what they hold stays local on purpose.
        cache = any(c.__module__ == "transformers.cache_utils" for c in type(out).__mro__)
        for key, value in vars(out).items():
            yield from tensors_in(value, f"{name}.{key}", cached or cache, depth + 1)


# -- fakes, flags, and leaving no trace


@dataclass
class _Fakes:
    mode: FakeTensorMode
    names: dict[int, tuple[str, str]]
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

    def fake(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
        with mode:
            return torch.empty(shape, dtype=tensor.dtype, device=device)

    def owned(tensor: torch.Tensor, name: str, origin: str) -> torch.Tensor:
        if id(tensor) not in made:
            new = fake(tensor, shapes.get(name, tuple(tensor.shape)))
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=grad and _differentiable(tensor))
            made[id(tensor)] = new
            names[id(new)] = (name, origin)
        return made[id(tensor)]

    def given(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in made:
            new = fake(value, tuple(value.shape))
            if grad and _differentiable(value):
                # Not a leaf, so that a forward may write into it.
                with mode:
                    new = new.requires_grad_().view_as(new)
            made[id(value)] = new
        return made[id(value)]

    for path, owner in module.named_modules():
        for origin, table in (("parameter", owner._parameters), ("buffer", owner._buffers)):
            for key, tensor in list(table.items()):
                if tensor is not None:
                    table[key] = owned(tensor, f"{path}.{key}" if path else key, origin)  # type: ignore[assignment]
    new_args, new_kwargs = pytree.tree_map(given, (args, dict(kwargs)))
    yield _Fakes(mode, names, new_args, new_kwargs)


def _differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@contextlib.contextmanager
def _untouched(root: nn.Module) -> Iterator[None]:
    """Restore every module's attributes, whatever the forward stored on them."""
    saved: list[tuple[nn.Module, dict[str, Any], list[tuple[Any, Any]]]] = []
    for module in root.modules():
        containers = [(v, v.copy()) for v in module.__dict__.values() if isinstance(v, (dict, list, set))]
        saved.append((module, dict(module.__dict__), containers))
    try:
        yield
    finally:
        for module, attributes, containers in saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for live, copy in containers:
                if isinstance(live, list):
                    live[:] = copy
                else:
                    live.clear()
                    live.update(copy)


@contextlib.contextmanager
def _exporting() -> Iterator[None]:
    """Tell models that they are being exported, as torch.export does."""
    flags = [f for f in ("_is_compiling_flag", "_is_exporting_flag") if hasattr(torch.compiler, f)]
    saved = [getattr(torch.compiler, f) for f in flags]
    try:
        for flag in flags:
            setattr(torch.compiler, flag, True)
        yield
    finally:
        for flag, value in zip(flags, saved, strict=True):
            setattr(torch.compiler, flag, value)


@contextlib.contextmanager
def _removing(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()
