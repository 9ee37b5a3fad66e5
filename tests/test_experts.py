"""Mixtures of experts of transformers: what runs them, what chooses them, experts without tokens."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import autotp
from autotp.comm.simulated import simulate
from autotp.rewrite.apply import apply
from autotp.verification import compare
from tests.models import randomised

PLAN = {
    "experts.gate_up_proj": {"style": "column", "dim": 1, "sections": 2},
    "experts.down_proj": {"style": "row", "dim": 2},
}
IDS = torch.randint(0, 97, (3, 7), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def mixtral():
    """The model, and what is proven of it on two ranks."""
    sizes = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "router_aux_loss_coef": 5.0,
    }  # fmt: skip
    model = randomised(MixtralForCausalLM(MixtralConfig(**sizes)).eval()).float()
    analysis = autotp.analyze(model, PLAN, tp=2)
    assert analysis.ok and analysis.certainty == "layouts"
    return model, analysis


def _step(model, **given):
    out = model(input_ids=IDS, **given)
    out.logits.float().square().mean().backward()
    return out.logits.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        {"input_ids": IDS, "labels": IDS, "output_router_logits": True},
        {"input_ids": IDS[:1, :1]},  # two of the four experts have no token
    ],
    ids=["router-loss", "empty-experts"],
)
def test_the_router_s_loss_and_experts_without_tokens(mixtral, given):
    result = compare(*mixtral, inputs=given, weights="random", dtype=None)
    assert result.ok and "train" in result.modes and result.max_grad_diff < 1e-9, str(result)
    assert result.dtype == torch.float64  # in which no rounding chooses other experts


@pytest.mark.slow
def test_another_implementation_of_the_experts_is_proven_when_it_runs(mixtral):
    """Generation takes another one in decoding; the mappings stand at the border of whatever runs. What
    cannot be traced here, kernels that this machine lacks and loops over values, raises."""
    model, analysis = mixtral
    logits, gradients = _step(copy.deepcopy(model))

    def rank(group):
        mine = apply(copy.deepcopy(model), analysis, group)
        found = {}
        for name in ("grouped_mm", "batched_mm"):
            mine.set_experts_implementation(name)
            mine.zero_grad()
            found[name] = _step(mine)
        for name in ("deepgemm", "sonicmoe", "eager"):
            mine.config._experts_implementation = name
            with pytest.raises(autotp.UnprovenPath, match=f"_experts_implementation_internal='{name}'"):
                mine(input_ids=IDS)
        return found

    for found in simulate(2, rank):
        for name, (here, parts) in found.items():
            assert (here - logits).abs().max() < 1e-5, name
            for key in ("model.embed_tokens.weight", "model.layers.0.mlp.gate.weight"):
                assert (parts[key] - gradients[key]).abs().max() < 1e-5 * gradients[key].abs().max(), name


@pytest.mark.slow
def test_ranks_choose_the_same_experts_in_bfloat16(mixtral):
    """Rounding may choose others than the unsharded model does, but the same ones on every rank."""
    model, analysis = mixtral
    model = copy.deepcopy(model).bfloat16()

    def rank(group):
        mine = apply(copy.deepcopy(model), analysis, group)
        with torch.no_grad():
            out = mine(input_ids=IDS, output_router_logits=True)
        return out.logits, torch.stack(out.router_logits)

    (logits, routed), other = simulate(2, rank)
    assert torch.equal(logits, other[0]) and torch.equal(routed, other[1])
