"""kv heads that ranks share, and the query heads of each: rules against execution."""

from __future__ import annotations

import pytest
import torch

from autotp.placement import INVARIANT, PARTIAL, REPLICATE, Joint, Layout, Shard, deal, joined, shared_deal
from tests.rules import Case, Placed, hold, tensor

TP = 4
KV = shared_deal(2, TP)  # two ranks hold each kv head
Q = joined(KV, 3)  # its three queries are 2 + 1
SOME = shared_deal(3, TP)  # two ranks share the first, the others have their own
SOME_Q = joined(SOME, 2)


def case(function, *inputs, each, takes=(), never=False, tp=TP) -> Case:
    def choices(_: int) -> list[list[Placed]]:
        return [[(one, t.is_floating_point()) for one in row] for t, row in zip(inputs, each, strict=True)]

    return Case(function, inputs, tps=(tp,), choices=choices, takes=takes, never=never)


def repeat_kv(x: torch.Tensor, times: int) -> torch.Tensor:
    b, kv, s, d = x.shape
    return x[:, :, None].expand(b, kv, times, s, d).reshape(b, kv * times, s, d)


J = Joint((1, 2), Q)
SHAPE = (2, 2, 3, 5, 4)  # batch, kv heads, queries of each, positions, features
EVERY: list[Layout] = [J, INVARIANT, REPLICATE, PARTIAL, Shard(1, KV), Shard(2, shared_deal(3, TP))]

TAKEN = {
    "expand": case(lambda x: x.expand(2, 2, 3, 4), tensor(2, 2, 1, 4), each=[[Shard(1, KV)]]),
    "expand, -1": case(lambda x: x.expand(-1, -1, 3, -1), tensor(2, 2, 1, 4), each=[[Shard(1, KV)]]),
    "expand, with more dims": case(lambda x: x.expand(5, 2, 3, 4), tensor(2, 1, 4), each=[[Shard(0, KV)]]),
    "expand some shared": case(lambda x: x.expand(2, 3, 2, 4), tensor(2, 3, 1, 4), each=[[Shard(1, SOME)]]),
    "repeat_kv": case(lambda x: repeat_kv(x, 3), tensor(2, 2, 5, 4), each=[[Shard(1, KV)]]),
    "repeat_kv some shared": case(lambda x: repeat_kv(x, 2), tensor(2, 3, 5, 4), each=[[Shard(1, SOME)]]),
    "repeat_interleave": case(lambda x: x.repeat_interleave(3, 1), tensor(2, 2, 5, 4), each=[[Shard(1, KV)]]),
    "repeat_interleave some shared": case(
        lambda x: x.repeat_interleave(2, -3), tensor(2, 3, 5, 4), each=[[Shard(1, SOME)]]
    ),
    "split": case(lambda x: x.view(2, 5, 2, 3, 4), tensor(2, 5, 24), each=[[Shard(2, Q)]]),
    "split some shared": case(lambda x: x.view(2, 3, 2, 4), tensor(2, 24), each=[[Shard(1, SOME_Q)]]),
    "together": case(lambda x: x.flatten(1, 2), tensor(*SHAPE), each=[[J]]),
    "together, with features": case(
        lambda x: x.permute(0, 3, 1, 2, 4).reshape(2, 5, 24), tensor(*SHAPE), each=[[J]]
    ),
    "another view": case(lambda x: x.reshape(2, 2, 3, 20), tensor(*SHAPE), each=[[J]]),
    "permute": case(lambda x: x.permute(2, 0, 1, 4, 3), tensor(*SHAPE), each=[[J]]),
    "unsqueeze": case(lambda x: x.unsqueeze(2), tensor(*SHAPE), each=[[J]]),
    "function": case(lambda x: (x * 2).tanh().contiguous(), tensor(*SHAPE), each=[[J]]),
    "with itself": case(torch.mul, tensor(*SHAPE), tensor(*SHAPE, seed=1), each=[[J], [J]]),
    "with kv heads": case(
        torch.mul, tensor(*SHAPE), tensor(2, 2, 1, 5, 4, seed=1), each=[[J], [Shard(1, KV)]]
    ),
    "with a mask": case(
        lambda x, y: x.masked_fill(y > 0.5, 0.0),
        tensor(*SHAPE),
        tensor(2, 1, 1, 5, 4),
        each=[[J], [REPLICATE]],
    ),
    "softmax": case(lambda x: x.softmax(-1), tensor(*SHAPE), each=[[J]]),
    "sum beside": case(lambda x: x.sum((0, 4)), tensor(*SHAPE), each=[[J]]),
    "slices beside": case(lambda x: torch.cat([x[..., 2:], x[..., :2]], -1), tensor(*SHAPE), each=[[J]]),
    "scores": case(
        lambda q, k: q @ k.transpose(-1, -2),
        tensor(*SHAPE),
        tensor(2, 2, 1, 5, 4),
        each=[[J], [Shard(1, KV)]],
    ),
    "scores by einsum": case(
        lambda q, k: torch.einsum("bunsd,butd->bunst", q, k),
        tensor(*SHAPE),
        tensor(2, 2, 5, 4),
        each=[[J], [Shard(1, KV)]],
    ),
    "features of each": case(lambda x, w: x @ w, tensor(*SHAPE), tensor(4, 3), each=[[J], [REPLICATE]]),
}

NEVER = {
    "sum over queries": case(lambda x: x.sum(2), tensor(*SHAPE), each=[[J]]),
    "sum over kv heads": case(lambda x: x.sum(1), tensor(*SHAPE), each=[[J]]),
    "sum over both": case(lambda x: x.sum((1, 2)), tensor(*SHAPE), each=[[J]]),
    "softmax over queries": case(lambda x: x.softmax(2), tensor(*SHAPE), each=[[J]]),
    "cumulated": case(lambda x: x.cumsum(-1), tensor(*SHAPE), each=[[J]]),
    "one head": case(lambda x: x[:, 0], tensor(*SHAPE), each=[[J]]),
    "one query": case(lambda x: x[:, :, 0], tensor(*SHAPE), each=[[J]]),
    "some queries": case(lambda x: x[:, :, :2], tensor(*SHAPE), each=[[J]]),
    "queries of heads contracted": case(
        lambda q, w: q.transpose(2, 4) @ w, tensor(*SHAPE), tensor(3, 3), each=[[J], [REPLICATE, INVARIANT]]
    ),
    "heads contracted": case(
        lambda q, w: torch.einsum("bunsd,ux->bnsdx", q, w),
        tensor(*SHAPE),
        tensor(2, 3),
        each=[[J], [Shard(0, KV), REPLICATE]],
    ),
    "apart": case(lambda x: x.transpose(1, 2).flatten(1, 2), tensor(*SHAPE), each=[[J]]),
    "across": case(lambda x: x.reshape(2, 3, 2, 5, 4), tensor(*SHAPE), each=[[J]]),
    "queries that are whole": case(
        torch.mul,
        tensor(*SHAPE),
        tensor(2, 2, 3, 5, 4, seed=1),
        each=[[J], [Shard(1, KV), REPLICATE, PARTIAL]],
    ),
    "another way round": case(lambda x: x.view(2, 3, 2, 4), tensor(2, 24), each=[[Shard(1, Q)]]),
    "other heads": case(lambda x: x.view(2, 2, 6, 2), tensor(2, 24), each=[[Shard(1, Q)]]),
    # 12 features that nobody said are heads, seen as two heads of six: a cut head.
    "features": case(lambda x: x.view(3, 2, 6), tensor(3, 12), each=[[Shard(1, deal(12, TP))]]),
}


@pytest.mark.parametrize("name", TAKEN)
def test_exact(name: str) -> None:
    assert not hold(TAKEN[name]).refused


@pytest.mark.parametrize("name", NEVER)
def test_refused(name: str) -> None:
    tally = hold(
        Case(NEVER[name].function, NEVER[name].inputs, tps=(TP,), choices=NEVER[name].choices, never=True)
    )
    assert tally.refused


def test_beside_any_other_layout() -> None:
    """Whatever is taken is exact; heads and their repeats meet only what is cut alike, or whole there."""
    for function in (torch.mul, torch.add, torch.maximum):
        tally = hold(case(function, tensor(*SHAPE), tensor(*SHAPE, seed=1), each=[EVERY, EVERY]))
        joint = {pair for pair in tally.taken if J in pair}
        assert joint == {(J, J)}
    small = [REPLICATE, INVARIANT, PARTIAL]
    tally = hold(case(torch.mul, tensor(*SHAPE), tensor(5, 4), each=[[J], small]))
    assert tally.taken == {(J, REPLICATE)}


def test_fewer_repeats_than_ranks_of_a_head_are_held_by_all() -> None:
    """Then the values are what they are, but no query head may follow them: a sum would count them twice."""
    tally = hold(
        case(lambda x: repeat_kv(x, 2), tensor(2, 1, 5, 4), each=[[Shard(1, shared_deal(1, 3))]], tp=3)
    )
    assert tally.accepted
    shared = Shard(1, shared_deal(2, 3))
    hold(case(lambda x: repeat_kv(x, 1).sum(1), tensor(2, 2, 5, 4), each=[[shared]], never=True, tp=3))
