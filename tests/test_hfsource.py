"""Everything that stands for a plan of transformers, and what does not."""

from __future__ import annotations

import json

import pytest
import transformers
from torch import nn

from autotp.diagnostic import UsageError
from autotp.plan import Plan
from tests.test_hfplan import tiny


def test_sources_of_a_plan(tmp_path):
    config = transformers.LlamaConfig()
    plan = Plan.from_transformers(config)
    assert "lm_head" in plan.rules and plan.model_type == "llama"
    assert Plan.from_transformers(transformers.LlamaForCausalLM) == plan
    assert Plan.from_transformers({"model_type": "llama"}) == plan
    config.save_pretrained(tmp_path)
    assert Plan.from_transformers(tmp_path) == plan
    assert Plan.from_transformers(str(tmp_path / "config.json")) == plan
    without = Plan.from_transformers(transformers.LlamaModel)
    assert set(plan.rules) - set(without.rules) == {"lm_head"}
    named = Plan.from_transformers(transformers.LlamaConfig(architectures=["LlamaModel"]))
    assert named == without
    model = Plan.from_transformers(tiny("Llama"))
    assert {n.removeprefix("model."): r for n, r in model.rules.items()} == plan.rules
    assert Plan.from_transformers(transformers.LlamaConfig) == without


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (3, "a config or a model of transformers has a plan, and this is of type int"),
        (transformers.GPT2Config(), "GPT2Config has no tensor-parallel plan of transformers"),
        ({}, "the dict has no tensor-parallel plan of transformers"),
        ({"a": 1}, "transformers' plan maps names to styles, and has 'a': 1"),
        ("/no/such/folder", "/no/such: there is no config.json, so transformers' plan is not known"),
        (nn.Linear, "a model class of transformers has a config_class, and Linear has none"),
    ],
)
def test_what_has_no_plan(source, message):
    with pytest.raises(UsageError) as caught:
        Plan.from_transformers(source)
    assert str(caught.value) == message


def test_a_config_that_transformers_does_not_know(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nosuch"}))
    for source in (tmp_path, {"model_type": "nosuch"}):
        with pytest.raises(UsageError, match="reads no config: "):
            Plan.from_transformers(source)
