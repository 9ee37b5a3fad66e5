"""Products, attention, embedding: rules against execution."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from autotp.placement import INVARIANT, PARTIAL, REPLICATE, Deal, Layout, Shard, deal
from tests.rules import Case, Placed, cut, hold, tensor

Takes = tuple[tuple[Layout, ...], ...]
MIDDLE: Takes = ((cut(2), cut(1)),)  # both along the summed dim of (2, 6, 4) x (2, 4, 6)
SUM: Takes = ((PARTIAL, REPLICATE), (REPLICATE, PARTIAL))


def of(function: Callable[..., object], *shapes: tuple[int, ...], few: int = 9, takes: Takes = ()) -> Case:
    return Case(function, tuple(tensor(*s, seed=i) for i, s in enumerate(shapes)), few=few, takes=takes)


def einsum(equation: str, *shapes: tuple[int, ...], few: int = 4, takes: Takes = ()) -> Case:
    return of(lambda *x: torch.einsum(equation, *x), *shapes, few=few, takes=takes)


CASES = {
    "linear": of(
        F.linear, (2, 5, 6), (9, 6), few=5, takes=((cut(2, 6), cut(1, 6)), (REPLICATE, cut(0, 9)), *SUM)
    ),
    "linear with bias": of(
        F.linear,
        (2, 6),
        (4, 6),
        (4,),
        few=4,
        takes=((REPLICATE, cut(0), cut(0)), (cut(0), REPLICATE, REPLICATE)),
    ),
    "linear of a vector": of(F.linear, (6,), (9, 6)),
    "matmul": of(torch.matmul, (2, 6, 4), (2, 4, 6), few=4, takes=(*MIDDLE, *SUM, (cut(0), cut(0)))),
    "matmul with a matrix": of(torch.matmul, (2, 6, 4), (4, 6), few=4, takes=((cut(2), cut(0)), *SUM)),
    "matmul of a matrix": of(torch.matmul, (6, 4), (2, 4, 6), few=4),
    "matmul broadcast": of(torch.matmul, (2, 1, 6, 4), (3, 4, 6), few=4, takes=((REPLICATE, cut(2)),)),
    "vector vector": of(torch.matmul, (6,), (6,), takes=((cut(0, 6), cut(0, 6)),)),
    "vector matrix": of(torch.matmul, (6,), (6, 4)),
    "matrix vector": of(torch.matmul, (4, 6), (6,)),
    "batch vector": of(torch.matmul, (2, 4, 6), (6,)),
    "vector batch": of(torch.matmul, (6,), (2, 6, 4)),
    "mm": of(torch.mm, (6, 4), (4, 6)),
    "bmm": of(torch.bmm, (2, 6, 4), (2, 4, 6), few=4, takes=MIDDLE),
    "mv": of(torch.mv, (6, 4), (4,)),
    "dot": of(torch.dot, (6,), (6,)),
    "vdot": of(torch.vdot, (6,), (6,)),
    "outer": of(torch.outer, (6,), (9,)),
    "ger": of(torch.ger, (6,), (9,)),
    "addmm": of(
        torch.addmm,
        (9,),
        (4, 6),
        (6, 9),
        few=4,
        takes=((cut(0, 9), REPLICATE, cut(1, 9)), (PARTIAL, cut(1), cut(0))),
    ),
    "addmm, a column": of(torch.addmm, (4, 1), (4, 6), (6, 9), few=3),
    "addmv": of(torch.addmv, (6,), (6, 4), (4,), few=4),
    "addr": of(torch.addr, (6,), (4,), (6,), few=4),
    "baddbmm": of(torch.baddbmm, (1, 6), (6, 2, 4), (6, 4, 6), few=3, takes=((REPLICATE, cut(0), cut(0)),)),
    "addbmm": of(torch.addbmm, (6, 6), (3, 6, 4), (3, 4, 6), few=2),
    "tensordot": of(lambda x, y: torch.tensordot(x, y, dims=([1, 0], [0, 2])), (2, 6, 4), (6, 3, 2), few=4),
    "einsum": einsum("bij, bjk -> bik", (2, 6, 4), (2, 4, 6), takes=(*MIDDLE, *SUM)),
    "einsum, letters left out": einsum("...ij, jk", (2, 6, 4), (4, 6)),
    "einsum, one summed alone": einsum("bij,k->bk", (2, 6, 4), (6,), takes=((cut(1), REPLICATE),)),
    "einsum, diagonal": einsum("bii->b", (4, 6, 6)),
    "einsum, dots": einsum("b...k,b...k->b...", (4, 3, 6), (4, 3, 6)),
    "einsum, three": einsum("ij,jk,kl->il", (2, 4), (4, 6), (6, 3)),
    "einsum, broadcast": einsum("bij,bjk->bik", (1, 6, 4), (2, 4, 6)),
    "einsum, a dim of one": einsum("ij,j->i", (6, 4), (1,)),
    "einsum, transposed": einsum("ij->ji", (6, 4)),
    "einsum, outer": einsum("i,j->ij", (6,), (4,)),
    "embedding": Case(
        lambda w, i: F.embedding(i, w, padding_idx=0),
        (tensor(6, 4), torch.tensor([[0, 3, 1, 5], [2, 2, 0, 1]])),
        takes=((cut(1), INVARIANT), (PARTIAL, INVARIANT), (REPLICATE, cut(0))),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_product_of_parts_is_a_part_of_the_product(name: str) -> None:
    hold(CASES[name])


def test_a_bias_is_not_added_to_a_sum_on_every_rank() -> None:
    case = of(F.linear, (2, 6), (4, 6), (4,), few=1)
    assert not any(layouts[0] == PARTIAL and layouts[2] != PARTIAL for layouts in hold(case).taken)


def test_shared_units_and_whole_sections_are_summed_once() -> None:
    # Two units over three ranks, the first on two of them: a contraction would count it twice.
    shared = Deal(2, ((0, 1), (0, 1), (1, 2)))
    by_unit, part_whole = Shard(1, shared), Shard(1, sections=((3, None), (3, deal(3, 3))))
    both: list[Placed] = [(by_unit, True), (part_whole, True)]
    rows: list[Placed] = [(s.at(0), True) for s in (by_unit, part_whole)]
    hold(Case(torch.mm, (tensor(4, 6), tensor(6, 2)), tps=(3,), choices=lambda tp: [both, rows], never=True))


# -- attention


def heads(*shapes: tuple[int, ...]) -> Callable[[int], list[list[Placed]]]:
    """Whole in every way, summed, and a few cuts of every dim."""

    def choices(tp: int) -> list[list[Placed]]:
        found: list[list[Placed]] = []
        for shape in shapes:
            whole: list[Placed] = [(INVARIANT, True), (INVARIANT, False), (REPLICATE, True), (PARTIAL, True)]
            fit = [
                Shard(d, deal(u, tp))
                for d, n in enumerate(shape)
                for u in (tp, 3, n)
                if n % u == 0 and u >= tp
            ]
            groups = (
                [Shard(1, deal(shape[1] // 2, tp), 2)] if shape[1] >= 2 * tp and shape[1] % 2 == 0 else []
            )
            found.append([*whole, *((s, True) for s in dict.fromkeys([*fit, *groups]))])
        return found

    return choices


def attention(query: tuple[int, ...], key: tuple[int, ...], takes: Takes, **options: object) -> Case:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, **options)  # type: ignore[arg-type]

    inputs = (tensor(*query), tensor(*key, seed=1), tensor(*key, seed=2))
    return Case(run, inputs, choices=heads(query, key, key), takes=takes)


ATTENTION = {
    "plain": attention((2, 6, 3, 4), (2, 6, 3, 4), ((cut(1),) * 3, (cut(0),) * 3)),
    "causal": attention((2, 6, 3, 4), (2, 6, 3, 4), ((cut(1),) * 3,), is_causal=True, scale=0.3),
    "grouped heads": attention(
        (1, 12, 3, 2), (1, 6, 3, 2), ((cut(1),) * 3, (cut(1, 6),) * 3), enable_gqa=True
    ),
    "three kv heads": attention((1, 12, 2, 2), (1, 3, 2, 2), ((cut(1, 3),) * 3,), enable_gqa=True),
    "one kv head": attention(
        (1, 12, 2, 2), (1, 1, 2, 2), ((cut(1, 12), REPLICATE, REPLICATE),), enable_gqa=True
    ),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_of_a_rank_s_heads(name: str) -> None:
    tally = hold(ATTENTION[name])
    assert not any(isinstance(x, Shard) and x.dim > 1 for layouts in tally.taken for x in layouts)


def test_attention_with_a_mask() -> None:
    by_head: list[Placed] = [(INVARIANT, True), (cut(1, 2), True), (cut(1, 3), True), (cut(0, 2), True)]
    masks: list[Placed] = [(INVARIANT, True), (INVARIANT, False), (REPLICATE, True), (PARTIAL, True),
                           (cut(0, 2), True), (cut(0, 3), True), (cut(1, 3), True)]  # fmt: skip
    shape = (2, 6, 3, 4)
    for mask in ((6, 3, 3), (1, 3, 3), (3, 3)):
        inputs = (tensor(*shape), tensor(*shape, seed=1), tensor(*shape, seed=2), tensor(*mask))
        fitting = [p for p in masks if not isinstance(p[0], Shard) or p[0].fits(mask[p[0].dim])]
        choices = [by_head, by_head, by_head, fitting]
        hold(Case(F.scaled_dot_product_attention, inputs, tps=(2,), choices=lambda tp, c=choices: c))  # type: ignore[misc]


def test_query_heads_follow_key_heads_that_several_ranks_share() -> None:
    # 2 key heads over 4 ranks: two ranks hold each; its 3 query heads are dealt inside, 2 + 1.
    keys = Shard(1, Deal(2, ((0, 1), (0, 1), (1, 2), (1, 2))))
    queries = Shard(1, Deal(6, ((0, 2), (2, 3), (3, 5), (5, 6))))
    across = Shard(1, Deal(6, ((0, 2), (2, 4), (4, 5), (5, 6))))  # rank 1 would need both key heads
    run = ATTENTION["grouped heads"].function
    inputs = (tensor(1, 6, 2, 2), tensor(1, 2, 2, 2, seed=1), tensor(1, 2, 2, 2, seed=2))
    placed: list[list[Placed]] = [[(queries, True), (across, True)], [(keys, True)], [(keys, True)]]
    tally = hold(Case(run, inputs, tps=(4,), choices=lambda tp: placed))
    assert tally.taken == {(queries, keys, keys)}
