"""Sample inputs for a trace: given by the caller, made from a transformers config, or found by trying.

Only shapes and dtypes matter to a trace; `verify` also runs on the values. Batch and sequence are primes
that are no size of the model (autotp/trace/sizes.py), so that a size in the recorded graph says where it
comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autotp.diagnostic import UsageError
from autotp.trace.sizes import primes

__all__ = ["Samples", "make", "primes"]


@dataclass(frozen=True)
class Samples:
    """The arguments of one forward. `origin` is "given", "config" or "found"; `labels` are further keyword
    arguments with which a transformers model also computes its loss; `also` are samples of other ranks that
    the forward takes as well, where autotp cannot tell which are meant: [batch, features] and
    [batch, sequence, features]. `crossed` are those of a decoder that may also be given an encoder's states.
    `pair` is the same with another batch and sequence, where those are autotp's
    to choose: sizes that coincide in one trace differ in the other."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    origin: str
    labels: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[Samples, ...] = ()
    pair: Samples | None = None
    crossed: Samples | None = None

    def with_argument(self, place: str, value: Any, position: int | None) -> Samples:
        """The same calls, with a value for the argument of that name, or at that position."""
        args, kwargs = self.args, dict(self.kwargs)
        if position is not None and position < len(args):
            args = (*args[:position], value, *args[position + 1 :])
        else:
            kwargs[place] = value

        def changed(other: Samples) -> Samples:
            return other.with_argument(place, value, position)

        pair = None if self.pair is None else changed(self.pair)
        return replace(self, args=args, kwargs=kwargs, also=tuple(map(changed, self.also)), pair=pair)

    @classmethod
    def given(cls, inputs: Any) -> Samples:
        """From a tensor, a tuple of arguments, or a dict of keyword arguments.

        >>> Samples.given(torch.zeros(2, 3)).args[0].shape
        torch.Size([2, 3])
        """
        if isinstance(inputs, torch.Tensor):
            return cls((inputs,), {}, "given")
        if isinstance(inputs, Mapping):
            if not all(isinstance(key, str) for key in inputs):
                raise UsageError("inputs: a dict of samples is keyed by the names of forward's arguments")
            return cls((), dict(inputs), "given")
        if isinstance(inputs, (tuple, list)):
            return cls(tuple(inputs), {}, "given")
        raise UsageError(
            "inputs is a tensor, a tuple of arguments or a dict of keyword arguments, "
            f"not {type(inputs).__name__}"
        )


def make(module: nn.Module, inputs: Any = None) -> Samples:
    """The samples to trace `module` with: the given ones, else made from its config, else found.

    Raises UsageError when none can be found; it says what to pass.
    """
    from autotp.trace.from_config import from_config
    from autotp.trace.meets import found

    if inputs is not None:
        return inputs if isinstance(inputs, Samples) else Samples.given(inputs)
    made = from_config(module)
    return made if made is not None else found(module)
