"""Writes in place, also through views: what is written stays laid out as it was, or the write is refused."""

from __future__ import annotations

import pytest
import torch

from autotp.placement import INVARIANT, PARTIAL, REPLICATE
from tests.rules import Case, cut, hold, tensor

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
    "copied into zeros": Case(copied_into_zeros, (Y,), never=True),
    "used after a write": Case(used_after_a_write, (X, tensor(4, 3))),
    "masked": Case(masked, (X, Y > 0.7), takes=((PARTIAL, INVARIANT), (cut(1), cut(1)))),
}


@pytest.mark.parametrize("name", CASES)
def test_a_write_in_place(name: str) -> None:
    hold(CASES[name])


def test_a_value_with_a_part_of_its_gradient_is_not_written_into_one_with_the_whole() -> None:
    taken = hold(CASES["copied into zeros"]).taken
    assert (INVARIANT,) in taken
    assert (REPLICATE,) not in taken
