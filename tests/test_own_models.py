"""Models as people write them, with `"auto"`: five steps of AdamW at tp 2 give the losses of one process."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autotp
from autotp.comm import simulate
from autotp.rewrite.apply import apply, sharded
from tests import edited
from tests.models import losses, randomised

IDS = torch.randint(0, 53, (3, 7), generator=torch.Generator().manual_seed(5))


class RMSNorm(nn.Module):
    """By hand, as llama2.c has it."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    """Queries in groups, rotated, normalised over the whole projection; `cross` keys and values are given."""

    def __init__(self, width, heads, kv):
        super().__init__()
        self.heads, self.kv, self.size = heads, kv, width // heads
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = (nn.Linear(width, kv * self.size, bias=False) for _ in range(2))
        self.q_norm = RMSNorm(width)

    def forward(self, x):
        b, t, c = x.shape
        q = self.q_norm(self.wq(x)).view(b, t, self.heads, self.size)
        k, v = (w(x).view(b, t, self.kv, self.size) for w in (self.wk, self.wv))
        k, v = (h[:, :, :, None].expand(b, t, self.kv, self.heads // self.kv, self.size) for h in (k, v))
        k, v = (h.reshape(b, t, self.heads, self.size).transpose(1, 2) for h in (k, v))
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(b, t, c))


class Decoder(nn.Module):
    """Like llama2.c: gated MLP, norms by hand, a head tied by assignment."""

    def __init__(self, width=48, heads=6, kv=3, wide=67):
        super().__init__()
        self.tok = nn.Embedding(53, width)
        self.att = nn.ModuleList(Attention(width, heads, kv) for _ in range(2))
        self.w1, self.w3 = (nn.ModuleList(nn.Linear(width, wide, bias=False) for _ in range(2)) for _ in "12")
        self.w2 = nn.ModuleList(nn.Linear(wide, width, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(5))
        self.output = nn.Linear(width, 53, bias=False)
        self.output.weight = self.tok.weight

    def forward(self, ids):
        x = self.tok(ids)
        for n in range(2):
            x = x + self.att[n](self.norms[2 * n](x))
            h = self.norms[2 * n + 1](x)
            x = x + self.w2[n](F.silu(self.w1[n](h)) * self.w3[n](h))
        return self.output(self.norms[4](x))


@pytest.mark.parametrize("build", [edited.NanoGPT, pytest.param(Decoder, marks=pytest.mark.slow)])
def test_five_steps_with_auto(build):
    model = randomised(build())
    analysis = autotp.analyze(model, "auto", tp=2, inputs=IDS)
    copies = [copy.deepcopy(model) for _ in range(2)]

    def rank(group):
        mine = apply(copies[group.rank], analysis, group)
        return losses(mine, IDS, 5), set(sharded(mine).layouts)

    wanted, matrices = losses(model, IDS, 5), {n for n, p in model.named_parameters() if p.dim() > 1}
    for told, cut in simulate(2, rank):
        assert told == pytest.approx(wanted, abs=1e-10)
        assert matrices <= cut


def test_renaming_every_module_changes_nothing(tmp_path, monkeypatch):
    """The models' own text, with other names for all modules and parameters."""
    names = [
        "c_attn",
        "c_proj",
        "ln_1",
        "ln_2",
        "attn",
        "c_fc",
        "mlp_proj",
        "wte",
        "wpe",
        "blocks",
        "ln_f",
        "lm_head",
    ]
    others = {name: f"zz{n}" for n, name in enumerate(names)}
    pieces = (edited.CausalSelfAttention, edited.Block, edited.NanoGPT)
    text = "\n".join(map(inspect.getsource, pieces))
    for name, other in others.items():
        text = re.sub(rf"\b{name}\b", other, text)
    head = "import math\nimport torch\nimport torch.nn.functional as F\nfrom torch import Tensor, nn\n\n"
    (tmp_path / "renamed_models.py").write_text(head + text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "renamed_models", raising=False)
    renamed = importlib.import_module("renamed_models").NanoGPT()
    plain, other = (autotp.analyze(m, "auto", tp=2, inputs=IDS) for m in (edited.NanoGPT(), renamed))
    assert plain.ok and other.ok and plain.sharded_fraction == other.sharded_fraction == 1.0

    def back(pattern):
        return ".".join({new: old for old, new in others.items()}.get(p, p) for p in pattern.split("."))

    assert {back(p): rule for p, rule in other.plan.rules.items()} == dict(plain.plan.rules)
