"""Edited models of transformers of which no plan is shipped: greedy generation with a cache gives the tokens
of the unsharded model. The others are in test_shipped_plans.py."""

from __future__ import annotations

import pytest
import torch
import transformers

import autotp
from tests.generation import generates_the_same
from tests.models import randomised
from tests.zoo.build import build as tiny


@pytest.mark.slow
def test_a_cache_that_is_filled_and_not_given_back():
    model = randomised(tiny("bert"))
    generates_the_same(model, autotp.analyze(model, "auto", tp=2))


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
