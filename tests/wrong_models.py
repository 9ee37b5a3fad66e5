"""More models for the refusals: what each does is right unsharded, and wrong on a shard."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import MLP, FusedGate, Opt

# Functions of the features between a column and a row layer.
BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "variance_of_no_name": lambda h: h / (2 * h).var(-1, keepdim=True),
    "topk": lambda h: h * (h >= h.topk(3, -1).values[..., -1:]),
    "argmax": lambda h: h * h.argmax(-1, keepdim=True),
    "sort": lambda h: h.sort(-1).values,
    "roll": lambda h: h.roll(1, -1),
    "cummax": lambda h: h.cummax(-1).values,
    "normalise": lambda h: F.normalize(h, dim=-1),
    "gram": lambda h: (h @ h.mT).softmax(-1) @ h,
    "median": lambda h: h - h.median(-1, keepdim=True).values,
    "feature_positions": lambda h: h * torch.arange(h.shape[-1]),
}


class Fused(nn.Module):
    """Attention with q, k and v in one layer, taken apart by `split`."""

    def __init__(
        self, split: Callable[[Tensor], tuple[Tensor, ...]], width: int = 24, heads: int = 3
    ) -> None:
        super().__init__()
        self.heads, self.split = heads, split
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.split(self.qkv(x)))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def interleaved(h: Tensor) -> tuple[Tensor, ...]:
    """Head by head q, k and v, as GPT-NeoX has it."""
    return h.view(*h.shape[:2], -1, 3 * 8).chunk(3, dim=-1)


def sections(h: Tensor) -> tuple[Tensor, ...]:
    """All of q, all of k, all of v."""
    return tuple(part.unflatten(-1, (-1, 8)) for part in h.chunk(3, dim=-1))


def by_size(h: Tensor) -> tuple[Tensor, ...]:
    """The same, by the size of the whole model."""
    return tuple(part.unflatten(-1, (-1, 8)) for part in h.split(24, dim=-1))


class Sliced(FusedGate):
    """A gate and an up of which the border is written as a number."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.gate_up(x)
        return self.down(F.silu(h[..., :33]) * h[..., 33:])


class Viewed(FusedGate):
    """Gate and up as columns of pairs: the view cuts through both."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).unflatten(-1, (-1, 2)).unbind(-1)
        return self.down(F.silu(gate) * up)


class Raw(nn.Module):
    """A row layer written by hand, and what stands beside its product."""

    def __init__(self, after: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(33, 16)), nn.Parameter(torch.randn(16, 33))
        self.bias, self.after = nn.Parameter(torch.randn(16)), after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(F.gelu(x @ self.w1.T) @ self.w2.T, self.bias, x)


class Residual(Raw):
    """The residual, where every rank adds it."""

    def __init__(self) -> None:
        super().__init__(lambda y, bias, x: y + x)


class Activated(Raw):
    """A function of a sum that is still on the ranks."""

    def __init__(self) -> None:
        super().__init__(lambda y, bias, x: torch.tanh(y))


class Alibi(nn.Module):
    """Attention with slopes by the number of a head, counted from the tensor at hand."""

    def __init__(self, slopes: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(24, 24) for _ in range(4))
        self.slopes = slopes

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        bias = self.slopes(q).view(-1, 1, 1) * torch.arange(x.shape[1])
        return self.out(F.scaled_dot_product_attention(q, k, v, bias.to(q)).transpose(1, 2).flatten(2))


def local_slopes(q: Tensor) -> Tensor:
    """As many slopes as there are heads here: every rank would take the first ones."""
    return 2.0 ** -torch.arange(1, q.shape.__getitem__(1) + 1)  # of no expression that edits know


class Tied(nn.Module):
    """An embedding and a head of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(97, 16), nn.Linear(16, 97, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


class PerHead(nn.Module):
    """Attention with a table of positions, a scale and a sink for each head, and the scales of all heads
    normalised together if `whole`."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.whole = whole
        self.q, self.k, self.v, self.out = (nn.Linear(24, 24) for _ in range(4))
        self.table = nn.Embedding(8, 3)
        self.scale, self.sinks = nn.Parameter(torch.ones(3, 1, 1)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        places = torch.arange(x.shape[1])
        bias = self.table((places[:, None] - places).abs().clamp(max=7)).permute(2, 0, 1)
        scale = self.scale.softmax(0) if self.whole else self.scale
        scores = (q * scale) @ k.mT / math.sqrt(8) + bias
        sinks = self.sinks.view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Tiled(nn.Module):
    """Two kv heads for four query heads, repeated one after the other: heads that no rank holds together."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(32, 32), nn.Linear(32, 32)
        self.k, self.v = nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class OneMask(MLP):
    """A mask that is drawn for all features, on the part of them that a rank has."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.fc1(x))
        return self.fc2(h * (torch.rand(x.shape[0], 33) > 0.5))


class Unseen(MLP):
    """Hands a layer's weight to code that runs no op that could be seen."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x))) + _compiled(self.fc2.weight)


def _compiled(weight: Tensor) -> Tensor:
    with torch.utils._python_dispatch._disable_current_modes():
        return weight.sum(1)


class NormedHeads(Opt):
    """A norm over the whole projection of queries and keys, as OLMo2 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(48), nn.RMSNorm(48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_norm(self.q(x)), self.k_norm(self.k(x)), self.v(x)
        q, k, v = (h.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for h in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class FewHeads(Opt):
    """Two heads, told by the head's size."""

    def __init__(self) -> None:
        super().__init__(heads=2)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
