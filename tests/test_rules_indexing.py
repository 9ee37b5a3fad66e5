"""Index, gather, scatter and their kin: rules against execution."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from autotp.placement import INVARIANT, PARTIAL, REPLICATE, Layout
from tests.rules import Case, cut, hold, tensor

Takes = tuple[tuple[Layout, ...], ...]
TWO, SAME, GRID = torch.tensor([2, 0]), torch.tensor([2, 2]), torch.tensor([[0, 2], [1, 0]])
PICK = torch.tensor([[0], [1], [2], [0], [3], [1]])
f64 = torch.float64


def of(
    function: Callable[..., object], *inputs: torch.Tensor, takes: Takes = (), never: bool = False
) -> Case:
    return Case(function, inputs, few=4, takes=takes, never=never)


def used_zeros(places: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    zeros = torch.zeros(4, 6, dtype=f64)
    zeros.add_(1)
    return zeros.index_add(0, places, rows)


CASES = {
    "rows": of(lambda x, i: x[i], tensor(6, 9), TWO, takes=((cut(1, 3), INVARIANT), (PARTIAL, INVARIANT))),
    "a grid of columns": of(
        lambda x, i: x[:, i], tensor(5, 6, 4), GRID, takes=((cut(0, 5), INVARIANT), (cut(2), INVARIANT))
    ),
    "two dims": of(
        lambda x, i, j: x[i, j], tensor(6, 5, 4), TWO, SAME, takes=((cut(2), INVARIANT, INVARIANT),)
    ),
    "two dims apart": of(lambda x, i, j: x[i, :, j], tensor(6, 5, 4), TWO, SAME),
    "two dims, broadcast": of(lambda x, i, j: x[i[:, None], j], tensor(6, 5, 4), TWO, SAME),
    "later dims": of(lambda x, i, j: x[:, i, j], tensor(3, 6, 5, 4), TWO, torch.tensor([2])),
    "index_select": of(
        lambda x, i: x.index_select(1, i),
        tensor(4, 6, 2),
        TWO,
        takes=((cut(0), INVARIANT), (PARTIAL, INVARIANT)),
    ),
    "index_select from the end": of(lambda x, i: x.index_select(-1, i), tensor(4, 6, 3), TWO),
    "index_put": of(
        lambda x, i, y: x.index_put((i,), y),
        tensor(4, 6),
        TWO,
        tensor(2, 6),
        takes=((cut(1), INVARIANT, cut(1)), (PARTIAL, INVARIANT, PARTIAL)),
    ),
    "index_put, one row for all": of(
        lambda x, i, y: torch.ops.aten.index_put(x, [None, i], y), tensor(4, 6, 3), TWO, tensor(2, 3)
    ),
    "index_put, added": of(
        lambda x, i, y: torch.ops.aten.index_put(x, [None, i], y, True),
        tensor(6, 4, 3),
        SAME,
        tensor(6, 2, 3),
    ),
    "index_put, two dims": of(
        lambda x, i, j, y: x.index_put((i, j), y), tensor(4, 3, 6), TWO, torch.tensor([1, 1]), tensor(2, 6)
    ),
    "index_put, a number": of(
        lambda x, i, y: x.index_put((i,), y),
        tensor(4, 6),
        TWO,
        tensor(),
        takes=((cut(1), INVARIANT, REPLICATE),),
    ),
    "index_put, a column": of(lambda x, i, y: x.index_put((i,), y), tensor(4, 6), TWO, tensor(2, 1)),
    "index_put, a grid": of(lambda x, i, y: x.index_put((i,), y), tensor(4, 6), GRID, tensor(2, 2, 6)),
    "index_put_": of(lambda x, i, y: x.clone().index_put_((i,), y), tensor(4, 6), TWO, tensor(2, 6)),
    "index_add": of(
        lambda x, i, y: x.index_add(0, i, y),
        tensor(4, 6),
        SAME,
        tensor(2, 6),
        takes=((cut(1), INVARIANT, cut(1)), (PARTIAL, INVARIANT, PARTIAL)),
    ),
    "index_copy": of(
        lambda x, i, y: x.index_copy(0, i, y),
        tensor(4, 6),
        TWO,
        tensor(2, 6),
        takes=((cut(1), INVARIANT, cut(1)), (PARTIAL, INVARIANT, PARTIAL)),
    ),
    "index_add into zeros": of(
        lambda i, y: torch.zeros(4, 6, dtype=f64).index_add(0, i, y, alpha=2),
        SAME,
        tensor(2, 6),
        takes=((INVARIANT, PARTIAL),),
    ),
    "index_add into zeros like": of(
        lambda x, i, y: torch.zeros_like(x).index_add(-2, i, y),
        tensor(4, 6),
        SAME,
        tensor(2, 6),
        takes=((INVARIANT, INVARIANT, PARTIAL),),
    ),
    "index_add into zeros that were written": of(
        used_zeros, SAME, tensor(2, 6), takes=((INVARIANT, cut(1)),)
    ),
    "gather": of(lambda x, i: x.gather(-1, i), tensor(6, 4), PICK, takes=((cut(0), cut(0)),)),
    "gather from fewer": of(lambda x, i: x.gather(1, i), tensor(6, 4), PICK[:3], never=True),
    "take_along_dim": of(lambda x, i: x.take_along_dim(i, -1), tensor(6, 4), PICK, takes=((cut(0), cut(0)),)),
    "scatter": of(
        lambda x, i, y: x.scatter(1, i, y),
        tensor(6, 4),
        PICK,
        tensor(6, 1),
        takes=((cut(0), cut(0), cut(0)),),
    ),
    "scatter a number": of(lambda x, i: x.scatter(1, i, 1.5), tensor(6, 4), PICK, takes=((cut(0), cut(0)),)),
    "scatter fewer": of(lambda x, i, y: x.scatter(1, i, y), tensor(6, 4), PICK[:3], tensor(3, 1), never=True),
    "scatter_add": of(
        lambda x, i, y: x.scatter_add(1, i, y),
        tensor(6, 4),
        PICK,
        tensor(6, 1),
        takes=((cut(0), cut(0), cut(0)),),
    ),
    "one_hot": of(lambda i: F.one_hot(i, 4), torch.tensor([[0, 3, 1, 2, 1, 1]]), takes=((cut(1),),)),
    "bucketize": of(torch.bucketize, tensor(6, 3), tensor(3).sort()[0], takes=((cut(0), INVARIANT),)),
    "isin": of(torch.isin, torch.arange(6), torch.tensor([1, 2, 3, 7, 8, 9]), takes=((cut(0), INVARIANT),)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rank_s_part_is_its_part_of_the_whole(name: str) -> None:
    hold(CASES[name])


def test_zeros_that_were_written_are_no_part_of_a_sum() -> None:
    taken = hold(CASES["index_add into zeros that were written"]).taken
    assert not any(PARTIAL in layouts for layouts in taken)
