"""How the functions with a backward of their own are called, for every derivative that torch can ask for.

torch.func's transforms, and no one else, need an `autograd.Function` that keeps what its backward needs in
`setup_context`; torch pays for that style with an `inspect.signature` in each call, several times what a
mapping without communication costs. So the functions are written in that style, and called in the older
one (`quick`) where no transform runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from autotp.trace.hooks import transformed

__all__ = ["quick", "tracked", "transformed"]


def quick(function: type[Function]) -> Callable[..., Any]:
    """A call of `function`, in the style that has no delay, or, under a transform, in its own."""

    class Quick(function):  # type: ignore[misc, valid-type]
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = function.forward(*inputs)
            function.setup_context(ctx, inputs, output)
            return output

        setup_context = Function.setup_context
        jvp, vmap = Function.jvp, Function.vmap  # compiled code takes no function that has its own

    Quick.__name__ = function.__name__

    def call(*inputs: Any) -> Any:
        return _taken_apart(function, *inputs) if transformed() else Quick.apply(*inputs)

    return call


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="torch.func takes autotp's functions apart, and that is not compiled"
)
def _taken_apart(function: type[Function], *inputs: Any) -> Any:
    """In compiled code the collectives of a function under a transform would be lost."""
    return function.apply(*inputs)  # type: ignore[no-untyped-call]


def tracked(x: Tensor) -> bool:
    """Whether a derivative by `x` may be asked for. Under a transform each tensor may be a wrapped one, which
    does not say so itself."""
    return (torch.is_grad_enabled() and x.requires_grad) or transformed()
