"""Values that meet shards and are used whole as well: each use on a shard has a copy of its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotp
from autotp.comm import simulate
from autotp.diagnostic import PlanError

X = torch.randn(5, 7, 6, generator=torch.Generator().manual_seed(0))
PLAN = {"up": "column", "down": "row"}


class Scaled(nn.Module):
    """One learned number for what is cut and what is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x * self.scale)
        return x + self.down(h.relu() * self.scale) * self.scale


class Drawn(nn.Module):
    """A loss of a pair that is cut is returned, and scales what is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.other, self.down = nn.Linear(6, 7), nn.Linear(6, 7), nn.Linear(7, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.up(x)
        near = F.mse_loss(h, self.other(x))
        return self.down(h.relu() * near), near


class Experts(nn.Module):
    """A router of one's own with a loss that balances it, and a loop over raw experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, 6, 7))
        self.down = nn.Parameter(torch.randn(4, 7, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        odds = self.gate(x).softmax(-1)
        weights, chosen = odds.topk(2, -1)
        out = torch.zeros_like(x)
        for expert in range(4):
            share = ((chosen == expert).to(x.dtype) * weights).sum(-1, keepdim=True)
            out = out + ((x @ self.up[expert]).relu() @ self.down[expert]) * share
        load = F.one_hot(chosen, 4).to(x.dtype).mean((0, 1, 2))
        return out, (load * odds.mean((0, 1))).sum() * 4


class Layers(nn.Module):
    """What a layer gives is reduced at its border, and meets the router of the next as a whole value."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Experts(), Experts()])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, first = self.layers[0](x)
        x, second = self.layers[1](x)
        return x, first + second


MODELS = {
    "scaled": (Scaled, PLAN),
    "drawn": (Drawn, PLAN | {"other": "column"}),
    "experts": (Layers, {"up": {"style": "column", "dim": 2}, "down": {"style": "row", "dim": 1}}),
}


@pytest.mark.parametrize("tp", (2, 3))
@pytest.mark.parametrize("name", MODELS)
def test_both_uses_have_their_gradients(name: str, tp: int) -> None:
    torch.manual_seed(0)
    kind, plan = MODELS[name]
    assert autotp.verify(kind(), plan, tp=tp, inputs=X).ok


def test_another_call_of_such_a_model_is_exact() -> None:
    torch.manual_seed(0)
    model, x = Scaled(), X[:1, :3].clone().requires_grad_()
    (want,) = torch.autograd.grad(model(x).sum(), model.scale)

    def rank(group) -> Tensor:
        torch.manual_seed(0)
        part = autotp.shard(Scaled(), PLAN, group, inputs=X)
        with torch.no_grad():
            part(X[0])
        return torch.autograd.grad(part(x).sum(), part.scale)[0]

    for got in simulate(2, rank):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


class Looped(Scaled):
    """The same expression has a shard in its first turn, and a whole value in the second."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.up, self.down):
            x = layer(x).relu() * self.scale
        return x


SOURCE = """
def forward(self, x):
    return self.down(self.up(x).relu() * self.scale) * self.scale
"""


class Written(Scaled):
    """Its code has no text that could be edited."""

    exec(SOURCE)


@pytest.mark.parametrize("kind", (Looped, Written))
def test_what_cannot_be_told_apart_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(
        PlanError, match=r"(?s)AT305.*use scale on sharded values in an expression of its own"
    ):
        autotp.verify(kind(), PLAN, tp=2, inputs=X)
