"""Tensors that give noted sizes (`trace/noted.py`) to the model's code, while it is recorded."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from autotp.trace.hooks import aside, sizes
from autotp.trace.noted import Dim, Notes, noted, noted_dims
from autotp.trace.source import is_library

__all__ = ["by_shape", "noting", "shape_name"]

Name = Callable[[torch.Tensor], str | None]


@contextlib.contextmanager
def noting(name_of: Name) -> Iterator[Notes]:
    """While it lasts, the model's code is given sizes that note what they are compared with; `name_of` gives
    the name of a tensor's node."""
    log = Notes()
    replaced = _readers(name_of, log)
    before = {name: vars(torch.Tensor).get(name, _INHERITED) for name in replaced}
    numel = torch.numel
    try:
        for name, reader in replaced.items():
            setattr(torch.Tensor, name, reader)
        torch.numel = replaced["numel"]
        yield log
    finally:
        torch.numel = numel
        for name, was in before.items():
            if was is _INHERITED:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, was)
        log.open = False


_INHERITED = object()


def by_shape(shape: Sequence[int]) -> str:
    """What stands for the tensors of a shape, where nothing else is known of them."""
    return f"a tensor of {list(shape)}"


def shape_name(tensor: torch.Tensor) -> str:
    """The name of a tensor by its shape."""
    return by_shape(sizes(tensor))


def _own() -> bool:
    """Whether the code that called the caller is the model's."""
    return not is_library(sys._getframe(2).f_code.co_filename)


def _readers(name_of: Name, log: Notes) -> dict[str, Any]:
    """What stands in the place of the methods of tensors that tell sizes, or compare with them."""
    base: Any = torch._C.TensorBase
    measured: Any = torch.Tensor.__len__

    def dims_of(tensor: torch.Tensor) -> frozenset[Dim]:
        name = name_of(tensor)
        with aside():  # a layer that is compared has no name, and calls the same functions
            return frozenset((name, d) for d in range(tensor.dim())) if name is not None else frozenset()

    def sized(tensor: torch.Tensor, shape: Any) -> Any:
        name = name_of(tensor)
        if name is None:
            return shape
        dims = [frozenset([(name, d)]) for d in range(len(shape))]
        return torch.Size(
            [
                noted(n, d, log, True, size=True) if type(n) is int else n
                for n, d in zip(shape, dims, strict=True)
            ]
        )

    def read_shape(tensor: torch.Tensor) -> Any:
        shape = base.shape.__get__(tensor)
        if not _own():
            return shape
        found = sized(tensor, shape)
        log.read(frozenset().union(*map(noted_dims, found)))
        return found

    def read_size(tensor: torch.Tensor, dim: Any = None) -> Any:
        found = base.size(tensor) if dim is None else base.size(tensor, dim)
        if not _own():
            return found
        whole = sized(tensor, base.shape.__get__(tensor))
        found = whole if dim is None else whole[dim] if isinstance(dim, int) else found
        log.read(frozenset().union(*map(noted_dims, found if dim is None else [found])))
        return found

    def count(tensor: torch.Tensor) -> Any:
        number = base.numel(tensor)
        return noted(number, dims_of(tensor), log, True) if _own() else number

    def read_bytes(tensor: torch.Tensor) -> Any:
        number = base.nbytes.__get__(tensor)
        return noted(number, dims_of(tensor), log, True) if _own() else number

    def read_stride(tensor: torch.Tensor, dim: Any = None) -> Any:
        found = base.stride(tensor) if dim is None else base.stride(tensor, dim)
        return noted(found, dims_of(tensor), log) if _own() else found

    def length(tensor: torch.Tensor) -> Any:
        if _own() and (name := name_of(tensor)) is not None:
            log.escaped(frozenset([(name, 0)]))
        return measured(tensor)

    def bounded(tensor: torch.Tensor, key: Any) -> None:
        """Note the bounds of slices in `tensor[key]`, each compared with its dim."""
        with aside():
            bounds = list(_bounds(key, tensor.dim()))
        for dim, bound in bounds:
            name = name_of(tensor)
            here = frozenset([(name, dim)]) if name is not None else frozenset()
            log.compared(noted_dims(bound) | here, bound, bound=True, depth=1)

    def taken(tensor: torch.Tensor, key: Any) -> Any:
        if _own():
            bounded(tensor, key)
        return base.__getitem__(tensor, key)

    def put(tensor: torch.Tensor, key: Any, value: Any) -> None:
        if _own():
            bounded(tensor, key)
        base.__setitem__(tensor, key, value)

    return {
        "shape": property(read_shape), "size": read_size, "numel": count, "nelement": count,
        "nbytes": property(read_bytes), "stride": read_stride, "__len__": length,
        "__getitem__": taken, "__setitem__": put,
    }  # fmt: skip


def _bounds(key: Any, dims: int) -> Iterator[tuple[int, Any]]:
    """The bounds of slices in `tensor[key]`, each with its dim."""
    parts = list(key) if isinstance(key, tuple) else [key]
    left = dims - sum(part is not None and part is not ... for part in parts)
    dim = 0
    for part in parts:
        if isinstance(part, slice):
            yield from ((dim, b) for b in (part.start, part.stop) if isinstance(b, int))
        dim += left if part is ... else part is not None
