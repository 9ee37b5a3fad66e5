"""Where code asks tensors how autograd sees them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autotp.trace import hooks

__all__ = ["asked"]


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

    owner, run = hooks.BACKWARD
    engine = getattr(owner, run)

    def backward(*args: Any, **kwargs: Any) -> Any:
        tell()
        return engine(*args, **kwargs)

    before = {name: vars(hooks.FAKE)[name] for name in (*names, *methods) if name in vars(hooks.FAKE)}
    try:
        for name in names:
            setattr(hooks.FAKE, name, property_of(name))
        for name in methods:
            setattr(hooks.FAKE, name, method_of(name))
        setattr(owner, run, backward)
        yield
    finally:
        setattr(owner, run, engine)
        for name in (*names, *methods):
            if name in before:
                setattr(hooks.FAKE, name, before[name])
            else:
                delattr(hooks.FAKE, name)
