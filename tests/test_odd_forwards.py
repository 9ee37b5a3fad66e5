"""Forwards and functions that are made in odd ways: of one instance, by a property, by exec."""

from __future__ import annotations

import copy
from types import FunctionType

import pytest
import torch
from torch import nn

import autotp
from autotp.comm import simulate
from autotp.diagnostic import UnprovenPath
from autotp.rewrite.apply import apply
from tests.models import randomised
from tests.test_around_held import PLAN, WAYS, Model, X, exact, outer


def _ranks(model, tp):
    analysis = autotp.analyze(model, PLAN, tp=tp, inputs=X)
    return simulate(tp, lambda group: apply(copy.deepcopy(model), analysis, group))


def made_by_exec():
    """Functions that say nothing of their module."""
    spaces: dict[str, object] = {}
    exec("def square(h):\n    return h * h", spaces)
    found = spaces["square"]
    assert isinstance(found, FunctionType) and found.__module__ is None
    return found


SQUARE = outer(made_by_exec())


class Squares(Model):
    def does(self, h):
        return SQUARE(h)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_a_function_without_a_module(tp):
    model = randomised(Squares(), seed=0).eval()
    exact(model, _ranks(model, tp))


class OfInstance(Model):
    """A forward that is an attribute of one module, as wrappers of models set it."""

    def __init__(self):
        super().__init__()
        self.forward = self.run

    def run(self, x, way="plain"):
        return self.fc2(WAYS[way](self.fc1(x)))


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = OfInstance()

    def forward(self, x, way="plain"):
        return self.inner(x, way)


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("kind", [OfInstance, Outer])
def test_a_new_call_of_a_forward_of_one_instance_is_proven(kind, tp):
    model = randomised(kind(), seed=0).eval()
    ranks = _ranks(model, tp)
    for these in (ranks, [copy.deepcopy(rank) for rank in ranks]):
        exact(model, these)
        for y in simulate(tp, lambda group: these[group.rank](X, "other")):  # noqa: B023
            torch.testing.assert_close(y, model(X, "other"), rtol=1e-10, atol=1e-10)
        with pytest.raises(UnprovenPath, match=r"way='wrong'.*: error.AT303."):
            these[0](X, "wrong")


class ClosesOver(nn.Module):
    """A copy of it would run the module that it was made on."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 6)
        self.forward = lambda x, way="plain": self.fc2(WAYS[way](self.fc1(x)))


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = ClosesOver()

    def forward(self, x, way="plain"):
        return self.inner(x, way)


@pytest.mark.parametrize("kind", [ClosesOver, Around])
def test_a_new_call_of_a_forward_that_closes_over_its_module_raises(kind):
    expected = randomised(kind(), seed=0)(X)

    def rank(group):
        model = autotp.shard(randomised(kind(), seed=0).eval(), PLAN, group, inputs=X)
        y = model(X)
        with pytest.raises(UnprovenPath, match=r"cannot be copied .* closes over a ClosesOver, .* a method"):
            model(X, "other")
        return y

    for y in simulate(2, rank):
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)


class Property(Model):
    """A part whose forward is chosen by a property."""

    @property
    def forward(self):
        return self.run

    def run(self, x):
        return self.fc2(self.act(self.fc1(x)))


class HasProperty(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Property()

    def forward(self, x):
        return self.inner(x)


def test_a_forward_that_is_a_property():
    model = randomised(HasProperty(), seed=0).eval()
    exact(model, _ranks(model, 2))
