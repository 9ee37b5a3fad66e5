"""Models whose forward uses sizes of the whole model, as people write them."""

from __future__ import annotations

import functools

import einops
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.own_code.nanogpt import CausalSelfAttention


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


# -- one way each to write a size of the whole model


def marked(function):
    """A decorator, as libraries put them around methods."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def by_heads(h: Tensor, heads: int) -> Tensor:
    """A helper of which only some callers are given a shard."""
    return h.view(len(h), heads, -1)


def twice_removed(h: Tensor, heads: int) -> Tensor:
    """A helper that calls a helper."""
    return by_heads(h, heads)


class Mixed(nn.Module):
    """Features by heads (`split`, of each subclass), a sum that is different for each head, and back."""

    def __init__(self, heads: int = 3, dim: int = 4) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, heads * dim), nn.Linear(heads * dim, 8)
        self.heads, self.dim = heads, dim

    def forward(self, x: Tensor) -> Tensor:
        h = self.split(self.fc1(x))
        return self.fc2((h - h.mean(-1, keepdim=True)).flatten(1))


class Positional(Mixed):
    def split(self, h):
        return h.view(h.size(0), self.heads, self.dim)


class Square(Mixed):
    """As many heads as a head has features: the place tells them apart, the number does not."""

    def __init__(self):
        super().__init__(3, 3)

    def split(self, h):
        return h.view(h.size(0), self.heads, self.dim).relu()


class Keyword(Mixed):
    def split(self, h):
        return torch.reshape(h, shape=(h.size(0), self.heads, self.dim))


class EarlierLine(Mixed):
    def split(self, h):
        shape = (*h.size()[:-1], self.heads, self.dim)
        return h.view(*shape)


class EarlierList(Mixed):
    def split(self, h):
        shape = [len(h), self.heads, self.dim]
        return h.view(shape)


class Private(Mixed):
    def __init__(self):
        super().__init__()
        self.__heads = self.heads

    def split(self, h):
        return h.view(len(h), self.__heads, 4)


class Computed(Mixed):
    """The head's size comes of the width that is there, and of the head count."""

    def split(self, h):
        batch, width = h.shape
        return h.view(batch, -1, width // self.heads)


class Merged(Mixed):
    """Batch and heads in one dim, and the batch found again."""

    def split(self, h):
        merged = h.view(len(h), self.heads, self.dim).reshape(len(h) * self.heads, self.dim)
        batch = len(merged) // self.heads
        return merged.view(batch, -1, self.dim)


class Checked(Mixed):
    """The model's own checks of a shape, and no op between them."""

    def split(self, h):
        h = h.view(len(h), self.heads, -1)
        if h.shape[1] != self.heads:
            raise ValueError(f"there should be {self.heads} heads, not {h.shape[1]}")
        if h.size() != (len(h), self.heads, self.dim):
            raise ValueError(f"the shape should be {(len(h), self.heads, self.dim)}, and is {h.size()}")
        return h


class CheckedTogether(Mixed):
    """The same of batch and heads in one dim."""

    def split(self, h):
        batch, _ = h.shape
        h = h.view(batch * self.heads, self.dim)
        if h.size() != (batch * self.heads, self.dim):
            raise ValueError(f"the shape should be {(batch * self.heads, self.dim)}, and is {h.size()}")
        return h.view(batch, self.heads, self.dim)


class Comprehension(Mixed):
    def split(self, h):
        (found,) = [part.view(*[len(h), self.heads], self.dim) for part in (h,)]
        return found


class Lambda(Mixed):
    def __init__(self):
        super().__init__()
        self.function = lambda h: h.view(len(h), self.heads, self.dim)

    def split(self, h):
        return self.function(h)


class Helper(Mixed):
    """The helper's other call has a whole value."""

    def split(self, h):
        other = by_heads(torch.ones(len(h), 6), 3)
        return twice_removed(h, self.heads) * other.mean()


class Decorated(Mixed):
    @marked
    @torch.no_grad()
    def twice(self, h):
        return h.view(len(h), self.heads, self.dim) * 2

    @marked
    def split(self, h):
        return h.view(len(h), self.heads, self.dim) + 0 * self.twice(h)


class Static(Mixed):
    @staticmethod
    def by(h, heads):
        return h.view(len(h), heads, -1)

    @classmethod
    def of(cls, h, heads):
        return cls.by(h, heads) if h.dim() == 2 else h

    def split(self, h):
        return self.of(h, self.heads)


class Above(Mixed):
    def split(self, h):
        return h.view(len(h), self.heads, self.dim)


class Super(Above):
    """Its class's own method, and the one above it."""

    def split(self, h):
        return super().split(h) + Above.split(self, h)


class NotSelf(Mixed):
    def split(this, h):
        return h.view(len(h), this.heads, this.dim)


class Names(Mixed):
    """Variables that are called like autotp's wrappers."""

    def split(self, h):
        local, swap = self.heads, 2
        return h.view(len(h), local, self.dim) * swap


class Multiline(Mixed):
    def split(self, h):
        return (
            h.clone()
            .view(
                len(h),
                self.heads,  # a comment
                self.dim,
            )
            .relu()
        )


class Rearranged(Mixed):
    """einops computes for the line that calls it."""

    def split(self, h):
        return einops.rearrange(h, "b (h d) -> b h d", h=self.heads)


class RearrangedByLambda(Mixed):
    """As vit_pytorch has it: a lambda of the forward, which `map` calls."""

    def split(self, h):
        (found,) = map(lambda t: einops.rearrange(t, "b (h d) -> b h d", h=self.heads), (h,))  # noqa: C417
        return found


class Property(Mixed):
    """An op in a property: no call stands where the model's code asks for it."""

    @property
    def gains(self):
        return torch.ones(self.heads, self.dim, dtype=self.fc1.weight.dtype)

    def split(self, h):
        return h.view(len(h), self.heads, self.dim) * self.gains


class Contiguous(Mixed):
    """With one head the value is contiguous already: a rank leaves an op out."""

    def split(self, h):
        turned = h.view(len(h), self.heads, self.dim).transpose(0, 1).contiguous()
        return turned.transpose(0, 1)


class WholeSlice(Mixed):
    """A slice that takes all there is of a rank's part: an alias, which does not show its bound."""

    def split(self, h):
        return h[:, : self.heads * self.dim].view(len(h), -1, self.dim)


class DecidedByValues(Mixed):
    """Rows in parts whose sizes values decide, as experts are given theirs; then a size of the model."""

    def split(self, h):
        even = torch.arange(len(h)) % 2 == 0
        parts = h.split(torch.stack((even.sum(), (~even).sum())).tolist())
        zeros = torch.zeros((len(h), self.heads * self.dim), dtype=h.dtype)
        return zeros.index_add(0, torch.arange(len(h)), torch.cat(parts)).view(len(h), -1, self.dim)


class Directly(nn.Module):
    """A layer whose forward is called past its hooks."""

    def __init__(self):
        super().__init__()
        self.inner = Positional()

    def forward(self, x):
        return self.inner.forward(x)


WAYS: dict[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in (
        Positional, Square, Keyword, EarlierLine, EarlierList, Private, Computed, Merged, Checked,
        Comprehension, Lambda, Helper, Decorated, Static, Super, NotSelf, Names, Multiline, Rearranged,
        RearrangedByLambda, Property, Contiguous, WholeSlice, DecidedByValues, Directly,
    )
}  # fmt: skip


class Branches(Mixed):
    """Other branches than the one that runs: with a size, with a call, and harmless ones."""

    way = "sizes"
    function = staticmethod(by_heads)

    def split(self, h):
        if h.dim() > 2:
            raise ValueError("too many dims")
        if self.way == "sizes":
            return h.view(len(h), self.heads, self.dim)
        elif self.way == "other sizes":
            return h.view(len(h), -1, self.dim)
        if self.way == "call":
            return self.elsewhere(h)
        if self.way == "loop":
            for _ in range(2):
                h = h.view(len(h), self.heads, self.dim)
            return h
        if self.way == "helper":
            return self.function(h, self.heads)
        h = h.relu()
        return h.unsqueeze(1)

    def elsewhere(self, h):
        return h.reshape(len(h), -1, self.dim)


class Chosen(Branches):
    """A function that is chosen at run time."""

    way = "helper"

    def split(self, h):
        return self.function(h, self.heads)
