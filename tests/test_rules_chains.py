"""Random programs of up to six ops, each with every layout of its input, hold against execution."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from autotp.placement import INVARIANT, REPLICATE
from tests.layouts import Placed, placements, tensor
from tests.rules import Case, hold

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
SHAPES = [(2, 6, 12), (5, 12), (3, 2, 12), (12, 6), (4, 18), (1, 12, 4)]
OTHERS = [(12, 6), (6, 12), (4, 4), (18, 3)]


def steps(draw: random.Random, shape: torch.Size) -> Iterator[Step]:
    """One step of each kind that a value of this shape can take, with random dims and bounds."""
    d, e = draw.randrange(len(shape)), draw.randrange(len(shape))
    n, sizes, order = shape[d], list(shape), draw.sample(range(len(shape)), len(shape))
    c = draw.choice([q for q in range(1, n + 1) if n % q == 0])
    i, k, m = draw.randrange(n), draw.randrange(c), draw.randrange(1, 4)
    joined = [*sizes[:d], -1, *sizes[d + 2 :]]
    yield lambda x, y: x.reshape(*sizes[:d], c, n // c, *sizes[d + 1 :])
    yield lambda x, y: x.reshape(joined)
    yield lambda x, y: x.flatten()
    yield lambda x, y: x.transpose(d, e)
    yield lambda x, y: x.permute(order)
    yield lambda x, y: x.unsqueeze(d)
    yield lambda x, y: x.squeeze()
    yield lambda x, y: x.chunk(c, d)[k]
    yield lambda x, y: x.narrow(d, i, n - i)
    yield lambda x, y: x[..., ::2]
    yield lambda x, y: x[..., 1::2]
    yield lambda x, y: x.select(d, i)
    yield lambda x, y: torch.cat((x, x * 2), d)
    yield lambda x, y: torch.stack((x, x.relu()), d)
    yield lambda x, y: x.repeat_interleave(m, d)
    yield lambda x, y: x.repeat([m if dim == d else 1 for dim in range(len(sizes))])
    yield lambda x, y: F.glu(x, d)
    yield lambda x, y: x.softmax(d)
    yield lambda x, y: x.sum(d, keepdim=bool(k % 2))
    yield lambda x, y: x - x.mean(d, keepdim=True)
    yield lambda x, y: x.clone().mul_(2)
    yield lambda x, y: x * y[:, 0]
    yield lambda x, y: x * y.sum()
    yield lambda x, y: x @ y
    yield lambda x, y: F.linear(x, y)
    yield lambda x, y: x @ x.transpose(-1, -2)


def chain(seed: int) -> Case:
    """A random program of `x` and `y`, and the layouts to try."""
    draw = random.Random(seed)
    x, y = tensor(*draw.choice(SHAPES)), tensor(*draw.choice(OTHERS), seed=3)
    program: list[Step] = []
    value = x
    for _ in range(draw.randrange(2, 7)):
        step = draw.choice(list(steps(draw, value.shape))) if value.dim() else torch.mul
        try:
            result = step(value, y)
        except (RuntimeError, IndexError):  # not for this shape
            continue
        if 0 < result.numel() < 4000:
            value = result
            program.append(step)

    def run(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for step in program:
            x = step(x, y)
        return x, y * 2

    def choices(tp: int) -> list[list[Placed]]:
        others = draw.sample(placements(y, tp, few=3), 3)
        return [placements(x, tp, few=6), [*others, (INVARIANT, False), (REPLICATE, True)]]

    return Case(run, (x, y), choices=choices, tps=(draw.choice((2, 3, 4)),))


def accepted(seeds: range) -> int:
    found = 0
    for seed in seeds:
        try:
            found += hold(chain(seed)).accepted
        except AssertionError as error:
            if not str(error).startswith("0 accepted"):
                raise AssertionError(f"seed {seed}: {error}") from error
    return found


def test_chains_of_ops() -> None:
    assert accepted(range(12)) > 100


@pytest.mark.slow
def test_many_chains_of_ops() -> None:
    assert accepted(range(1000, 1200)) > 2000
