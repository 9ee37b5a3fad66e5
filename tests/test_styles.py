"""Styles: which tensors of which modules are cut, and which modules a style does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotp.placement import Shard, deal
from tests.inventories import ATTENTION, MLP, clean, linear, model, module, only


def test_column_then_row_of_an_uneven_mlp() -> None:
    found = clean({"fc1": "column", "fc2": "row"}, MLP, 2)
    assert found.layouts == {
        "fc1.weight": Shard(0, deal(33, 2)),
        "fc1.bias": Shard(0, deal(33, 2)),
        "fc2.weight": Shard(1, deal(33, 2)),
    }
    assert found.layouts["fc1.weight"].local_shape((33, 16), 0) == (17, 16)
    assert found.layouts["fc2.weight"].local_shape((16, 33), 1) == (16, 16)
    assert not found.diagnostics and found.tp == 2
    fc1, fc2 = found.placed["fc1"], found.placed["fc2"]
    assert (fc1.path, fc1.target, fc1.style, fc1.pattern, fc1.declared) == (
        "fc1",
        "module",
        "column",
        "fc1",
        False,
    )
    assert dict(fc2.layouts) == {"fc2.weight": Shard(1, deal(33, 2))}
    assert set(found.placed) == {"fc1", "fc2"}  # the norm has no rule and is whole


def test_conv1d_is_cut_the_other_way_round() -> None:
    gpt = model(
        module("c_fc", "conv1d", weight=(12, 48), bias=(48,)),
        module("c_proj", "conv1d", weight=(48, 12), bias=(12,)),
    )
    found = clean({"c_fc": "column", "c_proj": "row"}, gpt, 3)
    assert found.layouts == {
        "c_fc.weight": Shard(1, deal(48, 3)),
        "c_fc.bias": Shard(0, deal(48, 3)),
        "c_proj.weight": Shard(0, deal(48, 3)),
    }
    headers = model(*(replace(m, kind="unknown") for m in gpt.modules.values()))
    told = {"c_fc": {"style": "column", "dim": 1}, "c_proj": {"style": "row", "dim": -2}}
    assert clean(told, headers, 3).layouts == found.layouts


def test_vocab_cuts_the_rows_and_replicate_is_placed() -> None:
    inventory = model(module("emb", "embedding", weight=(97, 8)), linear("fc", 8, 8))
    found = clean({"emb": "vocab", "fc": "replicate"}, inventory, 4)
    assert found.layouts == {"emb.weight": Shard(0, deal(97, 4))}
    assert found.placed["fc"].style == "replicate" and found.placed["fc"].layouts == {}


def test_a_parameter_and_a_buffer_are_cut_where_the_rule_says() -> None:
    attention = module("layers.0.attn", "other", sinks=(6,), slopes=(1, 6, 1))
    found = clean(
        {
            "attn.sinks": {"style": "column", "dim": 0},
            "attn.slopes": {"style": "column", "dim": -2, "heads": 3},
        },
        model(attention),
        2,
    )
    assert found.layouts["layers.0.attn.sinks"] == Shard(0, deal(6, 2))
    assert found.layouts["layers.0.attn.slopes"] == Shard(1, deal(3, 2))
    assert {p.target for p in found.placed.values()} == {"tensor"}


REFUSED = {
    "column on an embedding": (
        {"embed": "column"},
        2,
        "error[AT206]: embed: style column cuts a linear layer, not Embedding\n"
        "  = note: weight f32[3,48]\n"
        "  = help: an embedding is cut by `vocab`",
    ),
    "row on an embedding": (
        {"embed": "row"},
        2,
        "error[AT206]: embed: style row cuts a linear layer, not Embedding\n"
        "  = note: weight f32[3,48]\n"
        "  = help: an embedding is cut by `vocab`",
    ),
    "row on a norm": (
        {"norm": "row"},
        2,
        "error[AT206]: norm: style row cuts a linear layer, not LayerNorm\n"
        "  = note: weight f32[48]\n"
        "  = help: leave the rule out: a norm of whole values is whole on every rank",
    ),
    "vocab on a linear layer": (
        {"0.self_attn.q_proj": "vocab"},
        2,
        "error[AT206]: layers.0.self_attn.q_proj: style vocab cuts an embedding, not Linear\n"
        "  = note: weight f32[48,48]\n"
        "  = help: a linear layer is cut by `column` or `row`",
    ),
    "column on another class": (
        {"conv": "column"},
        2,
        "error[AT206]: conv: style column cuts a linear layer, not Mixer\n"
        "  = note: weight f32[4,3,3]\n"
        "  = help: a rule on its tensor states the dim: `conv.weight: {style: column, dim: 0}`",
    ),
    "vocab on a tensor": (
        {"sinks": "vocab"},
        2,
        "error[AT206]: layers.0.self_attn.sinks: style vocab cuts an embedding module, not a tensor by "
        "itself\n"
        "  = note: sinks f32[3]\n"
        "  = help: write `sinks: {style: column, dim: 0}` to cut its rows",
    ),
    "dim of a linear layer": (
        {"0.self_attn.q_proj": {"style": "column", "dim": 1}},
        2,
        "error[AT207]: layers.0.self_attn.q_proj: style column cuts dim 0 of a weight [out, in], not dim 1\n"
        "  = note: weight f32[48,48]\n"
        "  = help: leave `dim` out",
    ),
    "a tensor without a dim": (
        {"self_attn.sinks": "column"},
        2,
        "error[AT207]: layers.0.self_attn.sinks: a rule on a parameter or buffer states its dim\n"
        "  = note: sinks f32[3]\n"
        "  = help: add the dim that is cut: `sinks: {style: column, dim: 0}`",
    ),
    "the weight of a layer": (
        {"0.self_attn.q_proj.weight": "column"},
        2,
        "error[AT207]: layers.0.self_attn.q_proj.weight: a rule on a parameter or buffer states its dim\n"
        "  = note: weight f32[48,48]\n"
        "  = help: for the whole layer write `q_proj: column`",
    ),
    "a dim that a tensor does not have": (
        {"sinks": {"style": "column", "dim": 1}},
        2,
        "error[AT207]: layers.0.self_attn.sinks: dim is 1, and the tensor has 1 dim\n  = note: sinks f32[3]",
    ),
    "gather_output on a tensor": (
        {"sinks": {"style": "column", "dim": 0, "gather_output": True}},
        2,
        "error[AT207]: layers.0.self_attn.sinks: gather_output is for layers, and this is a tensor by "
        "itself\n"
        "  = note: sinks f32[3]",
    ),
}


def test_a_norm_by_hand_needs_no_rule() -> None:
    by_hand = model(replace(module("q_norm", "other", weight=(12,)), class_name="RMS"), linear("fc", 8, 8))
    assert only({"q_norm": "column"}, by_hand, 2) == (
        "error[AT206]: q_norm: style column cuts a linear layer, not RMS\n"
        "  = note: weight f32[12]\n"
        "  = help: leave the rule out: what code computes on a shard by hand, as a norm does, needs none"
    )


@pytest.mark.parametrize("case", REFUSED)
def test_refused_word_for_word(case: str) -> None:
    plan, tp, text = REFUSED[case]
    assert only(plan, ATTENTION, tp) == text


def test_a_tensor_that_the_style_does_not_know() -> None:
    inventory = model(module("l.fc", "linear", weight=(8, 4), bias=(8,), mask=(8, 4)))
    assert only({"fc": "column"}, inventory) == (
        "error[AT214]: l.fc: style column does not know its `mask`\n"
        "  = note: weight f32[8,4], bias f32[8], mask f32[8,4]\n"
        "  = help: give it a rule: `fc.mask: replicate`, or {style: column, dim: …}"
    )
    found = clean({"fc": "column", "fc.mask": {"style": "column", "dim": 0}}, inventory, 2)
    assert set(found.layouts) == {"l.fc.weight", "l.fc.bias", "l.fc.mask"}
    assert clean({"fc": "column", "fc.mask": "replicate"}, inventory, 2).placed["l.fc.mask"].layouts == {}


def test_a_matrix_is_a_linear_layer_or_an_embedding() -> None:
    inventory = model(
        module("fc", "unknown", weight=(8, 4), bias=(8,)), module("emb", "unknown", weight=(9, 4))
    )
    found = clean({"fc": "column", "emb": "vocab"}, inventory, 2)
    assert set(found.layouts) == {"fc.weight", "fc.bias", "emb.weight"}


def test_a_vector_is_neither() -> None:
    inventory = model(module("ln", "unknown", weight=(8,)))
    assert only({"ln": "row"}, inventory) == (
        "error[AT206]: ln: style row cuts a matrix, and the weight has 1 dim\n"
        "  = note: weight f32[8]\n"
        "  = help: leave the rule out: a norm of whole values is whole on every rank"
    )


def test_a_norm_is_cut_by_column() -> None:
    assert set(clean({"norm": "column"}, ATTENTION, 2).layouts) == {"norm.weight"}


def test_an_embedding_has_no_bias() -> None:
    inventory = model(module("fc", "unknown", weight=(8, 4), bias=(8,)))
    assert only({"fc": "vocab"}, inventory) == (
        "error[AT206]: fc: it has a bias, so it is no embedding\n"
        "  = note: weight f32[8,4], bias f32[8]\n"
        "  = help: a linear layer is cut by `column` or `row`"
    )


@pytest.mark.parametrize(("style", "dim"), [("column", 1), ("row", 0)])
def test_a_bias_tells_that_the_weight_lies_the_other_way_round(style: str, dim: int) -> None:
    inventory = model(module("c_attn", "unknown", weight=(32, 96), bias=(96,)))
    assert only({"c_attn": style}, inventory) == (
        "error[AT207]: c_attn: the bias has 96 elements, and dim 0 of the weight 32\n"
        "  = note: weight f32[32,96], bias f32[96]\n"
        f"  = help: a weight [in, out], as in Conv1D, is told by `dim: {dim}`"
    )
    assert clean({"c_attn": {"style": style, "dim": dim}}, inventory, 2).layouts["c_attn.weight"].dim == dim


def test_no_weight_at_all() -> None:
    inventory = model(module("q", "unknown", qweight=(8, 4), scales=(8,)))
    assert only({"q": "column"}, inventory) == (
        "error[AT206]: q: style column cuts a `weight`, and there is none\n"
        "  = note: qweight f32[8,4], scales f32[8]"
    )
