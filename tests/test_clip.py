"""Gradient norms of models with cut and whole parameters equal the unsharded model's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.clip import clip_grad_norm_
from autotp.comm import Group, simulate
from autotp.diagnostic import UsageError
from autotp.nn import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from autotp.placement import Deal, Shard
from tests.test_mappings import randn
from tests.test_nn_linear import close, load, serial

NORMS = [1.0, 2.0, 3.0, float("inf")]


def model_of(group: Group | None) -> nn.Module:
    """Embedding, column, norm, row: uneven parts, whole biases and norms."""
    table = nn.Embedding(11, 6, dtype=torch.float64)
    with torch.no_grad():
        table.weight.copy_(randn(1, 11, 6))
    up, down = serial(6, 9), serial(9, 6)
    norm = nn.LayerNorm(6, dtype=torch.float64)
    if group is None:
        return nn.Sequential(table, norm, up, nn.Tanh(), down)
    f64 = {"dtype": torch.float64, "group": group}
    return nn.Sequential(
        load(VocabParallelEmbedding(11, 6, **f64), table),
        norm,
        load(ColumnParallelLinear(6, 9, gather_output=False, **f64), up),
        nn.Tanh(),
        load(RowParallelLinear(9, 6, input_is_parallel=True, **f64), down),
    )


def clipped(group: Group | None, norm_type: float, max_norm: float) -> list[Tensor]:
    model = model_of(group)
    (model(torch.tensor([[0, 5, 10]])) * randn(2, 1, 3, 6)).sum().backward()
    if group is None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    else:
        norm = clip_grad_norm_(model, max_norm, norm_type)
    return [norm, model[1].weight.grad, model[4].bias.grad]


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_norm_and_scale_are_those_of_the_unsharded_model(run, norm_type: float, max_norm: float) -> None:
    want = clipped(None, norm_type, max_norm)
    for found in run(clipped, norm_type, max_norm):
        close(found, want)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 9), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.tanh(self.fc1(x)))


def sharded_model(group: Group) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = MLP().double(), randn(3, 5, 4)
    if group.size > 1:
        autotp.shard(model, {"fc1": "column", "fc2": "row"}, group, inputs=x)
    model(x).square().sum().backward()
    return [clip_grad_norm_(model, 0.1), model.fc2.bias.grad]


def test_a_model_that_was_sharded(run) -> None:
    want = simulate(1, sharded_model)[0]
    for found in run(sharded_model):
        close(found, want)


def test_elements_that_several_ranks_hold_count_once() -> None:
    def function(group: Group) -> Tensor:
        layer = nn.Linear(3, 4, bias=False, dtype=torch.float64)
        shard = Shard(0, Deal(2, ((0, 1), (0, 1), (1, 2))))
        ColumnParallelLinear.adopt(layer, shard=shard, group=group)
        start, stop = shard.ranges(4, group.rank)[0]
        layer.weight.data = randn(1, 4, 3)[start:stop]
        layer.weight.grad = randn(2, 4, 3)[start:stop]
        return clip_grad_norm_(layer, 1.0)

    for norm in simulate(3, function):
        close(norm, randn(2, 4, 3).norm())


def test_no_gradients_and_wrong_norms() -> None:
    assert clip_grad_norm_(MLP(), 1.0).item() == 0
    with pytest.raises(UsageError) as caught:
        clip_grad_norm_(MLP(), 1.0, 0.0)
    assert str(caught.value) == "clip_grad_norm_: norm_type=0.0 is not a p-norm with p > 0"

    def one_rank_has_none(group: Group) -> float:
        layer = ColumnParallelLinear(2, 2, bias=False, group=group)
        if group.rank == 1:
            layer.weight.grad = torch.full_like(layer.weight, 2.0)
        return clip_grad_norm_(layer, 1.0).item()

    assert simulate(2, one_rank_has_none) == pytest.approx([8**0.5] * 2)


def test_torchs_own_clipping_is_refused_for_parts() -> None:
    def refused(model: nn.Module) -> None:
        with pytest.raises(UsageError) as caught:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert str(caught.value) == (
            "torch's clip_grad_norm_ is given 4 parameters, 3 of which are this rank's parts: each rank "
            "would take another norm, and scale its gradients differently\n"
            "  = help: autotp.clip_grad_norm_(model, max_norm) takes the norm of the whole model"
        )

    def rank(group: Group) -> None:
        model, whole = MLP(), MLP()
        autotp.shard(model, {"fc1": "column", "fc2": "row"}, group)
        refused(model)
        refused(copy.deepcopy(model))
        f64 = {"dtype": torch.float64, "group": group}
        refused(
            nn.Sequential(
                ColumnParallelLinear(6, 9, gather_output=False, **f64),
                RowParallelLinear(9, 6, input_is_parallel=True, **f64),
            )
        )
        with pytest.raises(UsageError, match="1 of which"):
            nn.utils.clip_grad_norm_(model.fc1.weight, 1.0)
        for parameter in (model.fc2.bias, *whole.parameters()):  # what is whole is torch's business
            parameter.grad = torch.ones_like(parameter)
        assert nn.utils.clip_grad_norm_([model.fc2.bias], 1.0).item() == pytest.approx(3**0.5)
        nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        autotp.unshard(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    simulate(2, rank)
    model = autotp.shard(MLP(), {"fc1": "column", "fc2": "row"})
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def test_the_norm_that_torch_takes_of_parts_is_refused() -> None:
    def part(group: Group) -> None:
        model = autotp.shard(MLP(), {"fc1": "column", "fc2": "row"}, group)
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(UsageError) as caught:
            nn.utils.get_total_norm(p.grad for p in model.parameters())
        assert str(caught.value).startswith(
            "torch's get_total_norm is given 4 gradients, 3 of which are this rank's parts: each rank would "
        )
        whole = [model.fc2.bias.grad, torch.ones(3)]
        assert nn.utils.get_total_norm(whole).item() == pytest.approx(torch.cat(whole).norm().item())

    simulate(2, part)
