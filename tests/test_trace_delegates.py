"""Embeddings of a class of their own: which compute through nn.Embedding, and that these are exact."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autotp
from autotp.comm import simulate
from autotp.trace.delegates import delegates
from autotp.trace.inventory import kind_of


class Scaled(nn.Embedding):
    """As Bart and Gemma have it."""

    def __init__(self, *arguments, scale=3.0):
        super().__init__(*arguments)
        self.scale = scale

    def forward(self, ids):
        return super().forward(ids) * self.scale


class Learned(nn.Embedding):
    """As OPT and Bart have it: positions, shifted."""

    def forward(self, ids):
        places = torch.arange(ids.shape[1], device=self.weight.device)
        return super().forward(self.shifted(places))

    def shifted(self, places):
        return places + 2


class Plain(nn.Embedding):
    """A class that adds nothing to the forward."""


class Reads(nn.Embedding):
    def forward(self, ids):
        return F.embedding(ids, self.weight) * 3


class ReadsBeside(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) + self.weight.mean()


class ReadsInAMethod(Scaled):
    def forward(self, ids):
        return super().forward(ids) + self.mean()

    def mean(self):
        return self.weight.mean()


class ReadsInAProperty(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) + self.mean

    @property
    def mean(self):
        return self.weight.mean()


def _mean(module):
    return module.weight.mean()


class HandsItselfOn(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) + _mean(self)


class ReadsByName(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) + getattr(self, "weight").mean()  # noqa: B009


class ReadsTheTable(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) + self._parameters["weight"].mean()


class NotThrough(nn.Embedding):
    def forward(self, ids):
        return nn.Embedding.forward(self, ids)


@pytest.mark.parametrize("kind", [Scaled, Learned, Plain])
def test_these_compute_through_it(kind):
    assert delegates(kind, nn.Embedding) and kind_of(kind(9, 4)) == "embedding"


@pytest.mark.parametrize(
    "kind",
    [
        *(Reads, ReadsBeside, ReadsInAMethod, ReadsInAProperty, HandsItselfOn, ReadsByName, ReadsTheTable),
        *(NotThrough, nn.Linear),
    ],
)
def test_these_may_not(kind):
    assert not delegates(kind, nn.Embedding)
    assert kind is nn.Linear or kind_of(kind(9, 4)) == "other"


def test_a_patched_forward_is_none():
    layer = Scaled(9, 4)
    layer.forward = lambda ids: ids
    assert kind_of(layer) == "other"


class Tied(nn.Module):
    """A scaled table, positions, and a head that shares the table's weight."""

    def __init__(self):
        super().__init__()
        self.table, self.places = Scaled(99, 24), Learned(33, 24)
        self.head = nn.Linear(24, 99, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.table(ids) + self.places(ids))


IDS = torch.arange(14).reshape(2, 7)


@pytest.mark.parametrize("tp", [2, 3])
def test_they_are_exact(tp):
    result = autotp.verify(Tied(), "auto", tp=tp, inputs=IDS)
    assert result.ok and result.tolerance <= 1e-9
    analysis = autotp.analyze(Tied(), "auto", tp=tp, inputs=IDS)
    assert analysis.sharded_fraction == 1.0


def test_they_keep_their_class():
    def run(group):
        torch.manual_seed(0)
        model = autotp.shard(Tied(), "auto", group, inputs=IDS)
        assert isinstance(model.table, Scaled) and type(model.table).__name__ == "Scaled"
        assert model.table.weight.shape == (50 - group.rank, 24)
        again = pickle.loads(pickle.dumps(model.table))
        assert type(again) is type(model.table) and torch.equal(again.weight, model.table.weight)
        return model(IDS)

    torch.manual_seed(0)
    whole = Tied()(IDS)
    assert all(torch.allclose(found, whole, atol=1e-5) for found in simulate(2, run))
