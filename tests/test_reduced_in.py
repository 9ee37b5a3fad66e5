"""Sums over the ranks in a more precise dtype than the values'."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import autotp
from autotp.comm import group_of, reduced_in, simulate, within
from autotp.diagnostic import UsageError
from tests.test_same_inputs import PLAN, mlp

PARTS = [256.0, 1.0, 1.0, -256.0]  # in bfloat16, 256 + 1 is 256
LOST = torch.bfloat16


def sums(group):
    x = torch.full((4,), PARTS[group.rank], dtype=LOST)
    wide = reduced_in(group, torch.float32)
    found = [wide.all_reduce(x), wide.all_reduce_later(x)(), wide.reduce_scatter(x, 0, [1, 1, 1, 1])]
    assert torch.equal(x, torch.full((4,), PARTS[group.rank], dtype=LOST))
    for same in (torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64)):
        assert torch.equal(wide.all_reduce(same), group.all_reduce(same))  # as precise, or no fraction
    assert torch.equal(wide.all_gather(x[:1], 0, [1, 1, 1, 1]), torch.tensor(PARTS, dtype=LOST))
    assert (wide.rank, wide.size, wide.exchange(7)) == (group.rank, 4, [7] * 4)
    return [(total.dtype, total.tolist()) for total in found]


def on_a_rank(rank, size):
    group = group_of(None)
    wide = reduced_in(None, torch.float32)
    assert copy.deepcopy(wide) is wide and pickle.loads(pickle.dumps(wide)).group is group
    assert within(wide).exchange(rank) == list(range(size))
    return sums(group)


def test_a_sum_is_rounded_once():
    assert simulate(4, sums) == [[(LOST, [2.0] * 4), (LOST, [2.0] * 4), (LOST, [2.0])]] * 4


@pytest.mark.slow
def test_a_sum_is_rounded_once_on_real_ranks(ranks):
    assert ranks(4)(on_a_rank) == simulate(4, sums)


def test_a_model_whose_ranks_sum_in_float32():
    """Its row layer's sum is that of the ranks' rounded products, rounded once."""
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).to(LOST)
    model = mlp().to(LOST)
    cuts = [(0, 3), (3, 6), (6, 9)]
    hidden = torch.relu(model[0](x))
    products = [hidden[:, a:b] @ model[3].weight[:, a:b].T for a, b in cuts]
    wanted = sum(p.float() for p in products).to(LOST) + model[3].bias

    def here(group):
        mine = autotp.shard(copy.deepcopy(model), PLAN, reduced_in(group, torch.float32), inputs=x)
        out = mine(x)
        out.sum().backward()
        return out.detach(), mine[0].weight.grad.dtype

    for out, dtype in simulate(3, here):
        assert torch.equal(out, wanted.detach()) and dtype == LOST


def test_ranks_agree_on_it_and_it_is_a_floating_point_dtype():
    def here(group):
        given = reduced_in(group, torch.float32) if group.rank else group
        autotp.shard(mlp(), PLAN, given)

    with pytest.raises(UsageError, match="the ranks of the group have sums in a different dtype"):
        simulate(2, here)
    with pytest.raises(UsageError) as caught:
        reduced_in(None, torch.int32)
    assert str(caught.value) == "sums run in a floating-point dtype, not torch.int32"
