"""Which layers look alike."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autotp.trace.layers import Layers
from tests.stacks import Block, Stack


def groups(model, marks=None):
    """The groups, as lists of the layers' numbers."""
    found = {}
    for path, number in Layers.of(model, marks).groups.items():
        found.setdefault(number, []).append(int(path.rpartition(".")[2]))
    return list(found.values())


class Other(Block):
    pass


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([Block() for _ in range(1)], []),
        ([Block() for _ in range(2)], [[0, 1]]),
        ([Block() for _ in range(4)], [[0, 1, 2, 3]]),
        ([Block(i) for i in range(4)], [[0, 1, 2, 3]]),  # what a number does shows in what the layer runs
        ([Block(width=5 if i == 2 else 4) for i in range(4)], [[0, 1, 3]]),
        ([Other() if i % 2 else Block() for i in range(6)], [[0, 2, 4], [1, 3, 5]]),
        ([Block(sliding=i % 2 == 0) for i in range(6)], [[0, 2, 4], [1, 3, 5]]),
        ([Block(scale=0.5 if i == 1 else 2.0) for i in range(4)], [[0, 2, 3]]),
        ([Block().double() if i == 1 else Block() for i in range(4)], [[0, 2, 3]]),
        ([Block().train(i != 1) for i in range(4)], [[0, 2, 3]]),
        ([nn.Linear(4, 4) for _ in range(4)], []),
    ],
)  # fmt: skip
def test_what_looks_alike(blocks, expected):
    assert groups(Stack(blocks)) == expected


def test_a_plan_that_differs_makes_a_difference():
    blocks = [Block() for _ in range(5)]
    assert groups(Stack(blocks), {"layers.3.fc": "column"}) == [[0, 1, 2, 4]]
    assert groups(Stack(blocks), {f"layers.{i}.fc": "column" for i in range(5)}) == [[0, 1, 2, 3, 4]]
    assert groups(Stack(blocks), {"head": "column"}) == [[0, 1, 2, 3, 4]]


def test_the_outermost_layers_are_taken():
    stages = nn.ModuleList(Stack([Block() for _ in range(3)]) for _ in range(3))
    assert sorted(Layers.of(stages).groups) == ["0", "1", "2"]
    stages[1].head = nn.Linear(4, 3, dtype=torch.float64)
    assert sorted(Layers.of(stages).groups)[:2] == ["0", "1.layers.0"]  # 0 and 2


def test_a_layer_that_stands_twice_is_one():
    block = Block()
    assert groups(Stack([block] * 5)) == []
