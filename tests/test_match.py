"""Match: what each style cuts, what a plan may not say about a model, and the shipped plans on real names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotp.diagnostic import UsageError, errors, render
from autotp.inventory import Inventory, ModuleInfo, TensorInfo
from autotp.match import Matches, match
from autotp.placement import Shard, deal
from autotp.plan import Plan, as_plan

CLASSES = {
    "linear": "Linear",
    "embedding": "Embedding",
    "conv1d": "Conv1D",
    "norm": "LayerNorm",
    "other": "Mixer",
}


def module(path: str, kind: str, **shapes: tuple[int, ...]) -> ModuleInfo:
    tensors = {name: TensorInfo(f"{path}.{name}", shape, "F32", 4) for name, shape in shapes.items()}
    return ModuleInfo(path, kind, tensors, CLASSES.get(kind, ""))


def linear(path: str, inputs: int, outputs: int, *, bias: bool = True) -> ModuleInfo:
    biases = {"bias": (outputs,)} if bias else {}
    return module(path, "linear", weight=(outputs, inputs), **biases)


def model(
    *modules: ModuleInfo, aliases: Mapping[str, str] | None = None, config: Mapping[str, object] | None = None
) -> Inventory:
    paths = {".".join(m.path.split(".")[:n]): None for m in modules for n in range(1, m.path.count(".") + 2)}
    return Inventory({m.path: m for m in modules}, aliases or {}, tuple(paths), config or {}, "Model")


MLP = model(linear("fc1", 16, 33), module("norm", "norm", weight=(33,), bias=(33,)), linear("fc2", 33, 16))


def clean(plan: Any, inventory: Inventory, tp: int) -> Matches:
    found = match(as_plan(plan), inventory, tp)
    assert not errors(found.diagnostics), render(found.diagnostics)
    return found


def only(plan: Any, inventory: Inventory, tp: int = 2) -> str:
    """The text of the one finding."""
    diagnostics = match(as_plan(plan), inventory, tp).diagnostics
    assert len(diagnostics) == 1, render(diagnostics)
    return diagnostics[0].render()


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


def test_the_stronger_pattern_decides() -> None:
    inventory = model(linear("l.0.attention.output.dense", 8, 8), linear("l.0.output.dense", 32, 8))
    plan = {"output.dense": "row", "attention.output.dense": {"style": "row", "heads": 2}}
    found = clean(plan, inventory, 2)
    assert not found.diagnostics
    assert found.placed["l.0.attention.output.dense"].pattern == "attention.output.dense"
    assert found.placed["l.0.output.dense"].pattern == "output.dense"


PLAN = """version: 1
rules:
  fc1: column
  layers.*.fc2: row
  fc_2: {style: row, heads: 3}
"""


def test_a_finding_shows_the_line_of_the_plan() -> None:
    found = match(
        Plan.loads(PLAN, file="plan.yaml"),
        model(linear("layers.0.fc1", 8, 12), linear("layers.0.fc2", 12, 8)),
        2,
    )
    assert render(found.diagnostics) == (
        "error[AT201]: rule `fc_2` matches nothing in Model\n"
        "  --> plan.yaml:5:3\n"
        "   |\n"
        " 5 |   fc_2: {style: row, heads: 3}\n"
        "   |   ^^^^\n"
        "  = help: did you mean `fc2`?"
    )
    assert found.placed["layers.0.fc1"].span == Plan.loads(PLAN, file="plan.yaml").span("fc1")


def test_a_plan_that_matches_nothing() -> None:
    plan = Plan(model_type="bert", rules={"query": "column", "embed": "vocab"}, optional=["embed"])
    inventory = model(
        linear("layers.0.wq", 8, 8), linear("layers.0.wk", 8, 8), config={"model_type": "llama"}
    )
    assert render(match(plan, inventory, 2).diagnostics) == (
        "error[AT201]: rule `query` matches nothing in Model\n"
        "\n"
        "error[AT202]: the plan matches nothing in Model\n"
        "  = note: the plan is for model_type bert, and the model's is llama\n"
        "  = help: its layers: `wq`, `wk`"
    )
    whole = Plan(rules={"embed": "vocab"}, optional=["embed"])
    assert [d.code for d in errors(match(whole, inventory, 2).diagnostics)] == ["AT202"]


def test_optional_rules_may_match_nothing_and_are_named() -> None:
    plan = Plan(rules={"fc1": "column", "lm_head": "column", "head": "column"}, optional=["lm_head", "head"])
    assert only(plan, MLP) == "note[AT215]: optional rules that match nothing in Model: `lm_head`, `head`"
    assert not errors(match(plan, MLP, 2).diagnostics)


ATTENTION = model(
    linear("layers.0.self_attn.q_proj", 48, 48, bias=False),
    linear("layers.1.self_attn.q_proj", 48, 48, bias=False),
    module("layers.0.self_attn", "other", sinks=(3,)),
    module("embed", "embedding", weight=(3, 48)),
    module("norm", "norm", weight=(48,)),
    module("conv", "other", weight=(4, 3, 3)),
    config={"num_attention_heads": 3, "num_key_value_heads": 1, "vocab_size": 3, "dropout": 0.1},
)

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
    "column on a norm": (
        {"norm": "column"},
        2,
        "error[AT206]: norm: style column cuts a linear layer, not LayerNorm\n"
        "  = note: weight f32[48]\n"
        "  = help: leave the rule out: a norm is whole on every rank",
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
    "vocab on a tensor": (
        {"sinks": "vocab"},
        2,
        "error[AT206]: layers.0.self_attn.sinks: style vocab cuts an embedding module, not a tensor by "
        "itself\n"
        "  = note: sinks f32[3]\n"
        "  = help: write `sinks: {style: column, dim: 0}` to cut its rows",
    ),
    "a container": (
        {"layers.0": "column"},
        2,
        "error[AT213]: layers.0: a container has no tensors of its own\n"
        "  = help: name its layers: `0.self_attn.q_proj`, `0.self_attn`",
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
        "  = help: write a number: `heads: 12`"
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


def test_a_module_without_parameters() -> None:
    inventory = replace(MLP, paths=(*MLP.paths, "act"))
    plan = {"fc1": "column", "act": "column"}
    assert only(plan, inventory) == (
        "error[AT213]: act: a module without parameters has nothing to cut\n  = help: leave the rule out"
    )


def test_a_star_at_the_end_passes_over_what_has_no_tensors() -> None:
    inventory = replace(
        model(linear("l.mlp.fc1", 8, 8), linear("l.mlp.fc2", 8, 8)),
        paths=("l", "l.mlp", "l.mlp.act", "l.mlp.fc1"),
    )
    assert not clean({"mlp.*": "column", "mlp.fc2": "row"}, inventory, 2).diagnostics


def test_a_tie_shows_both_lines() -> None:
    text = "rules:\n  mlp.fc1: column\n  layers.*.*.fc1: row\n"
    inventory = model(linear("layers.0.mlp.fc1", 8, 8), linear("layers.1.mlp.fc1", 8, 8))
    found = match(Plan.loads(text, file="plan.yaml"), inventory, 2)
    assert render(found.diagnostics) == (
        "error[AT208]: layers.0.mlp.fc1: patterns `mlp.fc1` and `layers.*.*.fc1` are equally strong, and say "
        "different things\n"
        "  --> plan.yaml:2:3\n"
        "   |\n"
        " 2 |   mlp.fc1: column\n"
        "   |   ^^^^^^^\n"
        "  = note: `layers.*.*.fc1` at plan.yaml:3:3: `layers.*.*.fc1: row`\n"
        "  = note: and 1 more: layers.1.mlp.fc1\n"
        "  = help: the pattern with more names wins: add a name to the one that is meant"
    )
    assert not found.layouts


def test_a_tie_of_equal_rules_is_a_warning() -> None:
    plan = {"mlp.fc1": "column", "layers.*.*.fc1": "colwise"}
    inventory = model(linear("layers.0.mlp.fc1", 8, 8))
    assert only(plan, inventory) == (
        "warning[AT208]: layers.0.mlp.fc1: patterns `mlp.fc1` and `layers.*.*.fc1` are equally strong, and "
        "say the same\n"
        "  = note: `layers.*.*.fc1`: column\n"
        "  = help: one of them is enough"
    )
    assert clean(plan, inventory, 2).layouts["layers.0.mlp.fc1.weight"] == Shard(0, deal(8, 2))


def test_a_rule_that_never_decides_is_a_warning() -> None:
    plan = {"fc1": "row", "mlp.fc1": "column"}
    inventory = model(linear("mlp.fc1", 8, 8))
    assert only(plan, inventory) == (
        "warning[AT212]: rule `fc1` decides nothing: wherever it matches, another pattern is stronger\n"
        "  = note: stronger: `mlp.fc1`"
    )


def test_two_rules_for_one_tensor() -> None:
    plan = {"fc1": "column", "fc1.bias": "replicate"}
    assert only(plan, MLP) == (
        "error[AT209]: fc1.bias: style column of its module places it in another way\n  = note: `fc1`: column"
    )
    same = {"fc1": "column", "fc1.bias": {"style": "column", "dim": 0}, "fc2": "row", "fc2.bias": "replicate"}
    assert not clean(same, MLP, 2).diagnostics
    inside = {"fc1": "replicate", "fc1.weight": {"style": "column", "dim": 0}}
    assert list(clean(inside, MLP, 2).layouts) == ["fc1.weight"]


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


class TestHeadersOnly:
    """Modules of kind "unknown": the style decides what a 2-D weight is."""

    def test_a_matrix_is_a_linear_layer_or_an_embedding(self) -> None:
        inventory = model(
            module("fc", "unknown", weight=(8, 4), bias=(8,)), module("emb", "unknown", weight=(9, 4))
        )
        found = clean({"fc": "column", "emb": "vocab"}, inventory, 2)
        assert set(found.layouts) == {"fc.weight", "fc.bias", "emb.weight"}

    def test_a_vector_is_neither(self) -> None:
        inventory = model(module("ln", "unknown", weight=(8,)))
        assert only({"ln": "row"}, inventory) == (
            "error[AT206]: ln: style row cuts a matrix, and the weight has 1 dim\n"
            "  = note: weight f32[8]\n"
            "  = help: leave the rule out: a norm is whole on every rank"
        )

    def test_an_embedding_has_no_bias(self) -> None:
        inventory = model(module("fc", "unknown", weight=(8, 4), bias=(8,)))
        assert only({"fc": "vocab"}, inventory) == (
            "error[AT206]: fc: it has a bias, so it is no embedding\n"
            "  = note: weight f32[8,4], bias f32[8]\n"
            "  = help: a linear layer is cut by `column` or `row`"
        )

    @pytest.mark.parametrize(("style", "dim"), [("column", 1), ("row", 0)])
    def test_a_bias_tells_that_the_weight_lies_the_other_way_round(self, style: str, dim: int) -> None:
        inventory = model(module("c_attn", "unknown", weight=(32, 96), bias=(96,)))
        assert only({"c_attn": style}, inventory) == (
            "error[AT207]: c_attn: the bias has 96 elements, and dim 0 of the weight 32\n"
            "  = note: weight f32[32,96], bias f32[96]\n"
            f"  = help: a weight [in, out], as in Conv1D, is told by `dim: {dim}`"
        )
        assert (
            clean({"c_attn": {"style": style, "dim": dim}}, inventory, 2).layouts["c_attn.weight"].dim == dim
        )

    def test_no_weight_at_all(self) -> None:
        inventory = model(module("q", "unknown", qweight=(8, 4), scales=(8,)))
        assert only({"q": "column"}, inventory) == (
            "error[AT206]: q: style column cuts a `weight`, and there is none\n"
            "  = note: qweight f32[8,4], scales f32[8]"
        )


TIED = {"head.weight": "emb.weight"}
EMBEDDING = module("emb", "embedding", weight=(97, 8))
HEAD = linear("head", 8, 97, bias=False)
GATHERED = {"style": "column", "gather_output": True}


class TestTied:
    def test_both_ruled_alike(self) -> None:
        found = clean({"emb": "vocab", "head": GATHERED}, model(EMBEDDING, HEAD, aliases=TIED), 4)
        assert found.layouts == {"emb.weight": Shard(0, deal(97, 4)), "head.weight": Shard(0, deal(97, 4))}

    def test_two_placements(self) -> None:
        text = "rules:\n  emb: vocab\n  head: {style: row, split_input: true}\n"
        found = match(Plan.loads(text, file="p.yaml"), model(EMBEDDING, HEAD, aliases=TIED), 2)
        assert render(found.diagnostics) == (
            "error[AT210]: emb.weight: tied to head.weight, which is placed in another way\n"
            "  --> p.yaml:2:3\n"
            "   |\n"
            " 2 |   emb: vocab\n"
            "   |   ^^^\n"
            "  = note: emb.weight: shard(dim 0: 49+48 of 97), by `emb` at p.yaml:2:3: `emb: vocab`\n"
            "  = note: head.weight: shard(dim 1: 2 equal parts), by `head` at p.yaml:3:3: "
            "`head: {style: row, split_input: true}`\n"
            "  = help: one tensor has one placement: make the rules agree"
        )

    def test_one_cut_and_one_whole(self) -> None:
        inventory = model(EMBEDDING, HEAD, aliases=TIED)
        text = only({"emb": "vocab", "head": "replicate"}, inventory)
        assert text.startswith("error[AT210]") and "head.weight: whole, by `head`: replicate" in text

    @pytest.mark.parametrize(
        ("plan", "told", "untold", "line"),
        [
            ({"emb": "vocab"}, "emb", "head", "add the rule `head: {style: column, gather_output: true}`"),
            ({"head": GATHERED}, "head", "emb", "add the rule `emb: vocab`"),
            ({"head": "row"}, "head", "emb", "no style cuts both; write `head: replicate`"),
        ],
    )
    @pytest.mark.parametrize("unknown", [False, True])
    def test_one_ruled(self, plan: Any, told: str, untold: str, line: str, unknown: bool) -> None:
        modules = [replace(m, kind="unknown") if unknown else m for m in (EMBEDDING, HEAD)]
        (finding,) = match(as_plan(plan), model(*modules, aliases=TIED), 2).diagnostics
        assert finding.code == "AT211" and finding.module == f"{told}.weight"
        assert finding.message == f"tied to {untold}.weight, which has no rule"
        assert finding.notes[1] == f"{untold}.weight: no rule"
        if unknown and told == "head" and plan["head"] == GATHERED:
            line = "add the rule `emb: {style: column, gather_output: true}`, or `emb: vocab` if it is an "
            line += "embedding"
        assert finding.help == (line,)

    def test_a_whole_tied_tensor_needs_no_second_rule(self) -> None:
        assert not clean({"emb": "replicate"}, model(EMBEDDING, HEAD, aliases=TIED), 2).layouts

    def test_modules_of_one_kind_take_the_same_rule(self) -> None:
        inventory = model(
            EMBEDDING,
            module("dec.emb2", "embedding", weight=(97, 8)),
            aliases={"dec.emb2.weight": "emb.weight"},
        )
        found = clean({"emb": "vocab"}, inventory, 2)
        assert set(found.layouts) == {"emb.weight", "dec.emb2.weight"}
        assert found.placed["dec.emb2"].pattern == "emb" and found.placed["dec.emb2"].target == "module"

    def test_a_shared_block_ruled_under_one_path(self) -> None:
        inventory = model(
            linear("a.fc", 8, 8),
            linear("b.fc", 8, 8),
            aliases={"b.fc.weight": "a.fc.weight", "b.fc.bias": "a.fc.bias"},
        )
        found = clean({"a.fc": "column"}, inventory, 2)
        assert len(found.layouts) == 4 and set(found.placed) == {"a.fc", "b.fc"}

    def test_a_bare_parameter_takes_the_same_cut(self) -> None:
        inventory = model(
            module("cls", "other", bias=(97,)),
            linear("cls.decoder", 8, 97),
            aliases={"cls.decoder.bias": "cls.bias"},
        )
        found = clean({"cls.decoder": GATHERED}, inventory, 2)
        assert found.layouts["cls.bias"] == found.layouts["cls.decoder.bias"] == Shard(0, deal(97, 2))
        assert "cls.bias" not in found.placed

    def test_a_rule_that_does_not_fit_is_told_once(self) -> None:
        plan = {"emb": "vocab", "head": {"style": "column", "heads": 5}}
        assert only(plan, model(EMBEDDING, HEAD, aliases=TIED)).startswith("error[AT204]: head:")


@pytest.mark.parametrize("tp", [0, -1, True, 2.0, "2", None])
def test_impossible_tp(tp: Any) -> None:
    with pytest.raises(UsageError, match=r"tp is a whole number of at least 1, not"):
        match(as_plan({"fc1": "column"}), MLP, tp)


def test_the_root_module_and_its_parameters() -> None:
    root = ModuleInfo("", "other", {"scale": TensorInfo("scale", (6,), "F32", 4)}, "Model")
    found = clean({"scale": {"style": "column", "dim": 0}}, Inventory({"": root}, paths=("",)), 2)
    assert found.layouts == {"scale": Shard(0, deal(6, 2))}


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


ANY_RULE = st.sampled_from(["column", "row", "vocab", "replicate"]) | st.sampled_from(
    [
        GATHERED,
        {"style": "column", "dim": 0},
        {"style": "row", "dim": -1},
        {"style": "column", "heads": "n"},
        {"style": "column", "sections": 2},
        {"style": "row", "heads": 3},
    ]
)
ANY_MODULE = st.tuples(
    st.sampled_from(["linear", "embedding", "conv1d", "norm", "other", "unknown"]),
    st.dictionaries(
        st.sampled_from(["weight", "bias", "x"]),
        st.lists(st.integers(0, 7), max_size=3).map(tuple),
        min_size=1,
    ),
)
ANY_NAME = st.lists(st.sampled_from(["a", "b", "0", "weight", "x"]), min_size=1, max_size=3).map(".".join)


ANY_PATTERN = (
    st.lists(st.sampled_from(["a", "b", "0", "*", "weight", "x", "c"]), min_size=1, max_size=3)
    .filter(lambda parts: set(parts) != {"*"})
    .map(".".join)
)


@given(
    st.dictionaries(ANY_PATTERN, ANY_RULE, min_size=1, max_size=4),
    st.dictionaries(ANY_NAME, ANY_MODULE, max_size=5),
    st.integers(1, 4),
    st.randoms(),
)
@settings(max_examples=300, deadline=None)
def test_match_never_raises_for_a_bad_plan(rules: Any, modules: Any, tp: int, random: Any) -> None:
    inventory = model(
        *(module(path, kind, **shapes) for path, (kind, shapes) in modules.items()), config={"n": 2}
    )
    tensors = inventory.tensors()
    by_shape: dict[Any, str] = {}
    aliases = {n: by_shape[t.shape] for n, t in tensors.items() if by_shape.setdefault(t.shape, n) != n}
    inventory = replace(inventory, aliases={n: f for n, f in aliases.items() if random.random() < 0.5})
    found = match(Plan(rules=rules, optional=[p for p in rules if random.random() < 0.3]), inventory, tp)
    for name, shard in found.layouts.items():
        assert shard.fits(tensors[name].shape[shard.dim])
    if not errors(found.diagnostics):
        for further, first in inventory.aliases.items():
            assert found.layouts.get(further) == found.layouts.get(first)
    assert all(d.code.startswith("AT2") for d in found.diagnostics)
    assert {p.pattern for p in found.placed.values()} <= set(rules)


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=97, hidden_size=48, intermediate_size=129, num_hidden_layers=2, num_attention_heads=12,
        num_key_value_heads=6, max_position_embeddings=64, pad_token_id=0, **options,
    )  # fmt: skip


def bert(**options: Any) -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=97, hidden_size=48, intermediate_size=129, num_hidden_layers=2, num_attention_heads=12,
        max_position_embeddings=64, **options,
    )  # fmt: skip


REAL = {  # class -> config, plan, tensors that are cut, optional rules without a match
    "LlamaForCausalLM": (llama, "llama", 16, 0),
    "LlamaForCausalLM tied": (lambda: llama(tie_word_embeddings=True), "llama", 16, 0),
    "LlamaForCausalLM with biases": (lambda: llama(attention_bias=True, mlp_bias=True), "llama", 26, 0),
    "LlamaModel": (llama, "llama", 15, 1),
    "LlamaForSequenceClassification": (llama, "llama", 15, 1),
    "BertModel": (bert, "bert", 21, 3),
    "BertForMaskedLM": (bert, "bert", 24, 1),
    "BertForPreTraining": (bert, "bert", 24, 1),
    "BertLMHeadModel": (lambda: bert(is_decoder=True, add_cross_attention=True), "bert", 38, 0),
    "BertForSequenceClassification": (bert, "bert", 21, 3),
}


def real(name: str) -> Inventory:
    import torch
    import transformers

    from autotp.trace.inventory import inventory

    with torch.device("meta"):
        return inventory(getattr(transformers, name.split()[0])(REAL[name][0]()))


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("tp", [1, 2, 5])
def test_shipped_plans_on_real_models(name: str, tp: int) -> None:
    inventory = real(name)
    _, plan, cut, unmatched = REAL[name]
    found = clean(plan, inventory, tp)
    assert len(found.layouts) == cut
    notes = [d.message for d in found.diagnostics]
    assert [note.count("`") // 2 for note in notes] == ([unmatched] if unmatched else [])
    whole = {t for t in inventory.tensors() if t not in found.layouts and t.endswith("weight")}
    assert all(
        any(
            w in t
            for w in (
                "norm",
                "Norm",
                "position",
                "token_type",
                "pooler",
                "transform",
                "relationship",
                "score",
                "classifier",
            )
        )
        for t in whole
    ), whole
    for further, first in inventory.aliases.items():
        assert found.layouts.get(further) == found.layouts.get(first)


@pytest.mark.parametrize("name", REAL)
def test_headers_and_a_live_model_are_cut_alike(name: str) -> None:
    live = real(name)
    plan = Plan.load(REAL[name][1])
    stored = {p: replace(m, kind="norm" if _is_norm(m) else "unknown") for p, m in live.modules.items()}
    dropped = {name.rpartition(".")[0] for name in live.aliases}  # a checkpoint stores a tied tensor once
    kept = [info for path, info in stored.items() if path not in dropped]
    headers = model(*kept, config=live.config)
    proven, shapes = clean(plan, live, 3).layouts, clean(plan, headers, 3).layouts
    assert shapes == {tensor: cut for tensor, cut in proven.items() if tensor in headers.tensors()}


def _is_norm(info: ModuleInfo) -> bool:
    return "weight" in info.tensors and len(info.tensors["weight"].shape) == 1


def test_bert_never_takes_one_dense_for_another() -> None:
    placed = clean("bert", real("BertForMaskedLM"), 2).placed
    layer = "bert.encoder.layer.1"
    assert placed[f"{layer}.attention.output.dense"].pattern == "attention.output.dense"
    assert placed[f"{layer}.output.dense"].pattern == "output.dense"
    assert placed[f"{layer}.attention.output.dense"].declared and not placed[f"{layer}.output.dense"].declared
    assert "cls.predictions.transform.dense" not in placed and "bert.pooler.dense" not in placed


def test_bert_decoder_is_tied_to_the_embedding_with_its_bias() -> None:
    found = clean("bert", real("BertForMaskedLM"), 4)
    rows = Shard(0, deal(97, 4))
    for name in ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"):
        assert found.layouts[name] == rows
    assert found.layouts["cls.predictions.bias"] == found.layouts["cls.predictions.decoder.bias"] == rows
    assert found.placed["cls.predictions.decoder"].rule.gather_output


def test_llama_query_heads_follow_their_kv_heads() -> None:
    layouts = clean("llama", real("LlamaForCausalLM"), 4).layouts
    attention = "model.layers.0.self_attn"
    shapes = {"q_proj": (48, 48), "k_proj": (24, 48), "v_proj": (24, 48), "o_proj": (48, 48)}
    kv = [[4 * n for n in (2, 2, 1, 1)][rank] for rank in range(4)]
    for name, shape in shapes.items():
        shard = layouts[f"{attention}.{name}.weight"]
        local = [shard.local_size(shape[shard.dim], rank) for rank in range(4)]
        assert local == (kv if name in "k_proj v_proj" else [2 * n for n in kv])
    assert layouts[f"{attention}.o_proj.weight"].dim == 1


def test_slips_in_a_llama_plan_name_the_key_and_the_nearest_names() -> None:
    rules = {"layers.*.mlp.gate_prj": "column", "model.layers.*.mlp.down_proj": "row"}
    assert only(rules, real("LlamaForCausalLM")) == (
        "error[AT201]: rule `layers.*.mlp.gate_prj` matches nothing in LlamaForCausalLM\n"
        "  = help: did you mean `layers.*.mlp.gate_proj` or `layers.*.mlp.up_proj`?"
    )


def test_a_tied_llama_with_only_the_embedding_ruled() -> None:
    inventory = real("LlamaForCausalLM tied")
    assert only({"embed_tokens": "vocab"}, inventory) == (
        "error[AT211]: model.embed_tokens.weight: tied to lm_head.weight, which has no rule\n"
        "  = note: model.embed_tokens.weight: shard(dim 0: 49+48 of 97), by `embed_tokens`: vocab\n"
        "  = note: lm_head.weight: no rule\n"
        "  = help: add the rule `lm_head: {style: column, gather_output: true}`"
    )
    assert not errors(
        match(as_plan({"embed_tokens": "vocab", "lm_head": GATHERED}), inventory, 2).diagnostics
    )


def test_more_ranks_than_kv_heads_is_refused_before_anything_runs() -> None:
    found = match(Plan.load("llama"), real("LlamaForCausalLM"), 7)
    refused = errors(found.diagnostics)
    assert {d.code for d in refused} == {"AT203"} and len(refused) == 4
    assert all("6 kv heads over tp=7: fewer heads than ranks" in d.message for d in refused)
    assert all(d.help == ("tp sizes that work here: 1, 2, 3, 4, 5, 6",) for d in refused)
