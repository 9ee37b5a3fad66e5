"""A model in the manner of Whisper: audio in, text out, and a head that is the embedding's weight, turned."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MultiHeadAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n_head = heads
        self.query, self.value, self.out = (nn.Linear(width, width) for _ in range(3))
        self.key = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, xa: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        q = self.query(x)
        k = self.key(x if xa is None else xa)
        v = self.value(x if xa is None else xa)
        return self.out(self.qkv_attention(q, k, v, mask))

    def qkv_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        _, n_ctx, n_state = q.shape
        scale = (n_state // self.n_head) ** -0.25
        q = q.view(*q.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)
        k = k.view(*k.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)
        v = v.view(*v.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)
        qk = (q * scale) @ (k * scale).transpose(-1, -2)
        if mask is not None:
            qk = qk + mask[:n_ctx, :n_ctx]
        return (F.softmax(qk, dim=-1) @ v).permute(0, 2, 1, 3).flatten(start_dim=2)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, cross: bool) -> None:
        super().__init__()
        self.attn, self.attn_ln = MultiHeadAttention(width, heads), nn.LayerNorm(width)
        self.cross_attn = MultiHeadAttention(width, heads) if cross else None
        self.cross_attn_ln = nn.LayerNorm(width) if cross else None
        self.mlp = nn.Sequential(nn.Linear(width, 29), nn.GELU(), nn.Linear(29, width))
        self.mlp_ln = nn.LayerNorm(width)

    def forward(self, x: Tensor, xa: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.attn_ln(x), mask=mask)
        if self.cross_attn:
            x = x + self.cross_attn(self.cross_attn_ln(x), xa)
        return x + self.mlp(self.mlp_ln(x))


class TextDecoder(nn.Module):
    def __init__(self, width: int, heads: int, vocabulary: int, context: int = 16) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.positional_embedding = nn.Parameter(torch.randn(context, width) * 0.1)
        self.blocks = nn.ModuleList(Block(width, heads, cross=True) for _ in range(1))
        self.ln = nn.LayerNorm(width)
        self.register_buffer("mask", torch.full((context, context), float("-inf")).triu_(1), persistent=False)

    def forward(self, x: Tensor, xa: Tensor) -> Tensor:
        x = self.token_embedding(x) + self.positional_embedding[: x.shape[-1]]
        for block in self.blocks:
            x = block(x, xa, mask=self.mask)
        x = self.ln(x)
        return x @ torch.transpose(self.token_embedding.weight.to(x.dtype), 0, 1)


class Whisper(nn.Module):
    def __init__(self, heads: int, mels: int = 5, vocabulary: int = 53) -> None:
        super().__init__()
        width = 4 * heads
        self.conv = nn.Conv1d(mels, width, kernel_size=3, padding=1)
        self.encoder = nn.ModuleList(Block(width, heads, cross=False) for _ in range(1))
        self.decoder = TextDecoder(width, heads, vocabulary)

    def forward(self, mel: Tensor, tokens: Tensor) -> Tensor:
        xa = F.gelu(self.conv(mel)).permute(0, 2, 1)
        for block in self.encoder:
            xa = block(xa)
        return self.decoder(tokens, xa)


def plan(heads: int) -> dict[str, object]:
    by_head = {"style": "column", "heads": heads}
    return {
        "decoder.token_embedding": "vocab",
        "query": by_head,
        "key": by_head,
        "value": by_head,
        "out": {"style": "row", "heads": heads},
        "mlp.0": "column",
        "mlp.2": "row",
    }


def example(heads: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Whisper(heads), (torch.randn(2, 5, 7), torch.randint(0, 53, (2, 4)))
