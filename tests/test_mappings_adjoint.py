"""Every mapping's backward is the adjoint of its forward, on any cut: what makes gradients right.

    < forward(x), g >  =  < x, backward(g) >

How a value and a gradient are multiplied depends on the layout. A value that is invariant counts once;
of all others every rank's product counts: a replicated value's gradient is partial, a partial value's
whole, and of a sharded value each rank has its part, of shared elements a part of the gradient.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autotp import mappings
from autotp.comm import Group, simulate
from autotp.placement import Deal, Shard, deal

EIGHT = [name for name in mappings.MAPPINGS if name != "copy_shared"]


@st.composite
def deals(draw: st.DrawFn, tp: int) -> Deal | None:
    """A deal of some units, shared between neighbours, or whole everywhere."""
    kind = draw(st.sampled_from(["dealt", "uneven", "shared", "whole"]))
    if kind == "whole":
        return None
    if kind == "shared":
        units = draw(st.integers(1, tp - 1))
        first = sorted(draw(st.lists(st.integers(0, units - 1), min_size=tp, max_size=tp)))
        holders = sorted(set(first))
        return Deal(len(holders), tuple((holders.index(u), holders.index(u) + 1) for u in first))
    if kind == "dealt":
        return deal(draw(st.integers(tp, 2 * tp + 1)), tp)
    parts = draw(st.lists(st.integers(1, 3), min_size=tp, max_size=tp))
    bounds = [sum(parts[:r]) for r in range(tp + 1)]
    return Deal(bounds[-1], tuple((bounds[r], bounds[r + 1]) for r in range(tp)))


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, Shard, int, int]:
    """tp, a shard, the size of its dim, and the dim."""
    tp, dim = draw(st.integers(2, 4)), draw(st.integers(0, 2))
    dealt = draw(st.lists(deals(tp), min_size=1, max_size=3).filter(lambda found: any(found)))
    sections = tuple(((1 if d is None else d.units) * draw(st.integers(1, 2)), d) for d in dealt)
    return tp, Shard(dim, sections=sections), sum(size for size, _ in sections), dim


def random(*key: int, shape: list[int]) -> Tensor:
    seed = sum(k * 101**i for i, k in enumerate(key))
    return torch.randint(-5, 6, shape, generator=torch.Generator().manual_seed(seed)).double()


def local(x: Tensor, shard: Shard, rank: int) -> Tensor:
    """A rank's part, by index."""
    index = torch.cat([torch.arange(a, b) for a, b in shard.ranges(x.shape[shard.dim], rank)])
    return x.index_select(shard.dim, index)


def value(layout: str, rank: int, shape: list[int], shard: Shard) -> Tensor:
    if layout == "Shard":
        return local(random(1, shape=shape), shard, rank)
    return random(1, rank if layout == "Partial" else 0, shape=shape)


def gradient(layout: str, rank: int, shape: list[int], shard: Shard) -> Tensor:
    if layout == "Shard":
        return local(random(2, rank, shape=shape), shard, rank)
    return random(2, rank if layout == "Replicate" else 0, shape=shape)


def product(layout: str, values: list[Tensor], gradients: list[Tensor]) -> float:
    products = [(x * g).sum().item() for x, g in zip(values, gradients, strict=True)]
    if layout == "Invariant":
        for each in (values, gradients):
            assert all(torch.equal(x, each[0]) for x in each)
        return products[0]
    return sum(products)


@pytest.mark.parametrize("name", EIGHT)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(cut=cuts())
def test_backward_is_the_adjoint_of_forward(name: str, cut: tuple[int, Shard, int, int]) -> None:
    tp, shard, size, dim = cut
    row = mappings.MAPPINGS[name]
    shape = [2, 3, 2]
    shape[dim] = size
    options = {"shard": shard} if "Shard" in (row.source, row.target) else {}

    def run(group: Group) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = value(row.source, group.rank, shape, shard).requires_grad_()
        y = getattr(mappings, name)(x, group, **options)
        dy = gradient(row.target, group.rank, shape, shard)
        assert y.shape == dy.shape
        (dx,) = torch.autograd.grad(y, x, dy)
        return x.detach(), dx, y.detach(), dy

    x, dx, y, dy = map(list, zip(*simulate(tp, run), strict=True))
    assert product(row.target, y, dy) == product(row.source, x, dx)
    if row.target in ("Invariant", "Replicate"):
        assert all(torch.equal(each, y[0]) for each in y)
    if (row.source, row.target) == ("Invariant", "Shard") or name == "slice":
        whole = simulate(tp, lambda group: mappings.gather(y[group.rank], group, shard=shard))
        assert all(torch.equal(each, x[0]) for each in whole)
