"""Values that the forward makes or expands take the layout that they meet: rules against execution."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autotp.placement import INVARIANT, PARTIAL, REPLICATE, Shard
from tests.rules import Case, cut, hold, tensor

f64 = torch.float64
X, ONE = tensor(2, 6, 4), tensor(2, 1, 4)  # [batch, heads, features]
FREE = (cut(1), REPLICATE)


def with_one(function: Callable[..., torch.Tensor], *more: tuple[object, ...]) -> Case:
    """A case that meets shards over the heads with a value that has one head."""
    return Case(function, (X, ONE), takes=(FREE, *more))


CASES = {
    "expand": with_one(lambda x, y: torch.cat([x, y.expand(-1, 6, -1)], -1)),
    "expand of a new dim": Case(
        lambda x, y: torch.stack([x, y.expand(2, 6, 4)]), (X, tensor(4)), takes=((cut(1), REPLICATE),)
    ),
    "broadcast_to": with_one(lambda x, y: x * torch.broadcast_to(y, (2, 6, 4))),
    "repeat": with_one(lambda x, y: torch.cat([x, y.repeat(1, 6, 1)], 1)),
    "tile": with_one(lambda x, y: torch.cat([x, y.tile(6, 1)])),
    "repeat_interleave": with_one(lambda x, y: torch.cat([x, y.repeat_interleave(6, dim=-2)])),
    "through views": with_one(
        lambda x, y: torch.cat(
            [x.flatten(1), (y.expand(2, 6, 4) * 2).transpose(0, 1).transpose(0, 1).flatten(1)]
        )
    ),
    "rotated": with_one(
        lambda x, y: x.sin() + (lambda e: torch.cat([-e[..., 2:], e[..., :2]], -1))(y.expand(2, 6, 4))
    ),
    "a sum of two": Case(
        lambda x, y, z: torch.cat([x, y.expand(2, 6, 4) + z.expand(2, 6, 4)]),
        (X, ONE, tensor(2, 1, 1)),
        few=2,
        takes=((cut(1), REPLICATE, REPLICATE),),
    ),
    "zeros": Case(lambda x: torch.cat([x, torch.zeros(2, 6, 1, dtype=f64)], -1), (X,), takes=((cut(1),),)),
    "full": Case(
        lambda x: torch.cat([x, x.new_full((2, 6, 1), 3.0)], -1), (X,), takes=((cut(1),), (cut(0),))
    ),
    "a mask of ones": Case(
        lambda x: x.masked_fill(torch.ones(6, 4, dtype=torch.bool), 0.0),
        (X,),
        takes=((cut(1, 3),),),
    ),
    "zeros in a sum": Case(
        lambda x: torch.zeros(2, 6, 4, dtype=f64) + x, (X,), takes=((PARTIAL,), (cut(1),), (INVARIANT,))
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_costs_nothing_and_is_exact(name: str) -> None:
    hold(CASES[name])


def test_what_is_expanded_is_copied() -> None:
    taken = hold(CASES["expand"]).taken
    assert (cut(1), INVARIANT) in taken  # without a gradient
    function = CASES["expand"].function
    hold(
        Case(
            function,
            (X, ONE),
            tps=(2,),
            choices=lambda tp: [[(cut(1), True)], [(INVARIANT, True)]],
            never=True,
        )
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cat([x, torch.arange(6.0, dtype=f64).expand(2, 4, 6).transpose(1, 2)], -1),
        lambda x: x * torch.linspace(0, 1, 6, dtype=f64)[:, None],
        lambda x: torch.cat([x, torch.zeros(2, 6, 1, dtype=f64).cumsum(1)], -1),
    ],
)
def test_what_differs_from_head_to_head_is_refused(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    taken = hold(Case(function, (X,))).taken
    assert not any(isinstance(x, Shard) and x.dim == 1 for (x,) in taken)


def test_numbers_are_no_parts_of_a_sum() -> None:
    taken = hold(Case(lambda x: torch.ones(2, 6, 4, dtype=f64) + x, (X,))).taken
    assert not any(PARTIAL in layouts for layouts in taken)
