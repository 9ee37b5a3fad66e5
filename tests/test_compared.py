"""Comparisons that come out another way on a rank for some inputs: refused, at the line."""

from __future__ import annotations

import inspect
import math
import operator

import pytest
import torch
from torch import nn

import autotp
from autotp.diagnostic import errors
from autotp.trace.noted import argument, plain
from autotp.trace.noting import noting
from tests import edited

PLAN = {"fc1": "column", "fc2": "row"}
INPUTS = (torch.zeros(2, 17, 8),)


class Between(nn.Module):
    """Two layers of 8 -> 12 -> 6 with something between."""

    def __init__(self, between):
        super().__init__()
        self.fc1, self.fc2, self.between = nn.Linear(8, 12), nn.Linear(12, 6), between

    def forward(self, x):
        return self.fc2(self.between(x, self.fc1(x)))


def branch(x, h):
    return h.tanh() if x.shape[1] < h.shape[-1] else h


def _smaller(x, h):
    return h * min(h.size(-1) // 2, x.size(1) + 1, 3)


def _mixed(x, h):
    return h.tanh() if h.numel() > 40 else h


def _remainder(x, h):
    return h.tanh() if x.size(1) % h.size()[-1] == 99 else h


def _bound(x, h):
    return h[..., : x.shape[1]]


def _parts(x, h):
    return h.split(x.shape[1], -1)[0]


def _root(x, h):
    return h.tanh() if h.shape[-1] ** 0.5 > x.shape[1] / 100 else h


def _written(x, h):
    h = h.clone()
    h[..., : x.shape[1]] = 0
    return h


def _elements(x, h):
    return h.tanh() if torch.numel(x) < torch.numel(h) else h


def _bytes(x, h):
    return h.tanh() if x.nbytes < h.nbytes else h


def _steps(x, h):
    return h.tanh() if x.shape[1] < h.stride()[1] + h.stride(1) else h


def _rounded(x, h):
    return h.tanh() if math.floor(x.shape[1] / 2) < round(h.shape[-1] * 1.5) else h


def _together(x, h):
    return h.tanh() if h.flatten(1).shape[1] > 60 else h


def _left_alone(x, h):
    """A rank compares with another number."""
    return h.tanh() if x.shape[1] < int(h.shape[-1]) else h


@pytest.mark.parametrize(
    "between",
    [
        branch, _smaller, _mixed, _remainder, _bound, _parts, _root, _written, _elements, _bytes, _steps,
        _rounded, _together, _left_alone,
    ],
)  # fmt: skip
def test_a_cut_size_compared_with_a_size_of_the_input_is_refused(between):
    (found,) = errors(autotp.analyze(Between(between), PLAN, tp=2, inputs=INPUTS).diagnostics)
    assert found.code == "AT328" and found.source is not None
    lines = inspect.getsource(between).splitlines()
    assert lines[found.source.line - between.__code__.co_firstlineno].lstrip().startswith(("return", "h["))


def test_the_words_of_a_refused_comparison():
    (found,) = errors(autotp.analyze(Between(branch), PLAN, tp=2, inputs=INPUTS).diagnostics)
    assert found.message == (
        "a size of which each rank has a part (12 unsharded) is compared with a size of the input (17 in the "
        "trace): for some inputs it comes out another way on a rank"
    )
    assert found.help == ("compare with the whole number: keep it in an attribute of the module",)


def _plain(x, h):
    return h.tanh() if int(x.shape[1]) < int(h.shape[-1]) else h


def _lengths(x, h):
    return h.tanh() if len(x[0]) < len(h.transpose(0, -1)) else h


def _indexed(x, h):
    return h.tanh() if operator.index(x.shape[1]) < operator.index(h.shape[-1]) else h


def _ranges(x, h):
    return h.tanh() if len(range(x.shape[1])) < len(range(h.shape[-1])) else h


def _lists(x, h):
    return h.tanh() if len([0] * x.shape[1]) < len([0] * h.shape[-1]) else h


def _roots(x, h):
    return h.tanh() if math.sqrt(x.shape[1]) < math.sqrt(h.shape[-1]) else h


def _floats(x, h):
    return h.tanh() if float(x.shape[1]) < float(h.shape[-1]) else h


def _words(x, h):
    return h.tanh() if str(x.shape[1]) == f"{h.shape[-1]}" else h


def _least(x, h):
    return h.tanh() if min(x.shape[1], 9) == h.shape[-1] - 7 else h


def _counted(x, h):
    for i, _ in enumerate(x.unbind(1)):
        h = h.tanh() if i == h.shape[-1] else h
    return h


def _plainly_written(x, h):
    h = h.clone()
    h[..., : int(x.shape[1])] = 0
    return h


@pytest.mark.parametrize(
    "between",
    [
        _plain, _lengths, _indexed, _ranges, _lists, _roots, _floats, _words, _least, _counted,
        _plainly_written,
    ],
)  # fmt: skip
def test_a_size_that_is_compared_as_a_plain_number_is_refused(between):
    """Inputs of other sizes show it: those for which a rank would take another way."""
    (found,) = errors(autotp.analyze(Between(between), PLAN, tp=3, inputs=INPUTS).diagnostics)
    assert found.code in ("AT309", "AT315", "AT328")
    assert found.notes[-1] in (
        "for inputs of other sizes: [4, 8, 8]", "for inputs of other sizes: [8, 12, 8]",
        "for inputs of other sizes: [12, 4, 8]",
    )  # fmt: skip


def _alone(x, h):
    assert int(h.shape[-1]) % 2 == 0 and h.shape[-1] < 100 and len(x) > 0
    return h[..., : int(h.shape[-1])]


@pytest.mark.slow
def test_sizes_that_are_asked_alone_are_proven():
    assert autotp.verify(Between(_alone), PLAN, tp=3, inputs=INPUTS).ok


@pytest.mark.parametrize("between", [branch, _left_alone, _plain])
def test_sizes_are_noted_in_an_exported_trace(between, monkeypatch):
    monkeypatch.setattr("autotp.trace.recorder.MISSING", "gone")
    model = Between(between).eval()
    (found,) = errors(autotp.analyze(model, PLAN, tp=2, inputs=INPUTS).diagnostics)
    assert found.code in ("AT315", "AT328") and found.source is not None


def _usual(x, h):
    batch, length, width = h.shape
    assert h.shape[:-1] == x.shape[:-1] and h.numel() > 0 and len(h)
    if width % 2 == 1 and length > 3:
        return h
    return h.view(batch, length, width)[:, : x.size(1)].view(-1, width).view(h.size())


@pytest.mark.slow
def test_comparisons_of_the_same_kind_of_sizes_are_proven():
    assert autotp.verify(Between(_usual), PLAN, tp=3, inputs=INPUTS).ok


def test_a_check_that_batch_and_heads_make_one_dim_is_proven(monkeypatch):
    """Both sides have the batch in them: XGLM checks its attention so. No size of the inputs is tried."""
    monkeypatch.setattr("autotp.prove.witnesses", lambda *_: pytest.fail("inputs of other sizes are tried"))
    plan = {"fc1": {"style": "column", "heads": 3}, "fc2": {"style": "row", "heads": 3}}
    assert autotp.verify(edited.CheckedTogether(), plan, tp=3, inputs=torch.randn(5, 8)).ok


class Remembers(Between):
    """It sets a size that it has already, as Swin does with its window."""

    def __init__(self):
        super().__init__(None)
        self.size = 17

    def forward(self, x):
        self.size = min(self.size, x.shape[1])
        return self.fc2(self.fc1(x))


def test_a_size_of_the_input_that_is_set_to_what_it_was_is_proven():
    assert not errors(autotp.analyze(Remembers(), PLAN, tp=2, inputs=INPUTS).diagnostics)


def test_comparisons_are_no_matter_where_nothing_is_cut():
    gathered = {"fc1": {"style": "column", "gather_output": True}}
    assert autotp.analyze(Between(branch), gathered, tp=2, inputs=INPUTS).ok


def test_noted_numbers_are_numbers():
    x = torch.zeros(3, 5)
    with noting(lambda tensor: "x") as notes:
        rows, columns = x.shape
        k = notes.argument("k", 4)
        assert (rows + 1, 2 * columns, rows**2, columns / 2, -rows, divmod(columns, rows)) == (
            4, 10, 9, 2.5, -3, (1, 2),
        )  # fmt: skip
        assert x.view(columns, rows).shape == (5, 3) and {3: "three"}[plain(rows)] == "three"
        assert torch.arange(rows).tolist() == [0, 1, 2] and f"{rows}" == "3"
        before = len(notes.compares)
        assert k > 3
        assert [one.dims for one in notes.compares[before:]] == [{argument("k")}]
    assert type(rows + 1) is int and "shape" not in vars(torch.Tensor)
