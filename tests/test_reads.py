"""Whole parameters and buffers that meet shards: copied or sliced where they are read."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import autotp
from autotp.comm import simulate
from tests import models
from tests.models import verified
from tests.wrong_models import PerHead

PLAN = {"fc1": "column", "fc2": "row"}


def qwen3(**changes):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "vocab_size": 97, "hidden_size": 48, "intermediate_size": 67, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 12, "num_key_value_heads": 6, "max_position_embeddings": 64,
    }  # fmt: skip
    return Qwen3ForCausalLM(Qwen3Config(**{**sizes, **changes})).eval()


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize(
    ("factory", "plan", "reads"),
    [
        (models.Learned, PLAN, {"scale": (True, False)}),
        (models.PerFeature, PLAN, {"scale": (True, True), "offset": (False, True)}),
        pytest.param(
            qwen3,
            dict(autotp.Plan.load("llama").rules),
            {f"model.layers.{i}.self_attn.{n}_norm.weight": (True, False) for i in range(2) for n in "qk"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["number", "per feature", "qwen3"],
)
def test_they_are_found_and_exact(factory, plan, reads, tp):
    analysis = autotp.analyze(factory(), plan, tp=tp)
    assert {r.name: (r.copied, r.shard is not None) for r in analysis.reads} == reads
    assert verified(factory(), analysis).ok


def test_the_parameter_stays_whole_and_the_class_stays_itself():
    def rank(group):
        model = models.PerFeature()
        names, scale = list(model.state_dict()), model.scale
        autotp.shard(model, PLAN, group)
        assert list(model.state_dict()) == names
        assert model._parameters["scale"] is scale and dict(model.named_parameters())["scale"] is scale
        assert isinstance(model, models.PerFeature) and type(model).__name__ == "PerFeature"
        assert model.scale.shape == model.fc1.bias.shape == model.offset.shape
        model.load_state_dict({k: torch.full_like(v, 2.0) for k, v in model.state_dict().items()})
        assert (scale == 2).all() and (model.scale == 2).all()
        model.to(torch.float64)
        assert model.scale.dtype == torch.float64
        return True

    assert simulate(2, rank) == [True, True]


def test_copies_keep_it():
    def rank(group):
        model = autotp.shard(models.PerFeature().double(), PLAN, group)
        x = torch.randn(3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        return torch.equal(copy.deepcopy(model)(x), model(x)), copy.deepcopy(model).scale.shape

    for equal, shape in simulate(2, rank):
        assert equal and shape in ((17,), (16,))


def _pickled(rank, size):
    model = autotp.shard(models.randomised(models.Learned()), PLAN)
    file = io.BytesIO(pickle.dumps(model))
    again = pickle.load(file)
    x = torch.ones(2, 16, dtype=torch.float64)
    results = []
    for m in (model, again):
        m(x).sum().backward()
        results.append((m(x).detach(), m._parameters["scale"].grad))
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_pickle_keeps_it(ranks):
    # functions of a module cannot be pickled by value: `between` is a function of torch
    assert ranks(2)(_pickled) == [True, True]


@pytest.mark.slow
def test_the_weight_of_a_layer_is_never_read_in_parts():
    """A forgotten layer is refused; it is not sliced behind the user's back."""
    analysis = autotp.analyze(models.llama(), {"gate_proj": "column", "down_proj": "row"}, tp=2)
    assert not analysis.ok and analysis.reads == ()


def test_an_optimizer_step_keeps_it_equal_on_all_ranks():
    def rank(group):
        torch.manual_seed(0)
        model = autotp.shard(models.randomised(models.Learned()), PLAN, group)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            model(x).square().sum().backward()
            optimizer.step()
        return model._parameters["scale"].detach()

    first, second = simulate(2, rank)
    assert torch.equal(first, second)


@pytest.mark.parametrize("rules", [{}, {"table": "replicate", "scale": "replicate", "sinks": "replicate"}])
def test_what_each_head_has_is_read_in_parts_though_it_stays_whole(rules):
    plan = {n: {"style": "column", "heads": 3} for n in "qkv"} | {"out": "row"} | rules
    analysis = autotp.analyze(PerHead(), plan, tp=2)
    assert {read.name for read in analysis.reads if read.shard} == {"table.weight", "scale", "sinks"}
    assert verified(PerHead(), analysis).ok
