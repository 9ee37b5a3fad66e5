"""Deriving a plan: what is found on a model's graph, whatever the names are."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import autotp
from autotp import decide
from autotp.comm import simulate
from autotp.derive.derived import derive
from autotp.match import match
from autotp.propagate.engine import propagate
from autotp.trace.inputs import make
from autotp.trace.inventory import inventory
from autotp.trace.layers import Layers
from autotp.trace.modes import capture_modes, modes
from tests import architectures, models
from tests.models import verified
from tests.test_shipped_plans import MODELS

# The families that people use most, and some built otherwise.
FEW = ["llama", "bert", "gpt_neox", "mixtral"]
MORE = [
    "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi", "phi3", "starcoder2", "qwen3_moe", "vit",
    "albert", "modernbert", "cohere", "olmo2", "deepseek_v3", "gpt_oss", "gpt2", "gptj", "bloom", "falcon",
    "opt", "mpt", "stablelm",
]  # fmt: skip


def _shipped(name):
    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    model_class = getattr(transformers, kind)
    return model_class(model_class.config_class(**sizes)).eval()


def _found(model, tp=2, inputs=None):
    """What is derived on the eval trace, and that trace."""
    trace = modes(model, make(model, inputs))[0].capture(model)
    return derive(inventory(model), [trace], tp=tp), trace


def _rules(found):
    return {key: rule.to_data() for key, rule in found.rules.items()}


def _cuts(model, trace, plan, tp=2):
    """Every tensor's cut once the layouts are propagated."""
    stock = inventory(model)
    matches = match(plan, stock, tp)
    assert all(d.severity != "error" for d in matches.diagnostics)
    first = dict(stock.aliases)
    kinds = {t.name: m.kind for m in stock.modules.values() for t in m.tensors.values()}
    cuts = {first.get(n, n): cut for n, cut in matches.layouts.items()}
    whole = propagate(trace, matches, cuts, aliases=first, kinds=kinds, reads={}, regions={})
    assert not whole.findings
    return whole.cuts


@pytest.mark.parametrize("name", [*FEW, *(pytest.param(n, marks=pytest.mark.slow) for n in MORE)])
def test_the_cuts_of_the_shipped_plan(name):
    model = _shipped(name)
    found, trace = _found(model)
    shipped = _cuts(model, trace, autotp.Plan.load(name))
    derived = _cuts(model, trace, found.plan)
    vectors = {
        n for n in shipped if n.endswith("sinks")
    }  # which derive leaves to be sliced where they are read
    assert {n: cut for n, cut in derived.items() if n in shipped} == {
        n: cut for n, cut in shipped.items() if n not in vectors
    }
    # As the plans' comments say: small tables, which would take a sum in every forward; and a pooler.
    assert {n for n in derived if n not in shipped} == BEYOND.get(name, set())


BEYOND = {
    "gpt2": {"transformer.wpe.weight"},
    "opt": {"model.decoder.embed_positions.weight"},
    "bert": {"bert.embeddings.position_embeddings.weight"},
    "albert": {"albert.embeddings.position_embeddings.weight"},
    "vit": {"pooler.dense.weight", "pooler.dense.bias"},
}


ROLES = ("v", "gate", "down", "q", "k", "up", "o", "norm")


class Block(nn.Module):
    """Attention and a gated MLP, each part under a name that the test chooses."""

    def __init__(self, names=ROLES, width=24, heads=6, kv=3, wide=33):
        super().__init__()
        self.heads, self.kv, self.size = heads, kv, width // heads
        self.named = dict(zip(ROLES, names, strict=True))
        shapes = {
            "q": (width, width), "k": (width, kv * self.size), "v": (width, kv * self.size),
            "o": (width, width), "gate": (width, wide), "up": (width, wide), "down": (wide, width),
        }  # fmt: skip
        for role in ROLES:
            made = nn.LayerNorm(width) if role == "norm" else nn.Linear(*shapes[role])
            self.add_module(self.named[role], made)

    def part(self, role):
        return self._modules[self.named[role]]

    def forward(self, x):
        h = self.part("norm")(x)
        q, k, v = (self.part(r)(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for r in "qkv")
        k, v = (t.repeat_interleave(self.heads // self.kv, dim=1) for t in (k, v))
        x = x + self.part("o")(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.part("down")(F.silu(self.part("gate")(x)) * self.part("up")(x))


SAMPLE = torch.zeros(5, 7, 24)
MEGATRON = {
    "q": {"style": "column", "heads": 6},
    **{role: {"style": "column", "heads": 3} for role in "kv"},
    "o": "row",
    "gate": "column",
    "up": "column",
    "down": "row",
}


@pytest.mark.parametrize(
    "names", [ROLES, tuple("abcdefgh"), ("o", "q", "up", "norm", "down", "k", "gate", "v")]
)
def test_names_carry_no_meaning(names):
    found, _ = _found(Block(names), inputs=SAMPLE)
    roles = dict(zip(names, ROLES, strict=True))
    assert {roles[key]: rule for key, rule in _rules(found).items()} == MEGATRON


def _renamed(model):
    """Other names for every module with a name, in place, and the old ones by the new. The models' code still
    says the old ones: properties of classes of the same name give it the modules."""
    names = {}
    for module in [m for m in model.modules() if not isinstance(m, (nn.ModuleDict, nn.ModuleList))]:
        old = {n: names.setdefault(n, f"zz{len(names)}") for n in module._modules if not n.isdigit()}
        module._modules = {old.get(n, n): child for n, child in module._modules.items()}
        kind = type(module)
        found = {n: property(lambda self, new=new: self._modules[new]) for n, new in old.items()}
        if found:
            module.__class__ = type(kind.__name__, (kind,), {**found, "__module__": kind.__module__})
    return {new: n for n, new in names.items()}


RENAMED = ["llama", "bert", "phi3", "t5", "whisper", "falcon", "gpt_oss", "vit"]


@pytest.mark.parametrize(
    "name", ["gpt2", "mixtral", *(pytest.param(n, marks=pytest.mark.slow) for n in RENAMED)]
)
def test_renaming_every_module_changes_nothing(name):
    plain, other = _shipped(name), _shipped(name)
    back = _renamed(other)
    assert len(back) >= 6 and not any(set(n.split(".")) & {*back.values()} for n, _ in other.named_modules())
    cuts = []
    for model in (plain, other):
        found, _ = _found(model)
        cuts.append(match(found.plan, inventory(model), 2).layouts)
    renamed = {".".join(back.get(part, part) for part in n.split(".")): cut for n, cut in cuts[1].items()}
    assert renamed == dict(cuts[0])


def test_layers_under_different_names_are_alike():
    """Without a list there is no number to go by: each layer is found by itself."""
    stack = nn.Sequential()
    for name in ("first", "then", "last"):
        stack.add_module(name, Block(tuple(f"{role}_{name}" for role in ROLES)))
    found, _ = _found(stack, inputs=SAMPLE)
    assert len(found.rules) == 21
    assert {key.partition(".")[2].partition("_")[0] for key in found.rules} == {*MEGATRON}
    numbered, _ = _found(nn.Sequential(*(Block() for _ in range(3))), inputs=SAMPLE)
    assert set(numbered.plan.rules) == {*MEGATRON}
    assert numbered.tries < found.tries


# -- fused forms, found from the op that cannot take them as they are


class Fused(nn.Module):
    """q, k and v in one layer, taken apart in one of several ways."""

    def __init__(self, form, heads=6, size=4):
        super().__init__()
        self.form, self.heads, self.size = form, heads, size
        self.qkv = nn.Linear(24, 3 * heads * size)
        self.out = nn.Linear(heads * size, 24)

    def forward(self, x):
        b, s, _ = x.shape
        qkv, h, d = self.qkv(x), self.heads, self.size
        if self.form == "chunk":
            q, k, v = (t.unflatten(-1, (-1, d)) for t in qkv.chunk(3, dim=-1))
        elif self.form == "slices":
            w = h * d
            q, k, v = (qkv[..., i * w : (i + 1) * w].unflatten(-1, (-1, d)) for i in range(3))
        elif self.form == "view":
            q, k, v = qkv.view(b, s, 3, h, d).unbind(2)
        elif self.form == "permuted":
            q, k, v = (t.transpose(1, 2) for t in qkv.view(b, s, 3, h, d).permute(2, 0, 3, 1, 4))
        else:  # each head has its own q, k and v
            q, k, v = qkv.view(b, s, h, 3, d).unbind(3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        ("chunk", {"style": "column", "sections": 3}),
        ("slices", {"style": "column", "sections": 3}),
        ("view", {"style": "column", "sections": 3}),
        ("permuted", {"style": "column", "sections": 3}),
        ("per head", "column"),
    ],
)
def test_fused_qkv(form, wanted):
    found, _ = _found(Fused(form), inputs=SAMPLE)
    assert _rules(found) == {"qkv": wanted, "out": "row"}


@pytest.mark.parametrize("form", ["chunk", "view", "per head"])
def test_fused_qkv_with_uneven_heads(form):
    found, _ = _found(Fused(form, heads=3, size=8), inputs=SAMPLE)
    rule = found.rules["qkv"]
    assert (rule.heads, rule.sections) == (3, None if form == "per head" else 3)


class Gated(nn.Module):
    """A gate and an up projection in one layer; `pairs`: column by column."""

    def __init__(self, pairs=False, wide=33):
        super().__init__()
        self.pairs = pairs
        self.both = nn.Linear(24, 2 * wide)
        self.down = nn.Linear(wide, 24)

    def forward(self, x):
        both = self.both(x)
        gate, up = (both[..., ::2], both[..., 1::2]) if self.pairs else both.chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def test_fused_gate():
    assert _rules(_found(Gated(), inputs=SAMPLE)[0]) == {
        "both": {"style": "column", "sections": 2},
        "down": "row",
    }
    assert _rules(_found(Gated(pairs=True), inputs=SAMPLE)[0]) == {
        "both": {"style": "column", "heads": 33},
        "down": "row",
    }


class OneKeyHead(nn.Module):
    """Queries, one key head and one value head in one layer, as GPTBigCode has them."""

    def __init__(self, heads=6, size=4):
        super().__init__()
        self.sizes, self.size = (heads * size, size, size), size
        self.qkv, self.out = nn.Linear(24, sum(self.sizes)), nn.Linear(heads * size, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).split(self.sizes, dim=-1)
        q = q.unflatten(-1, (-1, self.size)).transpose(1, 2)
        k, v = k.unsqueeze(1), v.unsqueeze(1)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_a_section_that_every_rank_has():
    found, _ = _found(OneKeyHead(), inputs=SAMPLE)
    rule = found.rules["qkv"]
    assert rule.sections == (24, 4, 4) and rule.heads[1:] == (1, 1)
    for tp in (2, 4):
        result = autotp.verify(OneKeyHead(), "auto", tp=tp, inputs=torch.randn(5, 7, 24))
        assert result.ok and result.state_dict_equal


def test_experts_are_cut_inside_each_expert():
    found, _ = _found(architectures.build("mixtral"))
    experts = {k.rpartition(".")[2]: rule.to_data() for k, rule in found.rules.items() if "experts" in k}
    assert experts == {
        "gate_up_proj": {"style": "column", "sections": 2, "dim": 1},
        "down_proj": {"style": "column", "dim": 2},
    }
    assert [r.name for r in found.whole] == [f"model.layers.{n}.mlp.gate.weight" for n in (0, 1)]
    assert all("softmax" in r.message for r in found.whole)  # a router is whole


# -- where the obvious guess is wrong


class NormedProjection(Block):
    """A norm over the whole query projection: cutting it would change its statistics."""

    def __init__(self):
        super().__init__()
        self.q_norm = nn.LayerNorm(24)

    def forward(self, x):
        h = self.part("norm")(x)
        q = self.q_norm(self.part("q")(h))
        q, k, v = (t.unflatten(-1, (-1, self.size)).transpose(1, 2) for t in (q, self.k(h), self.v(h)))
        k, v = (t.repeat_interleave(self.heads // self.kv, dim=1) for t in (k, v))
        x = x + self.part("o")(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.part("down")(F.silu(self.part("gate")(x)) * self.part("up")(x))


def test_a_norm_over_a_projection_is_cut_with_it():
    analysis = autotp.analyze(NormedProjection(), "auto", tp=2, inputs=SAMPLE)
    assert analysis.ok and analysis.sharded_fraction == 1.0
    assert analysis.plan.rules["q_norm"] == analysis.plan.rules["k"]  # dealt head by head
    assert verified(NormedProjection(), analysis, inputs=SAMPLE).ok


class Latent(nn.Module):
    """A norm between a layer that makes a latent and one that reads it, as latent attention has it."""

    def __init__(self):
        super().__init__()
        self.down, self.norm = nn.Linear(24, 12), nn.RMSNorm(12)
        self.up, self.out = nn.Linear(12, 33), nn.Linear(33, 24)

    def forward(self, x):
        return self.out(self.up(self.norm(self.down(x))).relu())


def test_no_statistics_are_summed_where_what_follows_can_be_cut():
    found, _ = _found(Latent(), inputs=SAMPLE)
    assert _rules(found) == {"up": "column", "out": "row"}
    analysis = autotp.analyze(Latent(), "auto", tp=2, inputs=SAMPLE)
    assert analysis.ok and analysis.plan.rules["down"] == autotp.Rule(style="column", gather_output=True)


def test_the_proof_has_the_last_word():
    """What propagates but is refused by a rank's own trace is left out, the rest stays."""

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(24, 33), nn.Linear(33, 24)

        def forward(self, x):
            h = self.fc1(x).relu()
            return self.fc2(h * float(str(h.shape[-1])) ** -0.5)

    analysis = autotp.analyze(nn.Sequential(Mean(), Block()), "auto", tp=2, inputs=SAMPLE)
    assert analysis.ok and analysis.certainty == "layouts"
    gathered = autotp.Rule(style="column", gather_output=True)
    assert [analysis.plan.rules[f"fc{n}"] for n in (1, 2)] == [gathered, gathered]
    assert len({key.rpartition(".")[0] for key in analysis.layouts}) == 2 + 7


class Nameless(nn.Module):
    """A head called `output`, and a container of that name in each layer: patterns are read from the end."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"output": Block()}) for _ in range(2))
        self.output = nn.Linear(24, 99)

    def forward(self, x):
        for layer in self.layers:
            x = layer["output"](x)
        return self.output(x)


def test_what_no_pattern_names_stays_whole():
    analysis = autotp.analyze(Nameless(), "auto", tp=2, inputs=SAMPLE)
    assert analysis.ok and len(analysis.plan.rules) == 7
    told = {d.module: d.message for d in analysis.diagnostics if d.code == "AT393"}
    assert {*told} == {"output.weight"}
    assert "no pattern names output without naming layers.0.output, too" in told["output.weight"]


class Nested(nn.Module):
    """A layer whose name is the end of another one's: that one gets `replicate`."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"fc1": models.Inverse(24)})
        self.fc1, self.fc2 = nn.Linear(24, 33), nn.Linear(33, 24)

    def forward(self, x):
        return self.fc2(self.fc1(self.inner["fc1"](x)).relu())


def test_a_pattern_that_says_too_much_is_guarded():
    analysis = autotp.analyze(Nested(), "auto", tp=2, inputs=SAMPLE)
    assert analysis.ok
    assert {key: rule.style for key, rule in analysis.plan.rules.items()} == {
        "fc1": "column",
        "fc2": "row",
        "inner.fc1": "replicate",
    }


def test_nothing_to_shard_is_an_error():
    model = nn.Sequential(models.Inverse(8), nn.LayerNorm(8), models.Inverse(8))
    with pytest.raises(autotp.PlanError) as refused:
        autotp.verify(model, "auto", tp=2, inputs=torch.zeros(3, 8))
    (told,) = refused.value.diagnostics
    assert told.code == "AT391"
    assert told.message == '"auto" found nothing to shard: every rank would hold the whole model'
    assert any(re.match(r"\*\.weight: .*linalg_inv", note) for note in told.notes), told.notes
    with pytest.raises(autotp.UsageError, match="the model has no matrix that could be sharded"):
        autotp.analyze(nn.LayerNorm(8), "auto", tp=2, inputs=torch.zeros(3, 8))


def test_auto_needs_the_graph():
    with pytest.raises(autotp.UsageError, match='which check="shapes" leaves out'):
        autotp.analyze(models.MLP(), "auto", tp=2, check="shapes")


# -- tied tensors


class TiedHead(nn.Module):
    def __init__(self, vocabulary=99):
        super().__init__()
        self.table = nn.Embedding(vocabulary, 24)
        self.block = Block()
        self.head = nn.Linear(24, vocabulary, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.block(self.table(ids)))


def test_a_tied_head():
    analysis = autotp.analyze(TiedHead(), "auto", tp=2, inputs=torch.zeros(5, 7, dtype=torch.long))
    assert analysis.ok and analysis.sharded_fraction == 1.0
    rules = {key: rule.to_data() for key, rule in analysis.plan.rules.items()}
    assert rules["table"] == "vocab" and rules["head"] == {"style": "column", "gather_output": True}


def test_functional_weights():
    """A layer's weight that is used outside of its forward is cut as a tensor, with the bias beside it."""
    found, _ = _found(models.Functional(), inputs=torch.zeros(5, 7, 16))
    assert _rules(found) == {
        "fc2": "row",
        "fc1.weight": {"style": "column", "dim": 0},
        "fc1.bias": {"style": "column", "dim": 0},
    }
    assert autotp.verify(models.Functional(), "auto", tp=2, inputs=torch.randn(5, 7, 16)).ok


class TorchAttention(nn.Module):
    """torch's own attention, whose tensors are raw."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(24), nn.MultiheadAttention(24, 6, batch_first=True)

    def forward(self, x):
        return self.norm(x + self.attention(x, x, x, need_weights=False)[0])


def test_attention_of_torch():
    found, _ = _found(TorchAttention(), inputs=SAMPLE)
    assert _rules(found) == {
        "attention.in_proj_weight": {"style": "column", "sections": 3, "dim": 0},
        "attention.out_proj.weight": {"style": "row", "dim": 1},
    }
    assert autotp.verify(TorchAttention(), "auto", tp=4, inputs=torch.randn(2, 5, 24)).ok  # 2 + 2 + 1 + 1


class Positions(nn.Module):
    """Many tokens and a few positions."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(1000, 24), nn.Embedding(8, 24)

    def forward(self, ids):
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))


def test_a_small_table_is_not_worth_a_sum():
    found, _ = _found(Positions(), inputs=torch.zeros(5, 7, dtype=torch.long))
    assert _rules(found) == {"tokens": "vocab"}
    (left,) = found.whole
    assert left.name == "positions.weight" and left.message.startswith("a small table")


class Turned(nn.Module):
    """Heads that a table of positions turns: it is looked up once, and cut before any layer is."""

    def __init__(self, width=24, heads=6):
        super().__init__()
        self.size = width // heads
        self.places = nn.Embedding(32, 2 * self.size)
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(width, width) for name in "qkvo"}) for _ in range(2)
        )

    def forward(self, x):
        with torch.no_grad():  # as of sines
            sin, cos = self.places(torch.arange(x.shape[1])).chunk(2, dim=-1)
        for layer in self.layers:
            q, k, v = (layer[n](x).unflatten(-1, (-1, self.size)).transpose(1, 2) for n in "qkv")
            q, k = (
                h * cos + torch.stack((-h[..., 1::2], h[..., ::2]), -1).reshape_as(h) * sin for h in (q, k)
            )
            x = x + layer["o"](((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x


def test_what_is_cut_already_does_not_count_again():
    """The table that all layers read has its rule: none of them gains by it, and each is found alone."""
    found, _ = _found(Turned(), inputs=SAMPLE)
    for n in (0, 1):
        assert found.groups[f"layers.{n}.q"] == {f"layers.{n}.{m}" for m in "qkvo"}


class Slopes(Block):
    """A table of each head's decay, kept as a buffer, as lightning attention has it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("decay", torch.rand(6, 7, 7))

    def forward(self, x):
        q, k, v = (self.part(r)(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for r in "qkv")
        k, v = (t.repeat_interleave(self.heads // self.kv, dim=1) for t in (k, v))
        return self.part("o")(((q @ k.mT * self.decay) @ v).transpose(1, 2).flatten(2))


def test_a_table_of_the_heads_is_cut_with_them():
    found, _ = _found(Slopes(), inputs=SAMPLE)
    assert _rules(found)["decay"] == {"style": "column", "dim": 0, "heads": 3}


class Product(nn.Linear):
    """A linear layer by hand, as Falcon has it."""

    def forward(self, x):
        return x @ self.weight.T


class Falcon(nn.Module):
    """Layers that are products by hand; what leaves the MLP is a sum that is then written in place."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(Product(24, 33, bias=False), nn.GELU(), Product(33, 24, bias=False))
        self.beside = nn.Linear(24, 24)

    def forward(self, x):
        out = self.mlp(x)
        out += torch.tanh(self.beside(x))
        return x + out


def test_products_by_hand():
    analysis = autotp.analyze(Falcon(), "auto", tp=2, inputs=SAMPLE)
    assert {n: str(cut) for n, cut in analysis.layouts.items() if n.startswith("mlp")} == {
        "mlp.0.weight": "shard(dim 0: 17+16 of 33)",
        "mlp.2.weight": "shard(dim 1: 17+16 of 33)",
    }
    assert autotp.verify(Falcon(), "auto", tp=2, inputs=torch.randn(5, 7, 24)).ok


class ReadsItsTable(TiedHead):
    """The table is also read past the embedding, where it cannot be a vocab layer."""

    def forward(self, ids):
        return self.block(self.table(ids) + self.table.weight.mean())


def test_a_table_that_is_read_beside_its_layer_stays_whole():
    analysis = autotp.analyze(ReadsItsTable(), "auto", tp=2, inputs=torch.zeros(5, 7, dtype=torch.long))
    assert analysis.ok and "table.weight" not in analysis.layouts


# -- numbers


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_it_is_exact(tp):
    """Over 4 ranks the 3 kv heads of the first block are shared."""
    model = models.randomised(nn.Sequential(Block(), Block(kv=6)))
    result = autotp.verify(model, "auto", tp=tp, inputs=torch.randn(2, 5, 24, dtype=torch.float64))
    assert result.ok and result.tolerance <= 1e-9


def test_the_same_on_every_rank():
    plans = {autotp.analyze(Block(), "auto", tp=2, inputs=SAMPLE).plan.dumps() for _ in range(2)}
    assert len(plans) == 1
    (text,) = plans
    assert autotp.Plan.loads(text).dumps() == text


def test_one_rank_takes_the_plan_for_two():
    analysis = autotp.analyze(Block(), "auto", tp=1, inputs=SAMPLE)
    assert analysis.ok and len(analysis.plan.rules) == 7


class MeanBlock(Block):
    """A block beside which a rank's own width would scale a value."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(24, 33), nn.Linear(33, 24)

    def forward(self, x):
        h = self.fc1(x).relu()
        return super().forward(x) + self.fc2(h * float(str(h.shape[-1])) ** -0.5)


class Apart(nn.Module):
    """Layers that look alike, and a matrix that none of them has."""

    def __init__(self, layer):
        super().__init__()
        self.layers, self.odd = nn.ModuleList(layer() for _ in range(3)), nn.Linear(24, 24)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.odd(x).softmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "captures"),
    [(Block, ["repeats"]), (MeanBlock, ["repeats", "every"])],
    ids=["proven", "refused"],
)
def test_layers_that_repeat_are_recorded_once(layer, captures, monkeypatch):
    """And all of them where the first plan is not proven; either way the end is that of whole traces."""
    ran = []

    def noted(model, samples, layers):
        ran.append("repeats" if layers.groups else "every")
        return capture_modes(model, samples, layers)

    monkeypatch.setattr(decide, "capture_modes", noted)
    found = decide.derive_with_proof(Apart(layer), tp=2, inputs=SAMPLE)
    assert ran == captures
    monkeypatch.setattr(decide.Layers, "of", lambda module: Layers())
    whole = decide.derive_with_proof(Apart(layer), tp=2, inputs=SAMPLE)
    assert found[0].ok and found[0].plan == whole[0].plan and found[0].layouts == whole[0].layouts
    assert {r.name for r in found[2].whole} == {r.name for r in whole[2].whole}
    assert {(d.code, d.module) for d in found[0].diagnostics} == {
        (d.code, d.module) for d in whole[0].diagnostics
    }


@pytest.mark.slow
def test_frozen_and_bfloat16_weights_are_cut_alike():
    model = models.randomised(models.llama()).bfloat16()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    wanted = autotp.analyze(models.randomised(models.llama()), "auto", tp=2)
    found = autotp.analyze(model, "auto", tp=2)
    assert found.ok and found.layouts == wanted.layouts
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}

    def parts(group):
        part = autotp.shard(copy.deepcopy(model), "auto", group)
        return [(n, p.dtype, p.requires_grad) for n, p in part.named_parameters()]

    for held in simulate(2, parts):
        assert {n: g for n, _, g in held} == flags and {d for _, d, _ in held} == {torch.bfloat16}
