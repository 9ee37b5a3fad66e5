"""Norms as people write them, over features that may be cut."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """The mean of squares, in double precision inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.bias = nn.Parameter(torch.randn(width))
        self.eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.double()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * x + self.bias).to(dtype)


class BySum(RMSNorm):
    """A sum, divided by the size that the value has."""

    def forward(self, x: Tensor) -> Tensor:
        squares = x.pow(2).sum(-1, keepdim=True) / x.size(-1)
        return self.weight * (x * torch.rsqrt(squares + self.eps)) + self.bias


class ByRoot(RMSNorm):
    """A root of the size, taken on the line before."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.size(-1)
        return self.weight * x / (x.pow(2).sum(-1, keepdim=True).sqrt() * n**-0.5 + self.eps) + self.bias


class LayerNorm(RMSNorm):
    """Two means."""

    def forward(self, x: Tensor) -> Tensor:
        u = x.mean(-1, keepdim=True)
        s = (x - u).pow(2).mean(-1, keepdim=True)
        return self.weight * ((x - u) / torch.sqrt(s + self.eps)) + self.bias


class ByVariance(RMSNorm):
    """A mean and a variance, by a function and a method."""

    def forward(self, x: Tensor) -> Tensor:
        mean = torch.mean(x, dim=-1, keepdim=True)
        spread = x.var(-1, keepdim=True, unbiased=False)
        return self.weight * ((x - mean) / torch.sqrt(spread + self.eps)) + self.bias


class ByDeviation(RMSNorm):
    """The deviation with n - 1 below it, without keepdim."""

    def forward(self, x: Tensor) -> Tensor:
        mean, deviation = x.mean(-1), torch.std(x, dim=-1)
        return self.weight * (x - mean[..., None]) / (deviation.unsqueeze(-1) + self.eps) + self.bias


class Normed(nn.Module):
    """A norm between a column and a row layer; with `parts` the first is a fusion, and the parts multiply."""

    def __init__(self, norm: type[nn.Module], width: int = 8, hidden: int = 7, parts: int = 1) -> None:
        super().__init__()
        self.fc1, self.norm = nn.Linear(width, parts * hidden), norm(parts * hidden)
        self.fc2, self.parts = nn.Linear(hidden, width), parts

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.fc1(x)).tanh()
        first, *more = h.chunk(self.parts, -1)
        for part in more:
            first = first * part
        return self.fc2(first)


def centred(h: Tensor) -> Tensor:
    """Without its mean, by hand."""
    return h - (h.sum(-1) / h.shape[-1])[..., None]


def std(h: Tensor) -> Tensor:
    """Divided by its deviation."""
    return h / h.std(-1, keepdim=True)


def slopes(q: Tensor) -> Tensor:
    """As many slopes as there are heads here."""
    return 2.0 ** -torch.arange(1, q.shape[1] + 1)
