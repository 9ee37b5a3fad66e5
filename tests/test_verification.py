"""verify: right plans are exact, and faults put in on purpose are found."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autotp
from autotp import mappings
from autotp.nn import ColumnParallelLinear, RowParallelLinear
from tests import models
from tests.models import verified

PLAN = {"fc1": "column", "fc2": "row"}
ENCODER = {
    "in_proj_weight": {"style": "column", "dim": 0, "sections": 3, "heads": 4},
    "in_proj_bias": {"style": "column", "dim": 0, "sections": 3, "heads": 4},
    "out_proj.weight": {"style": "row", "dim": 1, "heads": 4},
    "linear1": "column",
    "linear2": "row",
}


def encoder():
    return nn.TransformerEncoderLayer(12, 4, 25, dropout=0.0, batch_first=True)


@pytest.mark.parametrize(
    ("factory", "plan", "tp"),
    [
        (models.MLP, PLAN, 2),
        (models.MLP, PLAN, 4),
        (models.Twice, PLAN, 3),
        (models.FusedGate, {"gate_up": {"style": "column", "sections": 2}, "down": "row"}, 3),
        (models.bert, "bert", 2),
        # its attention is given one value three times, which is copied once
        pytest.param(encoder, ENCODER, 3, marks=pytest.mark.slow),
        # its norms compute in float32, and in float64 where it is compared
        pytest.param(models.llama, "llama", 4, marks=pytest.mark.slow),
    ],
)
def test_right_plans_are_exact_and_collectives_those_of_the_analysis(factory, plan, tp):
    analysis = autotp.analyze(factory(), plan, tp=tp)
    result = verified(factory(), analysis)
    assert result.ok and result.state_dict_equal and result.tolerance == 1e-9
    assert result.max_output_diff <= 1e-10 and result.max_grad_diff <= 1e-10
    assert len(result.collectives) == tp
    for direction in ("forward", "backward"):
        said: dict[str, int] = {}
        for c in analysis.collectives:
            if c.direction == direction:
                said[c.operation] = said.get(c.operation, 0) + c.calls
        assert result.collectives[0][direction] == said


class Rooted(models.MLP):
    """The gradient of some features is not a number."""

    def forward(self, x):
        h = self.fc1(x)
        return self.fc2(torch.where(h > 0, (h * 0).sqrt(), h))


def test_gradients_that_are_no_numbers_are_compared_by_their_places():
    result = autotp.verify(Rooted(), PLAN, tp=2)
    assert result.ok and result.max_grad_diff <= 1e-10


class ByHand(models.MLP):
    """float32 by hand, random numbers in eval, gradients that are all zero: one of them each."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        if self.kind == "float32":
            x = x.float().pow(2).to(dtype=torch.float32).to(x.dtype)
        x = torch.nn.functional.dropout(x, 0.3) if self.kind == "whole draws" else x
        h = self.fc1(x).tanh()
        h = torch.nn.functional.dropout(h, 0.3) if self.kind == "shard draws" else h
        y = self.fc2(h)
        return y.softmax(-1).sum(-1) if self.kind == "zero" else y


@pytest.mark.parametrize("kind", ["float32", "whole draws", "zero"])
def test_rounding_random_numbers_and_zero_gradients_are_no_difference(kind):
    result = autotp.verify(ByHand(kind).float(), PLAN, tp=2)
    assert result.ok and result.tolerance == 1e-9 and result.modes == ("eval", "train"), str(result)


def test_random_numbers_on_shards_in_eval_cannot_be_compared():
    with pytest.raises(autotp.UsageError) as raised:
        autotp.verify(ByHand("shard draws"), PLAN, tp=2)
    assert str(raised.value) == (
        "ByHand draws random numbers on shards in eval mode, where ranks differ from the unsharded model, so "
        "their numbers cannot be compared"
    )


def test_the_model_is_untouched():
    model = models.MLP().to(torch.float32).train()
    before = copy.deepcopy(model.state_dict())
    autotp.verify(model, PLAN, tp=2)
    assert model.training and type(model.fc1) is nn.Linear
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert all(p.grad is None and not p._backward_hooks for p in model.parameters())


def test_collectives_are_counted_per_rank_and_phase():
    result = autotp.verify(models.MLP(), PLAN, tp=2)
    assert result.collectives == ({"forward": {"all-reduce": 1}, "backward": {"all-reduce": 1}},) * 2
    analysis = autotp.analyze(models.MLP(), PLAN, tp=2)
    assert [(c.mapping, c.module, c.direction, c.calls) for c in analysis.collectives] == [
        ("copy", "fc1", "backward", 1),
        ("reduce", "fc2", "forward", 1),
    ]


def test_zero_gradients_are_listed():
    result = autotp.verify(models.bert(), "bert", tp=2)
    assert result.zero_gradients == tuple(f"encoder.layer.{i}.attention.self.key.bias" for i in range(2))


def test_own_weights_and_own_dtype():
    model = models.randomised(models.MLP(), dtype=torch.float32)
    result = autotp.verify(model, PLAN, tp=2, weights="own", dtype=torch.float32)
    assert result.ok and result.tolerance == 1e-5
    with pytest.raises(autotp.UsageError, match="or \"own\", not 'mine'"):
        autotp.verify(model, PLAN, tp=2, weights="mine")


def _uncopied(self, x):
    return nn.functional.linear(x, self.weight, self.bias)


def _unreduced(self, x):
    return nn.functional.linear(x, self.weight) + self.bias


@pytest.mark.parametrize(
    ("layer", "forward", "what"),
    [(ColumnParallelLinear, _uncopied, "gradient"), (RowParallelLinear, _unreduced, "output")],
    ids=["no copy", "no reduce"],
)
def test_a_mapping_that_is_missing_is_found(monkeypatch, layer, forward, what):
    monkeypatch.setattr(layer, "forward", forward)
    result = autotp.verify(models.MLP(), PLAN, tp=2)
    assert not result.ok and str(result).startswith("WRONG: ")
    wrong, right = result.max_output_diff, result.max_grad_diff
    if what == "gradient":
        wrong, right = right, wrong
    assert wrong > 1e-3 and right < 1e-12


def test_a_bias_that_is_added_on_every_rank_is_found(monkeypatch):
    def forward(self, x):
        return mappings.reduce(nn.functional.linear(x, self.weight, self.bias), self.group)

    monkeypatch.setattr(RowParallelLinear, "forward", forward)
    result = autotp.verify(models.MLP(), PLAN, tp=2)
    assert not result.ok and result.max_output_diff > 1e-3


def test_weights_cut_wrongly_are_found(monkeypatch):
    from autotp.rewrite import apply

    monkeypatch.setattr(apply, "take", lambda t, shard, rank: _shifted(t, shard, rank))
    result = autotp.verify(models.MLP(hidden=32), PLAN, tp=2)
    assert not result.ok and not result.state_dict_equal


def _shifted(tensor, shard, rank):
    from autotp.slicing import take

    return take(tensor.roll(1, shard.dim), shard, rank)


def test_a_model_that_refers_to_itself_through_a_closure_is_refused():
    class Closed(models.MLP):
        def __init__(self):
            super().__init__()
            self.run = lambda x: self.fc2(self.fc1(x))

        def forward(self, x):
            return self.run(x)

    with pytest.raises(autotp.UsageError, match="a part of itself that deepcopy does not follow"):
        autotp.verify(Closed(), PLAN, tp=2)


def test_a_meta_model_is_refused():
    with torch.device("meta"):
        model = models.MLP()
    with pytest.raises(autotp.UsageError, match="this one is on the meta device"):
        autotp.verify(model, PLAN, tp=2)


class Asking(nn.Linear):
    """Asks for a value, so that no op of it can be recorded."""

    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


class Behind(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.mlp = Asking(16, 16), models.MLP()

    def forward(self, x):
        return self.mlp(self.first(x))


def test_a_part_that_is_not_looked_into_runs_as_it_is():
    plan = {"fc1": "column", "fc2": "row"}
    result = autotp.verify(Behind(), plan, tp=2, inputs=torch.randn(5, 16))
    assert result.ok and result.modes == ("eval", "train")
