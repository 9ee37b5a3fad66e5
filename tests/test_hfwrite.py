"""Plans written for transformers: from rules that came from there, and from proven analyses."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn
from transformers.distributed.tensor_parallel import _get_parameter_tp_plan

import autotp
from autotp.diagnostic import PlanError, UsageError
from autotp.plan import Plan
from tests import models
from tests.test_hfplan import told
from tests.test_shipped_plans import build

# Sizes that 2 divides: transformers cuts equal parts.
EVEN: dict[str, Any] = {
    "vocab_size": 98, "num_attention_heads": 12, "num_key_value_heads": 6, "intermediate_size": 68,
}  # fmt: skip
BOTH = {"fc1": "column", "fc2": "row"}


def written(model: nn.Module, plan: Any, *, tp: int = 2) -> dict[str, str]:
    analysis = autotp.analyze(model, plan, tp=tp)
    return analysis.plan.to_transformers(analysis)


def refused(model: nn.Module, plan: Any) -> list[str]:
    with pytest.raises(PlanError) as caught:
        written(model, plan)
    return told(caught.value)


def test_a_plan_of_ours_needs_an_analysis():
    with pytest.raises(PlanError) as caught:
        Plan(rules={"fc1": "column"}).to_transformers()
    assert told(caught.value) == [
        "error[AT115]: fc1: a pattern here matches the end of a name, and transformers takes whole names\n"
        "  = help: pass the analysis of a model: plan.to_transformers(autotp.analyze(model, plan, tp=2))"
    ]


def test_names_are_whole_as_transformers_looks_them_up():
    model = nn.Sequential(models.MLP(hidden=32), nn.Sequential(models.MLP(hidden=32)))
    entries = written(model, BOTH)
    assert entries == {"0.fc1": "colwise", "0.fc2": "rowwise", "1.*.fc1": "colwise", "1.*.fc2": "rowwise"}
    assert {_get_parameter_tp_plan(name, entries) for name, _ in model.named_parameters()} == {
        "colwise",
        "rowwise",
    }


@pytest.mark.parametrize("name", ["qwen3", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_shipped_plan_is_transformers_own_and_the_embedding(name):
    """The norms of q and k, which no rule of the plan names, are found by the proof."""
    changes = {**EVEN, "head_dim": 4} if name == "qwen3" else EVEN
    model = build(name, **changes)
    assert written(model, name) == {**model.tp_plan, "model.embed_tokens": "embedding_rowwise"}


@pytest.mark.slow
def test_experts_are_transformers_own():
    model = build("mixtral", **{**EVEN, "head_dim": 4, "intermediate_size": 48})
    assert written(model, "mixtral") == {**model.tp_plan, "model.embed_tokens": "embedding_rowwise"}


def test_options_and_sections():
    plan = {"fc1": {"style": "column", "gather_output": True}, "fc2": {"style": "row", "split_input": True}}
    entries = written(models.MLP(hidden=32), plan)
    assert entries == {"fc1": "colwise_gather_output", "fc2": "rowwise_split_input"}
    fused = models.FusedGate(hidden=32)
    plan = {"gate_up": {"style": "column", "sections": 2}, "down": "row"}
    assert refused(fused, plan) == [
        "error[AT115]: gate_up: transformers cuts the bias of a packed layer in one piece"
    ]
    fused.gate_up = nn.Linear(16, 64, bias=False)
    assert written(fused, plan) == {"gate_up": "packed_colwise", "down": "rowwise"}


def test_uneven_parts_are_refused():
    assert refused(models.MLP(), BOTH) == [
        f"error[AT115]: {name}: transformers cuts equal parts, and this is shard(dim {dim}: 17+16 of 33)"
        for name, dim in (("fc1", 0), ("fc2", 1))
    ]


class Layers(nn.Module):
    """Two layers in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(models.MLP(hidden=32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x))


def test_layers_of_one_name_that_differ_are_refused():
    assert written(Layers(), BOTH) == {"layers.*.fc1": "colwise", "layers.*.fc2": "rowwise"}
    assert refused(Layers(), {"layers.0.fc1": "column", "layers.0.fc2": "row"}) == [
        f"error[AT115]: layers.*.{name}: its layers are cut in different ways, and one entry is for all"
        for name in ("fc1", "fc2")
    ]


def test_parameters_read_in_part_are_refused():
    assert refused(models.PerFeature(hidden=32), BOTH) == [
        f"error[AT115]: {name}: transformers has no style for a parameter that is cut where it is read"
        for name in ("scale", "offset")
    ]


def test_only_proven_analyses_of_the_plan_are_written():
    model, plan = models.MLP(hidden=32), Plan(rules=BOTH)
    unproven = autotp.analyze(model, plan, tp=2, check="shapes")
    with pytest.raises(UsageError, match="only a proven analysis is written for it"):
        plan.to_transformers(unproven)
    with pytest.raises(UsageError, match="the analysis is of another plan"):
        Plan(rules={"fc1": "column"}).to_transformers(unproven)
