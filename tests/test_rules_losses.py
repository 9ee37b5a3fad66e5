"""Losses of a pair: rules against execution, and models that take them of what is cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotp
from autotp.diagnostic import PlanError
from tests.rules import Case, cut, hold, tensor

GIVEN, WANTED, FEW = tensor(6, 4) / 2, tensor(6, 4, seed=1) / 2, 4
PAIRED: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss, "l1": F.l1_loss, "smooth_l1": F.smooth_l1_loss, "huber": F.huber_loss,
    "binary_cross_entropy": F.binary_cross_entropy, "kl_div": F.kl_div,
    "with_logits": F.binary_cross_entropy_with_logits,
    "soft_margin": lambda x, y, **how: F.soft_margin_loss(x, y.detach(), **how),
}  # fmt: skip
COLUMNS = (cut(1), cut(1))


def pair(name: str, reduction: str) -> Case:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return PAIRED[name](x, y, reduction=reduction)

    return Case(function, (GIVEN, WANTED), few=FEW, tps=(2,), takes=(COLUMNS,))


PAIRS = {f"{name} {how}": pair(name, how) for name in PAIRED for how in ("none", "sum")}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name: str) -> None:
    hold(PAIRS[name])


def test_a_mean_is_not_one_of_a_part() -> None:
    """By itself: the mapping around it is found from the conflict."""
    hold(Case(lambda x, y: F.mse_loss(x, y), (GIVEN, WANTED), few=FEW, never=True))


def test_weights_of_elements_and_of_classes() -> None:
    def function(x: Tensor, y: Tensor, weight: Tensor, positive: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(
            x, y, weight.detach(), reduction="sum", pos_weight=positive.detach()
        )

    inputs = (GIVEN, WANTED, tensor(4), tensor(4, seed=2))
    hold(Case(function, inputs, few=2, tps=(2,), takes=((*COLUMNS, cut(0), cut(0)),)))


class Pair(nn.Module):
    """Two branches that are drawn together, of 7 features."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.loss = loss
        self.one, self.other, self.out = nn.Linear(6, 7), nn.Linear(6, 7), nn.Linear(7, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, g = self.one(x), self.other(x)
        return self.out(h.relu()), self.loss(h, g) * 0.5


def mean(h: Tensor, g: Tensor) -> Tensor:
    return F.smooth_l1_loss(h, g)


def total(h: Tensor, g: Tensor) -> Tensor:
    return F.mse_loss(h, g, reduction="sum")


PLAN = {"one": "column", "other": "column", "out": "row"}
X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("loss", "tp"), ((mean, 2), (mean, 3), (total, 3)))
def test_of_a_pair_that_is_cut(loss: Callable[[Tensor, Tensor], Tensor], tp: int) -> None:
    assert autotp.verify(Pair(loss), PLAN, tp=tp, inputs=X).ok


def test_of_a_pair_of_which_one_is_whole() -> None:
    with pytest.raises(PlanError, match="AT306"):
        autotp.verify(Pair(mean), PLAN | {"other": "replicate"}, tp=2, inputs=X)
