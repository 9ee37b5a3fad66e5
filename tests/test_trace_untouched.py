"""After a trace, succeeded or failed, the user's model is as it was."""

from __future__ import annotations

import functools
import random
from collections import OrderedDict, deque
from typing import ClassVar

import numpy
import pytest
import torch
from torch import nn

import autotp
from autotp.trace.export import export
from autotp.trace.graph import TraceError
from autotp.trace.recorder import record
from tests import architectures, tables

X = torch.randn(3, 4)
TABLE: dict[int, torch.Tensor] = {}


@functools.lru_cache(maxsize=4)
def cached_mask(size):
    return torch.ones(size)


class Cache:
    """An object that a model keeps: no module."""

    def __init__(self):
        self.rows, self.count = [], 0


class Hoarder(nn.Module):
    """Stores what it computes wherever it can, and then perhaps fails."""

    shared: ClassVar[dict[str, torch.Tensor]] = {}
    latest = None

    def __init__(self, fails=False):
        super().__init__()
        self.fc, self.fails = nn.Linear(4, 4), fails
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("later", None)
        self.plain = torch.ones(4)
        self.masks = {}
        self.history, self.recent, self.kinds = [1], deque(maxlen=2), {"a"}
        self.cache = Cache()
        self.nested = {"inner": OrderedDict(), "list": [[]]}
        self.fc.register_forward_hook(lambda m, args, out: out)

    def forward(self, x):
        h = self.dropout(self.fc(x))
        self.masks[3], self.mask = h, h
        self.history.append(h)
        self.recent.append(h)
        self.kinds.add("b")
        self.cache.rows.append(h)
        self.cache.count += 1
        self.cache.late = h
        self.nested["inner"]["x"] = h
        self.nested["list"][0].append(h)
        self.steps += 1
        self.later = h.detach()
        self.plain.mul_(2)
        self.plain[0] = 5
        self.fc.bias = nn.Parameter(torch.zeros(4))
        self.added = nn.Linear(4, 4)
        self.fc.register_forward_hook(lambda m, args, out: out + 1)
        self.training = not self.training
        Hoarder.shared["h"] = h
        Hoarder.latest = h
        TABLE[4] = h
        h = h + cached_mask(4)
        return h.view(5, 5) if self.fails else h


def snapshot(value, seen=None):
    """All that hangs on an object, as comparable data: identities, and contents of real tensors."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        return (id(value), type(value).__name__, tuple(value.shape), value.requires_grad, value.tolist())
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if id(value) in seen:
        return id(value)
    seen.add(id(value))
    if isinstance(value, dict):
        return (id(value), [(k, snapshot(v, seen)) for k, v in value.items()])
    if isinstance(value, (list, tuple, deque)):
        return (id(value), [snapshot(v, seen) for v in value])
    if isinstance(value, set):
        return (id(value), sorted(map(repr, value)))
    return (id(value), type(value), snapshot(getattr(value, "__dict__", None), seen))


@pytest.mark.parametrize("route", [record, export])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_a_trace_stays(route, grad, fails):
    cached_mask.cache_clear()
    model = Hoarder(fails)
    model.fc.eval()
    before = snapshot(model)
    try:
        route(model, (X,), {}, grad=grad)
    except TraceError:
        assert fails or route is export
    else:
        assert not fails
    assert snapshot(model) == before
    assert Hoarder.shared == {} and Hoarder.latest is None and TABLE == {}
    assert cached_mask.cache_info().currsize == 0
    assert "forward" not in vars(model) and len(model.fc._forward_hooks) == 1
    assert model.training and not model.fc.training


def test_the_recorder_takes_it():
    assert record(Hoarder(), (X,), {}).stored


class Keeps(nn.Module):
    """Its table of numbers is kept by code in another file."""

    def __init__(self, table):
        super().__init__()
        self.fc1, self.fc2, self.table = nn.Linear(4, 6), nn.Linear(6, 4), table

    def forward(self, x):
        return self.fc2(self.fc1(x) * self.table(6))


@pytest.mark.parametrize("way", tables.WAYS)
def test_what_code_keeps_is_made_anew(way):
    """A table of a trace in the place of one would be met by every model, sharded or not."""
    model, x = Keeps(tables.WAYS[way]).double(), X.double()
    record(model, (x,), {})
    assert list(dict.keys(tables.REMADE)) == ["first"]
    assert autotp.verify(model, {"fc1": "column", "fc2": "row"}, tp=2, inputs=x).ok
    torch.testing.assert_close(model.table(6), torch.arange(6.0).double())
    dict.pop(tables.REMADE, "later", None)


def test_the_callers_inputs_stay():
    class Fills(nn.Module):
        def forward(self, x, cache, *, extra):
            cache.rows.append(x * 2)
            extra["list"].append(x)
            x.add_(1)
            return x

    x, cache, extra = torch.ones(3, 4), Cache(), {"list": [torch.ones(2)]}
    trace = record(Fills(), (x, cache), {"extra": extra}, grad=False)
    assert cache.rows == [] and len(extra["list"]) == 1 and torch.equal(x, torch.ones(3, 4))
    placeholders = [n.meta["name"] for n in trace.graph.nodes if n.op == "placeholder"]
    assert placeholders == ["[0][0]", "[1].extra.list[0]"]


def test_a_failure_prints_nothing(capfd, caplog):
    with pytest.raises(TraceError):
        record(nn.Linear(4, 4), (torch.ones(3, 5),), {})
    assert capfd.readouterr() == ("", "") and not caplog.records


@pytest.mark.parametrize("name", ["llama", "bert", pytest.param("t5", marks=pytest.mark.slow)])
def test_transformers_models_are_as_they_were(name):
    model = architectures.build(name)
    before = [(id(m), {k: id(v) for k, v in vars(m).items()}, snapshot(vars(m))) for m in model.modules()]
    inputs = architectures.inputs(model)
    record(model, (), inputs)
    with pytest.raises(TraceError):
        record(model, (), {**inputs, "attention_mask": torch.ones(9, 9, 9, 9)})
    after = [(id(m), {k: id(v) for k, v in vars(m).items()}, snapshot(vars(m))) for m in model.modules()]
    assert after == before
    with torch.no_grad():
        model(**inputs)


def test_flags_and_modes_are_as_they_were():
    with pytest.raises(TraceError):
        record(Hoarder(fails=True), (X,), {}, grad=False)
    assert torch.is_grad_enabled() and not torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    assert type(torch.ones(2) + 1) is torch.Tensor


def test_random_numbers_are_as_they_were():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))

    def draws():
        return torch.rand(3).tolist(), random.random(), numpy.random.rand()

    def seed():
        torch.manual_seed(3)
        random.seed(3)
        numpy.random.seed(3)

    seed()
    expected = draws()
    seed()
    record(model, (X,), {})
    assert draws() == expected
