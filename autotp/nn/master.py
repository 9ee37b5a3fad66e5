"""How a layer that is built from the start comes to its weights: one full master, alike on all ranks.

The master is filled as the unsharded layer's weight would be, with fans of the full size and from the
same random stream, whatever tp is; each rank keeps its part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from autotp.comm import Group, within
from autotp.cut import cut_of
from autotp.diagnostic import UsageError
from autotp.placement import Shard, deal, join_pieces

__all__ = [
    "InitMethod",
    "checked_init",
    "checked_kind",
    "drawn_alike",
    "own_part",
    "shard_of",
    "whole_number",
]

InitMethod = Callable[[Tensor], Any]


def shard_of(
    layer: str,
    name: str,
    dim: int,
    size: int,
    tp: int,
    *,
    stride: int = 1,
    sections: Sequence[int] | None = None,
) -> Shard:
    """How dim `dim` of a weight, `size` elements called `name`, is cut over `tp` ranks.

    `stride` equal sections, or `sections` of these sizes, each cut on its own. Parts may be uneven.
    Raises UsageError when the sizes do not go together, or are no whole numbers.

    >>> shard_of("layer", "out_features", 0, 8, 2, stride=2).ranges(8, 0)
    [(0, 2), (4, 6)]
    """
    for what, number in [(name, size), ("stride", stride)]:
        whole_number(layer, what, number)
    if sections is not None and not isinstance(sections, Sequence):
        raise UsageError(f"{layer}: sections={sections!r} is no sequence of sizes")
    if sections is not None and not all(type(section) is int for section in sections):
        raise UsageError(f"{layer}: sections={list(sections)} are not whole numbers")
    if stride < 1:
        raise UsageError(f"{layer}: stride must be at least 1, not {stride}")
    if sections is not None and stride != 1:
        raise UsageError(f"{layer}: stride={stride} and sections={list(sections)} exclude each other")
    if sections is None:
        if size % stride:
            raise UsageError(f"{layer}: {name}={size} cannot be cut into stride={stride} equal sections")
        sections = [size // stride] * stride
    if sum(sections) != size:
        raise UsageError(f"{layer}: sections={list(sections)} add up to {sum(sections)}, not {name}={size}")
    if min(sections) < tp:
        what = f"a section of {min(sections)}" if len(sections) > 1 else f"{name}={size}"
        raise UsageError(f"{layer}: {what} cannot be dealt to {tp} ranks")
    shard = join_pieces(dim, [(section, deal(section, tp)) for section in sections])
    assert isinstance(shard, Shard)
    return shard


def whole_number(layer: str, name: str, number: object) -> None:
    """Raise UsageError for a size that is none: torch's own errors name neither layer nor argument."""
    if type(number) is not int:
        raise UsageError(f"{layer}: {name} must be a whole number, not {number!r}")


def checked_init(layer: str, init_method: object) -> None:
    """Raise UsageError for an `init_method` that cannot be called."""
    if not callable(init_method):
        raise UsageError(f"{layer}: init_method must be a function that fills a tensor, not {init_method!r}")


def checked_kind(layer: str, dtype: object, **flags: object) -> None:
    """Raise UsageError for a dtype that no parameter can have, and for flags that are neither True nor False:
    the text "False" would be taken for True."""
    if dtype is not None and not (
        isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)
    ):
        raise UsageError(f"{layer}: dtype must be a floating-point torch.dtype, not {dtype!r}")
    for name, flag in flags.items():
        if type(flag) is not bool:
            raise UsageError(f"{layer}: {name} must be True or False, not {flag!r}")


def own_part(whole: Tensor, shard: Shard, rank: int) -> Tensor:
    """The rank's part of a whole tensor: a new contiguous tensor."""
    cut = cut_of(shard, whole.shape[shard.dim], shard.dim)
    return torch.cat([whole.narrow(cut.dim, a, b - a) for a, b in cut.ranges[rank]], cut.dim)


@contextmanager
def drawn_alike(group: Group, device: torch.device) -> Iterator[None]:
    """Random numbers as rank 0's global stream gives them, on all ranks.

    Ranks that were seeded alike go on from there, as in one process; others return to their own state.
    """
    if group.size == 1:
        yield
        return
    on_cuda = device.type == "cuda"
    own = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if on_cuda else [])
    first = [
        torch.frombuffer(bytearray(state), dtype=torch.uint8)
        for state in within(group).exchange([state.numpy().tobytes() for state in own])[0]
    ]
    alike = all(torch.equal(a, b) for a, b in zip(own, first, strict=True))

    def put(states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if on_cuda:
            torch.cuda.set_rng_state(states[1], device)

    if not alike:
        put(first)
    yield
    if not alike:
        put(own)
