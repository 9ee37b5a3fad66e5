"""transformers' own plans: each is read and written back or refused by name, then proven or refused."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import nn
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

import autotp
from autotp import hfplan, hfsource
from autotp.diagnostic import PlanError
from autotp.plan import Plan, Rule
from tests.models import verified
from tests.test_shipped_plans import EXPERTS, GROUPED, HEAD_DIM, SIZES

transformers.logging.set_verbosity_error()


def config_classes() -> dict[str, type]:
    """Every config class of transformers that has a plan, by name. Modules that name none stay alone."""
    found: dict[str, type] = {}
    for file in sorted(Path(transformers.models.__path__[0]).glob("*/configuration_*.py")):
        if "base_model_tp_plan" not in file.read_text(encoding="utf-8"):
            continue
        module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        for cls in vars(module).values():
            own = inspect.isclass(cls) and cls.__module__ == module.__name__
            if own and issubclass(cls, transformers.PreTrainedConfig) and cls.base_model_tp_plan:
                found[cls.__name__] = cls
    return found


def told(error: PlanError) -> list[str]:
    return [str(found) for found in error.diagnostics]


IDENTITY = (
    "error[AT114]: layers.*.mlp.experts.identity_expert: style moe_identity_expert of transformers: "
    "it divides a value by the number of ranks so that their sum is right again"
)
SHARED = [
    f"error[AT115]: layers.*.mlp.shared_experts.{name}: transformers sums what a module's own parameters "
    "compute only where it is called experts"
    for name in ("gate_proj", "up_proj", "down_proj")
]


@pytest.mark.slow
def test_every_plan_of_transformers_comes_back_or_is_refused_by_name():
    counts: Counter[str] = Counter()
    for name, cls in config_classes().items():
        config = cls()
        entries = hfsource.read(config).styles
        assert entries.items() >= cls.base_model_tp_plan.items()
        try:
            plan = Plan.from_transformers(config)
        except PlanError as error:
            assert (name, told(error)) == ("LongcatFlashConfig", [IDENTITY])
            counts["refused"] += 1
            continue
        counts["read"] += 1
        counts["heads"] += any(rule.heads for rule in plan.rules.values())
        counts["experts"] += "moe_tp_experts" in entries.values()
        assert set(entries) - set(plan.rules) == {
            n for n, style in entries.items() if style in ("moe_tp_experts", "all_reduce")
        }
        assert Plan.loads(plan.dumps()) == plan
        try:
            back = plan.to_transformers()
        except PlanError as error:
            assert (name, told(error)) == ("InklingTextConfig", SHARED)
            counts["not written"] += 1
            continue
        assert back == entries
        counts["written"] += 1
    expected = {"read": 118, "heads": 99, "experts": 37, "written": 117, "not written": 1, "refused": 1}
    assert counts == expected


def test_every_style_of_transformers_is_read_or_refused():
    read = {*hfplan.LAYER, *hfplan.OLD, *hfplan.HOLDERS, *hfplan.TENSOR, hfplan.LOCAL}
    assert not read & (hfplan.REFUSED.keys() - {"packed_rowwise", hfplan.LOCAL})
    newer = {"local_params", "replicate", "embedding_colwise"}  # as of transformers 5.24
    assert (read | hfplan.REFUSED.keys()) - newer == set(ALL_PARALLEL_STYLES.keys()) - newer


def test_styles_of_newer_versions():
    block = "layers.*.self_attn"
    styles = {f"{block}.q_proj": "colwise", f"{block}.o_proj": "rowwise", "gate": "replicate"}
    vectors = {f"{block}.sinks": "colwise", f"{block}.gate_bias": "colwise", block: "local_params"}
    plan = Plan.from_transformers(styles | vectors)
    assert {name: rule.to_data() for name, rule in plan.rules.items()} == {
        f"{block}.q_proj": "column",
        f"{block}.o_proj": "row",
        f"{block}.sinks": {"style": "column", "dim": 0},
        f"{block}.gate_bias": {"style": "column", "dim": 0},
        "gate": "replicate",
    }
    with pytest.raises(PlanError) as caught:
        Plan.from_transformers(styles | {block: "local_params", "embed": "embedding_colwise"})
    assert told(caught.value) == [
        f"error[AT114]: {block}: style local_params of transformers: no parameter of this module has an "
        "entry of its own",
        "error[AT114]: embed: style embedding_colwise of transformers: it cuts the width of an embedding, "
        "and autotp cuts its rows",
    ]


def test_styles_as_rules():
    styles = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.linear_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
        "layers.*.mlp.gate_up_proj": "packed_colwise",
        "layers.*.mlp.experts": "moe_tp_experts",
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "layers.*.mlp.experts.down_proj": "rowwise",
        "layers.*.turned.experts": "moe_tp_experts",
        "layers.*.turned.experts.gate_up_proj": "packed_rowwise",
        "layers.*.turned.experts.down_proj": "colwise",
        "embed_tokens": "embedding_rowwise",
        "lm_head": "colwise_gather_output",
        "head": "rowwise_split_input",
    }
    plan = Plan.from_transformers(styles)
    assert {name: rule.to_data() for name, rule in plan.rules.items()} == {
        "layers.*.self_attn.q_proj": "column",
        "layers.*.self_attn.k_proj": "column",
        "layers.*.self_attn.sinks": {"style": "column", "dim": 0},
        "layers.*.self_attn.q_norm": "replicate",
        "layers.*.self_attn.o_proj": "row",
        "layers.*.linear_attn.kv_a_proj_with_mqa": "replicate",
        "layers.*.mlp.gate_up_proj": {"style": "column", "sections": 2},
        "layers.*.mlp.experts.gate_up_proj": {"style": "column", "sections": 2, "dim": -2},
        "layers.*.mlp.experts.down_proj": {"style": "row", "dim": -1},
        "layers.*.turned.experts.gate_up_proj": {"style": "column", "sections": 2, "dim": -1},
        "layers.*.turned.experts.down_proj": {"style": "row", "dim": -2},
        "embed_tokens": "vocab",
        "lm_head": {"style": "column", "gather_output": True},
        "head": {"style": "row", "split_input": True},
    }
    assert plan.optional == tuple(plan.rules) and plan.model_type is None
    assert plan.to_transformers() == styles
    old = Plan.from_transformers({"lm_head": "colwise_rep", "head": "rowwise_rep"})
    assert old.to_transformers() == {"lm_head": "colwise_gather_output", "head": "rowwise_split_input"}


def heads_of(config: Any) -> dict[str, Any]:
    return {n: r.heads for n, r in Plan.from_transformers(config).rules.items() if r.heads is not None}


def test_heads_come_from_the_config():
    grouped = "num_key_value_heads"
    block = "layers.*.self_attn."
    by_kv = {f"{block}{name}": grouped for name in ("k_proj", "v_proj")}
    by_query = {f"{block}{name}": "num_attention_heads" for name in ("q_proj", "o_proj")}
    assert heads_of(transformers.LlamaConfig()) == by_kv | by_query
    latent = heads_of(transformers.DeepseekV2Config())  # one latent for all heads: there are no kv heads
    assert latent.pop(f"{block}q_proj") == "num_attention_heads"
    assert latent == {f"{block}{n}": "num_attention_heads" for n in ("q_b_proj", "kv_b_proj", "o_proj")}
    fused = heads_of(transformers.GPTNeoXConfig())
    assert fused == {f"layers.*.attention.{n}": "num_attention_heads" for n in ("query_key_value", "dense")}
    assert heads_of(transformers.Phi3Config()) == {}  # gathered, so nothing is dealt
    assert heads_of({"model_type": "granite_swa"})[f"{block}sinks"] == "num_attention_heads"


@pytest.mark.parametrize(
    ("name", "style", "why"),
    [
        ("a", "grouped_gemm", "it gives each rank whole experts, and autotp cuts every expert"),
        ("a", "sequence_parallel", "it cuts the sequence, and a plan cuts weights"),
        ("a", "packed_rowwise", "it cuts a parameter by itself, and this is a layer"),
        ("a", "colwize", "autotp does not know it"),
        ("a", "moe_tp_experts", "no parameter of this module has an entry, so there is nothing to sum"),
        (
            "proj",
            "mla_kv_a_proj",
            "it splits the output of a layer named kv_a_proj…, and this one is named otherwise",
        ),
        ("a.sinks", "rowwise", "one number a head is cut by colwise"),
        ("a.sinks", "colwise_gather_output", "it is for a layer, and this is a parameter by itself"),
    ],
)
def test_what_no_rule_can_say(name, style, why):
    with pytest.raises(PlanError) as caught:
        Plan.from_transformers({name: style})
    assert told(caught.value) == [f"error[AT114]: {name}: style {style} of transformers: {why}"]


def test_all_faults_at_once():
    with pytest.raises(PlanError) as caught:
        Plan.from_transformers({"a": "grouped_gemm", "b": "colwise", "c": "nothing"})
    assert [found.module for found in caught.value.diagnostics] == ["a", "c"]


def tiny(name: str, **changes: Any) -> nn.Module:
    cls = getattr(transformers, f"{name}ForCausalLM")
    return cls(cls.config_class(**{**GROUPED, **changes})).eval()


def test_a_model_tells_embeddings_from_layers():
    """A row cut of an embedding is one of its rows; from names alone it looks like a layer's."""
    model = tiny("Llama", tie_word_embeddings=True)
    assert Plan.from_transformers(model).rules["model.embed_tokens"] == Rule(style="vocab")
    model._tp_plan = {"model.embed_tokens": "rowwise"}
    assert Plan.from_transformers(model).rules["model.embed_tokens"] == Rule(style="vocab")
    model._tp_plan = {"model.embed_tokens": "colwise"}
    with pytest.raises(PlanError, match="it cuts the width of an embedding, and autotp cuts its rows"):
        Plan.from_transformers(model)


def test_a_model_tells_parameters_from_layers():
    model = tiny("Mixtral", **{**EXPERTS, "num_local_experts": 4})
    plan = Plan.from_transformers(model)
    assert plan.rules["model.layers.*.mlp.experts.down_proj"] == Rule(style="row", dim=-1)
    assert plan.to_transformers() == model.tp_plan


# family -> its changes, and the code that the proof gives transformers' own plan (None: right)
FAMILIES: dict[str, tuple[dict[str, Any], str | None]] = {
    "Llama": ({}, None),
    "Mistral": (HEAD_DIM, None),
    "Qwen2": ({}, None),
    "Qwen3": (HEAD_DIM, None),
    "Phi3": ({}, None),
    "Starcoder2": ({"tie_word_embeddings": False}, None),
    "Mixtral": ({**EXPERTS, "num_local_experts": 4}, None),
    "Gemma2": (HEAD_DIM, None),
    "Olmo2": ({}, None),
    "GPTNeoX": (SIZES, None),
}
QUICK = ("Phi3", "Gemma2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in FAMILIES]
)
def test_transformers_plans_are_proven_and_exact_or_refused(name):
    changes, code = FAMILIES[name]
    model = tiny(name, **changes)
    plan = Plan.from_transformers(model.config)
    analysis = autotp.analyze(model, plan, tp=2)
    codes = {found.code for found in analysis.diagnostics if found.severity == "error"}
    assert codes == ({code} if code else set()), [str(found) for found in analysis.diagnostics]
    if code is None:
        assert analysis.certainty == "layouts" and analysis.sharded_fraction > 0.5
        whole = Plan.from_transformers(model)
        assert autotp.analyze(model, whole, tp=2, check="shapes").layouts.keys() == analysis.layouts.keys()
        assert verified(model, analysis).ok
