"""Slices, splits, concatenations: rules against execution."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from autotp.placement import INVARIANT, PARTIAL, Layout, Shard, deal
from tests.rules import Case, cut, hold, tensor

X = tensor(5, 12)
PAIR = (tensor(2, 6), tensor(2, 6, seed=1))
HALVES = cut(1, 2, groups=2)


def of(
    function: Callable[..., object],
    *inputs: torch.Tensor,
    takes: tuple[tuple[Layout, ...], ...] = (),
    never: bool = False,
) -> Case:
    return Case(function, inputs or (X,), takes=takes, never=never)


CASES = {
    "slice elsewhere": of(lambda x: x[2:4]),
    "first half": of(lambda x: x[:, :6], takes=((HALVES,),)),
    "second half": of(lambda x: x[:, 6:], takes=((HALVES,),)),
    "last third": of(lambda x: x[..., -4:], takes=((cut(1, 2, groups=3),),)),
    "middle third": of(lambda x: x[..., 4:8], takes=((cut(1, 2, groups=3),),)),
    "every second": of(lambda x: x[..., ::2], takes=((cut(1),), (cut(1, 3),), (cut(1, groups=3),))),
    "every second from the first": of(
        lambda x: x[..., 1::2], takes=((cut(1),), (cut(1, 3),), (cut(1, groups=3),))
    ),
    "every third": of(lambda x: x[..., 1::3], takes=((cut(1, 4),),)),
    "every second of an odd dim": of(lambda x: x[..., 1::2], tensor(5, 9)),
    "every second, counted from the end": of(lambda x: x[..., -2::2]),
    "every second, short of the end": of(lambda x: x[..., :-1:2]),
    "every second of a part": of(lambda x: x[..., 2:8:2]),
    "nothing": of(lambda x: x[..., 12:]),
    "beyond the end": of(lambda x: x[..., :100], takes=((cut(1, 12),),)),
    "narrow": of(lambda x: x.narrow(1, 6, 6), takes=((HALVES,),)),
    "narrow across": of(lambda x: x.narrow(1, 3, 6)),
    "narrow from the end": of(lambda x: x.narrow(1, -4, 4)),
    "narrow to all": of(lambda x: x.narrow(1, 0, 12), takes=((cut(1),),)),
    "narrow_copy": of(lambda x: x.narrow_copy(1, 6, 6), takes=((HALVES,),)),
    "select": of(lambda x: x[:, 2], tensor(5, 12, 4)),
    "select the last dim": of(lambda x: x.select(-1, 0), tensor(5, 12, 1)),
    "unbind": of(lambda x: x.unbind(1), tensor(5, 2, 4)),
    "split in halves": of(lambda x: x.split(6, -1), takes=((HALVES,),)),
    "split unevenly": of(lambda x: x.split([8, 4], -1)),
    "split in three": of(lambda x: x.split([4, 6, 2], -1)),
    "split with a rest": of(lambda x: x.split(5, -1)),
    "split elsewhere": of(lambda x: x.split(2)),
    "split in one": of(lambda x: x.split(12, -1), takes=((cut(1),),)),
    "chunk": of(lambda x: x.chunk(3, -1), takes=((cut(1, 4, groups=3),),)),
    "chunk with fewer results": of(lambda x: x.chunk(5, -1)),
    "tensor_split": of(lambda x: x.tensor_split(2, -1), takes=((HALVES,),)),
    "tensor_split at places": of(lambda x: x.tensor_split((4, 8), -1), takes=((cut(1, 4, groups=3),),)),
    "unsafe_split": of(lambda x: x.unsafe_split(6, -1), takes=((HALVES,),)),
    "unsafe_chunk": of(lambda x: x.unsafe_chunk(2, -1), takes=((HALVES,),)),
    "unsafe_split_with_sizes": of(lambda x: x.unsafe_split_with_sizes([6, 6], -1), takes=((HALVES,),)),
    "glu": of(lambda x: F.glu(x, -1), takes=((HALVES,),)),
    "glu elsewhere": of(lambda x: F.glu(x, 0), tensor(4, 9)),
    "cat": of(lambda x, y: torch.cat((x, y), -1), *PAIR, takes=((cut(1), cut(1, 6)), (PARTIAL, PARTIAL))),
    "cat of unequal ones": of(
        lambda x, y: torch.cat((x, y), -1), tensor(2, 6), tensor(2, 4), takes=((cut(1, 3), cut(1)),)
    ),
    "cat elsewhere": of(
        lambda x, y: torch.cat((x, y), 0), tensor(2, 6), tensor(4, 6), takes=((cut(1), cut(1)),)
    ),
    "cat after nothing": of(
        lambda x, y: torch.cat((x, y), 0), tensor(0), tensor(4, 6), takes=((INVARIANT, cut(1)),)
    ),
    "cat with a dim of one": of(lambda x, y: torch.cat((x, y), 0), tensor(3, 1), tensor(3, 1)),
    "concat": of(lambda x, y: torch.concat((x, y), -2), tensor(3, 6, 1), tensor(3, 3, 1)),
    "concatenate": of(lambda x, y: torch.concatenate((x, y), 1), *PAIR),
    "stack": of(lambda x, y: torch.stack((x, y), 1), *PAIR, takes=((cut(1), cut(1)), (PARTIAL, PARTIAL))),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rank_s_part_is_its_part_of_the_whole(name: str) -> None:
    hold(CASES[name])


def given(function: Callable[..., object], size: int, *cuts: Shard, never: bool = False) -> Case:
    return Case(
        function,
        (tensor(3, size),),
        tps=(2,),
        choices=lambda tp: [[(s, True) for s in cuts]],
        takes=() if never else tuple((s,) for s in cuts),
        never=never,
    )


def test_equal_pieces_in_any_number() -> None:
    hold(given(lambda x: x.chunk(4, -1), 24, cut(1, 2, groups=4), cut(1, 3, groups=8), cut(1, 6, groups=4)))


def test_a_split_by_one_number_into_parts_that_shrink_differently() -> None:
    # Of 5 + 5 + 2 elements a rank has 3 + 3 + 1 or 2 + 2 + 1, and no split(5) gives that.
    by_rank = Shard(1, sections=((5, deal(5, 2)), (5, deal(5, 2)), (2, deal(2, 2))))
    hold(given(lambda x: x.split(5, -1), 12, by_rank, never=True))
    hold(given(lambda x: x.split([5, 5, 2], -1), 12, by_rank))


def test_a_number_of_chunks_that_does_not_come_out() -> None:
    # chunk(5) of 24 gives 5+5+5+5+4; of a rank's 12 it gives 3+3+3+3.
    hold(given(lambda x: x.chunk(5, -1), 24, cut(1, 2, groups=4), cut(1, 6, groups=4), never=True))
