"""Branches of edited functions that no trace took: a call that takes one is proven when it is first made, and
the branch stands open from then on; what is inside of it, and was not taken, does not."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers
from torch import nn

import autotp
from autotp.comm import simulate
from tests import models

PLAN = {"fc1": {"style": "column", "heads": 3}, "fc2": {"style": "row", "heads": 3}}
X = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SAID = "no traced forward took this branch"


class Layer(nn.Module):
    """Three heads of four."""

    way, deep = "heads", False

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 8)
        self.heads, self.dim = 3, 4

    def split(self, h):
        if self.way == "heads":
            return h.view(len(h), self.heads, self.dim)
        h = h.reshape(len(h), -1, self.dim).tanh()
        if self.way == "whole":
            return h.view(len(h), 3, self.dim)
        if self.deep:
            h = h.cumsum(-1)
        return h

    def forward(self, x):
        return x + self.fc2(self.split(self.fc1(x)).flatten(1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def built():
    torch.manual_seed(0)
    return models.randomised(Model()).double()


def set_all(model, **attributes):
    for layer in model.layers:
        for name, value in attributes.items():
            setattr(layer, name, value)
    return model


def past_the_guard(model):
    """A forward of which nothing is asked before it runs: what a call does that is taken for another one."""
    model.forward.within.inside = True
    try:
        return model.forward.__wrapped__(X)
    finally:
        model.forward.within.inside = False


def whole(**attributes):
    """What the unsharded model gives, and the gradients of its weights."""
    model = set_all(built(), **attributes)
    out = model(X)
    out.pow(2).sum().backward()
    return out.detach(), model.layers[1].fc1.weight.grad


def is_exact(model, **attributes):
    wanted, gradient = whole(**attributes)
    model.zero_grad()
    out = model(X)
    torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-12)
    out.pow(2).sum().backward()
    part = autotp.gather_state_dict(model)["layers.1.fc1.weight"]
    assert part.shape == gradient.shape
    return [layer.fc1.weight.grad.clone() for layer in model.layers]


@pytest.mark.parametrize("tp", [2, 3])
def test_a_branch_is_proven_when_it_is_taken_and_what_is_inside_of_it_is_not(tp):
    def here(group):
        model = autotp.shard(built(), PLAN, group, inputs=X)
        is_exact(model)
        set_all(model, way="other")
        with pytest.raises(autotp.UnprovenPath, match=SAID):
            past_the_guard(model)
        first = is_exact(model, way="other")
        torch.testing.assert_close(past_the_guard(model), whole(way="other")[0])  # it stands open
        set_all(model, deep=True)
        with pytest.raises(autotp.UnprovenPath, match=SAID):
            past_the_guard(model)
        is_exact(model, way="other", deep=True)
        set_all(model, way="whole")  # a view of three heads, whatever a rank has
        with pytest.raises(autotp.UnprovenPath, match=SAID):
            model(X)
        with pytest.raises(autotp.UnprovenPath, match=SAID):
            past_the_guard(model)
        is_exact(set_all(model, way="heads", deep=False))
        again = is_exact(set_all(model, way="other"), way="other")
        for one, other in zip(first, again, strict=True):
            assert torch.equal(one, other)
        return first

    gradient = whole(way="other")[1]
    parts = [grads[1] for grads in simulate(tp, here)]
    torch.testing.assert_close(torch.cat(parts), gradient, rtol=1e-10, atol=1e-12)


def test_one_layer_that_takes_it_opens_it_for_itself_alone():
    def here(group):
        model = autotp.shard(built(), PLAN, group, inputs=X)
        model.layers[1].way = "other"
        want = built()
        want.layers[1].way = "other"
        torch.testing.assert_close(model(X), want(X), rtol=1e-10, atol=1e-12)
        model.layers[2].way = "other"
        with pytest.raises(autotp.UnprovenPath, match=SAID):
            past_the_guard(model)

    simulate(2, here)


def test_copies_and_pickles_take_it_too():
    def here(group):
        model = autotp.shard(built(), PLAN, group, inputs=X)
        before = copy.deepcopy(model)
        is_exact(set_all(model, way="other"), way="other")
        is_exact(set_all(before, way="other"), way="other")
        is_exact(copy.deepcopy(model), way="other")
        again = pickle.loads(pickle.dumps(model)) if group.rank == 0 else model
        assert [type(layer).split.__code__ for layer in again.layers] == [
            type(layer).split.__code__ for layer in model.layers
        ]
        autotp.unshard(model)
        assert all(type(layer) is Layer for layer in model.layers)
        torch.testing.assert_close(model(X), whole(way="other")[0])

    simulate(2, here)


def test_a_class_that_was_changed_since_is_left_and_raises():
    class Wrapped:
        pass

    def here(group):
        model = autotp.shard(built(), PLAN, group, inputs=X)
        layer = model.layers[0]
        layer.__class__ = type("Wrapped", (Wrapped, type(layer)), {})  # as `fully_shard` does
        is_exact(model)
        with pytest.raises(autotp.UnprovenPath):
            set_all(model, way="other")(X)

    simulate(2, here)


def static(rank, size):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double().eval()
    ids = torch.randint(3, 96, (2, 9))
    how = {"max_new_tokens": 6, "cache_implementation": "static", "do_sample": False, "eos_token_id": 97}
    want = model.generate(ids, pad_token_id=0, **how)
    got = autotp.shard(model, "llama").generate(ids, pad_token_id=0, **how)
    return torch.equal(got, want), tuple(got.shape)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [3, 4])
def test_a_static_cache_where_kv_heads_are_fewer_than_ranks(ranks, tp):
    """The attention function is edited, and slices an empty cache of fixed length in a branch of its own."""
    assert ranks(tp)(static) == [(True, (2, 15))] * tp
