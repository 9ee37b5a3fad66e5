"""What a forward reads besides its arguments, and what changes of it after the model was sharded."""

from __future__ import annotations

import copy
import enum
import os
import pickle
import sys
import types

import pytest
import torch
from torch import nn

import autotp
from autotp.comm import simulate
from autotp.diagnostic import UnprovenPath
from autotp.rewrite.apply import apply

PLAN = {"fc1": {"style": "column", "heads": 4}, "fc2": "row"}
X = torch.linspace(-1, 1, 2 * 5 * 8).reshape(2, 5, 8)
HERE = sys.modules[__name__]


class Way(enum.Enum):
    PLAIN, OTHER, WRONG = "plain", "other", "wrong"


FLAG: object = None
OPTIONS = {"way": ["plain"]}
WAY = Way.PLAIN
SETTINGS = types.SimpleNamespace(inner=types.SimpleNamespace(way="plain"))
FILE = types.ModuleType("settings")
FILE.way = "plain"
CALLS = 0


class Settings:
    way = "plain"


def plain(h):
    return h.tanh()


def other(h):
    return h.exp()


def wrong(h):
    return h.cumsum(-1)


ACT = plain
TABLE = {"act": plain}


def closed(way):
    def forward(self, x):
        return self.fc2(_by(way, self.fc1(x)))

    def put(new):
        nonlocal way
        way = new

    return forward, put


def _by(way, h):
    return wrong(h) if way == "wrong" else other(h) if way == "other" else h


class Model(nn.Module):
    """Four heads of three. Every case below is a forward of it."""

    way = "plain"

    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6)

    def forward(self, x):
        return self.fc2(self.does(self.fc1(x)))

    def does(self, h):
        return h


def _ranks(does=lambda self, h: self.act(h), forward=None):
    """A model of a class of its own, and both ranks of it."""
    ways = {"forward": forward} if forward else {"does": does}
    kind = type("Own", (Model,), ways)
    model = kind().eval()
    analysis = autotp.analyze(model, PLAN, tp=2, inputs=X)
    assert analysis.ok, analysis
    return model, simulate(2, lambda group: apply(copy.deepcopy(model), analysis, group))


def _exact(model, ranks):
    expected = model(X)
    for y in simulate(2, lambda group: ranks[group.rank](X)):
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)


def _refused(ranks, match):
    for rank in ranks:
        with pytest.raises(UnprovenPath, match=match):
            rank(X)


def _set(place, name):
    """Something that puts one of three values there."""
    return lambda model, value: setattr(place, name, value)


WORDS = ("plain", "other", "wrong")
CASES = {  # what the forward does with a shard; what sets what it reads, to which values; how it is told
    "a global": (lambda self, h: _by(FLAG, h), _set(HERE, "FLAG"), (None, "other", "wrong"), r"FLAG='wrong'"),
    "a container": (
        lambda self, h: _by(OPTIONS["way"][0], h),
        lambda model, value: OPTIONS["way"].__setitem__(0, value), WORDS, "OPTIONS=dict of 1",
    ),
    "an enum": (lambda self, h: _by(WAY.value, h), _set(HERE, "WAY"), tuple(Way), "WAY=.*Way.WRONG"),
    "an object": (
        lambda self, h: _by(SETTINGS.inner.way, h), _set(SETTINGS.inner, "way"), WORDS,
        "SETTINGS.inner.way='wrong'",
    ),
    "a file": (lambda self, h: _by(FILE.way, h), _set(FILE, "way"), WORDS, "FILE.way='wrong'"),
    "a class": (lambda self, h: _by(Settings.way, h), _set(Settings, "way"), WORDS, "Settings.way='wrong'"),
    "a function": (
        lambda self, h: ACT(h), _set(HERE, "ACT"), (plain, other, wrong), "ACT=function .*wrong",
    ),
    "a table of functions": (
        lambda self, h: TABLE["act"](h), lambda model, value: TABLE.update(act=value),
        (plain, other, wrong), "TABLE=dict of 1",
    ),
    "the model's class": (
        lambda self, h: _by(self.way, h), _set(Model, "way"), WORDS, r"Model.way='wrong'",
    ),
    "a class of the model's classes": (
        lambda self, h: _by(self.way, h),
        lambda model, value: setattr(next(k for k in type(model).__mro__ if k.__name__ == "Own" and
                                          "does" in vars(k)), "way", value),
        WORDS, "Own.way='wrong'",
    ),
    "an instance, and not its class": (
        lambda self, h: _by(self.way, h), lambda model, value: setattr(model, "way", value), WORDS,
        "with .* way='wrong' since",
    ),
    "what may not be there": (
        lambda self, h: _by(getattr(self, "later", "plain"), h),
        lambda model, value: setattr(model, "later", value), WORDS, "with .* later='wrong' since",
    ),
    "the environment": (
        lambda self, h: _by(os.environ.get("AUTOTP_WAY", "plain"), h),
        lambda model, value: os.environ.update(AUTOTP_WAY=value), WORDS, "AUTOTP_WAY'.='wrong'",
    ),
    "a method of an instance": (
        lambda self, h: self.act(h), lambda model, value: setattr(model.act, "forward", value),
        (torch.tanh, other, wrong), "act.forward=function .*wrong",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_before():
    """What the cases set is put back."""
    yield
    for place, name, value in (
        (HERE, "FLAG", None), (HERE, "WAY", Way.PLAIN), (HERE, "ACT", plain),
        (SETTINGS.inner, "way", "plain"),
        (FILE, "way", "plain"), (Settings, "way", "plain"), (Model, "way", "plain"), (HERE, "CALLS", 0),
    ):  # fmt: skip
        setattr(place, name, value)
    OPTIONS["way"][0], TABLE["act"] = "plain", plain
    os.environ.pop("AUTOTP_WAY", None)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_changes_after_shard_is_proven_or_refused(case):
    does, put, (first, right, bad), told = case
    model, ranks = _ranks(does)
    for value in (first, right):
        for each in (model, *ranks):
            put(each, value)
        _exact(model, ranks)
    for each in (model, *ranks):
        put(each, bad)
    _refused(
        ranks, rf"^Own is called {told}" if told.startswith("with") else f"{told}.* since it was sharded"
    )
    for each in (model, *ranks):
        put(each, right)
    _exact(model, ranks)


def test_what_a_function_closes_over_is_looked_at():
    forward, put = closed("plain")
    model, ranks = _ranks(forward=forward)
    put("other")
    _exact(model, ranks)
    put("wrong")
    _refused(ranks, r"Own.forward.<way>='wrong'")


def counts(self, h):
    global CALLS
    CALLS += 1
    return wrong(h) if CALLS == 4 else h


def test_a_number_that_the_forward_itself_counts_is_as_before_after_a_proof():
    global CALLS
    _, ranks = _ranks(counts)
    assert CALLS == 0
    CALLS = 3
    _refused(ranks, r"CALLS=3 since it was sharded")
    assert CALLS == 3


def test_another_module_in_the_place_of_one_raises():
    _, ranks = _ranks()
    for rank in ranks:
        rank.act = nn.Softmax(-1)
    for rank in ranks:
        with pytest.raises(UnprovenPath) as raised:
            rank(X)
        assert str(raised.value) == (
            "Own is called with another module as act than it was sharded with\n  = help: put modules in the "
            "place of others before the model is sharded"
        )


class Around(nn.Module):
    """What torch.compile and checkpointing put around a layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def test_a_module_around_one_is_no_other():
    model, ranks = _ranks()
    for rank in ranks:
        rank.fc2 = Around(rank.fc2)
        rank.unread = nn.Linear(2, 2)
    _exact(model, ranks)


class Edited(nn.Module):
    """A method whose number of heads is edited."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.heads = nn.Linear(8, 12), nn.Linear(12, 6), 4

    def forward(self, x):
        return self.fc2(self.split(self.fc1(x)))

    def split(self, h):
        b, t, _ = h.shape
        return h.view(b, t, self.heads, 3).softmax(-1).view(b, t, self.heads * 3)


def test_a_method_that_is_edited_may_not_be_put_in_another_place(monkeypatch):
    model = Edited()
    analysis = autotp.analyze(model, PLAN, tp=2, inputs=X)
    ranks = simulate(2, lambda group: apply(copy.deepcopy(model), analysis, group))
    _exact(model, ranks)
    monkeypatch.setattr(Edited, "split", lambda self, h: h)
    _refused(ranks, "the edits of the model's code do not fit: Edited.split is no longer Edited.split")


class Parts(nn.Module):
    """One part rests while another trains."""

    def __init__(self):
        super().__init__()
        self.fc1, self.inner, self.fc2 = nn.Linear(8, 12), Inner(), nn.Linear(12, 6)

    def forward(self, x):
        return self.fc2(self.inner(self.fc1(x), self.training))


class Inner(nn.Module):
    def forward(self, h, training):
        return h.cumsum(-1) if training and not self.training else h


def test_a_part_that_rests_while_the_model_trains_is_proven_as_it_is():
    model = Parts()
    analysis = autotp.analyze(model, PLAN, tp=2, inputs=X)
    ranks = simulate(2, lambda group: apply(copy.deepcopy(model), analysis, group).train())
    _exact(model, ranks)
    for rank in ranks:
        rank.eval().inner.train()
    _exact(model.eval(), ranks)
    for rank in ranks:
        rank.train().inner.eval()
    _refused(ranks, "inner.training=False since it was sharded: error.AT303.")


def test_what_is_read_is_pickled_by_name():
    _, (first, _) = _ranks_of(Pickled)
    again = pickle.loads(pickle.dumps(first.forward.attributes))
    assert again.words == first.forward.attributes.words
    assert [space.name for space, _ in again.read.globals] == [__name__]
    assert again.read.globals[0][0].table is globals()


class Pickled(Model):
    def does(self, h):
        return _by(FLAG, h)


def _ranks_of(kind):
    model = kind()
    analysis = autotp.analyze(model, PLAN, tp=2, inputs=X)
    return model, simulate(2, lambda group: apply(copy.deepcopy(model), analysis, group))
