"""A small GPT written with autotp.nn from the start, and trained: the same losses on one rank and on two.

python examples/03_gpt_block.py                              one process, no ranks needed
torchrun --nproc-per-node 2 examples/03_gpt_block.py         two ranks, each with half of every matrix
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from autotp import clip_grad_norm_, initialize, mappings
from autotp.comm import Group, group_of
from autotp.nn import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from autotp.nn.functional import vocab_parallel_cross_entropy
from autotp.random import use_rank_stream

VOCABULARY, WIDTH, HEADS, LENGTH = 101, 64, 4, 16  # 101 does not divide by two: 51 + 50


class Block(nn.Module):
    def __init__(self, group: Group) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        # q, k and v are sections: each is cut by itself, so that a rank holds whole heads of all three
        self.qkv = ColumnParallelLinear(
            WIDTH, 3 * WIDTH, sections=[WIDTH] * 3, gather_output=False, group=group
        )
        self.out = RowParallelLinear(WIDTH, WIDTH, input_is_parallel=True, group=group)
        self.up = ColumnParallelLinear(WIDTH, 4 * WIDTH, gather_output=False, group=group)
        self.down = RowParallelLinear(4 * WIDTH, WIDTH, input_is_parallel=True, group=group)
        self.dropout = nn.Dropout(0.0)
        use_rank_stream(self.dropout, group)  # on a sharded value each rank draws a mask of its own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (  # (batch, heads/tp, length, width/heads)
            part.view(batch, length, -1, WIDTH // HEADS).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(self.dropout(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group
        self.tokens = VocabParallelEmbedding(VOCABULARY, WIDTH, group=group)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(Block(group) for _ in range(2)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.blocks(self.tokens(ids) + self.positions[: ids.shape[1]]))
        # the head is tied to the embedding: its logits are cut as the table is, and stay so
        logits = F.linear(mappings.copy(h, self.group), self.tokens.weight)
        return vocab_parallel_cross_entropy(logits, target, group=self.group, vocab_size=VOCABULARY)


def main() -> None:
    mesh = initialize(tp=2, backend="gloo") if dist.is_torchelastic_launched() else None
    group = group_of(mesh)
    torch.manual_seed(0)  # the same on every rank: masters and replicated parameters are drawn alike
    model = GPT(group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    held = sum(parameter.numel() for parameter in model.parameters())
    print(f"rank {group.rank} of {group.size} holds {held} parameters")
    for step in range(30):
        start = torch.randint(0, VOCABULARY, (8, 1))
        sequence = (start + 7 * torch.arange(LENGTH + 1)) % VOCABULARY  # to be learnt: each is 7 more
        loss = model(sequence[:, :-1], sequence[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        if step % 10 == 9 and group.rank == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
