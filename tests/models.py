"""Models for the tests: small modules, right and wrong to shard, and tiny ones of transformers' classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autotp.analysis import Analysis
from autotp.verification import Verification, compare


def verified(model: nn.Module, analysis: Analysis, *, inputs: Any = None) -> Verification:
    """`autotp.verify` of a plan that is proven already, which takes most of its time."""
    assert analysis.ok, "\n".join(map(str, analysis.diagnostics))
    return compare(model, analysis, inputs=inputs, weights="random", dtype=None)


class MLP(nn.Module):
    """fc1, a function, fc2. The function decides whether `fc1: column, fc2: row` is right."""

    def __init__(
        self, features: int = 16, hidden: int = 33, between: Callable[[Tensor], Tensor] = F.gelu
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, hidden)
        self.fc2 = nn.Linear(hidden, features)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.between(self.fc1(x)))


def softmax(h: Tensor) -> Tensor:
    return h.softmax(-1)


def standardise(h: Tensor) -> Tensor:
    return h - h.mean(-1, keepdim=True)


def cumulate(h: Tensor) -> Tensor:
    return h.cumsum(-1)


def flip(h: Tensor) -> Tensor:
    return h.flip(-1)


class Normed(MLP):
    """A norm over the features between fc1 and fc2."""

    def __init__(self, features: int = 16, hidden: int = 33) -> None:
        super().__init__(features, hidden)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.norm(self.fc1(x)))


class FusedGate(nn.Module):
    """SwiGLU with gate and up in one layer, as Phi-3 has it."""

    def __init__(self, features: int = 16, hidden: int = 33) -> None:
        super().__init__()
        self.gate_up = nn.Linear(features, 2 * hidden)
        self.down = nn.Linear(hidden, features)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Opt(nn.Module):
    """Attention that writes its head count into a view, and leaves the sequence open, as OPT does."""

    def __init__(self, width: int = 48, heads: int = 6) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self.heads, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._heads(layer(x)) for layer in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v)
        return self.out(h.transpose(1, 2).flatten(2))


class Scaled(MLP):
    """Reads a size off a sharded value: the number is another one on a rank."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        return self.fc2(h * h.shape.__getitem__(-1) ** -0.5)  # not as edits know it


class BySize(MLP):
    """Goes another way where a rank's part is small."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        return self.fc2(F.gelu(h) if h.shape[-1] > 20 else h)


class Functional(MLP):
    """Uses a layer's weight without the layer."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(F.linear(x, self.fc1.weight, self.fc1.bias)))


class Learned(MLP):
    """A learned number, the same on every rank, times a sharded value."""

    def __init__(self, features: int = 16, hidden: int = 33) -> None:
        super().__init__(features, hidden)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)) * self.scale)


class LearnedBoth(Learned):
    """The learned number on a whole value, too, in one expression: its gradient is no plain sum."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.fc1, self.fc2):
            x = layer(x * self.scale)
        return x


class PerFeature(MLP):
    """A learned number for each hidden feature, and a table of them in a buffer, left whole by the plan."""

    def __init__(self, features: int = 16, hidden: int = 33) -> None:
        super().__init__(features, hidden)
        self.scale = nn.Parameter(torch.ones(hidden))
        self.register_buffer("offset", torch.linspace(0, 1, hidden), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)) * (1 + self.scale) + self.offset)


class Twice(MLP):
    """The same layers run twice, with a residual in between."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + super().forward(x))


class Dropped(MLP):
    """Dropout on the sharded value, and on the whole one after."""

    def __init__(self, features: int = 16, hidden: int = 33, rate: float = 0.25) -> None:
        super().__init__(features, hidden)
        self.inner, self.outer = nn.Dropout(rate), nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.fc2(self.inner(F.gelu(self.fc1(x)))))


class Mixed(MLP):
    """Dropout on a sharded and on a whole value in one module."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(F.gelu(self.fc1(x)), 0.25, self.training)
        return F.dropout(self.fc2(h), 0.25, self.training)


class Unused(MLP):
    """A layer that no forward runs."""

    def __init__(self, features: int = 16, hidden: int = 33) -> None:
        super().__init__(features, hidden)
        self.spare = nn.Linear(features, hidden)


class InPlace(MLP):
    """Writes a sharded value into a whole buffer."""

    def __init__(self, features: int = 16, hidden: int = 33) -> None:
        super().__init__(features, hidden)
        self.register_buffer("store", torch.zeros(64, hidden))

    def forward(self, x: Tensor) -> Tensor:
        store = self.store[: x.shape[0]]
        store.copy_(self.fc1(x))
        return self.fc2(store)


class Fresh(MLP):
    """Writes a sharded value into memory that it makes, with a size of the whole model."""

    def forward(self, x: Tensor) -> Tensor:
        store = torch.zeros(x.shape[0], 33)
        store.copy_(self.fc1(x))
        return self.fc2(store)


class Inverse(nn.Module):
    """x @ W⁻¹: a matrix of which no part makes a part of the result."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(features) + 0.01 * torch.randn(features, features))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.linalg.inv(self.weight)


def randomised(model: nn.Module, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Every parameter drawn anew: std 0.1, norms in 0.5…1.5, biases not zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            normal = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1
            parameter.copy_(0.5 + drawn if "norm" in name.lower() and name.endswith("weight") else normal)
    return model.to(dtype)


def llama(**changes: object) -> nn.Module:
    """A tiny Llama with grouped heads: 12 query heads, 6 kv heads, odd sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 97, "hidden_size": 48, "intermediate_size": 67, "num_hidden_layers": 2,
        "num_attention_heads": 12, "num_key_value_heads": 6, "max_position_embeddings": 64,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).eval()


def bert(**changes: object) -> nn.Module:
    """A tiny BERT: 12 heads, odd sizes."""
    from transformers import BertConfig, BertModel

    sizes = {
        "vocab_size": 97, "hidden_size": 48, "intermediate_size": 67, "num_hidden_layers": 2,
        "num_attention_heads": 12, "max_position_embeddings": 64,
    }  # fmt: skip
    return BertModel(BertConfig(**{**sizes, **changes})).eval()


def losses(model: nn.Module, ids: Tensor, steps: int) -> list[float]:
    """The losses of steps of AdamW at the next token."""
    optimizer, told = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(steps):
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        told.append(loss.item())
    return told
