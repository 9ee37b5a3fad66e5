"""What is put in place around a recording, and taken away after it."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import nn

from autotp.trace.calls import Calls
from autotp.trace.graph import TraceError
from autotp.trace.source import is_library

__all__ = ["FUSED", "functions", "quiet", "same_draws", "step_by_step"]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A forward that fails is told by its TraceError; torch would print its own traceback besides."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was


FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""Layers of torch with one kernel for all that they compute without gradients."""


@contextlib.contextmanager
def step_by_step(root: nn.Module) -> Iterator[None]:
    """Layers with a fused kernel compute without it what it computes, so that the trace shows it. A class
    that has a forward of its own around torch's may run otherwise, and is traced as it is."""
    forwards = [type(module).forward for module in root.modules() if isinstance(module, FUSED)]
    was = torch.backends.mha.get_fastpath_enabled()
    if all(is_library(forward.__code__.co_filename) for forward in forwards):
        torch.backends.mha.set_fastpath_enabled(was and not forwards)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was)


@contextlib.contextmanager
def same_draws(recorder: Calls) -> Iterator[None]:
    """Python's and numpy's random numbers are the same in every trace, and go on afterwards as before. It is
    noted whether any were drawn."""
    states = random.getstate(), numpy.random.get_state()
    random.seed(0)
    numpy.random.seed(0)
    start = random.getstate(), repr(numpy.random.get_state())
    try:
        yield
        recorder.trace.numbers_drawn = (random.getstate(), repr(numpy.random.get_state())) != start
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])


@contextlib.contextmanager
def functions(recorder: Calls) -> Iterator[None]:
    """Note which `autograd.Function` runs. Reentrant checkpointing is one that only runs its argument.

    `gelu = Gelu.apply` is bound when a file is imported, so what is noted stands behind it: in the class
    above `Function`, whose `apply` it calls.
    """
    function: Any = torch.autograd.Function.__mro__[1]
    if "apply" in vars(function):
        raise TraceError(
            "another trace is under way: a sharded model is called in a traced forward", "", None
        )

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__ == "torch.utils.checkpoint" and cls.__name__ == "CheckpointFunction":
            return args[0](*args[2:])
        if not recorder.repeats.inside:
            recorder.repeats.break_off()
        before, was = len(recorder.trace.graph.nodes), recorder.custom
        if torch.is_grad_enabled():  # without gradients no backward runs
            recorder.custom = cls.__name__
        try:
            out = super(function, cls).apply(*args, **kwargs)
        finally:
            recorder.custom = was
        registered = cls.__module__.startswith("torch._library")  # the backward of a custom op
        if not registered and not recorder.ran_backward(cls.__name__, (args, kwargs), out, before):
            recorder.note_backward(cls.__name__, (args, kwargs))
        return out

    hooked = torch.Tensor.register_hook

    def register_hook(self: torch.Tensor, hook: Any) -> Any:
        recorder.note_backward("a gradient hook", self)
        return hooked(self, hook)  # type: ignore[no-untyped-call]

    try:
        function.apply = classmethod(apply)
        torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
        yield
    finally:
        del function.apply
        torch.Tensor.register_hook = hooked  # type: ignore[method-assign]
