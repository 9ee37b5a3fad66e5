"""Attributes that code reads by words which it does not have: kept elsewhere, or all that there are."""

from __future__ import annotations

import copy
import dataclasses
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.comm import simulate
from autotp.diagnostic import UnprovenPath

X = torch.randn(5, 7, 6, generator=torch.Generator().manual_seed(0)).double()
PLAN = {"up": "column", "down": "row"}
WORDS = ("near", "far")


class Options:
    """Settings that look at themselves."""

    def __init__(self) -> None:
        self.far, self.aside = False, 1

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def any(self) -> bool:
        return any(value is True for value in vars(self).values())

    def table(self) -> dict[str, Any]:
        return copy.copy(self.__dict__)


@dataclasses.dataclass
class Data:
    far: bool = False
    aside: int = 1


class Block(nn.Module):
    def __init__(self, ask: Callable[[Block], bool]) -> None:
        super().__init__()
        self.up, self.down, self.ask = nn.Linear(6, 7), nn.Linear(7, 6), ask
        self.word, self.words, self.of_kind = "far", ["far"], {"kind": "far"}
        self.near, self.far, self.aside = False, False, 1
        self.options, self.data = Options(), Data()

    def any(self) -> bool:
        return any(value is True for key, value in vars(self).items() if key != "training")

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h.softmax(-1) if self.ask(self) else h)


def far(model: Block) -> None:
    model.far = True


def far_option(model: Block) -> None:
    model.options.far = True


def far_data(model: Block) -> None:
    model.data.far = True


def new(model: Block) -> None:
    model.later = True


def new_option(model: Block) -> None:
    model.options.later = True


READ: dict[str, tuple[Callable[[Any], Any], Callable[[Any], None]]] = {
    "an attribute": (lambda m: getattr(m, m.word), far),
    "a list": (lambda m: any(getattr(m, word) for word in m.words), far),
    "a dict": (lambda m: getattr(m, m.of_kind["kind"]), far),
    "a global": (lambda m: any(getattr(m, word, False) for word in WORDS), far),
    "vars": (lambda m: vars(m)[m.word], far),
    "attrgetter": (lambda m: operator.attrgetter(m.word)(m), far),
    "of an object": (lambda m: getattr(m.options, m.word), far_option),
    "by an object": (lambda m: m.options[m.word], far_option),
    "a copy": (lambda m: m.options.table()[m.word], far_option),
    "any of an object": (lambda m: m.options.any(), far_option),
    "a new one of an object": (lambda m: m.options.any(), new_option),
    "any": (lambda m: m.any(), far),
    "a new one": (lambda m: m.any(), new),
    "asdict": (lambda m: dataclasses.asdict(m.data)[m.word], far_data),
    "astuple": (lambda m: dataclasses.astuple(m.data)[0], far_data),
    "fields": (lambda m: any(getattr(m.data, f.name) is True for f in dataclasses.fields(m.data)), far_data),
}


@pytest.mark.parametrize("how", READ)
def test_what_is_read_by_a_word_is_looked_at(how):
    ask, change = READ[how]
    model = Block(ask).double()

    def rank(group) -> Tensor:
        sharded = autotp.shard(copy.deepcopy(model), PLAN, group, inputs=X)
        before = copy.deepcopy(sharded)(X)
        change(sharded)
        with pytest.raises(UnprovenPath, match="=True since it was sharded"):
            sharded(X)
        return before

    assert (simulate(2, rank)[0] - model(X)).abs().max() < 1e-10


@pytest.mark.parametrize("how", ("an attribute", "by an object", "a copy"))
def test_what_no_word_names_may_change(how):
    model = Block(READ[how][0]).double()

    def rank(group) -> Tensor:
        sharded = autotp.shard(copy.deepcopy(model), PLAN, group, inputs=X)
        sharded.aside = sharded.data.aside = 2
        return sharded(X)

    assert all((found - model(X)).abs().max() < 1e-10 for found in simulate(3, rank))
    assert pickle.loads(pickle.dumps(autotp.analyze(Block(any_far), PLAN, tp=2, inputs=X.float()))).ok


def any_far(model: Block) -> bool:
    return model.options.any()


def halved(*args: Tensor) -> Tensor:
    """A wrapper that has the defaults of what it wraps, and none of its names."""
    return args[0] / 2


halved.__defaults__ = ([1, 2],)


def test_a_wrapper_with_more_defaults_than_names():
    class Halves(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(halved(self.up(x)))

    whole = Halves(any_far).double()
    for found in simulate(2, lambda group: autotp.shard(copy.deepcopy(whole), PLAN, group, inputs=X)(X)):
        assert (found - whole(X)).abs().max() < 1e-10
