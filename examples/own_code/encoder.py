"""torch's own encoder: its attention's raw tensors have rules by name, each with its dim."""

import torch
from torch import Tensor, nn


class Encoder(nn.Module):
    def __init__(self, heads: int, layers: int = 1, classes: int = 3) -> None:
        super().__init__()
        width = 4 * heads
        self.embed = nn.Embedding(53, width)
        layer = nn.TransformerEncoderLayer(width, heads, 29, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(ids), src_key_padding_mask=padding)[:, 0])


def plan(heads: int) -> dict[str, object]:
    fused = {"style": "column", "dim": 0, "heads": heads, "sections": 3}
    return {
        "self_attn.in_proj_weight": fused,
        "self_attn.in_proj_bias": fused,
        "self_attn.out_proj.weight": {"style": "row", "dim": 1, "heads": heads},
        "linear1": "column",
        "linear2": "row",
    }


def example(heads: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    return Encoder(heads), (torch.randint(0, 53, (2, 5)), padding)
