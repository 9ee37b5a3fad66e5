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
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autotp.trace.branches import unwatched
from autotp.trace.calls import Boundary, Calls
from autotp.trace.graph import (
    REPEATED,
    Output,
    Trace,
    TraceError,
    Val,
    numbers_in,
    tensors_in,
)
from autotp.trace.layers import Layers
from autotp.trace.repeats import Different
from autotp.trace.surroundings import functions, quiet, same_draws
from autotp.trace.untouched import untouched
from autotp.trace.values import Known, val_of

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
            stack.enter_context(quiet())
            stack.enter_context(same_draws())
            # What the model compiles runs as it is written.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(fakes.mode)
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(_flags(*flags))
            recorder.watch(before, after, opaque)
            recorder.place(fakes.args, fakes.kwargs)
            stack.enter_context(functions(recorder))
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

    class _Recorder(Calls, SchemaCheckMode):  # type: ignore[no-untyped-call]
        def __init__(self, root: nn.Module, fakes: _Fakes, guide: Guide | None, layers: Layers) -> None:
            # SchemaCheckMode's own set-up takes no dispatch key.
            TorchDispatchMode.__init__(  # type: ignore[no-untyped-call]
                self, _dispatch_key=torch._C.DispatchKey.PreDispatch
            )
            known = Known(fakes.names, fakes.owned, _is_fake, _copied, _template, _memory)
            Calls.__init__(self, root, layers, known)
            self._fakes = fakes
            self._guide = guide
            self._written: list[tuple[torch.Tensor, torch.Tensor]] = []

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
            placed = self.argument(tuple(args)), self.argument(dict(kwargs))
            written = _mutated(func, args, kwargs)
            mutated = [self.node(t) for t in written]
            if any(node.target is REPEATED for node in mutated):
                raise Different("")
            if written:
                self.repeats.written(written)
            # An input that is written gets its gradient from what is written, so this is asked before.
            node = self.create(func, *placed, inputs)
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
                node.meta["val"] = val_of(out)
                self.bind(out, node)
            elif not results and not mutated:
                node.meta["val"] = None
            else:
                self._several(node, out)
                for tensor in args if not results else ():
                    if isinstance(tensor, torch.Tensor) and self.node(tensor) in mutated:
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
                if not self._is_fake(tensor) and not tensor.is_meta:
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
            node.meta["val"] = [val_of(o) if isinstance(o, torch.Tensor) else None for o in items]
            for index, item in enumerate(items):
                if isinstance(item, torch.Tensor):
                    part = self.trace.graph.create_node("call_function", operator.getitem, (node, index))
                    part.meta.update(node.meta, val=val_of(item), grads=set(), mutates=[])
                    self.bind(item, part)

        def finish(self, out: Any) -> None:
            """Note the tensors that a forward returned."""
            if isinstance(out, Iterator):
                raise TraceError("the forward is a generator, which runs after it has returned", "", None)
            for name, tensor, cached in tensors_in(out):
                self.trace.outputs.append(Output(name, self.node(tensor), cached))
            self.trace.returned |= numbers_in(out)
            self.trace.repeats = self.repeats.found

        def close_graph(self) -> None:
            """Note what the forward left on modules, and close the graph."""
            for path, module in self._root.named_modules():
                before = self._fakes.attributes.get(id(module), {})
                left = {k: v for k, v in vars(module).items() if k not in _TABLES and before.get(k) is not v}
                self.trace.kept |= numbers_in(left, path)
                for name, tensor, _ in tensors_in(left, path):
                    if self._is_fake(tensor) and id(tensor) not in self._names:
                        self.trace.stored.append(Output(name, self.node(tensor), True))
            self.trace.graph.output(tuple(o.node for o in self.trace.outputs))


def _memory(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """The memory that a tensor sees, and how; None where there is none."""
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


def _is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    with _disable_current_modes(), torch.no_grad():
        return tensor.detach().clone()


def _template(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
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


_TABLES = ("_parameters", "_buffers", "_modules", "forward")


_RUNNING: list[Any] = []


def in_place_of(tensor: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`make(tensor)`, which in a recording takes the tensor's place: no op is recorded."""
    if not _RUNNING:
        return make(tensor)
    recorder = _RUNNING[-1]
    (new,) = recorder.replaced((tensor,), (recorder.paused(make, tensor),))
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
