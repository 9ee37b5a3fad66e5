"""Small models with every kind of cut, for what brings a sharded model back together."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests import edited, models
from tests.test_reads import PLAN
from tests.test_regions import PLAN as RAW
from tests.test_regions import Net


class TiedLanguageModel(nn.Module):
    """A vocabulary that is cut unevenly, and a head that is tied to it."""

    def __init__(self, vocabulary: int = 37, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.mlp = models.MLP(width, 15)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.mlp(self.embed(ids)))


class FunctionalHead(nn.Module):
    """A head of no layer: the weight of the embedding, read past it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 12)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.linear(self.embed(ids).tanh(), self.embed.weight)


X = torch.randn(5, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
IDS = torch.randint(0, 37, (3, 5), generator=torch.Generator().manual_seed(4))

# name: (factory, plan, inputs)
MODELS = {
    "uneven": (models.MLP, PLAN, (X,)),
    "sections": (models.FusedGate, {"gate_up": {"style": "column", "sections": 2}, "down": "row"}, (X,)),
    "reads": (models.PerFeature, PLAN, (X,)),
    "random": (models.Dropped, PLAN, (X,)),
    "raw": (Net, RAW, (X,)),
    "tied, vocabulary": (
        TiedLanguageModel,
        {"embed": "vocab", "head": {"style": "column", "gather_output": True}, "mlp.fc1": "column",
         "mlp.fc2": "row"},
        (IDS,),
    ),
    "edited": (lambda: edited.NanoGPT(heads=3, layers=1), edited.nanogpt_plan(3), (IDS,)),
}  # fmt: skip


def build(name: str, seed: int = 0) -> nn.Module:
    """The model of a name, its weights drawn from `seed`."""
    torch.manual_seed(seed)
    return models.randomised(MODELS[name][0](), seed=seed).eval()


def outcome(model: nn.Module, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of one forward, and every gradient of a weighted sum of it."""
    model.zero_grad()
    out = model(*MODELS[name][2])
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return out.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
