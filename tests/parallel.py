"""Blocks whose attention and MLP stand side by side, as people write their sums."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Parallel(nn.Module):
    """Two branches of one input, and the input itself."""

    def __init__(self, width: int = 6, hidden: int = 5, dropout: float = 0.0) -> None:
        super().__init__()
        self.a1, self.a2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.b1, self.b2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def branches(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.dropout(self.a2(self.a1(x).tanh())), self.b2(self.b1(x).relu())

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.branches(x)
        return a + b + x


class Written(Parallel):
    """The sum is written into one of the branches."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.branches(x)
        a += b
        return a + x


class Aliased(Parallel):
    """What is written into has another name."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.branches(x)
        same = a
        a += b
        return a * same.tanh()


class WrittenInto(Parallel):
    """The branches are written into what goes in, which is read again."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.branches(x)
        y = x * 2
        y += a
        return y + b


class ReadTwice(Parallel):
    """One branch is read by itself as well."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.branches(x)
        return (a + b) * torch.sigmoid(b)


class Three(Parallel):
    """Three branches, of which one layer runs twice."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.branches(x)
        return a + b + self.b2(self.b1(x + 1).relu())


class Sometimes(Parallel):
    """Only in training the branches are summed by themselves."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.branches(x)
        return a + b if self.training else a + (x + b)


class Never(Parallel):
    """In training the branches do not meet."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.branches(x)
        return a * b if self.training else a + (x + b)


class Between(Parallel):
    """What goes in is added first, and read once more; it depends on a parameter."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        a, b = self.branches(x)
        h = x + a + b
        return h + x.tanh()


def summed(x: Tensor, y: Tensor) -> Tensor:
    return y + x


class Helped(Parallel):
    """A helper adds what goes in."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.branches(x)
        return summed(x, a) + b


class Branch(nn.Module):
    """One of several that are alike: only the first one is recorded."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.a1, self.a2 = nn.Linear(width, 5), nn.Linear(5, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.a2(self.a1(x).tanh())


class Twins(nn.Module):
    """The sum of branches that repeat one that stands by itself."""

    def __init__(self, first: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.three = Branch(), Branch(), Branch()
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            return self.one(x) + self.two(x) + self.three(x) + x
        return self.one(x).tanh() * x + (self.two(x) + self.three(x))
