"""Models of torch's own attention, encoder and decoder layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 20


class Attention(nn.Module):
    """Attention to the input itself, or to a memory, with the weights of all heads."""

    def __init__(self, heads: int, width: int = WIDTH, **options: Any) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(width, heads, **options)

    def forward(self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> Any:
        if memory is None:
            return x + self.attn(x, x, x, key_padding_mask=mask, need_weights=False)[0]
        y, weights = self.attn(x, memory, memory)
        return x + y, weights


class Encoder(nn.Module):
    """torch's encoder, and a head."""

    def __init__(
        self, heads: int, layer: type[nn.Module] = nn.TransformerEncoderLayer, **options: Any
    ) -> None:
        super().__init__()
        one = layer(WIDTH, heads, 13, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(one, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=padding))


class Decoder(nn.Module):
    """torch's decoder."""

    def __init__(self, heads: int, **options: Any) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, heads, 13, **options), 1)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(x), dtype=x.dtype)
        return self.decoder(x, memory, tgt_mask=mask, tgt_is_causal=True)


class Counting(nn.TransformerEncoderLayer):
    """A layer with a forward of its own around torch's."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs) + 0 * args[0]


def plan(heads: int) -> dict[str, Any]:
    """The rules of one attention: its raw tensors, each with its dim."""
    fused = {"style": "column", "dim": 0, "heads": heads, "sections": 3}
    return {
        "in_proj_weight": fused,
        "in_proj_bias": fused,
        "out_proj.weight": {"style": "row", "dim": 1, "heads": heads},
    }


def randomised(model: nn.Module) -> nn.Module:
    """With biases that are not zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
