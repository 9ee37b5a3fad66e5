"""nanoGPT blocks whose code autotp edits, beside the same blocks edited by hand, on two ranks.

Eight blocks of width 256, 8 heads, float32, one thread a rank, the same parallel layers in both: what
differs is where the rank's numbers of heads come from, and that autotp looks at each call before it runs.
One token, where Python's share is largest, and forward + backward of 64 tokens. Medians of interleaved runs,
and of several starts: two models that are the same by hand show the noise, and in one start they differ by up
to 4 %, always the same way.

    python -m benchmarks.edits [runs]
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotp
from benchmarks.interleaved import mean_of, measure, on_ranks

RUNS, STARTS, LIMIT, BLOCKS, WIDTH, HEADS = 151, 5, 1.03, 8, 256, 8
PLAN = {
    "c_attn": {"style": "column", "sections": 3, "heads": HEADS},
    "c_proj": {"style": "row", "heads": HEADS},
    "c_fc": "column",
    "mlp_proj": "row",
}


class Block(nn.Module):
    """Attention and MLP; `n_head` and `n_embd` are those of the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c_fc, self.mlp_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.n_head, self.n_embd = HEADS, WIDTH

    def attended(self, x: Tensor) -> Tensor:
        """As the model's author writes it."""
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        y = F.softmax(scores, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) -> the same."""
        x = x + self.attended(self.ln_1(x))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))


class ByHand(Block):
    """With the rank's numbers written in: `tp` ranks."""

    tp = 1

    def attended(self, x: Tensor) -> Tensor:
        """As a person edits it."""
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd // self.tp, dim=2)
        k = k.view(B, T, self.n_head // self.tp, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head // self.tp, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head // self.tp, C // self.n_head).transpose(1, 2)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        y = F.softmax(scores, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C // self.tp))


def _by_hand(block: nn.Module, tp: int) -> ByHand:
    """A block with the parallel layers and norms of another; the forward around them is the person's."""
    hand = ByHand()
    hand.tp = tp
    for name, layer in block.named_children():
        setattr(hand, name, layer)
    return hand


def work(tp: int, runs: int) -> dict[str, dict[str, dict[str, float]]]:
    """What each way takes on this rank."""
    whole = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    blocks = {"edited": autotp.shard(whole, PLAN, inputs=torch.randn(2, 7, WIDTH))}
    for name in ("by hand", "by hand again"):
        blocks[name] = nn.Sequential(*(_by_hand(block, tp) for block in whole))
    x, one = torch.randn(2, 64, WIDTH, requires_grad=True), torch.randn(2, 1, WIDTH)
    with torch.no_grad():
        for name, block in blocks.items():
            torch.testing.assert_close(block(x), blocks["edited"](x), msg=name)

    def token(block: nn.Module) -> Callable[[], None]:
        def call() -> None:
            with torch.no_grad():
                block(one)

        return call

    def step(block: nn.Module) -> Callable[[], None]:
        return lambda: block(x).sum().backward()

    kinds: dict[str, Callable[[nn.Module], Callable[[], Any]]] = {
        "one token": token,
        "forward + backward": step,
    }
    return {
        kind: measure({name: make(block) for name, block in blocks.items()}, runs, base="by hand")
        for kind, make in kinds.items()
    }


def main(runs: int = RUNS, tp: int = 2) -> int:
    """The table; 1 if the edited model takes more than one by hand."""
    starts, late = [on_ranks(work, tp, runs) for _ in range(STARTS)], []
    told = f"processor time a rank, median of {STARTS} starts, each of {runs} interleaved runs"
    print(f"{BLOCKS} nanoGPT blocks {WIDTH}, tp={tp}: {told}")
    for kind in starts[0][0]:
        seconds = {
            name: [mean_of(ranks, kind, name, "cpu") for ranks in starts] for name in starts[0][0][kind]
        }
        ratios = {
            name: statistics.median(one / hand for one, hand in zip(times, seconds["by hand"], strict=True))
            for name, times in seconds.items()
        }
        for name, ratio in ratios.items():
            cpu = ratio * statistics.median(seconds["by hand"])
            print(f"  {kind:<20} {name:<14} {cpu * 1e3:8.3f} ms  {ratio:.3f} of by hand")
        if ratios["edited"] > LIMIT * max(1.0, ratios["by hand again"]):
            late.append(f"{kind}: edited over {LIMIT} × by hand")
    print("\n".join(late) or "the edits cost nothing")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:2])))
