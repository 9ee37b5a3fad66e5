"""All that is private to torch, in one file: the recorder's mode, and fake tensors.

`SchemaCheckMode` is the one kind of mode that the PreDispatch key accepts besides torch's own; besides are
used the python dispatcher, the fake tensor mode, and the flags that tell models that they are being exported.
Where a hook is missing, `MISSING` says so and `capture` takes another route.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from autotp.trace.branches import unwatched

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

__all__ = [
    "FAKE",
    "FILLING",
    "MISSING",
    "NO_CONSTANT",
    "REQUIRES_GRAD",
    "Fakes",
    "OpMode",
    "Symbolic",
    "Template",
    "aside",
    "asks_values",
    "copied",
    "data_like",
    "device",
    "flags",
    "in_backward",
    "is_fake",
    "kernel",
    "like",
    "memory",
    "modes_off",
    "of_fakes",
    "only_fakes",
    "outside_transforms",
    "python_dispatcher",
    "sizes",
    "storage",
    "symbolic",
    "told",
    "transformed",
    "wrapped",
]  # fmt: skip

FAKE: Any = FakeTensor if MISSING is None else None
"""The class of fake tensors."""
FILLING = (
    "_calculate_fan_in_and_fan_out", "_no_grad_normal_", "_no_grad_trunc_normal_", "_no_grad_uniform_",
)  # fmt: skip
"""What the functions of torch.nn.init that draw, or go by sizes, call with the tensor."""
BACKWARD = (torch.autograd, "_engine_run_backward")
"""Where the function stands that runs every backward."""
_BASE: Any = torch._C.TensorBase
sizes = _BASE.shape.__get__
"""A tensor's sizes, which nothing notes."""
NO_CONSTANT, REQUIRES_GRAD = 5, 6
"""The places in `like` that say that a tensor's values are not known, and that it requires a gradient."""


class Symbolic(Exception):
    """A size that depends on values."""


if MISSING is None:

    class OpMode(SchemaCheckMode):  # type: ignore[no-untyped-call]
        """Sees every op call above autograd and above decompositions."""

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # what a model compiles runs as it is written while it is recorded

        def __init__(self) -> None:
            # SchemaCheckMode's own set-up takes no dispatch key.
            TorchDispatchMode.__init__(  # type: ignore[no-untyped-call]
                self, _dispatch_key=torch._C.DispatchKey.PreDispatch
            )

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if sys.gettrace() is None:
                return self.op(func, args, kwargs or {})
            with unwatched():
                return self.op(func, args, kwargs or {})

        def op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            """One op call."""
            return func(*args, **kwargs)

else:  # pragma: no cover - the tested torch has them all

    class OpMode:  # type: ignore[no-redef]
        """There is none."""


class Fakes:
    """Makes the fake tensors of one recording."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def made(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, requires_grad: bool = False
    ) -> torch.Tensor:
        """A fake tensor; one of a tensor on the meta device is on the CPU."""
        data = torch.empty(shape, dtype=dtype, device="meta")
        return wrapped(data, self.attributes(device), requires_grad)

    def remembered_elsewhere(self, elsewhere: bool) -> None:
        """Whether the mode need not remember results itself."""
        self.mode.cache_enabled = self.mode.cache_enabled and not elsewhere

    def attributes(self, device: torch.device) -> dict[str, Any]:
        """What hangs on each fake tensor on a device."""
        found = self._attributes.get(device)
        if found is None:
            on = torch.device("cpu") if device.type == "meta" else device
            first = FakeTensor(self.mode, torch.empty((0,), device="meta"), on)
            found = self._attributes[device] = dict(first.__dict__)
        return found


def wrapped(data: torch.Tensor, attributes: dict[str, Any], requires_grad: bool) -> torch.Tensor:
    """A fake tensor of the data of a meta tensor, without a run through torch."""
    new: torch.Tensor = _subclassed(
        FakeTensor, data, requires_grad,
        dispatch_device=True, device_for_backend_keys=attributes["_fake_device"],
    )  # fmt: skip
    _set_throw(new)
    new.__dict__.update(attributes)
    return new


_subclassed: Any = torch.Tensor._make_subclass
_set_throw = torch._C._set_throw_on_mutable_data_ptr


class Template:
    """How to make fake tensors like this one, which all see one memory: its `storage`."""

    __slots__ = ("attributes", "data", "needs", "storage")

    def __init__(self, tensor: torch.Tensor) -> None:
        shape, strides, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        held = None
        if offset:
            last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            held = data_like((max(offset + 1 + last, 0),), (1,), 0, tensor.dtype, None)
        self.data = data_like(shape, strides, offset, tensor.dtype, held)
        self.storage = storage(self.data)
        self.attributes, self.needs = dict(tensor.__dict__), tensor.requires_grad

    def __call__(self) -> torch.Tensor:
        return wrapped(self.data, self.attributes, self.needs)


def symbolic(tensor: torch.Tensor) -> bool:
    """Whether a size of it depends on values."""
    return bool(tensor._has_symbolic_sizes_strides)


def device(tensor: torch.Tensor) -> torch.device:
    """The device that a fake tensor is on."""
    on: torch.device = tensor.__dict__["_fake_device"]
    return on


def like(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What an op's result depends on of a tensor.

    Raises Symbolic where a size depends on values.
    """
    if tensor._has_symbolic_sizes_strides:
        raise Symbolic
    held = tensor.__dict__
    return (
        sizes(tensor), tensor.stride(), tensor.storage_offset(), tensor.dtype,
        held.get("_fake_device") or tensor.device, held.get("constant") is None, tensor.requires_grad,
    )  # fmt: skip


def memory(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """The memory that a tensor sees, and how; None where there is none."""
    try:
        storage = tensor.untyped_storage()._cdata
        if tensor._has_symbolic_sizes_strides:  # symbols have no hash
            return (
                storage,
                str(tensor.shape),
                str(tensor.stride()),
                str(tensor.storage_offset()),
                tensor.dtype,
            )
        return storage, sizes(tensor), tensor.stride(), tensor.storage_offset(), tensor.dtype
    except (RuntimeError, NotImplementedError):
        return None


def storage(tensor: torch.Tensor) -> int:
    """The memory that a tensor sees, whatever part of it."""
    return int(tensor.untyped_storage()._cdata)


def is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor)


def asks_values(error: BaseException) -> bool:
    """Whether an error is of a forward that asks for a value which a recording does not have."""
    names = ("DataDependent", "DynamicOutputShape", "UnsupportedMutationAliasing")
    text = f"{type(error).__name__}: {error}"
    return any(n in text for n in names) or "non-nested SymInt" in text or "data-dependent" in text.lower()


def of_fakes(error: BaseException) -> bool:
    """Whether an op of real tensors would not raise this error."""
    of_torch = type(error).__module__.startswith(("torch._subclasses", "torch.fx"))
    unwritten = isinstance(error, (AssertionError, NotImplementedError)) or "fake impl" in str(error)
    return of_torch or unwritten or asks_values(error)


@contextlib.contextmanager
def told(tell: Callable[[Exception], None]) -> Iterator[None]:
    """While the context lasts, `tell` is called with each error that leaves a fake tensor's op for want of a
    value, or is raised where the number is asked for that values decide."""
    depth = 0

    def telling(inner: Callable[..., Any], any_error: bool) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                return inner(*args, **kwargs)
            except Exception as error:
                if depth == 1 and (any_error or of_fakes(error)):
                    tell(error)
                raise
            finally:
                depth -= 1

        return method

    owners: list[tuple[Any, str]] = []
    if MISSING is None:
        owners = [(ShapeEnv, "evaluate_expr"), (FakeTensorMode, "dispatch")]
    before = [getattr(owner, name) for owner, name in owners]
    try:
        for (owner, name), inner in zip(owners, before, strict=True):
            setattr(owner, name, telling(inner, owner is ShapeEnv))
        yield
    finally:
        for (owner, name), inner in zip(owners, before, strict=True):
            setattr(owner, name, inner)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    with _disable_current_modes(), torch.no_grad():
        return tensor.detach().clone()


def aside() -> Any:
    """A context in which no torch function is noted."""
    return torch._C.DisableTorchFunction()


def modes_off() -> Any:
    """A context in which torch computes as if nothing was recorded."""
    return _disable_current_modes()


def python_dispatcher() -> Any:
    """The context in which the PreDispatch key is looked at."""
    return enable_python_dispatcher()


@contextlib.contextmanager
def flags(compiling: bool, exporting: bool) -> Iterator[None]:
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


def only_fakes() -> bool:
    """Whether an op that is called now is seen by the fake tensors' mode alone: by no other mode, transform,
    hook on what autograd saves, or forward derivative, nor in inference mode."""
    return (
        torch._C._len_torch_dispatch_stack() == 1
        and torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        and not transformed()
        and not torch.is_inference_mode_enabled()
    )


def in_backward() -> bool:
    """Whether a backward pass runs, as when activations are computed again."""
    return bool(torch._C._current_graph_task_id() != -1)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def transformed() -> bool:
    """Whether a transform of torch.func or a forward derivative is under way: also of one that is compiled,
    since the compiler begins it where it sees it, and asks here."""
    return (
        torch.autograd.forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def kernel(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What the op's kernel for tensors on the meta device gives: no mode and no autograd sees it."""
    with (
        torch._C._DisablePythonDispatcher(),
        torch._C._DisableTorchDispatch(),
        torch._C._AutoDispatchBelowAutograd(),
    ):
        return func(*args, **kwargs)


@contextlib.contextmanager
def outside_transforms() -> Iterator[None]:
    """Inside no transform of torch.func runs, so that a trace can be made in the middle of one."""
    transforms = torch._C._functorch
    stack: list[Any] = []
    try:
        while transforms.peek_interpreter_stack() is not None:
            stack.append(transforms.pop_dynamic_layer_stack())
        yield
    finally:
        while stack:
            transforms.push_dynamic_layer_stack(stack.pop())


def data_like(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    dtype: torch.dtype,
    of: torch.Tensor | None,
) -> torch.Tensor:
    """A meta tensor in its own memory (without an offset), or in that of the tensor `of`."""
    with torch._C._DisableTorchDispatch():
        if of is None:
            return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        data = torch.empty((0,), dtype=dtype, device="meta")
        return data.set_(of.untyped_storage(), offset, shape, strides)
