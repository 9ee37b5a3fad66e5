"""What went wrong for people who shard models, as small recipes: each ends exact, or refused with its help.

A: wrong numbers, silently. B: obscure crashes. I: usability. What other tests hold stands there:

| case | tests |
|---|---|
| A2 GPT-2, GPT-NeoX; fused layers of one's own, in five forms | test_zoo.py; test_derive.py: fused_qkv |
| A3 Phi-3 | test_zoo.py |
| A4 slopes in a buffer | test_derive.py: a_table_of_the_heads; test_statistics.py: a_size_of_the_whole |
| A6 every rank's part together is the whole | test_unshard.py, test_checkpoint_convert.py, test_state.py |
| A7 other inputs, A8 other sampled tokens | test_same_inputs.py |
| A9 names that match nothing | test_match.py: slips_in_a_llama_plan; test_refusals.py |
| A10 "auto" that shards nothing, or little | test_derive.py, test_cost.py, test_cli_{derive,plan}.py |
| A11 tied by assignment, and as a function | test_own_models.py, test_heads.py, test_tied.py |
| A12 Mixtral, its router's loss | test_experts.py |
| A13 GPT-NeoX, both forms of Falcon | test_zoo.py, test_merged.py, test_edits_generate.py |
| A15 sums in bfloat16 | test_reduced_in.py; the table of docs/usage.md |
| B2 3 heads over 2 ranks, of each family | test_shipped_plans.py |
| B2 the sizes that work | test_match.py: more_ranks_than_query_heads; test_refusals.py: fewer_heads |
| B3 head counts in the code | test_edits.py, test_edits_find.py, test_own_code.py |
| B7 save_pretrained | test_silent_faults.py, test_checkpoint_save.py, test_unshard.py |
| B8 names that say nothing | test_derive.py, test_own_models.py, test_detectors.py |
| B9 code that fx refuses | test_trace_capture.py, test_trace_untouched.py |
| I1 a dry run's plan, edited and applied | test_report.py, test_cli_plan.py |
| I3 no cluster | test_verification.py |
| I4 a model of one's own | test_own_code.py, test_own_models.py, test_examples.py |
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import autotp
from autotp.comm import simulate
from autotp.rewrite.apply import apply
from tests import models
from tests import wrong_models as wrong
from tests.zoo.build import build

PLAN = {"fc1": "column", "fc2": "row"}
X = torch.randn(5, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def exact(model: nn.Module, plan: Any, tp: int, **inputs: Any) -> autotp.Verification:
    result = autotp.verify(model, plan, tp=tp, **inputs)
    assert result.ok and result.state_dict_equal, result
    return result


class Own(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("kind", ["biases", "no biases"])
def test_a1_the_bias_of_a_row_layer_is_added_once(kind, tp):
    model = models.MLP()
    if kind == "no biases":
        model.fc1, model.fc2 = nn.Linear(16, 33, bias=False), nn.Linear(33, 16, bias=False)
    exact(model, PLAN, tp, inputs=X.float())


def test_a1_a_subclass_of_a_layer_is_cut_by_its_tensors():
    """Another class may compute otherwise: its layers are refused by name, its tensors may have rules."""
    model = models.MLP()
    model.fc1, model.fc2 = Own(16, 33), Own(33, 16)
    found = autotp.analyze(model, PLAN, tp=2, inputs=X.float()).diagnostics
    assert [d.code for d in found if d.severity == "error"] == ["AT206", "AT206"]
    cut = {"dim": 0, "style": "column"}
    exact(
        model,
        {"fc1.weight": cut, "fc1.bias": cut, "fc2.weight": {"dim": 1, "style": "row"}},
        2,
        inputs=X.float(),
    )


QKV = {"style": "column", "heads": 3}


@pytest.mark.parametrize(("split", "rule"), [("sections", QKV | {"sections": 3}), ("interleaved", QKV)])
@pytest.mark.parametrize("tp", [2, 3])
def test_a2_fused_attention_in_two_orders(split, rule, tp):
    exact(wrong.Fused(getattr(wrong, split)), {"qkv": rule, "out": "row"}, tp)


@pytest.mark.slow
def test_a2_fused_attention_of_transformers():
    model = build("codegen")
    analysis = autotp.analyze(model, "auto", tp=2)
    assert any("attn" in name for name in analysis.layouts)
    assert models.verified(model, analysis).ok


class Grouped(nn.Module):
    """q, k and v of unequal sizes in one layer, and a gate and an up of 33 features each."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 64), nn.Linear(32, 32)
        self.gate_up, self.down = nn.Linear(32, 66), nn.Linear(33, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split((32, 16, 16), dim=-1)
        q, k, v = (h.unflatten(-1, (-1, 8)).transpose(1, 2) for h in (q, k, v))
        h = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def test_a3_fused_parts_of_unequal_and_of_odd_sizes():
    plan = {
        "qkv": {"style": "column", "sections": [32, 16, 16], "heads": 2},
        "out": "row",
        "gate_up": {"style": "column", "sections": 2},
        "down": "row",
    }
    exact(Grouped(), plan, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "tp"), [(4, 2), (6, 2), (6, 3)])
def test_a4_slopes_of_each_head(heads, tp):
    config = transformers.BloomConfig(vocab_size=97, hidden_size=48, n_layer=1, n_head=heads)
    exact(transformers.BloomForCausalLM(config).eval(), "auto", tp)


@pytest.mark.slow
def test_a5_positions_of_each_head():
    config = transformers.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    analysis = autotp.analyze(model, "auto", tp=2)
    assert analysis.sharded_fraction > 0.5
    assert models.verified(model, analysis).ok


@pytest.mark.parametrize("tp", [2, 3])
def test_a11_a_tied_head_stays_tied(tp):
    plan = {"embed": "vocab", "head": {"style": "column", "gather_output": True}}
    exact(wrong.Tied(), plan, tp, inputs=torch.zeros(3, 5, dtype=torch.long))
    analysis = autotp.analyze(wrong.Tied(), {"embed": "vocab"}, tp=tp, inputs=torch.zeros(3, 5).long())
    assert [d.code for d in analysis.diagnostics if d.severity == "error"] == ["AT211"]


@pytest.mark.slow
def test_a12_routers_and_experts():
    config = transformers.Qwen3MoeConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    exact(transformers.Qwen3MoeForCausalLM(config).eval(), "qwen3_moe", 2)


@pytest.mark.slow
def test_a13_parallel_branches():
    exact(build("gptj"), "auto", 2)


@pytest.mark.slow
def test_a14_a_vocabulary_that_does_not_divide():
    model = models.llama(vocab_size=99, num_hidden_layers=1)
    analysis = autotp.analyze(model, "llama", tp=2)

    def rank(group):
        sharded = apply(copy.deepcopy(model), analysis, group)
        return sharded(input_ids=torch.arange(14).view(2, 7)).logits.shape

    assert simulate(2, rank) == [(2, 7, 99), (2, 7, 99)]
    assert models.verified(model, analysis).ok


def test_a14_a_table_of_49155_rows_over_5_ranks(tmp_path):
    """By the converter, from headers: 9831 rows each, and the same file again."""
    table = torch.arange(49155 * 2, dtype=torch.int32).view(49155, 2)
    source = tmp_path / "in" / "model.safetensors"
    source.parent.mkdir()
    save_file({"embed.weight": table}, source)
    autotp.convert(source.parent, tmp_path / "out", plan={"embed": "vocab"}, tp=5, check="shapes")
    parts = [load_file(f) for f in sorted((tmp_path / "out").rglob("*.safetensors"))]
    assert [len(p["embed.weight"]) for p in parts] == [9831] * 5
    assert torch.equal(torch.cat([p["embed.weight"] for p in parts]), table)
    autotp.merge(tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back" / source.name).read_bytes() == source.read_bytes()


@pytest.mark.slow
def test_b1_fewer_kv_heads_than_ranks():
    exact(models.llama(num_key_value_heads=1, num_hidden_layers=1), "llama", 2)


class Plain(nn.Module):
    """A norm before a column and a row layer, and torch's own attention, left whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), models.MLP()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.mlp(self.norm(x))


def test_b4_tensors_stay_plain():
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def train(model: nn.Module, clip: Any) -> list[float]:
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            clip(model)
            optimizer.step()
            losses.append(loss.item())
        return losses

    def rank(group: Any) -> list[float]:
        sharded = autotp.shard(copy.deepcopy(model), PLAN, group, inputs=x)
        return train(sharded, lambda m: autotp.clip_grad_norm_(m, 0.1))

    model = models.randomised(Plain())
    wanted = train(copy.deepcopy(model), lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1))
    for losses in simulate(2, rank):
        assert losses == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("features", [16, 17])
def test_b5_an_odd_hidden_size(features):
    exact(models.MLP(features, 33), PLAN, 2, inputs=torch.randn(5, features))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("half", "line"),
    [
        ({"down_proj": "row"}, "down_proj: {style: row, split_input: true}"),
        ({"up_proj": "column"}, "up_proj: {style: column, gather_output: true}"),
    ],
)
def test_b6_half_a_pair(half, line):
    model = models.llama(num_hidden_layers=1)
    analysis = autotp.analyze(model, half, tp=2)
    assert not analysis.ok
    assert any(line in help for d in analysis.diagnostics for help in d.help)
    exact(model, autotp.Plan.loads(f"version: 1\nrules:\n  {line}\n"), 2)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_b7_the_class_and_its_kernels_stay(kernel):
    model = models.llama(num_hidden_layers=1, attn_implementation=kernel)
    ids = torch.arange(8).view(2, 4)
    wanted = model.generate(ids, max_new_tokens=4, do_sample=False)

    def rank(group):
        sharded = autotp.shard(copy.deepcopy(model), "llama", group)
        assert isinstance(sharded, transformers.LlamaForCausalLM) and sharded.config.vocab_size == 97
        return sharded.generate(ids, max_new_tokens=4, do_sample=False)

    assert all(torch.equal(found, wanted) for found in simulate(2, rank))


def bytes_held(model: nn.Module) -> int:
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_i2_the_bytes_of_each_rank(tp):
    model = models.llama(num_hidden_layers=1)
    estimated = autotp.analyze(model, "llama", tp=tp).rank_bytes
    held = simulate(
        tp, lambda group: bytes_held(autotp.shard(copy.deepcopy(model), "llama", group, check="shapes"))
    )
    assert held == list(estimated)


def test_i2_a_llama_of_7_billion():
    config = transformers.LlamaConfig(num_hidden_layers=32)  # 32 heads, 11008 features, a head of its own
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    whole = 65 * 4096 + 2 * 64  # norms, and the rotary frequencies, which stand there twice
    matrices = 2 * 32000 * 4096 + 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    for tp in (1, 2, 4, 8):
        estimated = autotp.analyze(model, "llama", tp=tp, check="shapes").rank_bytes
        assert estimated == (4 * (matrices // tp + whole),) * tp


@pytest.mark.slow
def test_i5_saved_after_a_step_it_is_an_ordinary_checkpoint(tmp_path):
    torch.manual_seed(0)
    model = models.llama(num_hidden_layers=1).double()  # Adam makes steps of gradients that are only rounding
    ids = torch.arange(8).view(2, 4)

    def step(model: Any) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    def rank(group: Any) -> None:
        mine = autotp.shard(copy.deepcopy(model), "llama", group)
        step(mine)
        autotp.save_pretrained(mine, tmp_path / "saved")

    simulate(2, rank)
    step(model)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved").eval()
    whole, saved = model.state_dict(), again.state_dict()
    assert list(saved) == list(whole) and all(saved[n].dtype == t.dtype for n, t in whole.items())
    assert torch.allclose(again(input_ids=ids).logits, model.eval()(input_ids=ids).logits, atol=1e-5)
