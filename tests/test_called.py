"""Calls of a sharded model with flags, numbers and words that no trace was given."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autotp
from autotp.comm import simulate
from autotp.diagnostic import UnprovenPath
from autotp.rewrite.apply import apply

PLAN = {"fc1": {"style": "column", "heads": 4}, "fc2": "row"}
X = torch.linspace(-1, 1, 2 * 5 * 8).reshape(2, 5, 8)


TABLE = {"plain": torch.tanh, "more": torch.exp, "sum": lambda h: h.cumsum(2)}


class Flags(nn.Module):
    """Four heads of three, with ways that depend on plain arguments."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 6)

    def forward(self, x=None, k=-1, name="plain", start=0, scale=2.0, inner=1.0, running=False, y=None):
        x = y if x is None else x
        h = inner * self.fc1(x[:, start:]).unflatten(-1, (-1, 3)).softmax(k)
        h = TABLE[name](h).flatten(-2)
        return self.fc2(h.cumsum(-1) if running else h) * scale


@pytest.fixture(scope="module")
def sharded():
    """Both ranks of one model, which remember what was proven, and the model itself."""
    model = Flags()
    analysis = autotp.analyze(model, PLAN, tp=2, inputs=X)
    assert analysis.ok
    ranks = simulate(2, lambda group: apply(copy.deepcopy(model), analysis, group))
    return model, ranks


def _run(sharded, **given):
    model, ranks = sharded
    got = simulate(2, lambda group: ranks[group.rank](X, **given))
    assert all(torch.allclose(y, model(X, **given), atol=1e-5) for y in got)


@pytest.mark.parametrize("given", [{}, {"k": 1}, {"name": "more"}, {"start": 2, "scale": 0.5}])
def test_what_the_proof_holds_for_is_computed(sharded, given):
    _run(sharded, **given)


@pytest.mark.parametrize(
    ("given", "code"), [({"k": 2}, "AT303"), ({"name": "sum"}, "AT303"), ({"running": True}, "AT303")]
)
def test_what_it_does_not_hold_for_raises(sharded, given, code):
    (name, value), *_ = given.items()
    with pytest.raises(UnprovenPath) as raised:
        _run(sharded, **given)
    told = str(raised.value)
    assert told.startswith(f"Flags is called with {name}={value!r} (it was proven with {name}=")
    assert f"error[{code}]" in told
    assert told.endswith(
        "\n  = help: shard the model with inputs= that call it this way, to see what the plan lacks"
    )


def test_a_number_that_only_whole_values_depend_on_is_proven_once(sharded, monkeypatch):
    _run(sharded, start=1, inner=0.5)
    monkeypatch.setattr("autotp.decide.decide_with_proof", None)
    _run(sharded, start=3, inner=-2)
    free = next(iter(sharded[1][0]._forward_pre_hooks.values())).free
    assert {"start", "inner"} <= free and "k" not in free


def test_a_call_without_a_tensor_that_the_traces_had_is_proven_as_it_is(sharded):
    model, ranks = sharded
    for y in simulate(2, lambda group: ranks[group.rank](y=X)):
        assert torch.allclose(y, model(X), atol=1e-5)


def test_what_the_forward_does_not_take_it_refuses_itself(sharded):
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        _run(sharded, other=1)


class Rates(nn.Module):
    """Dropout of rate 0 on a shard: a module's own, and one from an attribute."""

    def __init__(self):
        super().__init__()
        self.fc1, self.drop, self.fc2 = nn.Linear(8, 12), nn.Dropout(0), nn.Linear(12, 6)
        self.rate = 0.0

    def forward(self, x):
        return self.fc2(nn.functional.dropout(self.drop(self.fc1(x)), self.rate, self.training))


@pytest.mark.parametrize(("path", "name"), [("drop", "p"), ("", "rate")])
def test_a_dropout_rate_that_was_zero_may_not_be_raised(path, name):
    model = Rates()
    analysis = autotp.analyze(model, {"fc1": "column", "fc2": "row"}, tp=2, inputs=X)
    assert analysis.ok and analysis.resting == ("", "drop")

    def run(group):
        copied = apply(copy.deepcopy(model), analysis, group).train()
        copied(X)
        setattr(copied.get_submodule(path), name, 0.25)
        copied.eval()(X)
        with pytest.raises(UnprovenPath) as raised:
            copied.train()(X)
        return str(raised.value)

    assert simulate(2, run)[0] == (
        f"{path or 'Rates'}: {name} is 0.25, and was 0.0 when the plan was proven: every rank would drop the "
        "same elements of its own part; set the rate before the model is sharded"
    )


@pytest.mark.parametrize("number", [3, 7, 8, 6, -3])
def test_a_number_like_a_size_of_the_samples_is_not_any_number(number):
    class Modes(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(8, 9), nn.Linear(9, 6)

        def forward(self, x, mode=number):
            h = self.fc1(x)
            return self.fc2(h.cumsum(-1) if mode == 99 else h)

    def here(group):
        model = autotp.shard(Modes(), {"fc1": "column", "fc2": "row"}, group, inputs=torch.zeros(3, 7, 8))
        model(torch.ones(2, 5, 8), number)
        with pytest.raises(autotp.UnprovenPath, match="is called with mode=99"):
            model(torch.ones(2, 5, 8), 99)

    simulate(2, here)


def test_flags_that_were_proven_one_by_one_are_proven_together():
    class Flags(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(8, 9), nn.Linear(9, 6)

        def forward(self, x, one=False, two=False):
            h = self.fc1(x)
            return self.fc2(h.cumsum(-1) if one and two else h)

    def here(group):
        model, x = autotp.shard(Flags(), {"fc1": "column", "fc2": "row"}, group), torch.ones(2, 8)
        for flags in ((True, False), (False, True), (True, False)):
            model(x, *flags)
        with pytest.raises(autotp.UnprovenPath, match=r"one=True .* and two=True"):
            model(x, True, True)

    simulate(2, here)


def test_a_call_like_an_earlier_one_is_not_looked_at_again(sharded, monkeypatch):
    _run(sharded)
    monkeypatch.setattr("autotp.rewrite.called.given_in", None)
    _run(sharded)
    with pytest.raises(TypeError, match="not callable"):
        _run(sharded, k=True)  # 1 is another value than True
