"""Sizes of batch and sequence."""

from __future__ import annotations

from itertools import islice

import pytest
from torch import nn

from autotp.trace.sizes import Sizes, heads_of, primes, sizes_of
from tests import architectures


@pytest.mark.parametrize(
    ("above", "avoid", "expected"),
    [(1, (), [2, 3, 5]), (10, (26,), [11, 17, 19]), (2, (9, 35), [11, 13, 17]), (0, (), [2, 3, 5])],
)
def test_primes(above, avoid, expected):
    assert list(islice(primes(above, frozenset(avoid)), 3)) == expected


def test_sizes_of_a_module():
    assert sizes_of(nn.Linear(10, 14)) == {10, 14}
    sizes = sizes_of(architectures.build("llama"))
    assert {97, 24, 40, 6, 3} <= sizes and 1 not in sizes and 0 not in sizes


def test_heads_of_configs_and_modules():
    assert heads_of(architectures.build("llama")) == 6
    assert heads_of(nn.Linear(3, 3)) == 1
    layer = nn.Linear(3, 3)
    layer.n_head, layer.head_dim, layer.head_count = 12, 64, 10_000
    assert heads_of(layer) == 12


def test_no_size_divides_another():
    model = nn.Linear(10 * 7, 11 * 13)
    assert Sizes.of(model) == Sizes(batch=19, sequence=17, decoder=23)
    assert Sizes.of(model, pair=1) == Sizes(batch=31, sequence=29, decoder=37)


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8, 20])
def test_a_limit_of_positions(limit):
    sizes = Sizes.of(nn.Linear(10, 14), limit=limit)
    assert sizes.sequence <= limit and sizes.decoder <= limit and sizes.batch > 4
    assert sizes.batch not in (sizes.sequence, sizes.decoder)
