"""What a forward asks of the sizes of its inputs: a call where something else comes out is proven anew."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import transformers
from torch import nn

import autotp
from autotp.comm import simulate
from autotp.diagnostic import UnprovenPath
from autotp.propagate.size_guards import SizeGuard, holds
from autotp.rewrite import called
from autotp.rewrite.apply import apply
from autotp.rewrite.sized_calls import check_of

PLAN = {"fc1": {"style": "column", "heads": 6}, "fc2": "row"}


class Asks(nn.Module):
    """Six heads of two; `way(x, h)` is what a length decides."""

    def __init__(self, way):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 5)
        self.way = [way]  # a list is no attribute that says how the model runs

    def forward(self, x):
        h = self.fc1(x).unflatten(-1, (-1, 2))  # [batch, length, heads, 2]
        return self.fc2(self.way[0](x, h).flatten(-2))


def _long(x, h, dim):
    if x.shape[1] > 40:
        h = h.flip(dim)
    return h


def _while(x, h, dim):
    n = x.shape[1]
    while n > 40:
        h, n = h.flip(dim), n - 40
    return h


def _for(x, h, dim):
    for _ in range(x.shape[1] // 40):
        h = h.flip(dim)
    return h


def _tried(x, h, dim):
    try:
        {x.shape[1] // 40: 0}[1]
    except KeyError:
        return h
    return h.flip(dim)


def _asked(x):
    """A helper that never sees what is cut."""
    return int(x.shape[1]) > 40


def _elements(x):
    return x.shape.numel() > 8 * 80 and x.size().numel() > 8 * 80


def _divisor(x):
    return math.gcd(x.shape[1], 50) == 50


KINDS = {
    "if": _long,
    "while": _while,
    "for": _for,
    "try": _tried,
    "else on one line": lambda x, h, d: torch.softmax(h, d if x.shape[1] > 40 else 1),
    "an and": lambda x, h, d: torch.softmax(h, (x.shape[1] > 40 and d) or 1),
    "least": lambda x, h, d: torch.softmax(h, (1, d)[min(x.shape[1] // 40, 1)]),
    "quotient": lambda x, h, d: torch.softmax(h, (1, d)[x.shape[1] // 40 % 2]),
    "elements": lambda x, h, d: h.flip(d) if x.numel() > 8 * 80 else h,
    "len": lambda x, h, d: h.flip(d) if len(x[0]) > 40 else h,
    "intermediate": lambda x, h, d: h.flip(d) if h.shape[1] + 1 > 40 else h,
    "merged": lambda x, h, d: h.flip(d) if x.flatten(0, 1).shape[0] > 80 else h,
    "elements of a shape": lambda x, h, d: h.flip(d) if _elements(x) else h,
    "divisor": lambda x, h, d: h.flip(d) if _divisor(x) else h,
    "parts": lambda x, h, d: h.flip(d) if [*x.split(40, dim=1)][1:] else h,
    "chunks": lambda x, h, d: h.flip(d) if len(torch.chunk(x, 60, 1)) > 40 else h,
    "slices": lambda x, h, d: h.flip(d) if len(x.unbind(1)) > 40 else h,
    "helper": lambda x, h, d: h.flip(d) if _asked(x) else h,
    "greatest": lambda x, h, d: h.flip(d) if max(x.shape) > 40 else h,
    "rows": lambda x, h, d: h.flip(d) if [i for i, _ in enumerate(x[0]) if i > 40] else h,
    "shape": lambda x, h, d: h.flip(d) if tuple(x.shape)[1:] != (7, 8) else h,
    "comprehension": lambda x, h, d: sum([h.flip(d) for n in x.shape if n > 40], h),
}


def _counted(monkeypatch):
    proofs = []
    prove = called.proven_anew
    monkeypatch.setattr(called, "proven_anew", lambda *a, **k: proofs.append(1) or prove(*a, **k))
    return proofs


class Sharded:
    """A model and its ranks."""

    def __init__(self, model, tp):
        self.model = model
        analysis = autotp.analyze(model, PLAN, tp=tp, inputs=torch.zeros(2, 7, 8))
        assert analysis.ok
        self.ranks = simulate(tp, lambda group: apply(copy.deepcopy(model), analysis, group))

    def run(self, length, batch=2):
        x = torch.linspace(-1, 1, batch * length * 8).reshape(batch, length, 8)
        for y in simulate(len(self.ranks), lambda group: self.ranks[group.rank](x)):
            assert torch.allclose(y, self.model(x), atol=1e-5)


ASKED = {"({0} <= 9)": True, "({0} > 9)": False, "bool({0})": True, "(({0} > 1) & ({0} <= 9))": True,
         "({0} // 4, {0} % 4)": (1, 3), "step({0} // 9)": 0, "step({0})": None, "max({0}, 3)": 7}  # fmt: skip


@pytest.mark.parametrize(("text", "outcome"), ASKED.items())
def test_a_guard_is_compiled_for_free_sizes(text, outcome):
    guard = SizeGuard(text, (("x", 1),), outcome)
    check = check_of([guard], (("x", None),), (torch.zeros(2, 7),), {})
    torch._dynamo.reset()
    call = torch.compile(lambda x: x + check((x,), {}), fullgraph=True, backend="eager", dynamic=True)
    lengths = (7, 6, 50)
    assert [bool(call(torch.zeros(2, n)).any()) for n in lengths] == [
        holds([guard], {("x", 1): n}) is None for n in lengths
    ]


@pytest.mark.parametrize(("tp", "kind"), [(2 + n % 2, kind) for n, kind in enumerate(KINDS)])
def test_what_a_size_decides_is_proven_when_it_comes_out_otherwise(kind, tp, monkeypatch):
    way, proofs = KINDS[kind], _counted(monkeypatch)
    exact = Sharded(Asks(lambda x, h: way(x, h, -1)), tp)
    exact.run(7)
    assert not proofs
    exact.run(50)
    exact.run(50)
    assert len(proofs) == 1
    wrong = Sharded(Asks(lambda x, h: way(x, h, -2)), tp)
    with pytest.raises(UnprovenPath, match=r"(?s)^Asks is called with x of size .*error\[AT303\]"):
        wrong.run(50)
    wrong.run(7)


class _Layer(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.fc1, self.fc2, self.number = nn.Linear(8, 12), nn.Linear(12, 8), number

    def forward(self, x):
        h = self.fc1(x)
        if x.shape[1] > 25 * self.number:
            h = h.flip(-1)
        return x + self.fc2(h)


def test_a_layer_that_repeats_another_asks_for_itself():
    model = nn.Sequential(*map(_Layer, (9, 8, 7, 6, 1, 5)))
    analysis = autotp.analyze(model, {"*.fc1": "column", "*.fc2": "row"}, tp=2, inputs=torch.zeros(2, 7, 8))
    assert analysis.ok
    ranks = simulate(2, lambda group: apply(copy.deepcopy(model), analysis, group))
    simulate(2, lambda group: ranks[group.rank](torch.ones(2, 25, 8)))
    with pytest.raises(UnprovenPath, match=r"(?s)input of size 26 in dim 1, .*error\[AT303\]"):
        simulate(2, lambda group: ranks[group.rank](torch.ones(2, 26, 8)))


def test_a_length_whose_origin_is_lost_is_proven_for_each_size(monkeypatch):
    def half(x, h):
        return h.flip(-1) if x[:, ::2].shape[1] > 20 else h

    proofs, model = _counted(monkeypatch), Sharded(Asks(half), 2)
    for length in (7, 9, 50, 9, 50):
        model.run(length)
    assert len(proofs) == 2


@pytest.mark.slow
def test_transformers_models_are_not_proven_for_each_length(monkeypatch):
    config = transformers.LlamaConfig(
        hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=97,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    analysis = autotp.analyze(model, autotp.Plan.from_transformers(config), tp=2)
    ranks = simulate(2, lambda group: apply(copy.deepcopy(model), analysis, group))
    proofs = _counted(monkeypatch)

    def generate(length):
        ids = torch.arange(3, 3 + 2 * length).reshape(2, length) % 90
        how = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        how["attention_mask"] = torch.ones_like(ids)
        (got, _) = simulate(2, lambda group: ranks[group.rank].generate(ids, **how))
        assert torch.equal(got, model.generate(ids, **how))
        return len(proofs)

    first = generate(5)
    assert generate(41) == generate(300) == first
