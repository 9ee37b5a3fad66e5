"""Calls of a sharded model with flags, numbers and words that no trace was given."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import inspect
import math
import types

import numpy
import pytest
import torch
from torch import nn

import autotp
from autotp.comm import simulate
from autotp.diagnostic import UnprovenPath
from autotp.rewrite.apply import apply

PLAN = {"fc1": {"style": "column", "heads": 4}, "fc2": "row"}
X = torch.linspace(-1, 1, 2 * 5 * 8).reshape(2, 5, 8)


TABLE = {"plain": torch.tanh, "more": torch.exp, "sum": lambda h: h.cumsum(2)}


class Flags(nn.Module):
    """Four heads of three, with ways that depend on plain arguments."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 6)

    def forward(self, x=None, k=-1, name="plain", start=0, scale=2.0, inner=1.0, running=False, y=None):
        x = y if x is None else x
        h = inner * self.fc1(x[:, start:]).unflatten(-1, (-1, 3)).softmax(k)
        h = TABLE[name](h).flatten(-2)
        return self.fc2(h.cumsum(-1) if running else h) * scale


@pytest.fixture(scope="module")
def sharded():
    """Both ranks of one model, which remember what was proven, and the model itself."""
    model = Flags()
    analysis = autotp.analyze(model, PLAN, tp=2, inputs=X)
    assert analysis.ok
    ranks = simulate(2, lambda group: apply(copy.deepcopy(model), analysis, group))
    return model, ranks


def _run(sharded, **given):
    model, ranks = sharded
    got = simulate(2, lambda group: ranks[group.rank](X, **given))
    assert all(torch.allclose(y, model(X, **given), atol=1e-5) for y in got)


@pytest.mark.parametrize("given", [{}, {"k": 1}, {"name": "more"}, {"start": 2, "scale": 0.5}])
def test_what_the_proof_holds_for_is_computed(sharded, given):
    _run(sharded, **given)


@pytest.mark.parametrize(
    ("given", "code"), [({"k": 2}, "AT303"), ({"name": "sum"}, "AT303"), ({"running": True}, "AT303")]
)
def test_what_it_does_not_hold_for_raises(sharded, given, code):
    (name, value), *_ = given.items()
    with pytest.raises(UnprovenPath) as raised:
        _run(sharded, **given)
    told = str(raised.value)
    assert told.startswith(f"Flags is called with {name}={value!r} (it was proven with {name}=")
    assert f"error[{code}]" in told
    assert told.endswith(
        "\n  = help: shard the model with inputs= that call it this way, to see what the plan lacks"
    )


def test_a_number_that_only_whole_values_depend_on_is_proven_once(sharded, monkeypatch):
    _run(sharded, start=1, inner=0.5)
    monkeypatch.setattr("autotp.rewrite.called.proven_anew", None)
    _run(sharded, start=3, inner=-2)
    free = sharded[1][0].forward.guard.proven.free
    assert {"start", "inner"} <= free and "k" not in free


def test_a_call_without_a_tensor_that_the_traces_had_is_proven_as_it_is(sharded):
    model, ranks = sharded
    for y in simulate(2, lambda group: ranks[group.rank](y=X)):
        assert torch.allclose(y, model(X), atol=1e-5)


def test_what_the_forward_does_not_take_it_refuses_itself(sharded):
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        _run(sharded, other=1)


class Rates(nn.Module):
    """Dropout of rate 0 on a shard: a module's own, and one from an attribute."""

    def __init__(self):
        super().__init__()
        self.fc1, self.drop, self.fc2 = nn.Linear(8, 12), nn.Dropout(0), nn.Linear(12, 6)
        self.rate = 0.0

    def forward(self, x):
        return self.fc2(nn.functional.dropout(self.drop(self.fc1(x)), self.rate, self.training))


@pytest.mark.parametrize(("path", "name"), [("drop", "p"), ("", "rate")])
def test_a_dropout_rate_that_was_zero_may_not_be_raised(path, name):
    model = Rates()
    analysis = autotp.analyze(model, {"fc1": "column", "fc2": "row"}, tp=2, inputs=X)
    assert analysis.ok and analysis.resting == ("", "drop")

    def run(group):
        copied = apply(copy.deepcopy(model), analysis, group).train()
        copied(X)
        setattr(copied.get_submodule(path), name, 0.25)
        copied.eval()(X)
        with pytest.raises(UnprovenPath) as raised:
            copied.train()(X)
        return str(raised.value)

    assert simulate(2, run)[0] == (
        f"{path or 'Rates'}: {name} is 0.25, and was 0.0 when the plan was proven: every rank would drop the "
        "same elements of its own part; set the rate before the model is sharded"
    )


@pytest.mark.parametrize("number", [3, 7, 8, 6, -3])
def test_a_number_like_a_size_of_the_samples_is_not_any_number(number):
    class Modes(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(8, 9), nn.Linear(9, 6)

        def forward(self, x, mode=number):
            h = self.fc1(x)
            return self.fc2(h.cumsum(-1) if mode == 99 else h)

    def here(group):
        model = autotp.shard(Modes(), {"fc1": "column", "fc2": "row"}, group, inputs=torch.zeros(3, 7, 8))
        model(torch.ones(2, 5, 8), number)
        with pytest.raises(autotp.UnprovenPath, match="is called with mode=99"):
            model(torch.ones(2, 5, 8), 99)

    simulate(2, here)


def test_flags_that_were_proven_one_by_one_are_proven_together():
    class Flags(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(8, 9), nn.Linear(9, 6)

        def forward(self, x, one=False, two=False):
            h = self.fc1(x)
            return self.fc2(h.cumsum(-1) if one and two else h)

    def here(group):
        model, x = autotp.shard(Flags(), {"fc1": "column", "fc2": "row"}, group), torch.ones(2, 8)
        for flags in ((True, False), (False, True), (True, False)):
            model(x, *flags)
        with pytest.raises(autotp.UnprovenPath, match=r"one=True .* and two=True"):
            model(x, True, True)

    simulate(2, here)


def test_a_call_like_an_earlier_one_is_not_looked_at_again(sharded, monkeypatch):
    _run(sharded)
    monkeypatch.setattr("autotp.rewrite.called.signature", None)
    _run(sharded)
    with pytest.raises(TypeError, match="not callable"):
        _run(sharded, k=True)  # 1 is another value than True


class Base(nn.Module):
    """Four heads of three. Every case below is a forward of it; `cumsum` over the features is never right."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 6)
        self.flag, self.act, self.options = False, torch.tanh, {"mode": "plain"}
        self.config = types.SimpleNamespace(mode="plain")


class Kind(enum.Enum):
    PLAIN, WRONG = "plain", "wrong"


@dataclasses.dataclass
class Options:
    mode: str = "plain"


class Slotted:
    __slots__ = ("mode",)

    def __init__(self, mode):
        self.mode = mode


def wrong(h):
    return h.cumsum(-1)


def softmax(dim):
    return lambda h: h.unflatten(-1, (-1, 3)).softmax(dim).flatten(-2)


def _given(is_wrong):
    """A forward that is wrong on a rank where what it is given says so."""

    def forward(self, x, given=None):
        h = self.fc1(x)
        return self.fc2(h.cumsum(-1) if is_wrong(given) else h)

    return forward


def _checks(self, x):
    if x.shape[1] > 7:
        raise ValueError("at most 7 tokens")
    return self.fc2(self.fc1(x))


def _both(self, x, flag=False, mask=None):
    h = self.fc1(x) if mask is None else self.fc1(x) * mask
    return self.fc2(h.cumsum(-1) if flag and mask is not None else h)


def _masked(self, x, mask=None):
    return self.fc2(self.fc1(x) if mask is None else self.fc1(x) * mask)


def _more(self, x, *args, **flags):
    h = self.fc1(x)
    return self.fc2(h.cumsum(-1) if len(args) == 2 else h)


def _squeezed(self, x):
    h = self.fc1(x).squeeze().unflatten(-1, (-1, 3))
    return self.fc2(h.softmax(1).flatten(-2))


def _deep(self, x):
    h = self.fc1(x)
    return self.fc2(h.cumsum(-1) if x.dim() == 4 else h)


def _typed(self, x):
    h = self.fc1(x.float())
    return self.fc2(h.cumsum(-1) if x.dtype == torch.float64 else h)


def _number(looks):
    def forward(self, x, n=1):
        h = self.fc1(x) * n
        return self.fc2(h.cumsum(-1) if looks(n) else h)

    return forward


def _looped(self, x, n=1):
    h = self.fc1(x) * n
    for index in range(n):
        h = h.cumsum(-1) if index == 50 else h
    return self.fc2(h)


ONE, MASK = torch.rand(2, 5, 1), torch.rand(2, 5, 12)
CALLED = {  # a forward; what it is traced with, what else is right, and what is wrong
    "a flag and a tensor": (_both, (), [(True,), (False, ONE)], [(True, ONE)]),
    "a tensor of other sizes": (_masked, (ONE,), [(), (ONE[:1],)], [(MASK,), (MASK[:, :1],)]),
    "a new tensor": (_masked, (), [(ONE,), (ONE[0],)], [(ONE.clone().requires_grad_(),)]),
    "a longer list": (_given(lambda g: len(g) > 2), ([X, X],), [((X, X),)], [([X, X, X],)]),
    "another key": (_given(lambda g: "b" in g), ({"a": X},), [({"c": X},)], [({"b": X},)]),
    "further arguments": (_more, (), [(1,)], [(1, 2)]),
    "an enum": (_given(lambda g: g is Kind.WRONG), (Kind.PLAIN,), [], [(Kind.WRONG,)]),
    "a set": (_given(lambda g: 2 in g), ({1},), [({1, 3},), (frozenset([1]),)], [({1, 2},)]),
    "a range": (_given(lambda g: len(g) > 2), (range(2),), [(range(1),)], [(range(3),)]),
    "a slice": (_given(lambda g: g.start == 1), (slice(2),), [(slice(3),)], [(slice(1, 2),)]),
    "numbers": (_given(lambda g: g[1] == 3), (numpy.arange(2),), [], [(numpy.array([0, 3]),)]),
    "a scalar": (_given(lambda g: g == 2), (numpy.float32(1),), [(1.0,)], [(numpy.float32(2),)]),
    "true and one": (_given(lambda g: type(g) is int), (True,), [(1.0,)], [(1,)]),
    "minus zero": (_given(lambda g: math.copysign(1, g) < 0), (0.0,), [(math.nan,)], [(-0.0,)]),
    "an object": (_given(lambda g: g.mode == "wrong"), (Options(),), [], [(Options("wrong"),)]),
    "slots": (_given(lambda g: g.mode == "wrong"), (Slotted("plain"),), [], [(Slotted("wrong"),)]),
    "a function": (lambda self, x, f: self.fc2(f(self.fc1(x))), (torch.tanh,), [(torch.exp,)], [(wrong,)]),
    "a partial": (
        lambda self, x, f: self.fc2(f(self.fc1(x))),
        (functools.partial(torch.mul, 2),), [(functools.partial(torch.mul, 3),)],
        [(functools.partial(torch.cumsum, dim=-1),)],
    ),
    "a module": (
        lambda self, x, f: self.fc2(f(self.fc1(x))), (nn.Softmax(1),), [(nn.Softmax(0),)], [(nn.Softmax(-1),)]
    ),
    "what cannot be told": (_given(lambda g: g is not None), (), [], [(iter([1]),)]),
    "int": (_number(lambda n: int(n) == 99), (), [(3,), (4,)], [(99,)]),
    "float": (_number(lambda n: float(n) == 99), (), [(3,), (4,)], [(99,)]),
    "text": (_number(lambda n: f"{n}" == "99"), (), [(3,), (4,)], [(99,)]),
    "percent": (_number(lambda n: "%d" % n == "99"), (), [(3,), (4,)], [(99,)]),  # noqa: UP031
    "modulo": (_number(lambda n: n % 50 == 49), (), [(3,), (4,)], [(99,)]),
    "length": (_number(lambda n: len([0] * n) == 99), (), [(3,), (4,)], [(99,)]),
    "a table": (_number(lambda n: ([False] * 99 + [True])[n]), (), [(3,), (4,)], [(99,)]),
    "a loop": (_looped, (), [(3,), (4,)], [(99,)]),
}  # fmt: skip


def _same(model, ranks, *given, **named):
    """Whether every rank's output, and the gradients of what is given and of the weights, are the model's."""
    leaves = [g for g in given if isinstance(g, torch.Tensor) and g.requires_grad]

    def outcome(called):
        y = called(*given, **named)
        return y, torch.autograd.grad(y.square().sum(), [*leaves, called.fc1.bias, called.fc2.bias])

    wanted, (*inputs, first, last) = outcome(model)
    runs = simulate(2, lambda group: outcome(ranks[group.rank]))
    for got, (*theirs, _, bias) in runs:
        for a, b in zip((got, *theirs, bias), (wanted, *inputs, last), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat([g[-2] for _, g in runs]), first, rtol=1e-4, atol=1e-5)


def _ranks(forward, *samples):
    model = type("Model", (Base,), {"forward": forward})()
    analysis = autotp.analyze(model, PLAN, tp=2, inputs=(X, *samples))
    assert analysis.ok, analysis
    return model, simulate(2, lambda group: apply(copy.deepcopy(model), analysis, group))


@pytest.mark.parametrize("case", CALLED.values(), ids=CALLED)
def test_a_call_is_right_or_raises(case):
    forward, samples, right, refused = case
    model, ranks = _ranks(forward, *samples)
    _same(model, ranks, X, *samples)
    for given in right:
        _same(model, ranks, X, *given)
    for given in refused:
        for rank in ranks:
            for called in (rank, rank.forward):
                with pytest.raises(UnprovenPath, match="is called with"):
                    called(X, *given)
    _same(model, ranks, X, *samples)


@pytest.mark.parametrize(
    ("forward", "right", "refused"),
    [
        (_squeezed, [X], [X[:1]]),
        (_deep, [X[0], X[:1], X[:, :1]], [X[None]]),
        (_typed, [X.half()], [X.double()]),
    ],
)
def test_a_tensor_of_another_kind_is_proven_or_refused(forward, right, refused):
    model, ranks = _ranks(forward)
    for x in right:
        _same(model, ranks, x)
        _same(model, ranks, x.clone().requires_grad_())
    for x in refused:
        with pytest.raises(UnprovenPath, match="is called with x=a tensor float"):
            ranks[0](x)


@pytest.mark.parametrize(
    ("asks", "right", "refused"),
    [
        (lambda self, h: h.cumsum(-1) if self.flag else h, {"flag": None}, {"flag": True}),
        (lambda self, h: self.act(h), {"act": torch.exp}, {"act": wrong}),
        (lambda self, h: h.cumsum(-1) if self.config.mode == "wrong" else h,
         {"config.mode": "other"}, {"config.mode": "wrong"}),
        (lambda self, h: h.cumsum(-1) if self.options["mode"] == "wrong" else h,
         {"options": {"mode": "other"}}, {"options": {"mode": "wrong"}}),
    ],
)  # fmt: skip
def test_an_attribute_that_is_set_later_is_proven_or_refused(asks, right, refused):
    model, ranks = _ranks(lambda self, x: self.fc2(asks(self, self.fc1(x))))

    def put(changes):
        for each in (model, *ranks):
            for name, value in changes.items():
                *path, last = name.split(".")
                setattr(functools.reduce(getattr, path, each), last, value)

    before = {name: functools.reduce(getattr, name.split("."), model) for name in right}
    put(right)
    _same(model, ranks, X)
    put(refused)
    for rank in ranks:
        with pytest.raises(UnprovenPath, match=next(iter(refused)) + "=.* since it was sharded"):
            rank(X)
    put(before)
    _same(model, ranks, X)


def test_what_the_model_itself_refuses_is_told_in_its_words():
    _, ranks = _ranks(_checks)
    for rank in ranks:
        with pytest.raises(UnprovenPath) as raised:
            rank(X.repeat(1, 2, 1))
        assert str(raised.value) == (
            "Model is called with x of size 10 in dim 1, which tests/test_called.py:"
            f"{_checks.__code__.co_firstlineno + 1} asks: it cannot be traced: ValueError: at most 7 tokens\n"
            "  = help: see whether the unsharded model takes such a call\n"
            "  = help: shard the model with inputs= that call it this way, to see what the plan lacks"
        )


def test_a_list_of_many_numbers_is_not_told_in_full():
    _, ranks = _ranks(_checks)
    for rank in ranks:
        with pytest.raises(UnprovenPath, match=r"x=list of 5 .* and 8 more: ") as raised:
            rank([[0] * 8] * 5)
        assert len(str(raised.value)) < 1000


def test_what_the_code_asks_of_torch_is_looked_at():
    model, ranks = _ranks(
        lambda self, x: self.fc2(
            self.fc1(x).cumsum(-1) if torch.is_inference_mode_enabled() else self.fc1(x).relu()
        )
    )
    _same(model, ranks, X)
    with torch.inference_mode():
        for rank in ranks:
            with pytest.raises(UnprovenPath, match=r"torch\.is_inference_mode_enabled\(\)=True since it was"):
                rank(X)
    _same(model, ranks, X)


def test_a_call_is_looked_at_in_copies():
    model, ranks = _ranks(_both)
    copied = simulate(2, lambda group: copy.deepcopy(ranks[group.rank]))
    _same(model, copied, X)
    assert copied[0].forward.model() is copied[0] and "forward" not in vars(model)
    with pytest.raises(UnprovenPath, match="flag=True"):
        copied[0](X, True, ONE)
    assert inspect.signature(ranks[0].forward) == inspect.signature(model.forward)


def test_a_call_is_proven_without_the_hooks_that_came_later():
    model, ranks = _ranks(_both)
    seen = []
    ranks[0].fc1.register_forward_hook(lambda *given: seen.append(1))
    ranks[0].fc1.register_full_backward_hook(lambda *given: None)
    _same(model, ranks, X.clone().requires_grad_(), True)  # proven anew
    assert seen == [1]
