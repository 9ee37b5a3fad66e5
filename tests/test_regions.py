"""Modules that own raw sharded tensors: mappings at their border, found by the proof."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotp
from autotp.comm import GroupOfOne, simulate
from autotp.diagnostic import errors
from autotp.propagate.reads import Read
from autotp.propagate.regions import Region
from autotp.rewrite.specialise import _mapped, _Own
from autotp.verification import compare
from tests.models import verified

PLAN = {
    "raw.w1": {"style": "column", "dim": 0},
    "raw.b1": {"style": "column", "dim": 0},
    "raw.w2": {"style": "row", "dim": 1},
}


class Raw(nn.Module):
    """An MLP written with raw parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(33, 16))
        self.b1 = nn.Parameter(torch.randn(33))
        self.w2 = nn.Parameter(torch.randn(16, 33))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return F.gelu(F.linear(x, self.w1, self.b1)) @ self.w2.T * scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pre, self.gate, self.raw, self.post = (
            nn.Linear(16, 16),
            nn.Linear(16, 1),
            Raw(),
            nn.Linear(16, 16),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.pre(x)
        return self.post(h + self.raw(h, scale=self.gate(h).sigmoid()))


class Around(Net):
    """Hands the raw module a value past its border."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.pre(x)
        self.raw.extra = h
        return self.post(self.raw(h, self.gate(h)))


class Peeking(Raw):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return F.gelu(F.linear(self.extra, self.w1, self.b1)) @ self.w2.T * scale


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_borders_are_found_and_exact(tp):
    analysis = autotp.analyze(Net(), PLAN, tp=tp)
    assert analysis.regions == (Region("raw", frozenset({"[0][0]", "[1].scale"}), frozenset({""})),)
    result = verified(Net(), analysis)
    assert result.ok and result.max_grad_diff < 1e-12
    assert result.collectives[0] == {"forward": {"all-reduce": 1}, "backward": {"all-reduce": 2}}


def test_a_value_that_comes_past_the_border_is_refused():
    model = Around()
    model.raw.__class__ = Peeking
    analysis = autotp.analyze(model, PLAN, tp=2)
    assert [d.code for d in analysis.diagnostics if d.severity == "error"] == ["AT319"]


class After(nn.Module):
    """An output projection right after the raw module, and another raw module right after that."""

    def __init__(self, between) -> None:
        super().__init__()
        self.one, self.two, self.between = Raw(), Raw(), between

    def forward(self, x: Tensor) -> Tensor:
        one = self.one(x, torch.ones(()))
        return self.two(one if self.between is None else self.between(one), torch.ones(()))


@pytest.mark.parametrize("between", [lambda: nn.Linear(16, 16), lambda: None])
def test_a_sum_is_reduced_before_the_next_layer(between):
    plan = {p.replace("raw.", ""): rule for p, rule in PLAN.items()}
    model, inputs = After(between()), torch.randn(5, 16)
    if model.between is not None:
        plan["between"] = {"style": "column", "gather_output": True}
    analysis = autotp.analyze(model, plan, tp=2, inputs=inputs)
    assert {r.path: r.reduced for r in analysis.regions} == {"one": {""}, "two": {""}}
    assert verified(model, analysis, inputs=inputs).ok


class Matrix(nn.Module):
    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, features))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Gated(nn.Module):
    """Two modules with a raw matrix each; a gate, computed from what the first one is given, multiplies the
    sum that the second one leaves: so the module around them is a region, too."""

    def __init__(self, between) -> None:
        super().__init__()
        self.up, self.down, self.gate = Matrix(33, 16), Matrix(16, 33), nn.Linear(16, 1)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.between(x)))) * self.gate(x).sigmoid()


@pytest.mark.parametrize("between", [lambda x: x, lambda x: x * 2])
def test_what_a_region_around_has_copied_is_not_copied_again(between):
    model = nn.Sequential(nn.Linear(16, 16), Gated(between))
    plan = {"up.weight": {"style": "column", "dim": 0}, "down.weight": {"style": "row", "dim": 1}}
    analysis = autotp.analyze(model, plan, tp=2, inputs=torch.randn(5, 16))
    assert [(r.path, r.copied) for r in analysis.regions if r.copied] == [("1", {"[0][0]"})]
    result = verified(model, analysis, inputs=torch.randn(5, 16))
    assert result.ok, str(result)


class Sliced(nn.Module):
    """The sum leaves the module that owns the matrices, and the model, as a slice of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Matrix(7, 16), Matrix(16, 7))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[:, 0]


def test_what_leaves_the_model_itself_is_reduced_once():
    plan = {"0.weight": {"style": "column", "dim": 0}, "1.weight": {"style": "row", "dim": 1}}
    result = autotp.verify(Sliced(), plan, tp=3, inputs=torch.randn(5, 4, 16))
    assert result.ok, str(result)


class Stacked(nn.Module):
    """Matrices of experts, for rows in the order of the experts; a list says how many rows are whose."""

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, width, features))

    def forward(self, x: Tensor, rows: list[int]) -> Tensor:
        return torch.cat([F.linear(part, self.weight[i]) for i, part in enumerate(x.split(rows))])


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.router = Stacked(33, 16), Stacked(16, 33), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        experts, order = logits.argmax(-1).sort()
        rows = F.one_hot(experts, 3).sum(0).tolist()
        h = self.down(F.gelu(self.up(x[order], rows)), rows) * logits.softmax(-1).amax(-1)[order, None]
        return torch.zeros_like(x).index_add(0, order, h)


@pytest.mark.slow
def test_numbers_that_values_decide_may_be_any_at_a_border():
    model = nn.Sequential(nn.Linear(16, 16), Routed())
    plan = {"up.weight": {"style": "column", "dim": 1}, "down.weight": {"style": "row", "dim": 2}}
    analysis = autotp.analyze(model, plan, tp=2, inputs=torch.randn(11, 16))
    assert analysis.ok, analysis.diagnostics
    given = {r.path: r.guard for r in analysis.regions if r.guard is not None}
    assert given["1.up"].free == {"rows[0]", "rows[1]", "rows[2]"}
    assert verified(model, analysis, inputs=torch.randn(11, 16)).ok


class Looked(nn.Module):
    """A table of ids that feeds a raw module, and all else: its gradient comes from parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.net = nn.Embedding(11, 16), Net()

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        return (self.net(h) + h) @ self.table.weight.T


def test_a_table_that_feeds_a_region_is_copied_at_its_border():
    analysis = autotp.analyze(Looked(), PLAN, tp=2, inputs=torch.zeros(3, 5, dtype=torch.long))
    assert analysis.ok and analysis.reads == ()
    assert verified(Looked(), analysis, inputs=torch.zeros(3, 5, dtype=torch.long)).ok


def test_places_are_mapped_in_one_order_on_all_ranks():
    """Sets of text have another order in each process, and the order decides that of the collectives."""

    class Backwards(frozenset):
        def __iter__(self):
            return iter(sorted(frozenset.__iter__(self), reverse=True))

    found = []
    for places in (frozenset(["[0]", "[1]"]), Backwards(["[0]", "[1]"])):
        order: list[float] = []
        own = _Own(None, region=Region("part", places))

        def mapping(x, group, order=order):
            order.append(float(x))
            return x

        _mapped([torch.tensor(1.0), torch.tensor(2.0)], own, places, mapping, "returns")
        found.append(order)
    assert found == [[1.0, 2.0], [1.0, 2.0]]


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("functional", [False, True])
def test_a_bias_in_the_sum_is_shared(functional, tp):
    class Biased(Raw):
        def __init__(self):
            super().__init__()
            self.b2 = nn.Parameter(torch.randn(16))

        def forward(self, x, scale):
            if functional:
                return F.linear(F.gelu(F.linear(x, self.w1, self.b1)), self.w2, self.b2) * scale
            return super().forward(x, scale) + self.b2 * 2

    model = Net()
    model.raw = Biased()
    analysis = autotp.analyze(model, PLAN, tp=tp)
    assert analysis.ok and analysis.reads == (Read("raw.b2", copied=False, shared=True),)
    result = verified(model, analysis)
    assert result.ok and result.max_grad_diff < 1e-12


class ScaledAfter(Net):
    """A learned shift and scale behind the border, then a whole value: the sum is reduced before these."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        h = self.pre(x)
        return self.post(h + (self.raw(h, scale=self.gate(h).sigmoid()) + self.shift) * self.scale)


def test_a_bias_behind_a_border_is_added_to_what_was_reduced_there():
    analysis = autotp.analyze(ScaledAfter(), PLAN, tp=2)
    assert analysis.ok and analysis.regions[0].reduced == {""} and not analysis.reads
    result = verified(ScaledAfter(), analysis)
    assert result.ok and result.max_grad_diff < 1e-12


def test_a_bias_that_is_used_whole_as_well_is_refused():
    class Biased(Raw):
        def forward(self, x, scale):
            return super().forward(x, scale) + self.extra * self.extra.norm()

    model = Net()
    model.raw.__class__ = Biased
    model.raw.extra = nn.Parameter(torch.randn(16))
    analysis = autotp.analyze(model, PLAN, tp=2)
    assert [d.code for d in analysis.diagnostics if d.severity == "error"] == ["AT310"]


class Gathering(Raw):
    """Writes what it computes into fresh memory, and sums into zeros."""

    def forward(self, x, scale):
        h = F.linear(x, self.w1, self.b1)
        both = h.new_empty(2, *h.shape)
        both[0] = F.gelu(h)
        both[1:] = x.mean(-1, keepdim=True)
        out = torch.zeros_like(x)
        for h in both:
            out.index_add_(0, torch.arange(x.shape[0]), h @ self.w2.T * scale)
        return out


@pytest.mark.parametrize("tp", [2, 3])
def test_what_is_written_into_fresh_memory_is_exact(tp):
    model = Net()
    model.raw.__class__ = Gathering
    result = autotp.verify(model, PLAN, tp=tp)
    assert result.ok and result.max_grad_diff < 1e-12


def test_a_bias_whose_weight_was_forgotten_is_refused():
    analysis = autotp.analyze(Net(), {k: v for k, v in PLAN.items() if k != "raw.w1"}, tp=2)
    assert [d.code for d in analysis.diagnostics if d.severity == "error"] == ["AT307"]


@pytest.mark.parametrize("name", ["raw.b1", "raw.w2"])
def test_a_forgotten_tensor_is_sliced_where_it_is_read(name):
    plan = {k: v for k, v in PLAN.items() if k != name}
    analysis = autotp.analyze(Net(), plan, tp=2)
    assert analysis.ok and [r.name for r in analysis.reads] == [name]
    assert verified(Net(), analysis).ok


def test_another_call_than_the_proven_one_raises():
    def rank(group):
        model = autotp.shard(Net(), PLAN, group)
        x = torch.randn(3, 16)
        assert model.raw.forward(x, torch.ones(3, 1)).shape == (3, 16)  # by position instead of by name
        with pytest.raises(autotp.UnprovenPath) as caught:
            model.raw.forward(x, 0.5)  # past any hook
        return str(caught.value), copy.deepcopy(model)(x).shape

    for message, shape in simulate(2, rank):
        assert shape == (3, 16)
        assert message == (
            "raw is called with other tensors than when its plan was proven: there is none at scale, "
            "but at x; shard the model with inputs= that call it this way"
        )


def mixtral(**changes):
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {
        "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 12, "num_key_value_heads": 6, "max_position_embeddings": 64,
        "num_local_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    return MixtralForCausalLM(MixtralConfig(**{**sizes, **changes})).eval()


@pytest.mark.slow
def test_experts_of_transformers_are_cut_inside():
    heads = {"style": "column", "heads": "num_key_value_heads"}
    plan = {
        "q_proj": heads, "k_proj": heads, "v_proj": heads, "o_proj": "row",
        "embed_tokens": "vocab", "lm_head": {"style": "column", "gather_output": True},
        "experts.gate_up_proj": {"style": "column", "dim": 1, "sections": 2},
        "experts.down_proj": {"style": "row", "dim": 2},
    }  # fmt: skip
    analysis = autotp.analyze(mixtral(), plan, tp=2)
    assert analysis.ok and analysis.sharded_fraction > 0.99
    (experts,) = (r for r in analysis.regions if r.path.endswith("experts"))
    assert experts.copied == {"[0][0]", "[0][2]"}  # states and weights, not the numbers of experts between
    result = verified(mixtral(), analysis)
    assert result.ok and result.dtype == torch.float64
    with pytest.raises(autotp.UsageError, match="MixtralForCausalLM does not run in float64: "):
        compare(mixtral(), analysis, inputs=None, weights="random", dtype=torch.float64)
    whole = plan | {"experts.gate_up_proj": {"style": "column", "dim": 1}}
    codes = [d.code for d in autotp.analyze(mixtral(), whole, tp=2).diagnostics if d.severity == "error"]
    assert codes == ["AT309"]


@pytest.mark.slow
def test_widths_that_the_kernel_refuses_are_refused_and_blocks_of_them_are_exact():
    plan = {
        "experts.gate_up_proj": {"style": "column", "dim": 1, "sections": 2},
        "experts.down_proj": {"style": "row", "dim": 2},
    }
    found = [
        d for d in autotp.analyze(mixtral(intermediate_size=68), plan, tp=2).diagnostics if d.code == "AT318"
    ]
    assert found and "the ranks would hold 34" in found[0].message
    assert found[0].help == ("deal blocks of 4: `heads: 17`",)
    blocks = {name: rule | {"heads": 17} for name, rule in plan.items()}
    assert autotp.verify(mixtral(intermediate_size=68), blocks, tp=2).ok  # 36 + 32


class Backwards(frozenset):
    """The same set on another rank, whose hashes differ: it is walked through in another order."""

    def __iter__(self):
        return iter(sorted(super().__iter__(), reverse=True))


def test_every_rank_maps_a_border_in_the_same_order():
    values = {"b": torch.zeros(2), "a": torch.zeros(1)}
    for places in (frozenset({"a", "b"}), Backwards({"a", "b"})):
        sizes = []
        own = _Own(GroupOfOne(), region=Region("raw", copied=places))
        _mapped(
            values, own, places, lambda x, group, sizes=sizes: sizes.append(len(x)) or x, "is called with"
        )
        assert sizes == [1, 2]


class AddedInPlace(nn.Module):
    """Two modules with raw weights whose sums are added in place outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.pre, self.raw, self.other = nn.Linear(16, 16), Raw(), Raw()

    def forward(self, x: Tensor) -> Tensor:
        h = self.pre(x)
        out = self.raw(h, h.new_ones(1))
        out += self.other(h, h.new_ones(1))
        return x + out


def test_a_sum_of_a_border_may_be_added_to_in_place():
    names = {n: PLAN[f"raw.{n}"] for n in ("w1", "b1", "w2")}
    plan = {f"{module}.{n}": rule for module in ("raw", "other") for n, rule in names.items()}
    result = autotp.verify(AddedInPlace(), plan, tp=2, inputs=torch.zeros(5, 16))
    assert result.ok and result.max_grad_diff < 1e-10, str(result)


class Loop(nn.Module):
    """Experts one after the other, each on the rows that chose it, their sums in fresh zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 32, 16)), nn.Parameter(torch.randn(4, 16, 32))
        self.bias = nn.Parameter(torch.randn(4, 16))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(4):
            row, place = torch.where(chosen == expert)
            h = F.gelu(F.linear(x[row], self.up[expert]))
            y = F.linear(h, self.down[expert], self.bias[expert])
            out.index_add_(0, row, y * weights[row, place, None])
        return out


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts, self.norm = nn.Linear(16, 4), Loop(), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        return x + self.experts(self.norm(x), chosen, weights)


@pytest.mark.slow
def test_a_loop_over_experts_is_exact():
    plan = {"up": {"style": "column", "dim": 1}, "down": {"style": "row", "dim": 2}}
    x = torch.randn(7, 16, generator=torch.Generator().manual_seed(0))
    analysis = autotp.analyze(Mixture(), plan, tp=3, inputs=x)
    assert analysis.ok and analysis.reads == (Read("experts.bias", copied=False, shared=True),)
    assert verified(Mixture(), analysis, inputs=x).max_grad_diff < 1e-12


class Weighted(nn.Module):
    """Features that are weighted by a raw matrix of the model itself."""

    def __init__(self):
        super().__init__()
        self.fc1, self.W = nn.Linear(8, 12), nn.Parameter(torch.rand(12, 6))

    def forward(self, x):
        return self.fc1(x).unflatten(-1, (4, 3)).softmax(-1).flatten(-2) @ self.W


def test_a_product_with_a_whole_matrix_says_how_to_cut_it():
    model, x = Weighted().double(), torch.rand(5, 8).double()
    plan = {"fc1": {"style": "column", "heads": 4}}
    (found,) = errors(autotp.analyze(model, plan, tp=2, inputs=x).diagnostics)
    assert found.code == "AT311" and found.help[0] == (
        "cut what it is multiplied by, too, and the sum is taken: `W: {style: row, dim: 0}`"
    )
    proven = autotp.analyze(model, plan | {"W": {"style": "row", "dim": 0}}, tp=2, inputs=x)
    verified(model, proven, inputs=x)
