"""transformers' models with fewer kv heads than ranks, and with groups that do not divide."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import autotp
from autotp.comm import simulate
from autotp.rewrite.apply import apply
from autotp.slicing import take
from tests import models
from tests.grouped import SIZES

FLOAT32 = 1e-5  # rotary tables and norms compute in float32


def built(family: str, queries: int, keys: int, **changes: Any) -> torch.nn.Module:
    config = getattr(transformers, f"{family}Config")(
        vocab_size=99, hidden_size=4 * queries, intermediate_size=129, num_hidden_layers=1,
        num_attention_heads=queries, num_key_value_heads=keys, head_dim=4, max_position_embeddings=64,
        bos_token_id=0, eos_token_id=1, pad_token_id=2, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    return models.randomised(
        getattr(transformers, f"{family}ForCausalLM")(config), dtype=torch.float64
    ).eval()


def inputs(*, padded: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 99, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[1, :3] = 0
    return {"input_ids": ids, "attention_mask": mask} if padded else {"input_ids": ids}


def step(model: torch.nn.Module, *, padded: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    out = model(**inputs(padded=padded)).logits
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
    (out * weights).sum().backward()
    return out.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def exact(model: torch.nn.Module, plan: Any, tp: int, *, tolerance: float = FLOAT32) -> None:
    """Outputs, every gradient and the words that are generated, with padding (kv heads are repeated by
    value) and without (the kernel repeats them)."""
    analysis = autotp.analyze(model, plan, tp=tp)
    assert analysis.ok, "\n".join(map(str, analysis.diagnostics))
    prompt = inputs(padded=True)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 2}
    wanted = [step(model, padded=padded) for padded in (True, False)]
    words = model.generate(**prompt, **options)

    def rank(group):
        own = apply(copy.deepcopy(model), analysis, group)  # what `shard` does after the proof
        return [step(own, padded=padded) for padded in (True, False)], own.generate(**prompt, **options)

    runs = simulate(tp, rank)
    for place, (out, grads) in enumerate(wanted):
        largest = max(float(g.abs().max()) for g in grads.values())
        for number, (found, generated) in enumerate(runs):
            assert torch.equal(generated, words)
            assert (found[place][0] - out).abs().max() <= tolerance * max(1.0, float(out.abs().max()))
            for name, gradient in grads.items():
                cut = analysis.layouts.get(name)
                part = gradient if cut is None else take(gradient, cut, number)
                far = (found[place][1][name] - part).abs().max()
                assert far <= tolerance * max(float(gradient.abs().max()), 1e-3 * largest), (name, number)


ROWS = [
    *(("Llama", *sizes) for sizes in SIZES),
    ("Llama", 4, 2, 3),
    ("Qwen2", 6, 2, 4),
    ("Qwen2", 4, 1, 3),
    ("Qwen3", 2, 1, 2),
    ("Qwen3", 14, 2, 4),
    ("Qwen3", 6, 3, 4),
]  # (family, query heads, kv heads, ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "queries", "keys", "tp"), ROWS)
def test_exact(family, queries, keys, tp):
    exact(built(family, queries, keys), family.lower(), tp)


def sized(family: str, **config: Any) -> torch.nn.Module:
    sizes = {"vocab_size": 99, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    torch.manual_seed(0)
    made = getattr(transformers, f"{family}Config")(**sizes, **config)
    return models.randomised(getattr(transformers, f"{family}ForCausalLM")(made), dtype=torch.float64).eval()


Q, KV, HEAD = "num_attention_heads", "num_key_value_heads", {"style": "column", "gather_output": True}
COLUMN = {"style": "column", "dim": 0}


def phi3(queries: int, keys: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Sections with different deals."""
    model = sized(
        "Phi3", hidden_size=4 * queries, intermediate_size=129, num_hidden_layers=1,
        num_attention_heads=queries, num_key_value_heads=keys, max_position_embeddings=64,
        original_max_position_embeddings=64,
    )  # fmt: skip
    return model, {
        "embed_tokens": "vocab",
        "qkv_proj": {"style": "column", "heads": [Q, KV, KV]},
        "o_proj": {"style": "row", "heads": Q},
        "gate_up_proj": {"style": "column", "sections": 2},
        "down_proj": "row",
        "lm_head": HEAD,
    }


def bigcode(queries: int, _: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """One kv head beside the queries, in one weight."""
    model = sized(
        "GPTBigCode",
        n_embd=4 * queries,
        n_inner=129,
        n_layer=1,
        n_head=queries,
        n_positions=64,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
    )
    rows = {"attn.c_proj": "row", "mlp.c_fc": "column", "mlp.c_proj": "row", "lm_head": HEAD}
    return model, {"wte": "vocab", "attn.c_attn": {"style": "column", "heads": [Q, 1, 1]}, **rows}


def gpt2(queries: int, _: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Conv1D with three equal sections."""
    config = transformers.GPT2Config(
        vocab_size=99, n_embd=4 * queries, n_inner=129, n_layer=1, n_head=queries, n_positions=64,
        bos_token_id=0, eos_token_id=1, pad_token_id=2, attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = models.randomised(transformers.GPT2LMHeadModel(config), dtype=torch.float64).eval()
    rows = {"attn.c_proj": "row", "mlp.c_fc": "column", "mlp.c_proj": "row", "lm_head": HEAD}
    return model, {"wte": "vocab", "attn.c_attn": {"style": "column", "sections": 3, "heads": Q}, **rows}


def falcon(queries: int, keys: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Linear layers that are no nn.Linear: with one kv head in its first form, else in its new one."""
    new = keys > 1
    model = sized(
        "Falcon", hidden_size=4 * queries, num_hidden_layers=1, num_attention_heads=queries,
        num_kv_heads=keys, new_decoder_architecture=new, multi_query=not new, parallel_attn=True, bias=True,
        ffn_hidden_size=129,
    )  # fmt: skip
    heads: Any = "num_kv_heads" if new else [Q, 1, 1]
    return model, {
        "word_embeddings": "vocab",
        "query_key_value.weight": {**COLUMN, "heads": heads},
        "query_key_value.bias": {**COLUMN, "heads": heads},
        "self_attention.dense.weight": {"style": "row", "dim": 1, "heads": "num_kv_heads" if new else Q},
        "dense_h_to_4h.weight": COLUMN,
        "dense_h_to_4h.bias": COLUMN,
        "dense_4h_to_h.weight": {"style": "row", "dim": 1},
        "lm_head": HEAD,
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # GPTBigCode's own file
@pytest.mark.parametrize(
    ("family", "queries", "keys", "tp"),
    [
        (gpt2, 4, 4, 3),
        (phi3, 6, 3, 2),
        (bigcode, 3, 1, 2),
        (bigcode, 4, 1, 3),
        (falcon, 6, 1, 3),
    ],
)
def test_fused_weights(family, queries, keys, tp):
    exact(*family(queries, keys), tp)
