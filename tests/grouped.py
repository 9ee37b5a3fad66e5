"""Attention whose query heads share kv heads, written in the ways that need no edit of the source."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["PATHS", "SIZES", "Grouped", "Mixer", "Packed", "attend", "mixer_plan", "plan"]

# (query heads, kv heads, ranks)
SIZES = [(6, 3, 2), (2, 1, 2), (6, 2, 4), (4, 1, 3), (8, 2, 4), (14, 2, 4), (6, 3, 4)]
PATHS = ("enable_gqa", "repeat_interleave", "expand", "grouped", "einsum")


def plan(queries: int, keys: int) -> dict[str, Any]:
    """All that a user writes: how many heads each layer has."""
    column = {n: {"style": "column", "heads": h} for n, h in (("q", queries), ("k", keys), ("v", keys))}
    return {**column, "o": {"style": "row", "heads": queries}}


class Grouped(nn.Module):
    """`path` is how kv heads meet their query heads; every number is read off a tensor. With `scaled` there
    are parameters with a number for each kv head and for each feature of a head."""

    def __init__(
        self,
        queries: int,
        keys: int,
        path: str,
        *,
        head: int = 5,
        width: int = 12,
        scaled: bool = False,
        dropped: float = 0.0,
    ) -> None:
        super().__init__()
        self.head, self.path, self.drop = head, path, nn.Dropout(dropped)
        self.q, self.o = nn.Linear(width, queries * head), nn.Linear(queries * head, width)
        self.k, self.v = nn.Linear(width, keys * head), nn.Linear(width, keys * head)
        self.scale = nn.Parameter(torch.ones(keys, 1, 1)) if scaled else None
        self.feature = nn.Parameter(torch.ones(head)) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        if self.scale is not None and self.feature is not None:
            k, v = k * self.scale * self.feature, v * self.scale
        return self.o(attend(q, self.drop(k), v, self.path).transpose(1, 2).flatten(2))


def attend(q: Tensor, k: Tensor, v: Tensor, path: str) -> Tensor:
    """Attention of q [b, heads, s, d] to k and v [b, kv heads, s, d]."""
    kv, times = k.shape[1], q.shape[1] // k.shape[1]
    if path == "enable_gqa":
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    if path == "repeat_interleave":
        k, v = (y.repeat_interleave(times, 1) for y in (k, v))
        return F.scaled_dot_product_attention(q, k, v)
    if path == "expand":
        k, v = (y[:, :, None].expand(-1, kv, times, -1, -1).flatten(1, 2) for y in (k, v))
        return (q @ k.mT * k.shape[-1] ** -0.5).softmax(-1) @ v
    q = q.unflatten(1, (kv, -1))
    if path == "grouped":
        scores = (q @ k.unsqueeze(2).mT * k.shape[-1] ** -0.5).softmax(-1)
        return (scores @ v.unsqueeze(2)).flatten(1, 2)
    scores = torch.einsum("bunsd,butd->bunst", q, k).mul(k.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("bunst,butd->bunsd", scores, v).flatten(1, 2)


class Packed(nn.Module):
    """Queries and one kv head in one layer, q|k|v; taken apart from the end, where k and v stand."""

    def __init__(self, queries: int, path: str, *, head: int = 4, width: int = 12) -> None:
        super().__init__()
        self.head, self.path = head, path
        self.qkv, self.o = nn.Linear(width, (queries + 2) * head), nn.Linear(queries * head, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.qkv(x).unflatten(-1, (-1, self.head))
        if self.path == "positions":
            q, k, v = h[..., :-2, :], h[..., [-2], :], h[..., [-1], :]
        elif self.path == "slices":
            q, k, v = h[..., :-2, :], h[..., -2:-1, :], h[..., -1:, :]
        else:
            q, k, v = h.split([h.shape[2] - 2, 1, 1], 2)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        return self.o(attend(q, k, v, "enable_gqa").transpose(1, 2).flatten(2))


class Mixer(nn.Module):
    """A state-space mixer in small: z | x | B | C | dt in one layer, x, z and dt by heads, and one B and C
    for all of them; a depthwise convolution over x | B | C."""

    def __init__(self, heads: int, *, head: int = 4, states: int = 5, width: int = 12) -> None:
        super().__init__()
        inner = heads * head
        self.sizes, self.mixed = (inner, inner + 2 * states, heads), (inner, states, states)
        self.head = head
        self.inside, self.out = nn.Linear(width, sum(self.sizes)), nn.Linear(inner, width)
        self.kernel = nn.Parameter(torch.randn(sum(self.mixed), 1, 3))
        self.shift = nn.Parameter(torch.randn(sum(self.mixed)))
        self.step = nn.Parameter(torch.randn(heads))

    def forward(self, x: Tensor) -> Tensor:
        z, mixed, step = self.inside(x).split(self.sizes, dim=-1)
        mixed = mixed.transpose(1, 2)
        mixed = F.silu(F.conv1d(mixed, self.kernel, self.shift, padding=1, groups=mixed.shape[1]))
        h, before, after = mixed.transpose(1, 2).split(self.mixed, dim=-1)
        step = F.softplus(step + self.step)
        scores = torch.einsum("btn,bsn->bts", after, before)
        y = torch.einsum("bts,bshp,bsh->bthp", scores, h.unflatten(-1, (-1, self.head)), step)
        return self.out(y.flatten(2) * F.silu(z))


def mixer_plan(heads: int, *, head: int = 4, states: int = 5) -> dict[str, Any]:
    """The plan of a Mixer: its sections, and how many heads each has."""
    inner = heads * head
    cut = {
        "style": "column",
        "sections": [inner, inner, states, states, heads],
        "heads": [heads, heads, 1, 1, heads],
    }
    mixed = {"style": "column", "dim": 0, "sections": [inner, states, states], "heads": [heads, 1, 1]}
    by_head = {"style": "column", "dim": 0}
    return {
        "inside": cut,
        "kernel": mixed,
        "shift": mixed,
        "step": by_head,
        "out": {"style": "row", "heads": heads},
    }
