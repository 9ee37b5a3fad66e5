"""What hangs on what a forward reads, and changes after the model was sharded: closures, defaults and
attributes of functions, objects that are called, containers of them, slots, places where nothing stood."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import autotp
from autotp import mappings
from autotp.comm import simulate
from autotp.diagnostic import UnprovenPath
from autotp.rewrite.apply import apply
from tests.models import randomised

PLAN = {"fc1": {"style": "column", "heads": 4}, "fc2": "row"}
X = torch.linspace(-1, 1, 2 * 5 * 8, dtype=torch.float64).reshape(2, 5, 8)
WAYS = {"plain": lambda h: h, "other": torch.exp, "wrong": lambda h: h.cumsum(-1)}


class Model(nn.Module):
    """Four heads of three; each case below is a `does` of it."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(8, 12), nn.Linear(12, 6), nn.Tanh()

    def forward(self, x):
        return self.fc2(self.does(self.fc1(x)))


def _ranks(does, prepare=lambda model: None, tp=2, **ways):
    model = type("Own", (Model,), {"does": does, **ways})().eval()
    randomised(model, seed=0)
    prepare(model)
    analysis = autotp.analyze(model, PLAN, tp=tp, inputs=X)
    assert analysis.ok, analysis
    return model, simulate(tp, lambda group: apply(copy.deepcopy(model), analysis, group))


def exact(model, ranks):
    expected = model(X)
    for y in simulate(len(ranks), lambda group: ranks[group.rank](X)):
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)


class Way:
    def __init__(self, way="plain"):
        self.way = way


class Called(Way):
    def __call__(self, h):
        return WAYS[self.way](h)


class AlwaysWrong:
    def __call__(self, h):
        return h.cumsum(-1)


@dataclass(slots=True)
class Slots:
    way: str = "plain"


class Table(dict):
    """A dict by another name."""


class OfClass:
    way = "plain"


class Beside:
    way = "plain"


Pair = namedtuple("Pair", "way")


def closed(around=lambda function: function):
    """A function, and what sets the way that it closes over."""
    way = "plain"

    @around
    def does(h):
        return WAYS[way](h)

    def put(model, new):
        nonlocal way
        way = new

    return does, put


def by_way(h, way):
    return WAYS[way](h)


def by_default(h, ways=Way()):  # noqa: B008
    return WAYS[ways.way](h)


def by_attribute(h):
    return WAYS[by_attribute.way](h)


by_attribute.way = "plain"
CALLED = Called()
ON_MODEL, PUT_ON_MODEL = closed()
IN_DICT, PUT_IN_DICT = closed()
IN_PARTIAL, PUT_IN_PARTIAL = closed()
LIKE_OURS, PUT_LIKE_OURS = closed(functools.wraps(mappings.copy))
IN_TABLE = {"a": closed()}


def _gives(**attributes):
    """What gives a model some attributes, each of its own."""

    def prepare(model):
        for name, make in attributes.items():
            setattr(model, name, make())

    return prepare


def outer(inner):
    return lambda h: inner(h)


NESTED = outer(LIKE_OURS)
CASES = {  # what the forward does with a shard, what is prepared, and what sets the way
    "an object that is called": (
        lambda self, h: self.call(h), _gives(call=Called), lambda m, way: setattr(m.call, "way", way),
    ),
    "another object": (
        lambda self, h: WAYS[self.ways.way](h), _gives(ways=Way),
        lambda m, way: setattr(m, "ways", Way(way)),
    ),
    "another object that is called": (
        lambda self, h: self.call(h), _gives(call=Called), lambda m, way: setattr(m, "call", Called(way)),
    ),
    "a global that is called": (
        lambda self, h: CALLED(h), _gives(), lambda m, way: setattr(CALLED, "way", way),
    ),
    "a closure of a function on the model": (
        lambda self, h: self.call(h), _gives(call=lambda: ON_MODEL), PUT_ON_MODEL,
    ),
    "a closure of a function in a dict": (
        lambda self, h: self.table["f"](h), _gives(table=lambda: {"f": IN_DICT}), PUT_IN_DICT,
    ),
    "a closure of a partial": (
        lambda self, h: self.call(h), _gives(call=lambda: functools.partial(IN_PARTIAL)), PUT_IN_PARTIAL,
    ),
    "a closure of a function in a global dict": (
        lambda self, h: IN_TABLE["a"][0](h), _gives(), IN_TABLE["a"][1],
    ),
    "a function that says it is autotp's": (lambda self, h: NESTED(h), _gives(), PUT_LIKE_OURS),
    "a keyword of a partial": (
        lambda self, h: self.call(h), _gives(call=lambda: functools.partial(by_way, way="plain")),
        lambda m, way: m.call.keywords.update(way=way),
    ),
    "a default": (
        lambda self, h: by_default(h), _gives(),
        lambda m, way: setattr(by_default.__defaults__[0], "way", way),
    ),
    "an attribute of a function": (
        lambda self, h: by_attribute(h), _gives(), lambda m, way: setattr(by_attribute, "way", way),
    ),
    "slots": (
        lambda self, h: WAYS[self.ways.way](h), _gives(ways=Slots),
        lambda m, way: setattr(m.ways, "way", way),
    ),
    "an object in a list": (
        lambda self, h: WAYS[self.ways[0].way](h), _gives(ways=lambda: [Way()]),
        lambda m, way: setattr(m.ways[0], "way", way),
    ),
    "another object in a list": (
        lambda self, h: WAYS[self.ways[0].way](h), _gives(ways=lambda: [Way()]),
        lambda m, way: m.ways.__setitem__(0, Way(way)),
    ),
    "a function beside an object": (
        lambda self, h: self.table["f"](h), _gives(table=lambda: {"f": WAYS["plain"], "o": Way()}),
        lambda m, way: m.table.update(f=WAYS[way]),
    ),
    "an ordered dict": (
        lambda self, h: WAYS[self.ways["way"]](h), _gives(ways=lambda: OrderedDict(way="plain")),
        lambda m, way: m.ways.update(way=way),
    ),
    "a dict with a default": (
        lambda self, h: WAYS[self.ways["way"]](h), _gives(ways=lambda: defaultdict(lambda: "plain")),
        lambda m, way: m.ways.update(way=way),
    ),
    "a dict of a class": (
        lambda self, h: WAYS[self.ways["way"]](h), _gives(ways=lambda: Table(way="plain")),
        lambda m, way: m.ways.update(way=way),
    ),
    "a named tuple": (
        lambda self, h: WAYS[self.ways.way](h), _gives(ways=lambda: Pair("plain")),
        lambda m, way: setattr(m, "ways", Pair(way)),
    ),
    "the class of an object": (
        lambda self, h: WAYS[self.ways.way](h), _gives(ways=OfClass),
        lambda m, way: setattr(OfClass, "way", way),
    ),
    "an object, and not its class": (
        lambda self, h: WAYS[self.ways.way](h), _gives(ways=Beside),
        lambda m, way: setattr(m.ways, "way", way),
    ),
    "vars": (
        lambda self, h: WAYS[vars(self)["way"]](h), _gives(way=lambda: "plain"),
        lambda m, way: setattr(m, "way", way),
    ),
    "a word": (
        lambda self, h: WAYS[getattr(self, "way")](h), _gives(way=lambda: "plain"),  # noqa: B009
        lambda m, way: setattr(m, "way", way),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_hangs_on_what_is_read_is_proven_or_refused(case):
    does, prepare, put = case
    model, ranks = _ranks(does, prepare)
    try:
        for way in ("plain", "other", "plain"):
            for each in (model, *ranks):
                put(each, way)
            exact(model, ranks)
        for each in (model, *ranks):
            put(each, "wrong")
        for rank in ranks:
            with pytest.raises(UnprovenPath, match=r"since it was sharded: error.AT303."):
                rank(X)
    finally:
        put(model, "plain")


class Wrong(nn.Module):
    def forward(self, h):
        return h.cumsum(-1)


def tries(self, h):
    try:
        return self.later(h)
    except AttributeError:
        return self.act(h)


def runs_all(self, h):
    for each in self.parts:
        h = each(h)
    return h


def runs_values(self, h):
    for each in self.parts.values():
        h = each(h)
    return h


def if_there(self, h):
    return self.act(h) if self.later is None else h.cumsum(-1)


NEW = {  # what comes where nothing stood
    "a function that is tried": (tries, _gives(), lambda m: setattr(m, "later", WAYS["wrong"])),
    "a module that is tried": (tries, _gives(), lambda m: setattr(m, "later", Wrong())),
    "a module of a list": (
        runs_all, _gives(parts=lambda: nn.ModuleList([nn.Tanh()])), lambda m: m.parts.append(Wrong()),
    ),
    "a module of a dict": (
        runs_values, _gives(parts=lambda: nn.ModuleDict({"a": nn.Tanh()})),
        lambda m: m.parts.update({"b": Wrong()}),
    ),
    "a module in a row": (
        lambda self, h: self.parts(h), _gives(parts=lambda: nn.Sequential(nn.Tanh())),
        lambda m: m.parts.append(Wrong()),
    ),
    "an object that is called": (
        runs_all, _gives(parts=lambda: [Called()]),
        lambda m: m.parts.append(AlwaysWrong()),
    ),
    "a module": (
        if_there, lambda m: m.register_module("later", None), lambda m: setattr(m, "later", nn.Tanh()),
    ),
    "a parameter": (
        if_there, lambda m: m.register_parameter("later", None),
        lambda m: setattr(m, "later", nn.Parameter(torch.ones(3))),
    ),
    "a buffer": (
        if_there, lambda m: m.register_buffer("later", None), lambda m: setattr(m, "later", torch.ones(3)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NEW.values(), ids=NEW)
def test_what_comes_where_nothing_stood_is_noticed(case):
    does, prepare, put = case
    model, ranks = _ranks(does, prepare)
    exact(model, ranks)
    for rank in ranks:
        put(rank)
        with pytest.raises(UnprovenPath, match=r"since it was sharded|than it was sharded with"):
            rank(X)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (staticmethod(WAYS["plain"]), staticmethod(WAYS["wrong"])),
        (classmethod(lambda cls, h: h), classmethod(lambda cls, h: h.cumsum(-1))),
        (property(lambda self: WAYS["plain"]), property(lambda self: WAYS["wrong"])),
    ],
    ids=["static", "of the class", "property"],
)
def test_another_method_of_a_class(before, after):
    model, ranks = _ranks(lambda self, h: self.part(h), part=before)
    exact(model, ranks)
    next(kind for kind in type(ranks[0]).__mro__ if "part" in vars(kind)).part = after
    for rank in ranks:
        with pytest.raises(UnprovenPath, match=r"Own.part=.* since it was sharded: error.AT303."):
            rank(X)


def switched(function):
    """A decorator whose function may become another."""

    def wrapper(*args):
        return function(*args)

    def put(new):
        nonlocal function
        function = new

    wrapper.put = put
    return wrapper


class Switched(nn.Module):
    """An edited method behind it: the sharded model has a copy of the decorator."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.heads = nn.Linear(8, 12), nn.Linear(12, 6), 4

    @switched
    def forward(self, x):
        h = self.fc1(x)
        return self.fc2(h.view(2, 5, self.heads, 3).softmax(-1).flatten(2))


def test_a_decorator_whose_function_becomes_another_raises():
    model = randomised(Switched(), seed=0).eval()
    analysis = autotp.analyze(model, PLAN, tp=2, inputs=X)
    ranks = simulate(2, lambda group: apply(copy.deepcopy(model), analysis, group))
    exact(model, ranks)
    vars(Switched)["forward"].put(lambda self, x: self.fc2(self.fc1(x)))
    for rank in ranks:
        with pytest.raises(UnprovenPath, match="the edits of the model's code do not fit"):
            rank(X)
