"""Statistics over a dim that is cut: summed over the ranks where the model's code makes them."""

from __future__ import annotations

import collections

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autotp
from autotp.comm import simulate
from autotp.verification import compare
from tests import models, statistics, wrong_models
from tests.models import verified

PLAN = {"fc1": "column", "fc2": "row"}
X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))


def exact(model, plan, tp, x=X):
    result = autotp.verify(model, plan, tp=tp, inputs=x)
    assert result.ok and result.tolerance == 1e-9, str(result)


@pytest.mark.parametrize(
    ("norm", "tp"),
    [("RMSNorm", 3), ("BySum", 3), ("ByRoot", 2), ("LayerNorm", 2), ("ByVariance", 3), ("ByDeviation", 2)],
)
def test_a_norm_by_hand_is_exact_over_a_dim_that_is_cut(norm, tp):
    exact(statistics.Normed(getattr(statistics, norm)), PLAN, tp)


def test_over_the_sections_of_a_fused_layer():
    plan = {"fc1": {"style": "column", "sections": 2}, "fc2": "row"}
    exact(statistics.Normed(statistics.LayerNorm, parts=2), plan, 4)


@pytest.mark.parametrize(
    "between", [models.standardise, statistics.centred, statistics.std, lambda h: h * h.shape[-1] ** -0.5]
)
def test_in_functions_and_lambdas(between):
    exact(models.MLP(between=between), PLAN, 2, torch.randn(5, 16))


def test_a_size_of_the_whole_model_that_was_read_off_a_part():
    plan = {
        "q": {"style": "column", "heads": 3},
        "k": {"style": "column", "heads": 3},
        "v": {"style": "column", "heads": 3},
        "out": "row",
    }
    model = wrong_models.Alibi(statistics.slopes)
    analysis = autotp.analyze(model, plan, tp=2)
    assert "+    return 2.0 ** -torch.arange(1, whole(q.shape[1]) + 1)" in analysis.edits.splitlines()
    result = verified(model, analysis)
    assert result.ok, str(result)


class Rounds(nn.Module):
    """A statistic, and checks of the model's own: each stops a trace, so the edits take several rounds."""

    def __init__(self, heads=3):
        super().__init__()
        self.fc1, self.norm = nn.Linear(8, 4 * heads), statistics.RMSNorm(4 * heads)
        self.fc2, self.heads = nn.Linear(4 * heads, 8), heads

    def forward(self, x):
        h = self.norm(self.fc1(x))
        if h.size(-1) != 4 * self.heads:
            raise ValueError("another width")
        h = h.view(*x.shape[:-1], self.heads, 4)
        if h.size(-2) != self.heads:
            raise ValueError("other heads")
        return self.fc2(h.tanh().flatten(-2))


@pytest.mark.slow
def test_what_one_round_has_edited_the_next_one_leaves():
    plan = {"fc1": {"style": "column", "heads": 3}, "fc2": {"style": "row", "heads": 3}}
    model = Rounds()
    analysis = autotp.analyze(model, plan, tp=2, inputs=X)
    added = "".join(line for line in analysis.edits.splitlines() if line.startswith("+ "))
    assert added.count("copy(mean(") == added.count("mean(x.") == 1 and added.count("local(") == 3
    assert compare(model, analysis, inputs=X, weights="random", dtype=None).ok


def test_the_mappings_are_in_the_diff():
    analysis = autotp.analyze(statistics.Normed(statistics.ByVariance), PLAN, tp=2, inputs=X)
    assert [line[1:].strip() for line in analysis.edits.splitlines() if line.startswith("+ ")] == [
        "mean = copy(mean(torch.mean(x, dim=-1, keepdim=True)))",
        "spread = copy(var(x.var(-1, keepdim=True, unbiased=False), x))",
    ]
    analysis = autotp.analyze(statistics.Normed(statistics.BySum), PLAN, tp=2, inputs=X)
    assert [line[1:].strip() for line in analysis.edits.splitlines() if line.startswith("+ ")] == [
        "squares = copy(reduce(x.pow(2).sum(-1, keepdim=True))) / whole(x.size(-1))"
    ]
    assert analysis.code | analysis.code.edits == analysis.code  # found once more, it is no second sum


def test_explain_shows_them():
    found = autotp.explain(statistics.Normed(statistics.LayerNorm), "norm", PLAN, tp=2, inputs=X)
    means = [step for step in found.steps if step.op == "mean"]
    assert [[m.mapping for m in step.mappings] for step in means] == [["reduce", "copy"]] * 2
    assert {step.placement for step in means} == {"replicate"}
    assert means[1].why == "of pow:46; added by the proof in the model's code"


def _counted(rank, size):
    """(forward, backward) all-reduces of one step, and what the analysis says."""
    plain, ran = dist.all_reduce, collections.Counter()

    def all_reduce(*args, **kwargs):
        ran["all"] += 1
        return plain(*args, **kwargs)

    found = []
    for norm in (statistics.RMSNorm, statistics.LayerNorm, statistics.ByVariance):
        torch.manual_seed(0)
        model = statistics.Normed(norm)
        said = autotp.analyze(model, PLAN, tp=size, inputs=X).collectives
        autotp.shard(model, PLAN, inputs=X)
        dist.all_reduce = all_reduce
        try:
            ran.clear()
            y = model(X.clone().requires_grad_())
            forward = ran["all"]
            y.sum().backward()
        finally:
            dist.all_reduce = plain
        ways = (forward, ran["all"] - forward)
        found.append((ways, tuple(sum(c.calls for c in said if c.direction == d) for d in DIRECTIONS)))
    return found


DIRECTIONS = ("forward", "backward")


@pytest.mark.slow
def test_collectives_run_as_often_as_the_analysis_says(ranks):
    # in forward each statistic and the row layer; in backward the statistics, fc1, weight and bias
    wanted = [(2, 4), (3, 5), (4, 6)]
    assert ranks(2)(_counted) == [[(each, each) for each in wanted]] * 2


def refused(model, plan, tp, x=X):
    (found,) = [d for d in autotp.analyze(model, plan, tp=tp, inputs=x).diagnostics if d.severity == "error"]
    return found


def test_elements_that_several_ranks_hold_are_not_counted_twice():
    plan = {"fc1": {"style": "column", "heads": [2, 1], "sections": [6, 3]}, "fc2": "row"}
    found = refused(statistics.Normed(statistics.RMSNorm, hidden=9), plan, 2)
    assert (found.code, found.message) == (
        "AT303",
        "mean over dim 2, which is sharded: each rank has only its part",
    )


def test_another_width_than_the_proven_one_raises():
    def rank(group):
        model = autotp.shard(statistics.Normed(statistics.BySum), PLAN, group, inputs=X)
        with pytest.raises(autotp.UnprovenPath) as caught:
            model.norm(torch.ones(2, 5))
        return str(caught.value).rpartition("statistics.py:")[2]

    assert simulate(2, rank) == [
        f"29: the size 5 of a rank's part is none that was proven there ({own}); shard the model with "
        "inputs= that run it this way"
        for own in (4, 3)
    ]


class Spread(nn.Module):
    """Rows of zeros have no spread; torch's std has the gradient 0 there."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 9, bias=False), nn.Linear(9, 8)

    def forward(self, x):
        h = self.fc1(x)
        return self.fc2(h / (h.std(-1, keepdim=True) + 1e-6))


def test_the_gradient_of_a_spread_that_is_zero():
    x = torch.cat([torch.randn(2, 8), torch.zeros(2, 8)]).double()
    result = autotp.verify(Spread(), {"fc1": "column", "fc2": "row"}, tp=2, inputs=x)
    assert result.ok and result.max_grad_diff < 1e-9


class Written(Spread):
    """A statistic is written in place, as in `mean(...).add_(eps).rsqrt_()`."""

    def forward(self, x):
        h = self.fc1(x)
        return self.fc2(h * h.pow(2).mean(-1, keepdim=True).add_(1e-5).rsqrt_())


def test_a_statistic_may_be_written_in_place():
    x = torch.randn(4, 8).double()
    analysis = autotp.analyze(Written(), {"fc1": "column", "fc2": "row"}, tp=2, inputs=x)
    assert analysis.ok and "copy(mean(" in analysis.edits
    assert autotp.verify(Written(), {"fc1": "column", "fc2": "row"}, tp=3, inputs=x).ok
