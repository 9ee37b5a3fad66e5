"""Random numbers on several ranks: one common stream, and streams of each rank's own.

A value that is the same on all ranks must be dropped out alike on all, a sharded value differently on
each. The common stream is torch's global one, seeded alike on all ranks. A named stream has no state of
its own: entering it draws one number from the common stream and seeds the generators with that number
and the stream's seed. So whatever brings back torch's global state, activation checkpointing above all,
brings back every stream, on CPU and CUDA, and the common stream stays equal on all ranks.

The rank's seed is offset by 2718 + rank, as in Megatron-LM (tensor_parallel/random.py).
"""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autotp.comm import Group, group_of, within
from autotp.diagnostic import UnprovenPath, UsageError
from autotp.mappings import Mesh

__all__ = [
    "RankDropout", "Streams", "global_states",
    "rank_stream", "restore", "synchronize", "use_common_stream", "use_rank_stream",
]  # fmt: skip

RANK_OFFSET = 2718
SPREAD = 0x9E3779B97F4A7C15  # odd, so that different seeds stay different in the low 32 bits


def _drawn() -> Tensor:
    """One number of the common stream."""
    return torch.randint(0, 2**63 - 1, (), device="cpu")


def global_states() -> list[Tensor]:
    """The states of torch's global generators: the CPU's, and this device's where CUDA runs."""
    on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_cuda else [])]


def by_python(mode: str) -> str:
    """The word for a forward that draws numbers from Python's or numpy's generator in a mode."""
    return f"{mode} by Python"


def python_states() -> Tensor:
    """The states of Python's and numpy's global generators, as numbers."""
    _, numbers, position, *_ = numpy.random.get_state(legacy=True)
    return torch.tensor([*random.getstate()[1], *map(int, numbers), int(position)], dtype=torch.int64)


def restore(states: list[Tensor]) -> None:
    """Set torch's global generators to these states."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


class _Seeded(AbstractContextManager[None]):
    """Run on `seed` and one number of the common stream; then go back to the common one, whose state is
    `common` meanwhile."""

    def __init__(self, seed: int, drawn: Tensor | None = None) -> None:
        self._seed, self._drawn = seed, drawn
        self.common: list[Tensor] = []

    def __enter__(self) -> None:
        drawn = int(_drawn() if self._drawn is None else self._drawn)
        self.common = global_states()
        mixed = (drawn ^ (self._seed * SPREAD)) % 2**63
        torch.default_generator.manual_seed(mixed)
        if len(self.common) > 1:
            torch.cuda.manual_seed(mixed)

    def __exit__(self, *error: object) -> None:
        restore(self.common)


def rank_stream(group: Mesh = None) -> AbstractContextManager[None]:
    """A context in which random numbers differ on each rank of `group`; the common stream stays common.

    >>> from autotp.comm import simulate
    >>> def draw(group):
    ...     torch.manual_seed(1)
    ...     with rank_stream(group):
    ...         own = torch.rand(())
    ...     return own, torch.rand(())
    >>> (a, x), (b, y) = simulate(2, draw)
    >>> bool(a == b), bool(x == y)
    (False, True)
    """
    return _rank_stream(group_of(group))


def _rank_stream(group: Group) -> _Seeded:
    return _Seeded(RANK_OFFSET + group.rank)


class Streams:
    """Named streams of random numbers, each with a seed of its own.

    A name is added once. `fork(name)` runs on that stream and comes back to the common one.

    >>> streams = Streams()
    >>> streams.add("experts", 7)
    >>> with streams.fork("experts"):
    ...     mask = torch.rand(3) < 0.1
    """

    def __init__(self) -> None:
        self._seeds: dict[str, int] = {}

    def add(self, name: str, seed: int) -> None:
        """A new stream. Raises UsageError for a name or a seed that another stream has."""
        if name in self._seeds:
            raise UsageError(f"the stream {name!r} is there already")
        for other, used in self._seeds.items():
            if used == seed:
                raise UsageError(f"the seed {seed} of the stream {name!r} is that of the stream {other!r}")
        self._seeds[name] = seed

    def fork(self, name: str) -> AbstractContextManager[None]:
        """A context that runs on the stream `name`. Raises UsageError for a name that was not added."""
        if name not in self._seeds:
            known = ", ".join(map(repr, self._seeds)) or "none"
            raise UsageError(f"there is no stream {name!r}; there is: {known}")
        return _Seeded(self._seeds[name])

    def reset(self) -> None:
        """Forget all streams."""
        self._seeds.clear()

    @property
    def states(self) -> dict[str, int]:
        """The streams and their seeds, to be kept beside torch's own random state."""
        return dict(self._seeds)

    @states.setter
    def states(self, states: dict[str, int]) -> None:
        self._seeds = dict(states)


@torch.library.custom_op("autotp::rank_mask", mutates_args=())
def _rank_mask(x: Tensor, drawn: Tensor, seed: int, p: float) -> Tensor:
    """What dropout multiplies `x` by, from `drawn` and `seed` alone, so that it may be computed again."""
    with _Seeded(seed, drawn):
        return F.dropout(torch.ones_like(x), p, True)


@_rank_mask.register_fake
def _(x: Tensor, drawn: Tensor, seed: int, p: float) -> Tensor:
    return torch.empty_like(x)


class RankDropout(nn.Dropout):
    """nn.Dropout on a sharded value: it draws from the rank's own stream, the same in compiled code."""

    group: Group

    def forward(self, input: Tensor) -> Tensor:
        """Any shape, and the same."""
        if not self.training:
            return input
        if not torch.compiler.is_compiling():
            with rank_stream(self.group):
                return F.dropout(input, self.p, True, self.inplace)
        seed = RANK_OFFSET + self.group.rank
        mask: Tensor = torch.ops.autotp.rank_mask(input.detach(), _drawn(), seed, self.p)
        return input.mul_(mask) if self.inplace else input * mask


class _OnRankStream:
    """The two hooks that run a module's forward on the rank's stream; entered while it trains, or always."""

    def __init__(self, group: Group, always: bool) -> None:
        self.group = group
        self.always = always
        self.entered: list[_Seeded | None] = []

    def enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        stream = _rank_stream(self.group) if module.training or self.always else None
        if stream is not None:
            stream.__enter__()
        self.entered.append(stream)

    def leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        stream = self.entered.pop() if self.entered else None
        if stream is not None:
            stream.__exit__(None, None, None)


def use_rank_stream(module: nn.Module, group: Mesh = None, *, always: bool = False) -> None:
    """Run `module`'s forward on the rank's own stream whenever it is in training mode.

    For dropout and other random modules on sharded values. In evaluation nothing is drawn, but by modules
    that draw `always` (`F.dropout(x, 0.5)` without its training flag). An nn.Dropout becomes a `RankDropout`,
    which torch.compile takes into its graph. Around other modules (attention that drops out its weights) it
    breaks the graph in training (`fullgraph=True` raises), and not in evaluation.
    """
    if type(module) is nn.Dropout and not always:
        module.__class__ = RankDropout
        module.__dict__["group"] = group_of(group)
        return
    hooks = _OnRankStream(group_of(group), always)
    module.register_forward_pre_hook(hooks.enter)
    module.register_forward_hook(hooks.leave, always_call=True)


class _OnCommonStream:
    """The two hooks that take a module inside of one on the rank's stream back to the common stream."""

    def __init__(self, around: _OnRankStream) -> None:
        self.around = around
        self.left: list[tuple[_Seeded, list[Tensor]] | None] = []

    def enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not module.training and not self.around.always:
            self.left.append(None)
            return
        stream = next((s for s in self.around.entered if s is not None), None)
        if stream is None:
            raise UnprovenPath(
                f"{type(module).__name__}: it draws random numbers that all ranks share, inside of a layer "
                "that draws its own on each rank, and is run outside of that layer's forward; checkpoint the "
                "whole layer, or call the layer"
            )
        self.left.append((stream, global_states()))
        restore(stream.common)

    def leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        left = self.left.pop() if self.left else None
        if left is not None:
            stream, own = left
            stream.common = global_states()
            restore(own)


def use_common_stream(module: nn.Module, around: nn.Module) -> None:
    """Run `module`'s forward on the stream that is common to all ranks, inside of `around`, a module that
    runs on the rank's own stream: the dropout of a whole value in a layer that draws on shards.

    Outside of `around`'s forward it raises UnprovenPath where it would draw: activation checkpointing of
    `module` alone could not bring back what it drew.
    """
    found = [getattr(hook, "__self__", None) for hook in around._forward_pre_hooks.values()]
    hooks = _OnCommonStream(next(one for one in found if isinstance(one, _OnRankStream)))
    module.register_forward_pre_hook(hooks.enter)
    module.register_forward_hook(hooks.leave, always_call=True)


def synchronize(group: Mesh = None) -> None:
    """Make the common stream common: every rank of `group` takes rank 0's random states, Python's and numpy's
    too.

    After it, sampling and the dropout of replicated values draw alike on all ranks.
    """
    group = group_of(group)
    on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state().tolist() if on_cuda else None
    plain = random.getstate(), numpy.random.get_state()
    cpu_state, cuda_state, plain = within(group).exchange((torch.get_rng_state().tolist(), cuda, plain))[0]
    random.setstate(plain[0])
    numpy.random.set_state(plain[1])
    torch.set_rng_state(torch.tensor(cpu_state, dtype=torch.uint8))
    if on_cuda and cuda_state is not None:
        torch.cuda.set_rng_state(torch.tensor(cuda_state, dtype=torch.uint8))
