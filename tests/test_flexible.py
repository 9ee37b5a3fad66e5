"""Values with one element for all heads: expanded, masked and gated beside shards, exact without an edit."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotp
from autotp.comm import simulate
from autotp.propagate.regions import Region
from tests import architectures
from tests.models import MLP, verified

HEADS, WIDE = 3, 8
X = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0))


class Latent(nn.Module):
    """Attention whose keys have one part for all heads, out of a latent that stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a, self.q_norm, self.q_b = nn.Linear(24, 10), nn.LayerNorm(10), nn.Linear(10, HEADS * WIDE)
        self.kv_a, self.kv_norm, self.kv_b = nn.Linear(24, 10), nn.LayerNorm(6), nn.Linear(6, HEADS * 12)
        self.out = nn.Linear(HEADS * WIDE, 24)

    def keys(self, own: Tensor, shared: Tensor) -> Tensor:
        return torch.cat([own, shared.expand(-1, own.shape[1], -1, -1)], -1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q = self.q_b(self.q_norm(self.q_a(x))).unflatten(-1, (-1, WIDE)).transpose(1, 2)
        latent, shared = self.kv_a(x).split([6, 4], -1)
        kv = self.kv_b(self.kv_norm(latent)).unflatten(-1, (-1, 12)).transpose(1, 2)
        k = self.keys(kv[..., :4], shared[:, None].sin())
        scores = q @ k.transpose(-1, -2) * WIDE**-0.5
        scores = scores if mask is None else scores + mask
        return self.out((scores.softmax(-1) @ kv[..., 4:]).transpose(1, 2).flatten(2))


class Assembled(Latent):
    """The same keys, written into memory that is made for them."""

    def keys(self, own: Tensor, shared: Tensor) -> Tensor:
        k = own.new_empty(*own.shape[:-1], WIDE)
        k[..., :4] = own
        k[..., 4:] = shared
        return k


class Model(nn.Module):
    def __init__(self, attention: type[nn.Module] = Latent) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(24), attention()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x + self.attention(self.norm(x), mask=mask)


UNITS = {"style": "column", "heads": HEADS}
PLAN = {"q_b": UNITS, "kv_b": UNITS, "out": {"style": "row", "heads": HEADS}}


@pytest.mark.parametrize("attention", [Latent, Assembled])
@pytest.mark.parametrize("tp", [2, 3])
def test_a_part_for_all_heads_is_exact(attention, tp):
    result = autotp.verify(Model(attention), PLAN, tp=tp, inputs=X)
    assert result.ok and result.max_grad_diff < 1e-12
    counts = result.collectives[0]
    assert counts["forward"] == {"all-reduce": 1}
    assert counts["backward"] == {"all-reduce": 9}  # what goes in, and four layers' weights and biases


def test_what_goes_in_is_copied_once_and_the_whole_layers_where_they_are_read():
    analysis = autotp.analyze(Model(), PLAN, tp=2, inputs=X)
    assert analysis.regions == (Region("attention", frozenset({"[0][0]"})),)
    assert analysis.uncopied == ("attention.kv_b", "attention.q_b")
    whole = ("q_a", "q_norm", "kv_a", "kv_norm")
    assert {r.name for r in analysis.reads} == {
        f"attention.{n}.{t}" for n in whole for t in ("weight", "bias")
    }
    assert all(r.copied and r.shard is None for r in analysis.reads)


@pytest.mark.parametrize("shape", [(2, 1, 5, 5), (5, 5), (2, 1, 1, 5)])
def test_a_mask_with_a_gradient_is_copied_where_it_comes_in(shape):
    inputs = {"x": X, "mask": torch.randn(shape)}
    analysis = autotp.analyze(Model(), PLAN, tp=2, inputs=inputs)
    assert analysis.regions == (Region("attention", frozenset({"[0][0]", "[1].mask"})),)
    assert verified(Model(), analysis, inputs=inputs).max_grad_diff < 1e-12
    whole = Model()
    expected = whole(X)

    def rank(group):
        model = autotp.shard(copy.deepcopy(whole), PLAN, group, inputs=inputs)
        assert model(X, mask=inputs["mask"]).shape == model(X, inputs["mask"]).shape
        torch.testing.assert_close(model(X), expected, rtol=0, atol=1e-5)  # proven anew, without a mask

    simulate(2, rank)


class Gated(MLP):
    """One gate for all features, of a layer that is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)) * self.gate(x).sigmoid())


class Twice(Gated):
    """The column layer is called on a value that meets shards, and on one that is whole."""

    def forward(self, x: Tensor) -> Tensor:
        inner = super().forward(x)
        return self.fc2(self.fc1(inner))


class Returned(Gated):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.gate(x)


class Scan(MLP):
    """A step after another, each with its own part of a gate for all features, as state spaces have it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        h, gate = F.gelu(self.fc1(x)), self.gate(x)
        state, out = torch.zeros_like(h[:, 0]), []
        for step in range(x.shape[1]):
            state = state * gate[:, step, :1].sigmoid() + h[:, step] * gate[:, step, 1:]
            out.append(state)
        return self.fc2(torch.stack(out, dim=1))


def test_a_value_that_each_step_reads_is_copied_once():
    counts = []
    for steps in (3, 6):
        x = torch.randn(2, steps, 16)
        result = autotp.verify(Scan(), {"fc1": "column", "fc2": "row"}, tp=2, inputs=x)
        assert result.ok and result.max_grad_diff < 1e-12
        counts.append(result.collectives[0])
    assert counts[0] == counts[1]
    assert counts[0]["backward"] == {"all-reduce": 3}  # what goes in; the gate's weight and bias


def test_a_gate_for_all_features_is_exact():
    plan = {"fc1": "column", "fc2": "row"}
    for tp in (2, 3):
        assert autotp.verify(Gated(), plan, tp=tp).max_grad_diff < 1e-12


@pytest.mark.parametrize("model", [Twice, Returned])
def test_a_value_of_two_kinds_is_copied_where_it_meets_a_shard(model):
    assert autotp.verify(model(), {"fc1": "column", "fc2": "row"}, tp=2).max_grad_diff < 1e-12


MLA = {
    "q_b_proj": "column", "kv_b_proj": "column", "o_proj": "row",
    "gate_proj": "column", "up_proj": "column", "down_proj": "row",
    "experts.gate_up_proj": {"style": "column", "dim": 1, "sections": 2, "heads": 8},
    "experts.down_proj": {"style": "row", "dim": 2, "heads": 8},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tp"), [("deepseek_v2", 3)])
def test_latent_attention_of_transformers_is_exact(name, tp):
    result = autotp.verify(architectures.build(name), MLA, tp=tp)
    assert result.ok and result.max_grad_diff < 1e-5  # its norms and router compute in float32
