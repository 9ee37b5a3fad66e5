"""Norms over features that are cut against torch's: outputs, every gradient, uneven parts, half precision."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.comm import Group, simulate
from autotp.diagnostic import UsageError
from autotp.nn import ParallelLayerNorm, ParallelRMSNorm
from autotp.placement import Deal, Shard, deal
from tests.test_mappings import randn

SIZE = 13
KINDS: dict[str, Any] = {
    "layer": (nn.LayerNorm, ParallelLayerNorm, {}),
    "layer, no bias": (nn.LayerNorm, ParallelLayerNorm, {"bias": False}),
    "rms": (nn.RMSNorm, ParallelRMSNorm, {}),
    "rms, eps": (nn.RMSNorm, ParallelRMSNorm, {"eps": 1e-3}),
}


def whole(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    made, _, options = KINDS[name]
    norm = made(SIZE, **options, dtype=dtype)
    with torch.no_grad():
        for seed, parameter in enumerate(norm.parameters()):
            parameter.copy_(1 + randn(seed, SIZE) / 4)
    return norm


def held(shard: Shard, rank: int) -> list[int]:
    """The features of a rank, counted by hand."""
    found, offset = [], 0
    for size, dealt in shard.pieces(SIZE):
        assert dealt is not None
        unit = size // dealt.units
        start, stop = dealt.ranges[rank]
        found += range(offset + start * unit, offset + stop * unit)
        offset += size
    return found


def cut(name: str, group: Group, shard: Shard, dtype: torch.dtype = torch.float64) -> nn.Module:
    norm = whole(name, dtype)
    KINDS[name][1].adopt(norm, shard=shard, group=group)
    for parameter in norm.parameters():
        parameter.data = parameter.data[held(shard, group.rank)].clone()
    return norm


def both(group: Group, name: str, shard: Shard) -> bool:
    """Output, gradients and second gradients of a rank are its part of the whole norm's."""
    mine = held(shard, group.rank)
    x = randn(5, 2, 3, SIZE).add(3).requires_grad_()
    part = x.detach()[..., mine].clone().requires_grad_()
    weight = randn(6, 2, 3, SIZE)
    found = []
    for norm, given, outer in ((whole(name), x, weight), (cut(name, group, shard), part, weight[..., mine])):
        y = norm(given)
        parameters = list(norm.parameters())
        first = torch.autograd.grad((y.sin() * outer).sum(), [given, *parameters], create_graph=True)
        squares = sum((g**2).sum() for g in first[:1])
        found.append([y, *first, *torch.autograd.grad(squares, [given, *parameters[:1]])])
    return all(torch.allclose(a[..., mine], b, rtol=1e-11, atol=1e-11) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", KINDS)
def test_a_rank_has_its_part_of_the_whole(run, name):
    assert all(run(both, name, Shard(0, deal(SIZE, run.size))))


def test_features_of_two_sections():
    shard = Shard(0, sections=((9, deal(3, 2)), (4, deal(4, 2))))
    assert all(simulate(2, lambda group: both(group, "layer", shard)))


def far(group: Group, name: str) -> tuple[Tensor, Tensor]:
    """Values with a mean that is large beside their deviation, in bfloat16."""
    mine = held(Shard(0, deal(SIZE, 2)), group.rank)
    x = (randn(7, 4, SIZE) + 8).bfloat16()
    y = cut(name, group, Shard(0, deal(SIZE, 2)), torch.bfloat16)(x[:, mine].contiguous())
    return y, whole(name, torch.bfloat16)(x)[:, mine]


@pytest.mark.parametrize("name", ["layer", "rms"])
def test_half_precision_is_computed_as_torch_does(name):
    for got, want in simulate(2, lambda group: far(group, name)):
        assert got.dtype == want.dtype == torch.bfloat16
        torch.testing.assert_close(got, want, rtol=1.6e-2, atol=1e-2)


def test_copies_and_files_keep_it():
    def rank(group: Group) -> bool:
        shard = Shard(0, deal(SIZE, 2))
        norm, x = cut("layer", group, shard), randn(1, 2, len(held(shard, group.rank)))
        return torch.equal(norm(x), copy.deepcopy(norm)(x))

    assert all(simulate(2, rank))
    alone = whole("rms")
    ParallelRMSNorm.adopt(alone, shard=Shard(0, deal(SIZE, 1)), group=None)
    x = randn(2, 3, SIZE)
    assert torch.equal(pickle.loads(pickle.dumps(alone))(x), whole("rms")(x))


@pytest.mark.parametrize(
    ("norm", "shard", "said"),
    [
        (nn.RMSNorm(4), Shard(0, deal(4, 1)), "takes the place of an LayerNorm, not of RMSNorm"),
        (nn.LayerNorm((2, 4)), Shard(0, deal(4, 1)), r"not one over \[2, 4\]"),
        (nn.LayerNorm(4, elementwise_affine=False), Shard(0, deal(4, 1)), "without a weight"),
        (nn.LayerNorm(4), Shard(1, deal(4, 1)), "is no cut of 4 features over 1 ranks"),
        (nn.LayerNorm(4), Shard(0, deal(4, 2)), "is no cut of 4 features over 1 ranks"),
        (nn.LayerNorm(4), Shard(0, Deal(2, ((0, 1), (0, 1)))), "is no cut of 4 features"),
    ],
)
def test_what_cannot_be_cut_stays_as_it_was(norm, shard, said):
    kind = type(norm)
    with pytest.raises(UsageError, match=said):
        ParallelLayerNorm.adopt(norm, shard=shard, group=None)
    assert type(norm) is kind


class Model(nn.Module):
    """A norm over the features of a column layer, as OLMo 2 has over its queries."""

    def __init__(self, norm: nn.Module, hidden: int = 33) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(16, hidden), norm, nn.Linear(hidden, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.tanh(self.norm(self.fc1(x))))


PLAN = {"fc1": "column", "norm": "column", "fc2": "row"}


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_model_with_a_norm_over_its_shards_is_exact(norm, tp):
    result = autotp.verify(Model(norm(33)), PLAN, tp=tp)
    assert result.ok and result.max_grad_diff < 1e-12
    statistics = 2 if norm is nn.LayerNorm else 1
    assert result.collectives[0] == {
        "forward": {"all-reduce": 1 + statistics},
        "backward": {"all-reduce": 1 + statistics},
    }
    analysis = autotp.analyze(Model(norm(33)), PLAN, tp=tp)
    counted = [c.direction for c in analysis.collectives for _ in range(c.calls)]
    assert counted.count("forward") == counted.count("backward") == 1 + statistics


@pytest.mark.parametrize(
    ("plan", "code"),
    [
        ({"fc1": "column", "fc2": "row"}, "AT303"),  # the statistics are communicated: that needs a rule
        ({"norm": "column", "fc2": {"style": "column", "gather_output": True}}, "AT307"),
        ({**PLAN, "fc1": {"style": "column", "heads": 3}}, "AT307"),
        ({**PLAN, "norm": {"style": "column", "gather_output": True}}, "AT207"),
        ({**PLAN, "norm": "row"}, "AT206"),
    ],
)
def test_a_plan_that_does_not_fit_the_norm_is_refused(plan, code):
    analysis = autotp.analyze(Model(nn.LayerNorm(33)), plan, tp=2)
    assert code in {d.code for d in analysis.diagnostics if d.severity == "error"}


def test_a_group_norm_is_no_norm_of_features():
    class Grouped(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(self.norm(self.fc1(x)))

    analysis = autotp.analyze(Grouped(nn.GroupNorm(3, 33)), PLAN, tp=3)
    assert "AT206" in {d.code for d in analysis.diagnostics if d.severity == "error"}
