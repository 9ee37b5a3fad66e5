"""Heads and sections: units are dealt whole, and what cannot be dealt is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotp.diagnostic import errors
from autotp.match import match
from autotp.placement import Shard, deal
from autotp.plan import Plan, as_plan
from tests.inventories import ATTENTION, MLP, clean, linear, model, module, only


def test_heads_are_dealt_whole_and_sections_each() -> None:
    config = {"heads": 3, "half": 24}
    inventory = model(linear("qkv", 48, 144), linear("out", 48, 48), linear("up", 48, 66), config=config)
    plan = {
        "qkv": {"style": "column", "sections": 3, "heads": "heads"},
        "out": {"style": "row", "heads": "heads"},
        "up": {"style": "column", "sections": ["half", 42]},
    }
    found = clean(plan, inventory, 2)
    assert found.layouts["qkv.weight"] == Shard(0, deal(3, 2), groups=3)
    assert found.layouts["qkv.bias"].ranges(144, 1) == [(32, 48), (80, 96), (128, 144)]
    assert found.layouts["out.weight"] == Shard(1, deal(3, 2))
    assert found.layouts["up.weight"].ranges(66, 0) == [(0, 12), (24, 45)]
    assert all(found.placed[name].declared for name in plan)


def test_kv_heads_deal_query_heads_and_one_rank_holds_all() -> None:
    config = {"num_key_value_heads": 6}
    inventory = model(linear("q", 48, 48), linear("k", 48, 24), config=config)
    plan = {name: {"style": "column", "heads": "num_key_value_heads"} for name in "qk"}
    found = clean(plan, inventory, 4)
    assert [found.layouts["q.weight"].local_size(48, rank) for rank in range(4)] == [16, 16, 8, 8]
    assert [found.layouts["k.weight"].local_size(24, rank) for rank in range(4)] == [8, 8, 4, 4]
    alone = clean(plan, inventory, 1)
    assert alone.layouts["q.weight"].local_shape((48, 48), 0) == (48, 48)


REFUSED = {
    "fewer heads than ranks": (
        {"q_proj": {"style": "column", "heads": "num_attention_heads"}},
        4,
        "error[AT203]: layers.0.self_attn.q_proj: 3 attention heads over tp=4: fewer heads than ranks\n"
        "  = note: heads: num_attention_heads = 3 in the model's config\n"
        "  = note: weight f32[48,48]\n"
        "  = note: and 1 more: layers.1.self_attn.q_proj\n"
        "  = help: tp sizes that work here: 1, 2, 3",
    ),
    "fewer kv heads than ranks": (
        {"0.self_attn.q_proj": {"style": "column", "heads": "num_key_value_heads"}},
        2,
        "error[AT203]: layers.0.self_attn.q_proj: 1 kv head over tp=2: fewer heads than ranks\n"
        "  = note: heads: num_key_value_heads = 1 in the model's config\n"
        "  = note: weight f32[48,48]\n"
        "  = help: tp sizes that work here: 1",
    ),
    "fewer features than ranks": (
        {"0.self_attn.q_proj": {"style": "row", "sections": 24}},
        3,
        "error[AT203]: layers.0.self_attn.q_proj: 2 input features of a section over tp=3: fewer features "
        "than ranks\n"
        "  = note: weight f32[48,48]\n"
        "  = help: tp sizes that work here: 1, 2",
    ),
    "a vocabulary smaller than tp": (
        {"embed": "vocab"},
        4,
        "error[AT203]: embed: 3 rows over tp=4: fewer rows than ranks\n"
        "  = note: weight f32[3,48]\n"
        "  = help: tp sizes that work here: 1, 2, 3",
    ),
    "a cut head": (
        {"0.self_attn.q_proj": {"style": "column", "heads": 5}},
        2,
        "error[AT204]: layers.0.self_attn.q_proj: 5 heads do not divide 48 output features\n"
        "  = note: weight f32[48,48]\n"
        "  = help: numbers that divide 48: 1, 2, 3, 4, 6, 8, 12, 16, 24, 48",
    ),
    "sections that do not divide": (
        {"0.self_attn.q_proj": {"style": "column", "sections": 5}},
        2,
        "error[AT204]: layers.0.self_attn.q_proj: 5 equal sections do not divide 48 output features\n"
        "  = note: weight f32[48,48]\n"
        "  = help: numbers that divide 48: 1, 2, 3, 4, 6, 8, 12, 16, 24, 48",
    ),
    "sections that do not add up": (
        {"0.self_attn.q_proj": {"style": "column", "sections": [32, "vocab_size", "num_key_value_heads"]}},
        2,
        "error[AT204]: layers.0.self_attn.q_proj: the sections are 32 + 3 + 1 = 36, but there are 48 output "
        "features\n"
        "  = note: in the model's config: vocab_size = 3, num_key_value_heads = 1\n"
        "  = note: weight f32[48,48]\n"
        "  = help: sections are counted in elements of the dim, not in heads",
    ),
    "heads that do not divide a section": (
        {"0.self_attn.q_proj": {"style": "column", "sections": [32, 16], "heads": 32}},
        2,
        "error[AT204]: layers.0.self_attn.q_proj: 32 heads do not divide 16 output features of a section\n"
        "  = note: weight f32[48,48]\n"
        "  = help: numbers that divide 16: 1, 2, 4, 8, 16",
    ),
    "a config key that is not there": (
        {"0.self_attn.q_proj": {"style": "column", "heads": "num_atention_heads"}},
        2,
        "error[AT205]: layers.0.self_attn.q_proj: heads: the model's config has no num_atention_heads\n"
        "  = note: weight f32[48,48]\n"
        "  = help: did you mean `num_attention_heads`?",
    ),
    "a config key that is no number": (
        {"0.self_attn.q_proj": {"style": "column", "heads": "dropout"}},
        2,
        "error[AT205]: layers.0.self_attn.q_proj: heads: dropout is no whole number in the model's config, "
        "but 0.1\n"
        "  = note: weight f32[48,48]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_word_for_word(case: str) -> None:
    plan, tp, text = REFUSED[case]
    assert only(plan, ATTENTION, tp) == text


def test_heads_by_config_key_of_a_model_without_config() -> None:
    assert only({"fc1": {"style": "column", "heads": "num_heads"}}, MLP) == (
        "error[AT205]: fc1: heads: num_heads is a config key, and this model has no config\n"
        "  = note: weight f32[33,16], bias f32[33]\n"
        "  = help: write the number itself: `heads: N`"
    )


@pytest.mark.parametrize("value", [0, -1, True, "12", [12], None])
def test_config_values_that_are_no_count(value: object) -> None:
    inventory = replace(MLP, config={"n_head": value})
    found = match(as_plan({"fc1": {"style": "column", "heads": "n_head"}}), inventory, 2)
    assert [d.code for d in found.diagnostics] == ["AT205"]


@pytest.mark.parametrize("config", [{}, {"num_key_value_heads": None}])
def test_an_old_llama_config_has_as_many_kv_heads_as_heads(config: dict[str, object]) -> None:
    config = {"model_type": "llama", "num_attention_heads": 3, **config}
    plan = {"fc1": {"style": "column", "heads": "num_key_value_heads"}}
    assert clean(plan, replace(MLP, config=config), 2).layouts["fc1.weight"] == Shard(0, deal(3, 2))
    assert "heads: num_key_value_heads = num_attention_heads = 3 in" in only(
        plan, replace(MLP, config=config), 4
    )
    assert "has no num_key_value_heads" in only(plan, replace(MLP, config={**config, "model_type": "gpt"}))


SIZES = st.integers(1, 24)


@given(
    st.sampled_from(["column", "row"]),
    SIZES,
    SIZES,
    st.none() | st.integers(1, 8),
    st.none() | st.integers(2, 4) | st.lists(SIZES, min_size=2, max_size=3),
    st.integers(1, 8),
    st.sampled_from(["linear", "conv1d", "unknown"]),
)
@settings(max_examples=300, deadline=None)
def test_what_is_cut_adds_up_and_what_is_not_is_told(
    style: str, inputs: int, outputs: int, heads: int | None, sections: Any, tp: int, kind: str
) -> None:
    shape = (inputs, outputs) if kind == "conv1d" else (outputs, inputs)
    inventory = model(module("fc", kind, weight=shape, bias=(outputs,)))
    plan = Plan(rules={"fc": {"style": style, "heads": heads, "sections": sections}})
    found = match(plan, inventory, tp)
    assert bool(found.layouts) != bool(errors(found.diagnostics))
    for name, shard in found.layouts.items():
        size = inventory.tensors()[name].shape[shard.dim]
        assert size == (outputs if style == "column" else inputs)
        assert shard.tp == tp and shard.fits(size)
        held = [
            element for rank in range(tp) for piece in shard.ranges(size, rank) for element in range(*piece)
        ]
        assert sorted(held) == list(range(size))
        assert all(shard.local_size(size, rank) for rank in range(tp))
        if heads is not None:
            assert all(
                (stop - start) % (length // heads) == 0
                for rank in range(tp)
                for (start, stop), (length, _) in zip(
                    shard.ranges(size, rank), shard.pieces(size), strict=True
                )
            )
