"""The proof of whole models: every mode, every layer."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autotp
from tests import architectures, models
from tests.test_reads import qwen3

FFN = {"fc1": "column", "fc2": "row"}


@pytest.mark.slow
def test_all_layers_stand_after_a_proof():
    model = qwen3(num_hidden_layers=5)
    autotp.analyze(model, dict(autotp.Plan.load("llama").rules), tp=2)
    assert len(model.model.layers) == 5


@pytest.mark.slow
def test_a_layer_with_a_rule_of_its_own_is_traced():
    plan = dict(autotp.Plan.load("llama").rules) | {"layers.3.mlp.up_proj": "replicate"}
    analysis = autotp.analyze(models.llama(num_hidden_layers=5), plan, tp=2)
    found = [d for d in analysis.diagnostics if d.severity == "error"]
    assert [d.code for d in found] == ["AT306"] and found[0].module == "model.layers.3.mlp"


def test_a_mode_that_cannot_be_traced_is_a_warning_and_refused_at_run_time():
    class Eval(models.MLP):
        def forward(self, x):
            if self.training and x.sum() > 0:
                x = -x
            return super().forward(x)

    def rank(group):
        model = autotp.shard(Eval(), {"fc1": "column", "fc2": "row"}, group)
        model.eval()(torch.ones(2, 16))
        with pytest.raises(autotp.UnprovenPath) as caught:
            model.train()(torch.ones(2, 16))
        return str(caught.value)

    analysis = autotp.analyze(Eval(), {"fc1": "column", "fc2": "row"}, tp=2)
    assert analysis.ok and "train" not in analysis.modes
    warnings = [d for d in analysis.diagnostics if d.code == "AT320"]
    assert [d.severity for d in warnings] == ["warning"] and "in train mode" in warnings[0].message
    for message in autotp.comm.simulate(2, rank):
        assert message.startswith("Eval: its forward could not be traced in train mode when it was sharded")


def test_a_forward_that_cannot_be_traced_is_refused():
    class Asks(models.MLP):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    analysis = autotp.analyze(Asks(), {"fc1": "column", "fc2": "row"}, tp=2, inputs=torch.ones(2, 16))
    assert [d.code for d in analysis.diagnostics if d.severity == "error"] == ["AT320"]
    shapes = autotp.analyze(Asks(), {"fc1": "column", "fc2": "row"}, tp=2, check="shapes")
    assert shapes.ok and shapes.certainty == "names and shapes"


def test_a_row_layer_does_not_sum_what_several_ranks_hold():
    """A rule of the engine, held by hand: no plan makes such a cut yet."""
    from autotp.match import match
    from autotp.placement import Deal, Shard
    from autotp.plan import Plan
    from autotp.propagate.engine import propagate
    from autotp.trace.inventory import inventory
    from autotp.trace.recorder import record

    model = models.MLP(hidden=32)
    stock = inventory(model)
    matches = match(Plan(rules={"fc1": "column", "fc2": "row"}), stock, 3)
    twice = Deal(2, ((0, 1), (0, 1), (1, 2)), declared=2)
    cuts = {n: Shard(cut.dim, twice) for n, cut in matches.layouts.items()}
    kinds = dict.fromkeys(stock.tensors(), "linear")
    trace = record(model, (torch.zeros(3, 16),), {})
    found = propagate(trace, matches, cuts, aliases={}, kinds=kinds, reads={}, regions={}).findings
    assert [f.conflict.code for f in found] == ["AT307"]
    assert "would be counted more than once" in found[0].conflict.message


def test_a_shard_left_on_the_model_is_told():
    class Keeps(models.MLP):
        def forward(self, x):
            self.hidden = self.fc1(x)
            return self.fc2(self.hidden)

    analysis = autotp.analyze(Keeps(), {"fc1": "column", "fc2": "row"}, tp=2)
    told = [d for d in analysis.diagnostics if d.code == "AT324"]
    assert analysis.ok and [d.severity for d in told] == ["warning"] and "hidden" in told[0].message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes", "plan"),
    [
        ("bert", {}, None),
        pytest.param("qwen3", {}, None, marks=pytest.mark.slow),
        pytest.param("gemma2", {"num_hidden_layers": 5}, None, marks=pytest.mark.slow),
        pytest.param("whisper", {"encoder_layers": 3, "decoder_layers": 3}, FFN, marks=pytest.mark.slow),
        pytest.param("gpt_neox", {}, None, marks=pytest.mark.slow),
        pytest.param("gpt2", {}, None, marks=pytest.mark.slow),
    ],
)
def test_layers_that_repeat_are_proven_as_if_each_were_recorded(name, changes, plan, monkeypatch):
    """The same cuts, reads, regions, shared copies, calls and notes, with every layer recorded or not; the
    same edits (gpt2), one reduce for each layer's branches (gpt_neox)."""
    from autotp import prove, settle
    from autotp.decide import decide_with_proof

    repeated = []

    def spread(whole, before):
        repeated.append(len(whole.trace.repeats))
        found(whole, before)

    found = settle.spread
    monkeypatch.setattr(settle, "spread", spread)
    model = architectures.build(name, device="meta", **({"num_hidden_layers": 4} | changes))
    proofs = [decide_with_proof(model, plan, tp=3, every=every)[1] for every in (False, True)]
    assert repeated[0] > 2 and repeated[-1] == 0
    for field in dataclasses.fields(prove.Proof):
        if field.name == "edits":
            assert set(proofs[0].edits.edits) == set(proofs[1].edits.edits)
        elif field.name == "read":
            assert proofs[0].read.names >= proofs[1].read.names  # what is logged once runs in the first
        elif field.name not in ("propagations", "shared"):
            assert getattr(proofs[0], field.name) == getattr(proofs[1], field.name), field.name
    assert len(set(map(frozenset, proofs[0].shared))) == len(proofs[1].shared)
    assert set(map(frozenset, proofs[0].shared)) == set(map(frozenset, proofs[1].shared))


class Layered(nn.Module):
    """Feed-forward layers; `odd` calls one of them otherwise."""

    def __init__(self, odd=None):
        super().__init__()
        self.layers = nn.ModuleList(models.MLP(hidden=32) for _ in range(5))
        self.odd = odd

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = layer(x) if index != 3 or self.odd is None else self.odd(layer, x)
        return x


@pytest.mark.parametrize(
    ("odd", "code"),
    [
        (lambda layer, x: layer.fc2(layer.fc1(x).softmax(-1)), "AT303"),
        (lambda layer, x: layer(x) + (layer.fc1(x) @ layer.fc1(x).mT).sum(), "AT310"),
        (lambda layer, x: layer(x) + F.linear(x, layer.fc1.weight).sum(), "AT312"),
    ],
)
def test_one_layer_that_is_called_otherwise_is_proven_on_its_own(odd, code):
    plan = {"layers.*.fc1": "column", "layers.*.fc2": "row"}
    assert autotp.analyze(Layered(), plan, tp=2).ok
    found = autotp.analyze(Layered(odd), plan, tp=2).diagnostics
    assert {d.code for d in found if d.severity == "error"} == {code}


@pytest.mark.parametrize("rule", ["replicate", {"style": "column", "gather_output": True}])
def test_a_rule_for_one_layer_of_many(rule):
    plan = {
        "layers.3.fc1": rule,
        "layers.3.fc2": "replicate",
        "layers.*.fc1": "column",
        "layers.*.fc2": "row",
    }
    analysis = autotp.analyze(Layered(), plan, tp=2)
    assert analysis.ok and ("layers.3.fc1.weight" in analysis.layouts) == (rule != "replicate")
    assert analysis.layouts["layers.4.fc2.weight"].dim == 1


class Shared(nn.Module):
    """An embedding that only names the table of another one, as encoder-decoders have it."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.encoder, self.mlp = nn.Embedding(11, 16), nn.Embedding(11, 16), models.MLP()
        self.encoder.weight = self.shared.weight

    def forward(self, ids):
        return self.mlp(self.encoder(ids))


def test_a_layer_that_only_names_a_proven_table_need_not_run():
    plan = {"shared": "vocab", "encoder": "vocab", "fc1": "column", "fc2": "row"}
    result = autotp.verify(Shared(), plan, tp=2, inputs=torch.zeros(3, 5, dtype=torch.long))
    assert result.ok


@pytest.mark.parametrize("row", [0, 10])
def test_a_row_of_padding_that_another_rank_holds(row):
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(12, 16, padding_idx=row), nn.Linear(16, 16)

        def forward(self, ids):
            return self.out(self.table(ids))

    ids = torch.arange(12).view(3, 4)
    model = Padded()
    assert autotp.verify(model, {"table": "vocab"}, tp=3, inputs=ids).ok
    assert model.table.padding_idx == row
