"""Models whose forward uses sizes of the whole model, as people write them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CausalSelfAttention(nn.Module):
    """Fused q, k and v; the head count and the width are written into the views."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.n_head, self.n_embd = heads, width

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(torch.ones(T, T, dtype=torch.bool).tril().logical_not(), float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class Block(nn.Module):
    """Norm, attention, norm, MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads)
        self.c_fc, self.mlp_proj = nn.Linear(width, 37), nn.Linear(37, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    """A decoder with a tied head."""

    def __init__(self, heads: int = 6, layers: int = 2, vocab: int = 53) -> None:
        super().__init__()
        width = 8 * heads
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def nanogpt_plan(heads: int) -> dict[str, object]:
    """The plan of `NanoGPT`."""
    return {
        "c_attn": {"style": "column", "sections": 3, "heads": heads},
        "attn.c_proj": {"style": "row", "heads": heads},
        "c_fc": "column",
        "mlp_proj": "row",
        "wte": "vocab",
        "lm_head": {"style": "column", "gather_output": True},
    }


class TwoNeeds(nn.Module):
    """One expression sees a sharded value and a whole one, each of 4 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.other = nn.Linear(16, 32), nn.Linear(16, 32)
        self.fc2 = nn.Linear(32, 16)
        self.heads = 4

    def forward(self, x: Tensor) -> Tensor:
        seen = [layer(x).view(len(x), self.heads, -1) for layer in (self.fc1, self.other)]
        return self.fc2(seen[0].flatten(1)) + seen[1].mean((1, 2), keepdim=False)[:, None]
