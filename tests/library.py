"""Modules of libraries that keep a size of the whole model: heads, groups."""

from __future__ import annotations

import torch
from einops.layers.torch import Rearrange, Reduce
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


class Images(nn.Module):
    """Convolutions of 5 groups of 3 channels."""

    def __init__(self, kind: type[nn.Module], between: int) -> None:
        super().__init__()
        self.up, self.down = kind(3, 15, 1), kind(15, 4, 1)
        self.between = kind(15, 15, 3, padding=1, groups=between)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.between(self.up(x))))


class Pooled(nn.Module):
    """What is reduced of heads, or of each head."""

    def __init__(self, kept: str, how: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 15), nn.Linear(5 if kept == "h" else 3, 4)
        self.pool = Reduce(f"b n (h d) -> b n {kept}", how, h=5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.pool(self.up(x)))


def plan(model: nn.Module) -> dict[str, object]:
    """Whole heads, or whole groups."""
    units = {"style": "column", "heads": 5}
    if isinstance(model, Heads):
        return {"q": units, "k": units, "v": units, "out": "row"}
    if isinstance(model, Pooled):
        return {"up": units, "down": "row" if model.down.in_features == 5 else "replicate"}
    own = {"style": "column", "dim": 0, "heads": 5}
    if isinstance(model, Images):
        names = [f"{layer}.{name}" for layer in ("up", "between") for name in ("weight", "bias")]
        return dict.fromkeys(names, own) | {"down.weight": {"style": "row", "dim": 1, "heads": 5}}
    return {"up": units, "between.weight": own, "between.bias": own, "down": "row"}
