"""A mixture of experts in two einsums: all experts' weights are one parameter, each expert is cut."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Experts(nn.Module):
    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.w_in = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.w_gate = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.w_out = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        h = F.silu(torch.einsum("btd,edh->bteh", x, self.w_gate)) * torch.einsum(
            "btd,edh->bteh", x, self.w_in
        )
        return torch.einsum("bteh,ehd,bte->btd", h, self.w_out, weights)


class Mixture(nn.Module):
    def __init__(self, heads: int, width: int = 12, experts: int = 3) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(width), Experts(width, 4 * heads, experts)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


def plan(heads: int) -> dict[str, object]:
    return {
        "w_in": {"style": "column", "dim": 2},
        "w_gate": {"style": "column", "dim": 2},
        "w_out": {"style": "row", "dim": 1},
    }


def example(heads: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Mixture(heads), (torch.randn(2, 5, 12),)
