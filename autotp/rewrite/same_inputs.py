"""Ranks of one group that are given different inputs: found in the forward, before a number is computed.

A tensor-parallel group computes one forward together, so each of its ranks takes the same batch. A data
loader that counts by the global rank, or ranks that sample from differently seeded generators, give each
rank another, and the sum over the ranks is then a number of no model, without a word.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autotp.comm import Group, within
from autotp.derivatives import transformed
from autotp.diagnostic import UsageError
from autotp.fingerprint import sampled
from autotp.random import by_python, global_states, python_states

__all__ = ["SameInputs", "compare_inputs", "forwards"]

TIMEOUT = 300.0  # seconds for the slowest rank to come to its forward
_ELEMENTS = 1 << 22  # of each tensor, spread over it
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
_RANDOM = "random state"
_PYTHON = "random state of Python and numpy"


def forwards(check_inputs: int | bool) -> int | None:
    """In how many forwards inputs are compared; None: in all.

    Raises UsageError for what is no number of forwards.
    """
    if not isinstance(check_inputs, int) or check_inputs < 0:
        raise UsageError(f"check_inputs is a number of forwards, or True for all, not {check_inputs!r}")
    return None if check_inputs is True else int(check_inputs)


def compare_inputs(model: nn.Module, group: Group, left: int | None, draws: tuple[str, ...]) -> None:
    """Compare what the ranks give to the next `left` calls of `model`; None: to all.

    `draws` says whether the model draws common random numbers, in "train" and in "eval", from torch's
    generators or `by_python`.
    """
    if left != 0 and group.size > 1:
        model.register_forward_pre_hook(SameInputs(group, left, draws), with_kwargs=True, prepend=True)


@dataclass
class SameInputs:
    """A forward pre-hook: every rank's arguments, compared by checksums. `left` None: for ever.

    Tensors and plain values are compared, by the names of forward's arguments; containers and caches, whose
    parts may be a rank's own, are not. Compiled code leaves it out, and so do torch.func's transforms, whose
    tensors have no values that could be read.
    """

    group: Group
    left: int | None
    draws: tuple[str, ...]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self.left == 0 or transformed():
            return
        if self.left is not None:
            self.left -= 1
            self._leave(module)
        mine = {name: _word(value) for name, value in _named(module, args, kwargs).items()}
        mode = "train" if module.training else "eval"
        if mode in self.draws:
            mine[_RANDOM] = sampled(global_states())[:8]
        if by_python(mode) in self.draws:
            mine[_PYTHON] = sampled([python_states()])[:8]
        everyone = within(self.group).exchange(mine, timeout=TIMEOUT)
        _refuse(type(module).__name__, everyone)

    def _leave(self, module: nn.Module) -> None:
        """The last forward is compared: a module with a hook is called more slowly than one without."""
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is self and not self.left]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name; those of `*args` by their place."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names += [f"argument {i}" for i in range(len(names), len(args))]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _word(value: Any) -> str:
    """An argument as ranks compare it."""
    if isinstance(value, Tensor):
        kind = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        return f"{kind}, checksum {sampled([value], _ELEMENTS)[:8]}"
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__


def _refuse(model: str, everyone: list[dict[str, str]]) -> None:
    """Raises UsageError, on every rank alike, where ranks differ."""
    for name in dict.fromkeys(name for words in everyone for name in words):
        words = [theirs.get(name, "nothing") for theirs in everyone]
        odd = next((rank for rank, word in enumerate(words) if word != words[0]), None)
        if odd is None:
            continue
        differ = f"{name} is {words[0]} on rank 0, and {words[odd]} on rank {odd}"
        if name in (_RANDOM, _PYTHON):
            raise UsageError(
                f"{model} draws random numbers that all ranks of the group share, and the generators differ: "
                f"{differ}"
                "\n  = help: seed every rank alike, or call autotp.random.synchronize(mesh)"
            )
        raise UsageError(
            f"the ranks of the group gave {model} different inputs: {differ}"
            "\n  = help: every rank of a tensor-parallel group takes the same batch: let the sampler count "
            "by the data-parallel rank; before sampling, call autotp.random.synchronize(mesh)"
        )
