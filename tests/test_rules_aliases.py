"""Writes in place, also through views: what is written stays laid out as it was, or the write is refused."""

from __future__ import annotations

import pytest
import torch

from autotp.placement import INVARIANT, PARTIAL, REPLICATE, Layout
from tests.rules import Case, Placed, cut, hold, tensor

X, Y = tensor(4, 6), tensor(4, 6, seed=1)


def added_into_a_column(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x.clone()
    z[:, 0].add_(y)
    return z


def scaled_through_a_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x.clone()
    z.view(24).mul_(2)
    return z + y


def clipped_through_a_transpose(x: torch.Tensor) -> torch.Tensor:
    z = x.clone()
    z.transpose(0, 1).relu_()
    return z


def rows_replaced(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x.clone()
    z[:2] = y
    return z


def interleaved(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = torch.empty_like(x)
    z[..., ::2] = y
    z[..., 1::2] = y
    return z


def copied_into_zeros_like(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = torch.zeros_like(x)
    z[:] = y
    return z


def copied_into_zeros(y: torch.Tensor) -> torch.Tensor:
    z = torch.zeros(4, 6, dtype=torch.float64)
    z[:] = y
    return z


def used_after_a_write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = torch.zeros(4, 6, dtype=torch.float64)
    z[:, :3] = y
    return x * z


def masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    z = x.clone()
    z.masked_fill_(mask, 0.0)
    return z


def two_halves(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x.new_empty(4, 12)
    z[:, :6] = x
    z[:, 6:].copy_(y)
    return z


def a_slot_broadcast(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = torch.zeros(2, 4, 6, dtype=torch.float64)
    z[0] = x
    z[1:] = y
    return z


def rows_put(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    z = torch.zeros(3, 4, 6, dtype=torch.float64)
    z[place] = x
    return z.index_add_(0, place - 1, x[None])


def summed_up(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    z = torch.zeros_like(x)
    for part in (x, y):
        z += part
    return z.masked_fill_(mask, 0.0)


def renamed(x: torch.Tensor) -> torch.Tensor:
    z = x.clone()
    seen = z[0]
    z.unsqueeze_(0).transpose_(1, 2)
    return z * 2 + seen[:, None]


CASES = {
    "added into a column": Case(
        added_into_a_column, (X, tensor(4)), takes=((cut(0), cut(0)), (PARTIAL, PARTIAL))
    ),
    "scaled through a view": Case(scaled_through_a_view, (X, tensor(6)), takes=((cut(1), cut(0)),)),
    "clipped through a transpose": Case(clipped_through_a_transpose, (X,), takes=((cut(1),), (cut(0, 4),))),
    "rows replaced": Case(rows_replaced, (X, tensor(2, 6)), takes=((cut(1), cut(1)), (PARTIAL, PARTIAL))),
    "interleaved": Case(interleaved, (X, tensor(4, 3)), takes=((cut(0), cut(0)),)),
    "copied into zeros like": Case(
        copied_into_zeros_like, (X, Y), takes=((cut(1), cut(1)), (INVARIANT, INVARIANT))
    ),
    "copied into zeros": Case(
        copied_into_zeros, (Y,), takes=((cut(1),), (PARTIAL,), (INVARIANT,), (REPLICATE,))
    ),
    "used after a write": Case(used_after_a_write, (X, tensor(4, 3))),
    "two halves": Case(two_halves, (X, Y), takes=((cut(0), cut(0)), (PARTIAL, PARTIAL))),
    "a slot broadcast": Case(
        a_slot_broadcast, (X, tensor(4, 1)), takes=((cut(1), REPLICATE), (cut(0), cut(0)))
    ),
    "rows put": Case(
        rows_put,
        (X, torch.tensor([2])),
        takes=((cut(0), INVARIANT), (cut(1), INVARIANT), (PARTIAL, INVARIANT)),
    ),
    "summed up": Case(
        summed_up,
        (X, Y, Y[:, :1] > 0.7),
        few=3,
        takes=((cut(1), cut(1), INVARIANT), (PARTIAL, PARTIAL, INVARIANT)),
    ),
    "renamed": Case(renamed, (X,), takes=((cut(1),),)),
    "masked": Case(masked, (X, Y > 0.7), takes=((PARTIAL, INVARIANT), (cut(1), cut(1)))),
}


@pytest.mark.parametrize("name", CASES)
def test_a_write_in_place(name: str) -> None:
    hold(CASES[name])


@pytest.mark.parametrize(("first", "second"), [(INVARIANT, REPLICATE), (REPLICATE, INVARIANT)])
def test_a_part_of_a_gradient_and_a_whole_one_do_not_go_into_one_tensor(
    first: Layout, second: Layout
) -> None:
    def choices(tp: int) -> list[list[Placed]]:
        return [[(first, True)], [(second, True)]]

    assert not hold(Case(rows_replaced, (X, tensor(2, 6)), choices=choices, never=True)).taken
