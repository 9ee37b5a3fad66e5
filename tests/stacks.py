"""Stacks of layers that look alike."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Block(nn.Module):
    """Two linear layers and a residual; further settings become attributes."""

    def __init__(self, index: int = 0, width: int = 4, **settings: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(4, width)
        self.out = nn.Linear(width, 4)
        self.layer_idx = index
        for name, value in settings.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.fc(x))


class Stack(nn.Module):
    """Layers one after the other, and a head."""

    def __init__(self, blocks: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
