"""New tensors, and complex numbers seen as pairs: rules against execution."""

from __future__ import annotations

import pytest
import torch

from autotp.placement import INVARIANT, PARTIAL, REPLICATE
from tests.rules import Case, cut, hold, tensor

X = (tensor(6, 4),)
COMPLEX = torch.complex(tensor(6, 9), tensor(6, 9, seed=1))


def rotary(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Pairs of features turned, as the first Llama did it."""
    pairs = torch.view_as_complex(x.reshape(2, 3, 6, 4, 2))
    return torch.view_as_real(pairs * turns[:, None]).flatten(3)


CASES = {
    "new_ones": Case(lambda x: x.new_ones(3), X, takes=((cut(0),), (PARTIAL,))),
    "new_zeros": Case(lambda x: x.new_zeros(3, 2) + 1, X),
    "new_full": Case(lambda x: x.new_full((3,), 2.0), X),
    "new_empty": Case(lambda x: x.new_empty(3).fill_(1), X),
    "view_as_complex": Case(torch.view_as_complex, (tensor(6, 4, 2),), takes=((cut(0),), (PARTIAL,))),
    "view_as_real": Case(torch.view_as_real, (COMPLEX,), takes=((cut(1, 9),), (PARTIAL,))),
    "rotary": Case(
        rotary,
        (tensor(2, 3, 6, 8), torch.complex(tensor(3, 4), tensor(3, 4, seed=1))),
        few=4,
        takes=((cut(2), REPLICATE), (cut(2, 3), REPLICATE), (cut(2), INVARIANT)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rank_s_part_is_its_part_of_the_whole(name: str) -> None:
    hold(CASES[name])


def test_a_pair_is_not_cut() -> None:
    case = Case(
        torch.view_as_complex, (tensor(6, 2),), choices=lambda tp: [[(cut(1), True)]], tps=(2,), never=True
    )
    assert hold(case).refused == 1
