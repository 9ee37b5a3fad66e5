"""Edited models of transformers: greedy generation with a cache gives the tokens of the unsharded model."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import autotp
from autotp.comm import simulate
from tests.models import randomised
from tests.test_shipped_plans import build, three
from tests.zoo.build import build as tiny

NAMES = (
    "bloom",
    "codegen",
    "falcon",
    "gpt2",
    "gpt_neo",
    "gptj",
    "mpt",
    "opt",
    "persimmon",
    "phi3",
    "stablelm",
    "t5",
    "whisper",
    "xglm",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_generate_gives_the_same_tokens(name):
    model = randomised(build(name, **three(name)))
    if name == "xglm":
        model.float()  # its forward adds the least number of the dtype to float32 values
    generates_the_same(model, name)


def generates_the_same(model, plan):
    generator = torch.Generator().manual_seed(1)
    if model.main_input_name == "input_features":
        given = {"input_features": torch.randn(2, 8, 20, dtype=torch.float64, generator=generator)}
    else:
        ids = torch.randint(4, 60, (2, 5), generator=generator)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": 60}
    wanted = model.generate(**given, **options)
    copies = [copy.deepcopy(model) for _ in range(2)]

    def rank(group):
        return autotp.shard(copies[group.rank], plan, group).generate(**given, **options)

    for tokens in simulate(2, rank):
        assert torch.equal(tokens, wanted)


@pytest.mark.slow
def test_a_cache_that_is_filled_and_not_given_back():
    generates_the_same(randomised(tiny("bert")), "auto")


@pytest.mark.slow
def test_falcon_with_one_head_of_keys_for_all():
    """q, k and v in one layer: the sections of k and v are whole on every rank."""
    sizes = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 6}
    config = transformers.FalconConfig(**sizes, multi_query=True, new_decoder_architecture=False, bias=True)
    model = randomised(transformers.FalconForCausalLM(config).eval())
    fused = {"style": "column", "dim": 0, "sections": [24, 4, 4], "heads": [6, 1, 1]}
    column = {"style": "column", "dim": 0}
    plan = {
        "query_key_value.weight": fused,
        "query_key_value.bias": fused,
        "self_attention.dense.weight": {"style": "row", "dim": 1, "heads": 6},
        "dense_h_to_4h.weight": column,
        "dense_h_to_4h.bias": column,
        "dense_4h_to_h.weight": {"style": "row", "dim": 1},
    }
    result = autotp.verify(model, plan, tp=3)
    assert result.ok, str(result)
    generates_the_same(model, plan)


@pytest.mark.slow
def test_swin_with_its_windows():
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=12, depths=[2, 2], num_heads=[3, 6], window_size=4
    )
    model = randomised(transformers.SwinModel(config).eval())
    plan = {"fc1": "column", "fc2": "row"}
    for stage, heads in enumerate((3, 6)):
        attention = f"layers.{stage}.blocks.*.attention"
        plan |= {f"{attention}.{name}_proj": {"style": "column", "heads": heads} for name in "qkv"}
        plan[f"{attention}.o_proj"] = {"style": "row", "heads": heads}
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    for tp in (2, 3):
        result = autotp.verify(model, plan, tp=tp, inputs=x)
        assert result.ok, str(result)
