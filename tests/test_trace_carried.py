"""What the forward leaves on the model, and the next call reads."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autotp
from autotp.comm import simulate
from autotp.diagnostic import UnprovenPath
from autotp.rewrite.apply import apply
from autotp.trace.carried import carried_in

PLAN = {"fc1": "column", "fc2": "row"}
X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


class Left(nn.Module):
    """Leaves values on itself, by one of the functions below."""

    def __init__(self, does):
        super().__init__()
        self.fc1, self.fc2, self.does = nn.Linear(8, 16), nn.Linear(16, 8), does
        self.step, self.calls, self.kept = 0, 0, None

    def forward(self, x):
        return self.fc2(self.does(self, self.fc1(x).tanh()))


def counted(self, h):
    self.step += 1
    return h.flip(-1) if self.step > 3 else h


def scaled(self, h):
    self.step = self.step + 1
    return h * (-1 if self.step > 3 else 1)


def logged(self, h):
    self.calls += 1
    return h


def added(self, h):
    h = h if self.kept is None else h + self.kept.mean(-1, keepdim=True)
    self.kept = h.detach()
    return h


def shown(self, h):
    self.kept = h.detach()
    return h + self.kept


def averaged(self, h):
    h = h if self.kept is None else h + self.kept
    self.kept = h.detach().mean(1, keepdim=True).sum()
    return h


@pytest.mark.parametrize(
    ("does", "right"), [(counted, 3), (scaled, 5), (logged, 5), (shown, 5)]
)  # how many calls are right; the others raise
def test_calls_that_earlier_ones_decide_are_right_or_raise(does, right):
    model = Left(does).eval()
    analysis = autotp.analyze(model, PLAN, tp=2, inputs=X)
    assert analysis.ok

    def rank(group):
        mine = apply(copy.deepcopy(model), analysis, group)
        found = [mine(X) for _ in range(right)]
        for _ in range(5 - right):
            with pytest.raises(UnprovenPath, match="step=3"):
                mine(X)
        return found

    alone = copy.deepcopy(model)
    expected = [alone(X) for _ in range(right)]
    for found in simulate(2, rank):
        assert all(torch.allclose(y, z, atol=1e-6) for y, z in zip(found, expected, strict=True))


@pytest.mark.parametrize("first", [None, torch.zeros(1)])
@pytest.mark.parametrize("does", [added, averaged])
def test_a_call_that_reads_what_an_earlier_one_left_in_parts_raises(does, first):
    """Read by a mean, or as one number, a part raises nothing by its shape."""
    model = Left(does).eval()
    model.kept = first
    analysis = autotp.analyze(model, PLAN, tp=2, inputs=X)
    assert [(d.code, d.severity) for d in analysis.diagnostics] == [("AT324", "warning")]
    right = copy.deepcopy(model)(X)

    def rank(group):
        mine = apply(copy.deepcopy(model), analysis, group)
        found = mine(X)
        with pytest.raises(
            UnprovenPath, match="kept is read, of which an earlier call left each rank its own"
        ):
            mine(X)
        return found

    assert all(torch.allclose(found, right, atol=1e-6) for found in simulate(2, rank))


def test_a_part_that_is_left_and_not_read_is_no_matter():
    model = Left(shown).eval()
    analysis = autotp.analyze(model, PLAN, tp=2, inputs=X)

    def rank(group):
        mine = apply(copy.deepcopy(model), analysis, group)
        return [mine(X), mine(X), mine(-X)]

    for found in simulate(2, rank):
        for y, x in zip(found, (X, X, -X), strict=True):
            assert torch.allclose(y, model(x), atol=1e-6)


def test_what_is_written_first_is_not_carried():
    def first(self, x):
        self.a = x
        return self.a + self.b

    def perhaps(self, x):
        if x:
            self.a = x
        self.c += 1
        return self.a

    assert carried_in([first.__code__]) == {"b"}
    assert carried_in([perhaps.__code__]) == {"a"}
