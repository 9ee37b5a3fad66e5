"""Where code asks for what a recording does not have, past all ops: a tensor's memory, a number's digits."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autotp.trace import hooks
from autotp.trace.source import is_library

__all__ = ["unknown"]

_OF_TENSORS = ("numpy", "__array__", "__dlpack__", "__format__", "data_ptr")


@contextlib.contextmanager
def unknown(raised: Callable[[Exception], None]) -> Iterator[None]:
    """While the context lasts, `raised` is called with what fake tensors, and numbers that values decide,
    raise where the model's code asks for what they lack; a truth is compared with 0 and 1 as one, and a
    number with itself, which tells whether it is one, is asked for."""

    def told(kind: Any, name: str) -> Callable[..., Any]:
        inner = getattr(kind, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return inner(self, *args, **kwargs)
            except Exception as error:
                if not is_library(sys._getframe(1).f_code.co_filename):  # einops goes on without a hash
                    raised(error)
                raise

        return method

    def compared(name: str) -> Callable[..., Any]:
        inner, equal = getattr(torch.SymBool, name), name == "__eq__"

        def method(self: torch.SymBool, other: Any) -> Any:
            if type(other) in (bool, int) and other in (0, 1):
                return self if bool(other) is equal else torch.sym_not(self)  # type: ignore[no-untyped-call]
            return inner(self, other)

        return method

    def with_itself(name: str) -> Callable[..., Any]:
        inner = getattr(torch.SymFloat, name)

        def method(self: torch.SymFloat, other: Any) -> Any:
            own = not is_library(sys._getframe(1).f_code.co_filename)
            if own and isinstance(other, torch.SymFloat) and str(self) == str(other):
                float(self)  # it raises
            return inner(self, other)

        return method

    places: list[tuple[Any, str]] = [(hooks.FAKE, name) for name in _OF_TENSORS if hooks.FAKE is not None]
    places += [(kind, "__format__") for kind in (torch.SymInt, torch.SymFloat, torch.SymBool)]
    places.append((torch.SymInt, "__hash__"))
    new = {(kind, name): told(kind, name) for kind, name in places}
    new |= {(torch.SymBool, name): compared(name) for name in ("__eq__", "__ne__")}
    new |= {(torch.SymFloat, name): with_itself(name) for name in ("__eq__", "__ne__")}
    before = {(kind, name): vars(kind).get(name) for kind, name in new}
    try:
        for (kind, name), method in new.items():
            setattr(kind, name, method)
        yield
    finally:
        for (kind, name), method in before.items():
            setattr(kind, name, method) if method is not None else delattr(kind, name)
