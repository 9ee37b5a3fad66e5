"""The ways through a module that asks tensors for the truth: `if positions.max() > self.length:`.

A recording knows no values, so such a module is one node of the graph, which nothing sharded may enter. What
it gives is found by running its forward once for each answer to each question. Where every way gives results
alike, they are the node's; a way that raises gives none, on any rank.

Its ops are told in words, which must be the same on a rank: nothing in it may hang on the size of a part.
What a way leaves on the module, or on what hangs on it, shows in no trace, so no code around may read it
(`Ways.left`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autotp.trace.branches import unwatched
from autotp.trace.handled import may_be_caught
from autotp.trace.hooks import asks_values, symbolic
from autotp.trace.noted import plain
from autotp.trace.operands import tensors_of
from autotp.trace.seeds import may_draw
from autotp.trace.untouched import Saved

__all__ = ["Way", "Ways", "ways"]

_MOST = 16  # ways through one module
_aten = torch.ops.aten
_OURS = ("constant",)  # attributes of tensors that are the recording's
_CAUGHT = (
    "it asks tensors for the truth, so autotp cannot look into it, and it raises by the answer what code "
    "around may catch: let it return what is to be told"
)
_SET = (
    "it asks tensors for the truth, so autotp cannot look into it, and it changes how torch computes, or "
    "what hangs on a tensor of others: return what is new as a result"
)
_TRUTH = (_aten.is_nonzero.default, _aten.item.default, _aten._local_scalar_dense.default)


Drawing = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A call of an op that may draw, without its tensors."""
Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class _Asked(Exception):
    """Something else is asked of a value, or too much."""


class Way:
    """One run through a module: each question is answered as in `answers`, and no after the last of them;
    `used` are the tensors that its ops took."""

    def __init__(self, answers: tuple[bool, ...]) -> None:
        self.answers, self.used, self.ops = list(answers), list[torch.Tensor](), list[str]()
        self.draws: list[Drawing] = []
        self.failed = False  # whether anything was raised for want of a value: the module may catch it
        self._next = 0

    def op(self, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op's result, by `run` where no question is asked."""
        inputs = [*tensors_of(args), *tensors_of(kwargs)]
        self.used += inputs
        self.ops.append(f"{func}{_said((args, kwargs))}")
        if may_draw(func):
            self.draws.append(pytree.tree_map_only(torch.Tensor, lambda _: None, (func, args, kwargs)))
        if func not in _TRUTH or inputs[0].__dict__.get("constant") is not None:
            return run(func, args, kwargs)
        if func is not _TRUTH[0] and inputs[0].dtype is not torch.bool:
            raise _Asked(f"{func} gives a number")
        if self._next == len(self.answers):
            if self._next == _MOST:
                raise _Asked("too much")
            self.answers.append(False)
        self._next += 1
        return self.answers[self._next - 1]


@dataclass
class Ways:
    """What the ways through a module give, the tensors that they took, their ops in words, the calls
    that may draw random numbers, and the names of what they leave changed."""

    results: list[Any] = field(default_factory=list)
    used: list[torch.Tensor] = field(default_factory=list)
    ops: list[tuple[str, ...]] = field(default_factory=list)
    draws: list[Drawing] = field(default_factory=list)
    left: set[str] = field(default_factory=set)


def ways(module: nn.Module, given: Any, run: Callable[[Way], Any]) -> Ways | None:
    """What `run` gives on each way through `module`, which is called with `given`; None where it cannot be
    told, or where the ways give what is unlike. Raises RuntimeError where a way changes what it is given, or
    how torch computes, or raises what code around may catch."""
    found = Ways()
    inputs = [*tensors_of([given]), *module.parameters(), *module.buffers()]
    todo: list[tuple[bool, ...]] = [()]
    saved, arguments = Saved(), Saved()
    saved.all_of(module)
    arguments.objects([given])
    found.left |= saved.may_change()
    state = _state(inputs)
    for _ in range(_MOST):
        begun = todo.pop()
        way = Way(begun)
        try:
            with unwatched():
                found.results.append(run(way))
            if way.failed:
                return None
        except Exception as error:
            if isinstance(error, _Asked) or asks_values(error):
                return None
            if may_be_caught():
                raise RuntimeError(_CAUGHT) from error
        finally:
            found.left |= saved.changed()
            changed = arguments.changed() or arguments.has_changed()
            arguments.restore()
            saved.restore()
            now = _state(inputs)
            torch.set_grad_enabled(state[0])
            torch.set_default_dtype(state[1])
        if now != state:
            raise RuntimeError(_SET)
        if changed:
            raise RuntimeError(
                "it asks tensors for the truth, so autotp cannot look into it, and it changes an object that "
                "it is given: return what is new as a result"
            )
        found.used += way.used
        found.ops.append((*way.ops, str(way.answers)))
        found.draws += way.draws
        todo += [(*way.answers[:place], True) for place in range(len(begun), len(way.answers))]
        if not todo:
            return found if len({_form(result, inputs) for result in found.results}) == 1 else None
    return None


def _said(value: Any) -> str:
    """The arguments of an op in words."""
    leaves, spec = pytree.tree_flatten(value)
    words = [
        f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, torch.Tensor)
        else type(leaf).__name__ if isinstance(leaf, torch.Generator) else repr(plain(leaf))
        for leaf in leaves
    ]  # fmt: skip
    return f"{spec}{words}"


def _state(inputs: list[torch.Tensor]) -> tuple[Any, ...]:
    """What code around may ask besides values: how torch computes, and of each tensor what hangs on it."""
    how = torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu")
    return *how, [(*_seen(t), id(t.grad) if t.is_leaf else 0) for t in inputs]


def _seen(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What is seen of a tensor besides its values and sizes."""
    own = tuple(sorted(name for name in tensor.__dict__ if name not in _OURS))
    return type(tensor), tensor.requires_grad, tensor.is_leaf, own


def _form(result: Any, inputs: list[torch.Tensor]) -> Any:
    """What a result is like: its structure, of each tensor dtype, device, sizes and strides, and which of
    those before it, or of the `inputs`, it is."""
    leaves, spec = pytree.tree_flatten(result)
    known = [*inputs, *leaves]
    return str(spec), tuple(_leaf(leaf, known) for leaf in leaves)


def _leaf(value: Any, known: list[Any]) -> Any:
    if not isinstance(value, torch.Tensor):
        return type(value), repr(value)
    same = next(place for place, other in enumerate(known) if other is value)
    if symbolic(value):
        return type(value), same
    strides = value.stride() if value.layout is torch.strided else value.layout
    return tuple(value.shape), strides, value.dtype, value.device, type(value), _seen(value)[-1], same
