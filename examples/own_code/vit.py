"""A vision transformer with einops: patches, one layer for q, k and v, heads by name."""

import torch
from einops import rearrange
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.norm = nn.LayerNorm(width)
        self.to_qkv = nn.Linear(width, 3 * width, bias=False)
        self.to_out = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.heads) for t in qkv)
        attention = (q @ k.transpose(-1, -2) * self.scale).softmax(dim=-1)
        return self.to_out(rearrange(attention @ v, "b h n d -> b n (h d)"))


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class ViT(nn.Module):
    def __init__(self, heads: int, patch: int = 4, layers: int = 1, classes: int = 3) -> None:
        super().__init__()
        width = 4 * heads
        self.patch = patch
        self.embed = nn.Linear(3 * patch * patch, width)
        self.cls = nn.Parameter(torch.randn(1, 1, width))
        self.layers = nn.ModuleList(
            nn.ModuleList([Attention(width, heads), FeedForward(width, 29)]) for _ in range(layers)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, image: Tensor) -> Tensor:
        p = self.patch
        x = self.embed(rearrange(image, "b c (h p) (w q) -> b (h w) (p q c)", p=p, q=p))
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1)
        for attention, feed_forward in self.layers:
            x = x + attention(x)
            x = x + feed_forward(x)
        return self.head(x[:, 0])


def plan(heads: int) -> dict[str, object]:
    return {
        "to_qkv": {"style": "column", "heads": heads, "sections": 3},
        "to_out.0": {"style": "row", "heads": heads},
        "net.1": "column",
        "net.3": "row",
    }


def example(heads: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return ViT(heads), (torch.randn(2, 3, 8, 8),)
