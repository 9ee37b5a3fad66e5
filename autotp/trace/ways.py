"""The ways through a module that asks tensors for the truth: `if positions.max() > self.length:`.

A recording knows no values, so such a module is one node of the graph, which nothing sharded may enter. What
it gives is found by running its forward once for each answer to each question. Where every way gives results
alike, they are the node's; a way that raises gives none, on any rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autotp.trace.branches import unwatched
from autotp.trace.hooks import symbolic
from autotp.trace.operands import tensors_of
from autotp.trace.untouched import untouched

__all__ = ["Way", "ways"]

_MOST = 16  # ways through one module
_aten = torch.ops.aten
_TRUTH = (_aten.is_nonzero.default, _aten.item.default, _aten._local_scalar_dense.default)


Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class _Asked(Exception):
    """Something else is asked of a value, or too much."""


class Way:
    """One run through a module: each question is answered as in `answers`, and no after the last of them;
    `used` are the tensors that its ops took."""

    def __init__(self, answers: tuple[bool, ...]) -> None:
        self.answers, self.used = list(answers), list[torch.Tensor]()
        self._next = 0

    def op(self, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op's result, by `run` where no question is asked."""
        inputs = [*tensors_of(args), *tensors_of(kwargs)]
        self.used += inputs
        if func not in _TRUTH or inputs[0].__dict__.get("constant") is not None:
            return run(func, args, kwargs)
        if func is not _TRUTH[0] and inputs[0].dtype is not torch.bool:
            raise _Asked(f"{func} gives a number")
        if self._next == len(self.answers):
            self.answers.append(False)
        self._next += 1
        return self.answers[self._next - 1]


def ways(
    module: nn.Module, run: Callable[[Way], Any], is_dynamic: Callable[[BaseException], bool]
) -> tuple[list[Any], list[torch.Tensor]] | None:
    """What `run` gives on each way through `module`, and the tensors that it took; None where it cannot be
    told, or where the ways give what is unlike."""
    found: list[Any] = []
    used: list[torch.Tensor] = []
    todo: list[tuple[bool, ...]] = [()]
    for _ in range(_MOST):
        given = todo.pop()
        way = Way(given)
        try:
            with unwatched(), untouched(module):
                found.append(run(way))
        except Exception as error:
            if isinstance(error, _Asked) or is_dynamic(error):
                return None
        used += way.used
        todo += [(*way.answers[:place], True) for place in range(len(given), len(way.answers))]
        if not todo:
            alike = len({_form(result) for result in found}) == 1
            return (found, used) if alike else None
    return None


def _form(result: Any) -> Any:
    """What a result is like: its structure, and of each tensor dtype, device and shape."""
    leaves, spec = pytree.tree_flatten(result)
    return str(spec), tuple(map(_leaf, leaves))


def _leaf(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return type(value), repr(value)
    return None if symbolic(value) else (tuple(value.shape), value.dtype, value.device)
