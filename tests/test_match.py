"""Match as a whole: it never raises for a bad plan, and the shipped plans fit real models."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotp.diagnostic import UsageError, errors
from autotp.inventory import Inventory, ModuleInfo, TensorInfo
from autotp.match import match
from autotp.placement import Shard, deal
from autotp.plan import Plan, as_plan
from tests.inventories import GATHERED, MLP, clean, model, module, only


def test_two_rules_for_one_tensor() -> None:
    plan = {"fc1": "column", "fc1.bias": "replicate"}
    assert only(plan, MLP) == (
        "error[AT209]: fc1.bias: style column of its module places it in another way\n  = note: `fc1`: column"
    )
    same = {"fc1": "column", "fc1.bias": {"style": "column", "dim": 0}, "fc2": "row", "fc2.bias": "replicate"}
    assert not clean(same, MLP, 2).diagnostics
    inside = {"fc1": "replicate", "fc1.weight": {"style": "column", "dim": 0}}
    assert list(clean(inside, MLP, 2).layouts) == ["fc1.weight"]


@pytest.mark.parametrize("tp", [0, -1, True, 2.0, "2", None])
def test_impossible_tp(tp: Any) -> None:
    with pytest.raises(UsageError, match=r"tp is a whole number of at least 1, not"):
        match(as_plan({"fc1": "column"}), MLP, tp)


def test_the_root_module_and_its_parameters() -> None:
    root = ModuleInfo("", "other", {"scale": TensorInfo("scale", (6,), "F32", 4)}, "Model")
    found = clean({"scale": {"style": "column", "dim": 0}}, Inventory({"": root}, paths=("",)), 2)
    assert found.layouts == {"scale": Shard(0, deal(6, 2))}


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


@pytest.mark.slow
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


def test_more_ranks_than_query_heads_is_refused_before_anything_runs() -> None:
    found = match(Plan.load("llama"), real("LlamaForCausalLM"), 13)
    refused = errors(found.diagnostics)
    assert {d.code for d in refused} == {"AT203"} and len(refused) == 4
    told = [f"{heads} over tp=13: fewer heads than ranks" for heads in ("12 attention heads", "6 kv heads")]
    assert [d.message for d in refused] == [told[0], told[1], told[1], told[0]]
    assert {d.help for d in refused} == {("tp sizes that work here: 1 to 12",)}
    for tp in range(1, 13):  # what is said there is so: kv heads are shared above 6
        assert not errors(match(Plan.load("llama"), real("LlamaForCausalLM"), tp).diagnostics), tp


def test_ranks_share_kv_heads_up_to_the_number_of_query_heads() -> None:
    layouts = clean("llama", real("LlamaForCausalLM"), 7).layouts
    held = {}
    for name, size, head in (("q_proj", 48, 4), ("k_proj", 24, 4), ("v_proj", 24, 4)):
        shard = layouts[f"model.layers.0.self_attn.{name}.weight"]
        held[name] = [[edge // head for edge in shard.ranges(size, rank)[0]] for rank in range(7)]
    assert held["k_proj"] == held["v_proj"] == [[0, 1], [0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6]]
    assert held["q_proj"] == [[0, 1], [1, 2], [2, 4], [4, 6], [6, 8], [8, 10], [10, 12]]


def test_a_plan_is_read_and_matched_without_torch() -> None:
    code = (
        "import sys, autotp.match, autotp.plan; print({'torch', 'numpy', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
