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


GROUPED = {"num_attention_heads": 6, "num_key_value_heads": 2}
Q, KV = "num_attention_heads", "num_key_value_heads"


def grouped(q: int, kv: int, head: int = 4) -> tuple[Any, dict[str, Any]]:
    """An attention with these heads, and its plan."""
    layers = [linear(f"attn.{n}", 16, h * head) for n, h in (("q", q), ("k", kv), ("v", kv))]
    inventory = model(*layers, linear("attn.o", q * head, 16), module("attn", "other", scale=(kv, 1)),
                      config={Q: q, KV: kv})  # fmt: skip
    column = {n: {"style": "column", "heads": h} for n, h in (("q", Q), ("k", KV), ("v", KV))}
    scale = {"style": "column", "dim": 0, "heads": KV}
    return inventory, {**column, "o": {"style": "row", "heads": Q}, "attn.scale": scale}


@pytest.mark.parametrize(
    ("q", "kv", "tp", "queries", "keys"),
    [
        (6, 3, 2, [4, 2], [[0, 1], [2]]),  # query heads follow their kv heads
        (2, 1, 2, [1, 1], [[0], [0]]),
        (6, 2, 4, [2, 1, 2, 1], [[0], [0], [1], [1]]),
        (4, 1, 3, [2, 1, 1], [[0], [0], [0]]),
        (6, 3, 4, [1, 1, 2, 2], [[0], [0], [1], [2]]),
        (14, 2, 4, [4, 3, 4, 3], [[0], [0], [1], [1]]),
        (8, 2, 8, [1] * 8, [[0]] * 4 + [[1]] * 4),
    ],
)
def test_fewer_kv_heads_than_ranks_are_shared(
    q: int, kv: int, tp: int, queries: list[int], keys: list[list[int]]
) -> None:
    inventory, plan = grouped(q, kv)
    found = clean(plan, inventory, tp).layouts
    assert [found["attn.q.weight"].local_size(4 * q, rank) for rank in range(tp)] == [4 * n for n in queries]
    assert found["attn.o.weight"] == found["attn.q.weight"].at(1)
    assert found["attn.k.weight"] == found["attn.v.weight"] == found["attn.scale"] == found["attn.k.bias"]
    held = [[(4 * heads[0], 4 * heads[-1] + 4)] for heads in keys]
    assert [found["attn.k.weight"].ranges(4 * kv, rank) for rank in range(tp)] == held


def test_sections_of_one_weight_have_heads_of_their_own() -> None:
    layers = model(linear("a.qkv", 16, 40), linear("b.mqa", 16, 32), linear("c.mix", 16, 76), config=GROUPED)
    plan = {
        "qkv": {"style": "column", "heads": [Q, KV, KV]},
        "mqa": {"style": "column", "heads": [6, 1, 1]},
        "mix": {"style": "column", "sections": [30, 20, 20, 6], "heads": [6, 1, 1, 6]},
    }
    found = clean(plan, layers, 4).layouts
    assert [found["a.qkv.weight"].ranges(40, rank) for rank in range(4)] == [
        [(0, 8), (24, 28), (32, 36)],
        [(8, 12), (24, 28), (32, 36)],
        [(12, 20), (28, 32), (36, 40)],
        [(20, 24), (28, 32), (36, 40)],
    ]
    assert found["b.mqa.weight"].sections is not None
    assert found["b.mqa.weight"].sections[1:] == ((4, None), (4, None))
    assert found["b.mqa.weight"].ranges(32, 2) == [(16, 20), (24, 28), (28, 32)]
    assert found["c.mix.weight"].ranges(76, 3) == [(25, 30), (30, 50), (50, 70), (75, 76)]


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
        "  = help: tp sizes that work here: 1\n"
        "  = help: ranks can share kv heads where the query heads beside them are dealt: "
        "`heads: num_attention_heads` on the query layer and on the row layer after it",
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
    "heads of equal width that do not divide": (
        {"0.self_attn.q_proj": {"style": "column", "heads": [3, 1, 1]}},
        2,
        "error[AT204]: layers.0.self_attn.q_proj: 3 + 1 + 1 = 5 heads do not divide 48 output features\n"
        "  = note: weight f32[48,48]\n"
        "  = help: heads that are not equally wide need the sizes of their `sections`, too",
    ),
    "heads for other sections": (
        {"0.self_attn.q_proj": {"style": "column", "sections": 3, "heads": [2, 2]}},
        2,
        "error[AT204]: layers.0.self_attn.q_proj: 2 numbers of heads for 3 sections\n"
        "  = note: weight f32[48,48]",
    ),
    "a section with fewer heads than ranks, and no multiple of them": (
        {"0.self_attn.q_proj": {"style": "column", "sections": [32, 16], "heads": [8, 3]}},
        4,
        "error[AT203]: layers.0.self_attn.q_proj: 3 heads of a section over tp=4: fewer heads than ranks\n"
        "  = note: weight f32[48,48]\n"
        "  = help: tp sizes that work here: 1, 2, 3",
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


def test_a_config_key_inside_of_another_config() -> None:
    inventory = replace(MLP, config={"text_config": {"n_head": 3}, "n_head": 11})
    rules = {"fc1": {"style": "column", "heads": "text_config.n_head"}}
    found = match(as_plan(rules), inventory, 2)
    assert found.layouts["fc1.weight"].pieces(33) == ((33, deal(3, 2)),)
    lost = match(as_plan({"fc1": {"style": "column", "heads": "n_head.text_config"}}), inventory, 2)
    assert "the model's config has no n_head.text_config" in str(lost.diagnostics[0])


def test_heads_by_config_key_of_a_model_without_config() -> None:
    assert only({"fc1": {"style": "column", "heads": "num_heads"}}, MLP) == (
        "error[AT205]: fc1: heads: num_heads is a config key, and this model has no config that tells "
        "numbers\n"
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
