"""Parts of a sharded model that are called by themselves."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import autotp
from autotp.comm import simulate
from autotp.diagnostic import UnprovenPath
from autotp.rewrite.apply import apply

PLAN = {"fc1": "column", "fc2": "row"}
X = torch.linspace(-1, 1, 2 * 5 * 8).reshape(2, 5, 8)


class Layer(nn.Module):
    """With a flag, a mask, and a way for long inputs, none of which the model uses."""

    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(8, 13), nn.Tanh(), nn.Linear(13, 8)

    def forward(self, x, flag=False, mask=None):
        h = self.act(self.fc1(x))
        h = h if mask is None else h * mask
        return self.fc2(h.cumsum(-1) if flag or x.shape[1] > 40 else h)


class Model(nn.Module):
    def __init__(self, again=None):
        super().__init__()
        self.layers, self.again = nn.ModuleList([Layer(), Layer()]), again

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if self.again is None else checkpoint(layer, x, use_reentrant=self.again)
        return x

    def features(self, x):
        return self.layers[0](x).relu()


def _ranks(again=None):
    model = Model(again).eval()
    analysis = autotp.analyze(model, PLAN, tp=2, inputs=X)
    assert analysis.ok, analysis
    return model, simulate(2, lambda group: apply(copy.deepcopy(model), analysis, group))


@pytest.fixture(scope="module")
def sharded():
    return _ranks()


def _exact(model, ranks, call):
    """The outputs, and the gradient of the input."""

    def outcome(called):
        x = X.clone().requires_grad_()
        y = call(called, x)
        y.square().sum().backward()
        return y.detach(), x.grad

    expected = outcome(model)
    for found in simulate(2, lambda group: outcome(ranks[group.rank])):
        for got, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


CALLS = {
    "a layer": lambda model, x: model.layers[0](x),
    "its forward": lambda model, x: model.layers[1].forward(x),
    "another mask": lambda model, x: model.layers[0](x, mask=X[..., :1]),
    "another method": lambda model, x: model.features(x),
    "another size": lambda model, x: model.layers[0](x[:, :1]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_part_that_is_called_by_itself_is_proven(sharded, call):
    _exact(*sharded, call)


WRONG = {
    "a flag": (lambda model, x: model.layers[0](x, True), "flag=True and mask=None and x=a tensor", "AT303"),
    "a size": (lambda model, x: model.layers[0](x.repeat(1, 9, 1)), "x of size 45 in dim 1, which ", "AT303"),
    "a mask of features": (
        lambda model, x: model.layers[0](x, mask=torch.ones(13)),
        "mask=a tensor",
        "AT306",
    ),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_a_part_may_not_be_called_otherwise_than_can_be_proven(sharded, case):
    call, told, code = case
    _exact(*sharded, CALLS["a layer"])
    for rank in sharded[1]:
        with pytest.raises(UnprovenPath) as raised:
            call(rank, X)
        said = str(raised.value)
        assert said.startswith("layers.0 is called by itself with ") and told in said
        assert f": error[{code}]: layers.0: " in said
        assert said.endswith(
            "\n  = help: call the model, and not its parts; or shard this part, as a model of its own"
        )


def test_one_look_suffices(sharded, monkeypatch):
    _exact(*sharded, CALLS["a layer"])
    monkeypatch.setattr("autotp.rewrite.called.proven_anew", None)
    _exact(*sharded, CALLS["a layer"])


def test_copies_of_a_model_guard_their_own_parts(sharded):
    model, ranks = sharded
    copied = [copy.deepcopy(rank) for rank in ranks]
    assert all(layer.forward.within is copied[0].forward.within for layer in copied[0].layers)
    _exact(model, copied, lambda model, x: model(x))
    assert all(layer.forward.called is None for layer in copied[0].layers)  # they were called by the model
    _exact(model, copied, CALLS["a layer"])
    with pytest.raises(UnprovenPath, match="called by itself"):
        copied[0].layers[1](X, True)


def test_a_copy_of_a_part_alone_does_not_hold_the_model(sharded):
    gc.collect()
    before = sum(isinstance(each, Model) for each in gc.get_objects())
    part = copy.deepcopy(sharded[1][0].layers[0])
    assert sum(isinstance(each, Model) for each in gc.get_objects()) == before
    assert part.forward.within.model is None


@pytest.mark.parametrize("again", [False, True])
def test_what_is_computed_again_in_backward_is_no_call_of_a_part(again):
    model, ranks = _ranks(again)
    _exact(model, ranks, lambda model, x: model(x))
    for rank in ranks:
        for layer in rank.layers:
            assert layer.forward.called is None or not layer.forward.called.proven.states
    with pytest.raises(UnprovenPath, match="called by itself"):
        ranks[0].layers[1](X, True)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 45), nn.Linear(15, 8)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (5, 3)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(torch.softmax(q @ k.mT, -1).matmul(v).transpose(1, 2).flatten(2))


def test_an_empty_batch_is_proven_as_any_other():
    model = Heads().eval()
    plan = {"qkv": {"style": "column", "sections": 3, "heads": 5}, "out": "row"}
    analysis = autotp.analyze(model, plan, tp=2, inputs=X)
    assert analysis.ok, analysis
    shards = simulate(2, lambda group: apply(copy.deepcopy(model), analysis, group))
    for shape in ((0, 5, 8), (3, 4, 8)):
        x = torch.linspace(-1, 1, 96)[: torch.Size(shape).numel()].reshape(shape)
        for out in simulate(2, lambda group, x=x: shards[group.rank](x)):
            torch.testing.assert_close(out, model(x))
