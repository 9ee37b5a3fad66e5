"""Loops over rows that values decide are looked into, and hold for any number of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotp
from autotp.trace.capture import capture
from autotp.verification import compare

EXPERTS = 4


class Own(nn.Module):
    """The weights of all experts in one matrix each, of which the module around gives it those of one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS * 6, 8) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS * 6, 8) / 3)

    def forward(self, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.gelu(x @ up.t()) @ down


class Experts(nn.Module):
    """As dbrx runs them: each expert that a token chose, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Own()

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        mask = F.one_hot(chosen, EXPERTS + 1).permute(2, 1, 0)
        for expert in (mask.sum(dim=(-1, -2)) > 0).nonzero():
            expert = expert[0]
            place, row = torch.where(mask[expert])
            up, down = (w.view(-1, 6, 8)[expert] for w in (self.mlp.up, self.mlp.down))
            y = self.mlp(x[row], up, down)
            out.index_add_(0, row, y * weights[row, place, None])
        return out


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts, self.norm = nn.Linear(8, EXPERTS), Experts(), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        return x + self.experts(self.norm(x), chosen, weights)


RANDOM = torch.randn(7, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_experts_that_are_hit_are_exact_however_many():
    """Of an expert that no token chose the gradient is zero."""
    model = Mixture()
    analysis = autotp.analyze(model, "auto", tp=2, inputs=RANDOM)
    assert {"experts.mlp.up", "experts.mlp.down"} <= set(analysis.layouts)
    (region,) = analysis.regions
    assert (region.path, len(region.copied)) == ("experts", 2)
    for hit in (RANDOM, RANDOM[:1], RANDOM[:0]):
        result = compare(model, analysis, inputs=hit, weights="random", dtype=None)
        assert result.ok and result.max_grad_diff < 1e-12
        assert result.collectives[0]["forward"]["all-reduce"] == 1


class Carried(nn.Module):
    """A loop whose first turn meets another value than the later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 6, 8)), nn.Parameter(torch.randn(4, 8, 6))

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for expert in (x.sum(0)[:4] > 0).nonzero():
            out = out + F.linear(F.gelu(F.linear(x, self.up[expert[0]])), self.down[expert[0]])
        return out.tanh()


def test_what_holds_for_some_numbers_of_rows_alone_is_refused():
    plan = {"up": {"style": "column", "dim": 1}, "down": {"style": "row", "dim": 2}}
    analysis = autotp.analyze(Carried(), plan, tp=2, inputs=RANDOM)
    assert [d.code for d in analysis.diagnostics if d.severity == "error"] == ["AT310"]


@pytest.mark.parametrize(("places", "rows"), [(1, 1), (2, 1), (3, 2), (4, 3), (9, 3)])
def test_the_first_rows_are_recorded_with_their_values(places, rows):
    class Walk(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            return [x[row[0]] for row in (x[:, 0] > 0).nonzero()]

    trace = capture(Walk(), (torch.zeros(places, 2),), {})
    ours = [n for n in trace.ops() if n.target is torch.ops.aten.select.int]
    selected = [n.args[2] for n in ours if n.args[0].op == "placeholder"]
    assert trace.opaque == () and selected[-rows:] == list(range(rows))
    assert len(trace.outputs) == rows


def decided(self, x, row):
    return x if row[0] >= 3 else x @ self.mlp.up[:8]


def called(self, x, row):
    return decided(self, x, row)


def numbered(self, x, row):
    return x * int(row)


def chosen_of_a_list(self, x, row):
    return self.ways[row[0]](x)


def compared(self, x, row):
    return x if torch.equal(row, torch.tensor([3])) else -x


def kept(self, x, row):
    return x * {0: 1.0, 1: 2.0, 2: 3.0}.get(row.item(), 4.0)


@pytest.mark.parametrize("does", [decided, called, numbered, chosen_of_a_list, compared, kept])
def test_a_loop_that_asks_for_the_number_of_a_row_is_not_looked_into(does):
    """Rows that are not recorded may go another way."""

    class Asks(Experts):
        def __init__(self) -> None:
            super().__init__()
            self.ways = (torch.abs, torch.abs, torch.abs, torch.tanh)

        def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for row in (chosen.sum(1) > 0).nonzero():
                out = out + does(self, x, row)
            return out

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Asks()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, x.topk(2, -1)[1], x)

    assert capture(Around(), (RANDOM,), {}).opaque == ("inner",)
