"""All that is private to torch, in one file: the recorder's mode, and fake tensors.

`SchemaCheckMode` is the one kind of mode that the PreDispatch key accepts besides torch's own; besides are
used the python dispatcher, the fake tensor mode, and the flags that tell models that they are being exported.
Where a hook is missing, `MISSING` says so and `capture` takes another route.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
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
    "FAKE", "MISSING", "NO_CONSTANT", "Fakes", "Made", "OpMode", "Symbolic", "Template", "aside", "asked",
    "copied", "flags", "is_fake", "like", "made_like", "memory", "modes_off", "only_fakes",
    "python_dispatcher", "storage",
]  # fmt: skip

FAKE: Any = FakeTensor if MISSING is None else None
"""The class of fake tensors."""
NO_CONSTANT = 5
"""The place in `like` that says that a tensor's values are not known."""


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
        return _wrapped(data, self.attributes(device), requires_grad)

    def attributes(self, device: torch.device) -> dict[str, Any]:
        """What hangs on each fake tensor on a device."""
        found = self._attributes.get(device)
        if found is None:
            on = torch.device("cpu") if device.type == "meta" else device
            first = FakeTensor(self.mode, torch.empty((0,), device="meta"), on)
            found = self._attributes[device] = dict(first.__dict__)
        return found


def _wrapped(data: torch.Tensor, attributes: dict[str, Any], requires_grad: bool) -> torch.Tensor:
    """A fake tensor of the data of a meta tensor, without a run through torch."""
    new: torch.Tensor = torch.Tensor._make_subclass(
        FakeTensor, data, requires_grad,
        dispatch_device=True, device_for_backend_keys=attributes["_fake_device"],
    )  # fmt: skip
    torch._C._set_throw_on_mutable_data_ptr(new)
    new.__dict__.update(attributes)
    return new


class Template:
    """How to make fake tensors like this one, which all see one memory: its `storage`."""

    __slots__ = ("attributes", "data", "needs", "storage")

    def __init__(self, tensor: torch.Tensor) -> None:
        shape, strides, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        held = offset + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        with torch._C._DisableTorchDispatch():
            data = torch.empty((max(held, 0),), dtype=tensor.dtype, device="meta")
            self.data = data.as_strided(shape, strides, offset)
        self.storage = data.untyped_storage()._cdata
        self.attributes, self.needs = dict(tensor.__dict__), tensor.requires_grad

    def __call__(self) -> torch.Tensor:
        return _wrapped(self.data, self.attributes, self.needs)


def like(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What an op's result depends on of a tensor.

    Raises Symbolic where a size depends on values.
    """
    if tensor._has_symbolic_sizes_strides:
        raise Symbolic
    held = tensor.__dict__
    return (
        tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype,
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
        return storage, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
    except (RuntimeError, NotImplementedError):
        return None


def storage(tensor: torch.Tensor) -> int:
    """The memory that a tensor sees, whatever part of it."""
    return int(tensor.untyped_storage()._cdata)


def is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor)


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


# -- results that are made without a run through torch


def only_fakes() -> bool:
    """Whether an op that is called now is seen by the fake tensors' mode alone: by no other mode, transform,
    hook on what autograd saves, or forward derivative, nor in inference mode."""
    return (
        torch._C._len_torch_dispatch_stack() == 1
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        and torch.autograd.forward_ad._current_level < 0
        and not torch.is_inference_mode_enabled()
    )


class Made:
    """How an op's result is made anew, in its own memory, or as a view of `viewed`, an argument of the op."""

    __slots__ = ("dtype", "needs", "offset", "on", "shape", "strides", "viewed")

    def __init__(self, tensor: torch.Tensor, viewed: int | None) -> None:
        self.shape, self.strides = tuple(tensor.shape), tensor.stride()
        self.offset, self.dtype = tensor.storage_offset(), tensor.dtype
        self.on, self.needs, self.viewed = tensor.__dict__["_fake_device"], tensor.requires_grad, viewed

    def __call__(self, fakes: Fakes, tensors: list[torch.Tensor]) -> torch.Tensor:
        """The result, of an op on these tensors."""
        with torch._C._DisableTorchDispatch():
            if self.viewed is None:
                data = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")
            else:
                data = torch.empty((0,), dtype=self.dtype, device="meta")
                data.set_(tensors[self.viewed].untyped_storage(), self.offset, self.shape, self.strides)
        return _wrapped(data, fakes.attributes(self.on), self.needs)


def made_like(out: torch.Tensor, tensors: list[torch.Tensor], fakes: Fakes) -> Made | int | None:
    """How `out`, the result of an op on `tensors`, is made anew: the number of the tensor that it is, or as
    `Made` says; None where it cannot be."""
    same = [number for number, tensor in enumerate(tensors) if tensor is out]
    if same:
        return same[0] if len(same) == 1 else None
    if type(out) is not FakeTensor or out.dtype.is_complex or out._has_symbolic_sizes_strides:
        return None
    if out.layout is not torch.strided or out.__dict__ != fakes.attributes(out.__dict__["_fake_device"]):
        return None
    storage = out.untyped_storage()._cdata
    seen = [number for number, tensor in enumerate(tensors) if tensor.untyped_storage()._cdata == storage]
    if len(seen) > 1 or (not seen and out.storage_offset()):
        return None
    return Made(out, seen[0] if seen else None)


@contextlib.contextmanager
def asked(tell: Callable[[], None]) -> Iterator[None]:
    """While the context lasts, `tell` is called where code asks fake tensors how autograd sees them, which
    a tensor that was made without autograd does not know."""
    names = ("grad_fn", "is_leaf", "_base", "_version")
    methods = ("retain_grad", "requires_grad_", "_is_view")

    def property_of(name: str) -> property:
        descriptor = getattr(torch.Tensor, name)

        def read(self: torch.Tensor) -> Any:
            tell()
            return descriptor.__get__(self)

        return property(read)

    def method_of(name: str) -> Callable[..., Any]:
        inner = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            tell()
            return inner(self, *args, **kwargs)

        return method

    engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def backward(*args: Any, **kwargs: Any) -> Any:
        tell()
        return engine(*args, **kwargs)

    before = {name: vars(FakeTensor)[name] for name in (*names, *methods) if name in vars(FakeTensor)}
    try:
        for name in names:
            setattr(FakeTensor, name, property_of(name))
        for name in methods:
            setattr(FakeTensor, name, method_of(name))
        torch.autograd._engine_run_backward = backward  # type: ignore[attr-defined]
        yield
    finally:
        torch.autograd._engine_run_backward = engine  # type: ignore[attr-defined]
        for name in (*names, *methods):
            if name in before:
                setattr(FakeTensor, name, before[name])
            else:
                delattr(FakeTensor, name)
