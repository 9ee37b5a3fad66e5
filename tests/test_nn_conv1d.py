"""transformers' Conv1D as a parallel layer: numbers, identity, checkpoints, and what it refuses."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

import autotp
from autotp.checkpoint.load import from_pretrained
from autotp.checkpoint.save import save_pretrained
from autotp.comm import simulate
from autotp.diagnostic import UsageError
from autotp.nn.conv1d import ColumnParallelConv1D, RowParallelConv1D
from autotp.placement import Deal, Shard, deal
from tests import models

PLAN = {"fc": "column", "proj": "row"}
GPT2 = {"mlp.c_fc": "column", "mlp.c_proj": "row"}


class MLP(nn.Module):
    def __init__(self, hidden: int = 33) -> None:
        super().__init__()
        self.fc, self.proj = Conv1D(hidden, 16), Conv1D(16, hidden)

    def forward(self, x):
        return self.proj(torch.tanh(self.fc(x)))


class Fused(nn.Module):
    """Gate and up in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.proj = Conv1D(66, 16), Conv1D(16, 33)

    def forward(self, x):
        gate, up = self.fc(x).chunk(2, -1)
        return self.proj(torch.tanh(gate) * up)


class Pair(nn.Module):
    """Two layers that read one value."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.proj = Conv1D(33, 16), Conv1D(33, 16), Conv1D(16, 33)

    def forward(self, x):
        return self.proj(torch.tanh(self.gate(x)) * self.up(x))


def gpt2():
    sizes = {
        "vocab_size": 97, "n_embd": 48, "n_inner": 67, "n_layer": 1, "n_head": 12, "n_positions": 64,
        "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    return GPT2LMHeadModel(GPT2Config(**sizes)).eval()


WHOLE = {"fc": {"style": "column", "gather_output": True}, "proj": {"style": "row", "split_input": True}}
BLOCKS = {"fc": {"style": "column", "sections": 2, "heads": 11}, "proj": "row"}
CASES = {
    "mlp": (MLP, PLAN),
    "gathered": (MLP, WHOLE),
    "gathered alone": (MLP, {"fc": WHOLE["fc"]}),
    "split alone": (MLP, {"proj": WHOLE["proj"]}),
    "blocks of features": (MLP, {"fc": {"style": "column", "heads": 11}, "proj": "row"}),
    "fused": (Fused, {"fc": {"style": "column", "sections": 2}, "proj": "row"}),
    "fused, in blocks": (Fused, BLOCKS),
}


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_exact(name, tp):
    model, plan = CASES[name]
    inputs = torch.randn(5, 16) if tp == 4 else torch.randn(5, 7, 16)
    result = autotp.verify(model(), plan, tp=tp, inputs=inputs)
    assert result.ok and result.max_grad_diff < 1e-10, str(result)


def test_layers_that_read_one_value_share_its_copy():
    plan = {"gate": "column", "up": "column", "proj": "row"}
    result = autotp.verify(Pair(), plan, tp=2, inputs=torch.randn(5, 16))
    assert result.ok
    assert result.collectives[0] == {"forward": {"all-reduce": 1}, "backward": {"all-reduce": 1}}


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (Fused, {"fc": "column", "proj": "row"}),  # gate|up in one piece
        (MLP, {"fc": "column"}),
        (MLP, {"proj": "row"}),
        (MLP, {"fc": "row", "proj": "column"}),
        (MLP, {"fc": WHOLE["fc"], "proj": "row"}),
        (MLP, {"fc": "column", "proj": WHOLE["proj"]}),
    ],
)
def test_wrong_plans_are_refused(model, plan):
    for tp in (2, 3):
        assert not autotp.analyze(model(), plan, tp=tp, inputs=torch.randn(5, 16)).ok


@pytest.mark.slow
def test_the_mlps_of_gpt2():
    result = autotp.verify(models.randomised(gpt2()), GPT2, tp=3)
    assert result.ok and result.max_grad_diff < 1e-10, str(result)


def step(group):
    model = models.randomised(MLP())
    autotp.shard(model, PLAN, group, inputs=torch.zeros(5, 16, dtype=torch.float64))
    out = model(torch.linspace(-1, 1, 48, dtype=torch.float64).view(3, 16))
    out.square().sum().backward()
    return out.detach(), [p.grad for p in model.parameters()], [tuple(p.shape) for p in model.parameters()]


def on_a_rank(rank, size):
    return step(None)


def test_real_ranks_and_simulated_ones_equal_the_unsharded_layer(ranks):
    whole = models.randomised(MLP())
    out = whole(torch.linspace(-1, 1, 48, dtype=torch.float64).view(3, 16))
    out.square().sum().backward()
    real = ranks(2)(on_a_rank)
    for found, simulated in zip(real, simulate(2, step), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found[1], simulated[1], strict=True))
        assert (found[0] - out).abs().max() < 1e-12
    assert [shapes for _, _, shapes in real] == [
        [(16, 17), (17,), (17, 16), (16,)],
        [(16, 16), (16,), (16, 16), (16,)],
    ]
    first, second = (grads for _, grads, _ in real)
    wanted = [p.grad for p in whole.parameters()]
    for got, want in (
        (torch.cat([first[0], second[0]], 1), wanted[0]),
        (torch.cat([first[1], second[1]]), wanted[1]),
        (torch.cat([first[2], second[2]]), wanted[2]),
        (first[3], wanted[3]),
        (second[3], wanted[3]),
    ):
        assert (got - want).abs().max() < 1e-12


def test_the_layer_stays_itself():
    def rank(group):
        model = models.randomised(MLP())
        layer, weight, calls = model.fc, model.fc.weight, []
        layer.register_forward_hook(lambda *_: calls.append("fc"))
        autotp.shard(model, PLAN, group, inputs=torch.zeros(5, 16, dtype=torch.float64))
        calls.clear()
        model(torch.zeros(5, 16, dtype=torch.float64))
        assert calls == ["fc"] and model.fc is layer and layer.weight is weight and weight.is_contiguous()
        assert isinstance(layer, Conv1D) and (layer.nf, layer.nx) == (33, 16)
        assert repr(layer) == "ColumnParallelConv1D(nf=33, nx=16, tp=2)"
        assert repr(model.proj) == "RowParallelConv1D(nf=16, nx=33, tp=2)"
        x = torch.ones(2, 16, dtype=torch.float64)
        for other in (copy.deepcopy(model.proj), pickle.loads(pickle.dumps(model.proj.state_dict()))):
            assert other is not None
        assert torch.equal(copy.deepcopy(model)(x), model(x))
        with pytest.raises(UsageError, match="ColumnParallelConv1D already"):
            autotp.shard(nn.Sequential(model.fc), {"0": "column"}, group)

    simulate(2, rank)


def test_columns_that_several_ranks_hold_have_their_gradient_summed():
    shared = Shard(1, Deal(2, ((0, 1), (0, 1), (1, 2))))
    x = torch.randn(5, 4, dtype=torch.float64)
    weights = torch.randn(3, 5, 3, dtype=torch.float64)

    def rank(group):
        torch.manual_seed(0)
        layer = Conv1D(6, 4).double()
        whole = layer.weight.detach().clone()
        ColumnParallelConv1D.adopt(layer, shard=shared, group=group)
        start, stop = shared.ranges(6, group.rank)[0]
        layer.weight.data, layer.bias.data = whole[:, start:stop].clone(), layer.bias.data[start:stop].clone()
        (layer(x) * weights[group.rank]).sum().backward()
        return layer.weight.grad, layer.bias.grad

    first, second, third = simulate(3, rank)
    assert torch.allclose(first[0], x.T @ (weights[0] + weights[1])) and torch.equal(first[0], second[0])
    assert torch.allclose(first[1], (weights[0] + weights[1]).sum(0)) and torch.equal(first[1], second[1])
    assert torch.allclose(third[0], x.T @ weights[2])


def test_what_adopt_refuses():
    def message(call):
        with pytest.raises(UsageError) as caught:
            simulate(3, call)
        return str(caught.value)

    shared = Shard(0, Deal(2, ((0, 1), (0, 1), (1, 2))))
    thirds = Shard(1, deal(3, 3))
    assert message(lambda g: ColumnParallelConv1D.adopt(nn.Linear(4, 6), shard=thirds, group=g)) == (
        "ColumnParallelConv1D takes the place of a Conv1D, not of Linear"
    )
    assert message(lambda g: ColumnParallelConv1D.adopt(Conv1D(6, 4), shard=thirds.at(0), group=g)) == (
        "ColumnParallelConv1D: shard(dim 0: 3 equal parts) is no cut of dim 1 of the weight, 6 elements over "
        "3 ranks"
    )
    assert message(lambda g: RowParallelConv1D.adopt(Conv1D(4, 6), shard=shared, group=g)) == (
        "RowParallelConv1D: shard(dim 0: 2 parts, held by 2+1 ranks) gives some rows to several ranks, each "
        "of which would add them to the sum"
    )

    def too_wide(group):
        layer = Conv1D(4, 6)
        RowParallelConv1D.adopt(layer, shard=Shard(0, deal(3, 3)), group=group, input_is_parallel=False)
        layer(torch.zeros(1, 2))

    assert message(too_wide) == (
        "RowParallelConv1D: the input has 2 features, expected 6 of nx=6 on rank 0 of 3 "
        "(input_is_parallel=False)"
    )


@pytest.mark.slow
def test_a_checkpoint_is_sharded_loaded_saved_and_merged(tmp_path):
    model = gpt2()
    model.save_pretrained(tmp_path / "in")
    ids = torch.arange(8)[None]
    wanted = model(ids).logits.detach()
    autotp.convert(tmp_path / "in", tmp_path / "ranks", plan=autotp.Plan(rules=GPT2), tp=2)
    autotp.merge(tmp_path / "ranks", tmp_path / "merged")
    there = (tmp_path / "in" / "model.safetensors").read_bytes()
    assert (tmp_path / "merged" / "model.safetensors").read_bytes() == there

    def run(group):
        loaded = from_pretrained(tmp_path / "ranks", mesh=group, check="shapes")
        assert tuple(loaded.transformer.h[0].mlp.c_fc.weight.shape) == (48, 34 - group.rank)
        assert (loaded(ids).logits - wanted).abs().max() < 1e-5
        save_pretrained(loaded, tmp_path / "out")

    simulate(2, run)
    back = GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert all(torch.equal(back.state_dict()[n], t) for n, t in model.state_dict().items())
