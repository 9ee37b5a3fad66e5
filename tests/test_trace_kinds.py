"""Layers of one kind are traced once."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import nn

from autotp.trace.inputs import Samples, make
from autotp.trace.kinds import Shortened, prefix, shorten
from autotp.trace.modes import captured
from autotp.trace.recorder import record
from tests import architectures

X = torch.randn(3, 4)


class Block(nn.Module):
    def __init__(self, index=0, width=4, **settings):
        super().__init__()
        self.fc = nn.Linear(4, width)
        self.out = nn.Linear(width, 4)
        self.layer_idx = index
        for name, value in settings.items():
            setattr(self, name, value)

    def forward(self, x):
        return x + self.out(self.fc(x))


class Stack(nn.Module):
    def __init__(self, blocks, config=None):
        super().__init__()
        self.layers = nn.ModuleList(blocks)
        self.config = config
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def kept(model, marks=None):
    with shorten(model, marks) as short:
        return short.kept


@pytest.mark.parametrize(
    ("found", "length"),
    [
        ([0], 1),
        ([0, 0], 2),
        ([0, 0, 0, 0], 2),
        ([0, 1, 1, 1], 3),
        ([0, 0, 1, 1, 1], 4),
        ([0, 1, 0, 1, 0, 1], 4),
        ([0, 1, 0, 1, 0], 3),
        ([0, 0, 0, 1, 0, 0, 0, 1, 0], 5),
        ([0, 1, 2, 3], 4),
        ([0, 0, 0, 1], 4),
    ],
)
def test_the_prefix_has_every_kind_and_every_pair(found, length):
    assert prefix(found) == length


def test_a_stack_of_one_kind():
    model = Stack(Block(i) for i in range(9))
    names = list(model.state_dict())
    with shorten(model) as short:
        assert short.kept == {"layers": 2} and len(model.layers) == 2
        assert short.twin("layers.7.fc.weight") == "layers.1.fc.weight"
        assert (
            short.twin("layers.1.fc.weight") == "layers.1.fc.weight"
            and short.twin("head.bias") == "head.bias"
        )
        assert len(record(model, (X,), {}).ops()) == 7
    assert len(model.layers) == 9 and list(model.state_dict()) == names
    assert [layer.layer_idx for layer in model.layers] == list(range(9))


def test_the_model_is_whole_again_after_a_failure():
    model = Stack(Block(i) for i in range(5))
    with pytest.raises(KeyError), shorten(model):
        raise KeyError
    assert len(model.layers) == 5
    copy.deepcopy(model)(X)


class Other(Block):
    pass


class Decides(Block):
    def forward(self, x):
        return super().forward(x) if self.layer_idx != 3 else x


def shared(count):
    blocks = [Block(i) for i in range(count)]
    blocks[3].fc.weight = blocks[0].fc.weight
    return blocks


class Config:
    def __init__(self, **values):
        self.__dict__.update(values)


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: Stack([Block(i) for i in range(2)]), None),
        (lambda: Stack([Block(i, width=5 if i == 3 else 4) for i in range(6)]), 5),
        (lambda: Stack([Block(i, width=5 if i == 0 else 4) for i in range(6)]), 3),
        (lambda: Stack([Other(i) if i % 2 else Block(i) for i in range(9)]), 3),
        (lambda: Stack([Block(i, sliding=i % 3 == 2) for i in range(9)]), 6),
        (lambda: Stack([Block(i, scale=0.1 * i) for i in range(6)]), None),
        (lambda: Stack([Block(i, window=(i % 2, "x")) for i in range(8)]), 4),
        (lambda: Stack([Block(i, function=torch.relu if i else torch.tanh) for i in range(6)]), 3),
        (lambda: Stack([Block(10 + i) for i in range(6)]), 2),
        (lambda: Stack([Block(i * i) for i in range(6)]), None),
        (lambda: Stack([Decides(i) for i in range(6)]), None),
        (lambda: Stack([Block(i) for i in range(6)], Config(kinds=["a", "b"] * 3)), 4),
        (lambda: Stack([Block(i) for i in range(6)], Config(kinds=["a", "b"] * 2)), 2),
        (lambda: Stack(shared(8)), 5),
        (lambda: Stack([Block(i).double() if i == 1 else Block(i) for i in range(6)]), 4),
    ],
)
def test_what_makes_a_kind(build, expected):
    assert kept(build()) == ({} if expected is None else {"layers": expected})


def test_marks_make_kinds():
    model = Stack(Block(i) for i in range(9))
    assert kept(model, {"layers.3.fc": "column", "layers.3.fc.weight": 0}) == {"layers": 5}
    every = {f"layers.{i}.fc": "column" for i in range(9)}
    assert kept(model, every) == {"layers": 2}
    assert kept(model, {"head": "column"}) == {"layers": 2}


def test_a_parent_that_counts_keeps_its_layers():
    class Skips(Stack):
        def forward(self, x):
            for i, layer in enumerate(self.layers):
                x = layer(x) if i != 4 else x
            return x

    assert kept(Skips(Block(i) for i in range(9))) == {}


def test_lists_in_lists():
    class Stage(nn.Module):
        def __init__(self, index):
            super().__init__()
            self.blocks = nn.ModuleList(Block(i) for i in range(5))
            self.stage = index

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    model = Stack(Stage(i) for i in range(4))
    with shorten(model) as short:
        assert short.kept == {"layers": 2, "layers.0.blocks": 2, "layers.1.blocks": 2}
        assert short.twin("layers.3.blocks.4.fc.weight") == "layers.1.blocks.1.fc.weight"
        assert len(record(model, (X,), {}).ops()) == 13
    assert sum(len(stage.blocks) for stage in model.layers) == 20


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("llama", {"num_hidden_layers": 7}, {"model.layers": 2}),
        pytest.param("gemma2", {"num_hidden_layers": 8}, {"model.layers": 4}, marks=pytest.mark.slow),
        ("bert", {"num_hidden_layers": 7}, {"bert.encoder.layer": 2}),
        pytest.param(
            "t5", {"num_layers": 6}, {"encoder.block": 3, "decoder.block": 3}, marks=pytest.mark.slow
        ),
        pytest.param("mixtral", {"num_hidden_layers": 6}, {"model.layers": 2}, marks=pytest.mark.slow),
    ],
)
def test_the_rest_of_a_model_repeats_what_is_kept(name, changes, expected):
    """Each layer that is left out records what its twin records."""
    model = architectures.build(name, device="meta", **changes)
    samples = make(model)
    whole = record(model, (), samples.kwargs)

    def inside(path):
        return [
            (
                str(n.target),
                n.meta["val"].shape if n.meta["val"] and not isinstance(n.meta["val"], list) else None,
            )
            for n in whole.ops()
            if f"{n.meta['module']}.".startswith(f"{path}.")
        ]

    with shorten(model) as short:
        assert short.kept == expected
        part = record(model, (), samples.kwargs)
    assert len(part.ops()) < len(whole.ops())
    for left_out in short.twins:
        assert inside(left_out) == inside(short.twin(left_out)) and inside(left_out)


@pytest.mark.slow
def test_a_model_of_405_billion_parameters():
    """The whole model, traced in about the time of a tiny one: processor time, as machines are shared."""
    sizes = {"hidden_size": 16384, "intermediate_size": 53248, "vocab_size": 128256}
    heads = {"num_attention_heads": 128, "num_key_value_heads": 8}
    model = architectures.build("llama", device="meta", num_hidden_layers=126, **sizes, **heads)
    samples = make(model)
    before = time.process_time()
    with shorten(model) as short:
        trace = record(model, (), samples.kwargs)
    assert short.kept == {"model.layers": 2} and len(short.twins) == 124
    assert time.process_time() - before < 1.0
    assert trace.calls["model.layers.1.mlp.down_proj"] == 1


def test_where_the_short_model_fails_the_whole_is_traced():
    class Counts(Stack):
        def __init__(self, blocks):
            super().__init__(blocks)
            self.depth = len(self.layers)

        def forward(self, x):
            for i in range(self.depth):
                x = self.layers[i](x)
            return x

    model = Counts(Block(i) for i in range(6))
    assert kept(model) == {"layers": 2}
    with captured(model, Samples.given(X)) as (found, short):
        assert not found.failed and short == Shortened() and len(model.layers) == 6
        assert found.traces[0][1].calls["layers.5.fc"] == 1
    with captured(Stack(Block(i) for i in range(6)), Samples.given(X)) as (found, short):
        assert short.kept == {"layers": 2} and "layers.5.fc" not in found.traces[0][1].calls
