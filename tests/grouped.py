"""Attention whose query heads share kv heads, written in the ways that need no edit of the source."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["PATHS", "SIZES", "Grouped", "plan"]

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
