"""Modules of libraries that keep a size of the whole model: heads, groups."""

from __future__ import annotations

import torch
from einops.layers.torch import Rearrange
from torch import Tensor, nn


class Heads(nn.Module):
    """Attention whose heads a module makes, of q, k and v alike."""

    def __init__(self, split: nn.Module, width: int = 15) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.split = split

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(layer(x)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Channels(nn.Module):
    """Something between two layers that works on channels."""

    def __init__(self, between: nn.Module, width: int = 5, channels: int = 15) -> None:
        super().__init__()
        self.up, self.between, self.down = nn.Linear(width, channels), between, nn.Linear(channels, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.between(self.up(x).transpose(1, 2)).transpose(1, 2)))


def unflatten() -> nn.Module:
    """torch's."""
    return Heads(nn.Unflatten(-1, (5, 3)))


def rearrange() -> nn.Module:
    """einops'."""
    return Heads(Rearrange("b n (h d) -> b n h d", h=5))


def depthwise() -> nn.Module:
    """A convolution with a group for each channel."""
    return Channels(nn.Conv1d(15, 15, 3, padding=1, groups=15))


def groups() -> nn.Module:
    """A norm of groups of channels."""
    norm = nn.GroupNorm(5, 15)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return Channels(norm)


def plan(model: nn.Module) -> dict[str, object]:
    """Whole heads, or whole groups."""
    units = {"style": "column", "heads": 5}
    if isinstance(model, Heads):
        return {"q": units, "k": units, "v": units, "out": "row"}
    own = {"style": "column", "dim": 0, "heads": 5}
    return {"up": units, "between.weight": own, "between.bias": own, "down": "row"}
