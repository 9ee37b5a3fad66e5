"""Edited models at run time: what was not proven raises; copies, pickles, several groups keep the edits."""

from __future__ import annotations

import copy
import io
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import autotp
from autotp.comm import simulate
from autotp.rewrite.edits.bind import Observed
from autotp.rewrite.edits.text import source_of
from tests import edited, models

PLAN = {"fc1": {"style": "column", "heads": 3}, "fc2": {"style": "row", "heads": 3}}
X = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def built(kind, **attributes):
    torch.manual_seed(0)
    model = models.randomised(kind())
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def run_as(kind, change, tp=2, forward=nn.Module.__call__):
    """What each rank's sharded model says to a forward after `change`: its message, or the output."""

    def rank(group):
        model = autotp.shard(built(kind), PLAN, group, inputs=X)
        change(model)
        try:
            return forward(model, X)
        except autotp.UnprovenPath as error:
            return str(error)

    return simulate(tp, rank)


def line_of(text: str) -> int:
    with open(edited.__file__) as file:
        return next(n for n, line in enumerate(file, 1) if text in line)


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("other sizes", "return h.view(len(h), -1, self.dim)"),
        *((way, 'if self.way == "call":') for way in ("call", "loop", "helper", "none")),
    ],
)
def test_a_branch_that_no_trace_took_raises(way, text):
    said = (
        f"{edited.__file__}:{line_of(text)}: no traced forward took this branch, so nothing is proven about "
        "it; shard the model with inputs= that take it"
    )
    unsharded = built(edited.Branches, way=way)(X)
    for found in run_as(edited.Branches, lambda m: setattr(m, "way", way)):
        if way in ("other sizes", "call"):  # right on every rank, which is proven when it is taken
            torch.testing.assert_close(found, unsharded, rtol=1e-10, atol=1e-12)
        else:
            assert f"way={way!r} since it was sharded: error[AT315]" in found and said in found
    past = run_as(edited.Branches, lambda m: setattr(m, "way", way), forward=past_the_guard)
    assert past == [said, said]


def past_the_guard(model, x):
    return model.forward.__wrapped__(x)


def test_a_check_of_the_model_is_told():
    def rank(group):
        model = autotp.shard(built(edited.Branches), PLAN, group, inputs=X)
        with pytest.raises(autotp.UnprovenPath, match="cannot be traced: ValueError: too many dims"):
            model(X[None])

    simulate(2, rank)


def test_unproven_branches_are_in_the_diff():
    analysis = autotp.analyze(built(edited.Branches), PLAN, tp=2, inputs=X)
    marked = [line[1:].strip() for line in analysis.edits.splitlines() if line.startswith("+ ")]
    assert marked == [
        "return h.view(len(h), local(self.heads), self.dim)",
        "unproven(); return h.view(len(h), -1, self.dim)",
        'if (unproven() or (self.way == "call")):',
    ]


def test_a_size_that_was_not_proven_raises():
    for message in run_as(edited.Positional, lambda m: setattr(m, "heads", 6)):
        assert "together and heads=6 since it was sharded: it cannot be traced" in message


def test_another_function_than_the_proven_one_raises():
    for message in run_as(edited.Chosen, lambda m: setattr(m, "function", edited.twice_removed)):
        assert message.endswith(
            "twice_removed is called, which was not when the plan was proven; shard the model as it will run"
        )


def test_deepcopy_keeps_the_edits_and_the_model_stays_of_its_class():
    def rank(group):
        model = autotp.shard(built(edited.Decorated), PLAN, group, inputs=X)
        assert isinstance(model, edited.Decorated) and type(model).__name__ == "Decorated"
        twin = copy.deepcopy(model)
        return torch.equal(twin(X), model(X)), type(twin) is type(model)

    assert simulate(2, rank) == [(True, True)] * 2


def _pickled(rank, size):
    kept = []
    for kind in (edited.Decorated, edited.Helper, edited.Static):
        model = autotp.shard(built(kind), PLAN, inputs=X)
        again = pickle.load(io.BytesIO(pickle.dumps(model)))
        kept.append(torch.equal(again(X), model(X)))
    model = autotp.shard(built(edited.Lambda), PLAN, inputs=X)
    with pytest.raises((pickle.PicklingError, AttributeError)):  # the lambda itself, first
        pickle.dumps(model)
    return kept


@pytest.mark.slow
def test_pickle_keeps_the_edits_or_raises(ranks):
    assert ranks(2)(_pickled) == [[True] * 3] * 2


def test_groups_of_two_sizes_in_one_process():
    """Wrappers hold their own rank's numbers: two sharded models do not meet."""
    outputs = []
    for tp in (2, 3, 2):
        outputs += run_as(edited.Helper, lambda m: None, tp)
    wanted = built(edited.Helper)(X)
    for output in outputs:
        torch.testing.assert_close(output, wanted, rtol=0, atol=1e-12)


def test_the_unsharded_model_is_untouched_by_the_search():
    model = built(edited.Checked)
    kinds = [type(m) for m in model.modules()]
    analysis = autotp.analyze(model, PLAN, tp=2, inputs=X)
    assert analysis.ok and analysis.code
    assert [type(m) for m in model.modules()] == kinds and "split" not in vars(model)


def test_code_without_text_says_what_to_do():
    names: dict[str, object] = {}
    exec("def split(self, h):\n    return h.view(len(h), self.heads, self.dim)\n", names)
    kind = type("Made", (edited.Mixed,), {"split": names["split"]})
    (found,) = [d for d in autotp.analyze(kind(), PLAN, tp=2, inputs=X).diagnostics if d.severity == "error"]
    assert found.code == "AT315"
    assert any("has no source text (made by exec, or compiled)" in note for note in found.notes)


def applied(self, x):
    if self.flag:
        x = self.f(x)
    return x


def test_branches_are_known_by_function_and_owner():
    """What a function calls is its owner's, and another one after a change: as long as the model stays as it
    is, and no longer, its branches are known."""
    one, other = SimpleNamespace(f=dict), SimpleNamespace(f=torch.nn.ReLU())
    observed, source = Observed(), source_of(applied.__code__, applied.__globals__)
    for _ in range(2):
        assert not observed.branches(source, applied, one)
        assert len(observed.branches(source, applied, other)) == 1
    one.f = other.f
    assert not observed.branches(source, applied, one)
    assert len(Observed().branches(source, applied, one)) == 1
