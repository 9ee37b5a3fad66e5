"""What a module gives that was not looked into, beside what it gave in the traces."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.comm import simulate
from autotp.diagnostic import PlanError, UnprovenPath
from autotp.trace.signature import told_of

X = torch.randn(5, 7, 6, generator=torch.Generator().manual_seed(0)).double()


class Marked(Tensor):
    """A tensor of a class of its own."""


class Asks(nn.Module):
    """What it has seen decides of which class the later results are."""

    def __init__(self, far: bool) -> None:
        super().__init__()
        self.far = far

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        was, self.far = self.far, bool(x.max() > 50)
        return (x * 2).as_subclass(Marked) if was else x * 2, 2.0


class Block(nn.Module):
    def __init__(self, far: bool) -> None:
        super().__init__()
        self.asks, self.up, self.down = Asks(far), nn.Linear(6, 7), nn.Linear(7, 6)

    def forward(self, x: Tensor) -> Tensor:
        given, size = self.asks(x)
        h = self.up(given) * size
        return self.down(h.softmax(-1) if isinstance(h, Marked) else h)


PLAN = {"up": "column", "down": "row"}


def test_a_later_result_of_another_class_raises():
    model = Block(False).double()

    def rank(group) -> None:
        sharded = autotp.shard(copy.deepcopy(model), PLAN, group, inputs=X)
        sharded(X + 100)
        sharded(X)

    with pytest.raises(UnprovenPath, match=r"^asks: it gives a tests.test_results.Marked at \[0\]"):
        simulate(2, rank)


def test_a_class_that_no_recording_gives_is_refused():
    with pytest.raises(PlanError, match=r"AT320\]: asks"):
        autotp.verify(Block(True).double(), PLAN, tp=2, inputs=X)


def test_the_class_is_told():
    marked = torch.ones(2).as_subclass(Marked)
    assert ("[1]", "a tests.test_results.Marked") in told_of((1, marked))
    assert told_of(nn.Parameter(torch.ones(2))) == told_of(torch.ones(2, requires_grad=True))
