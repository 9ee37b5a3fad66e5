"""Flips, rolls, windows, differences, padding: rules against execution."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from autotp.placement import PARTIAL
from tests.rules import Case, cut, hold, tensor

X = (tensor(5, 12),)

CASES = {
    "flip": Case(lambda x: x.flip(-1), X, takes=((PARTIAL,), (cut(0, 5),))),
    "roll": Case(lambda x: x.roll(1, 0), X, takes=((PARTIAL,), (cut(1),))),
    "roll over all": Case(lambda x: x.roll(1), X, takes=((PARTIAL,),)),
    "rot90": Case(lambda x: x.rot90(1, (0, 2)), (tensor(4, 6, 4),), takes=((cut(1),),)),
    "diff": Case(lambda x: x.diff(dim=-1), (tensor(4, 9),), takes=((PARTIAL,), (cut(0),))),
    "unfold": Case(lambda x: x.unfold(1, 3, 2), (tensor(4, 9),), takes=((PARTIAL,), (cut(0),))),
    "diagonal": Case(lambda x: x.diagonal(0, 0, 2), (tensor(4, 6, 4),), takes=((PARTIAL,), (cut(1),))),
    "tril": Case(lambda x: x.tril(), (tensor(3, 4, 4),), takes=((PARTIAL,), (cut(0, 3),))),
    "triu": Case(lambda x: x.triu(1), (tensor(3, 4, 4),), takes=((PARTIAL,), (cut(0, 3),))),
    "pad": Case(lambda x: F.pad(x, (1, 0)), X, takes=((PARTIAL,), (cut(0, 5),))),
    "pad by a number": Case(lambda x: F.pad(x, (1, 0), value=1.0), X, takes=((cut(0, 5),),)),
    "pad by the border": Case(
        lambda x: F.pad(x, (1, 1), mode="replicate"), (tensor(2, 5, 6),), takes=((PARTIAL,),)
    ),
    "crop": Case(lambda x: F.pad(x, (0, -1)), X, takes=((cut(0, 5),),)),
    "constant_pad_nd": Case(lambda x: torch.constant_pad_nd(x, (0, 2)), X, takes=((PARTIAL,), (cut(0, 5),))),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rank_s_part_is_its_part_of_the_whole(name: str) -> None:
    hold(CASES[name])


def test_a_sum_and_padding_that_is_no_zero() -> None:
    pad = Case(lambda x: F.pad(x, (1, 0), value=1.0), X)
    assert (PARTIAL,) not in hold(pad).taken


def test_differences_with_a_value_before() -> None:
    pair = (tensor(4, 6), tensor(4, 1))
    hold(Case(lambda x, y: x.diff(dim=-1, prepend=y), pair, takes=((PARTIAL, PARTIAL), (cut(0), cut(0)))))
