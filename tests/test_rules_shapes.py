"""Views, transposes, expansions: rules against execution. A cut head is never accepted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autotp.placement import INVARIANT, PARTIAL, Deal, Layout, Shard, deal
from tests.rules import Case, Placed, cut, hold, tensor


def view(source: tuple[int, ...], *shape: int) -> Case:
    return Case(lambda x: x.view(shape), (tensor(*source),), takes=((PARTIAL,),))


VIEWS = [
    view((6, 6), 2, 3, 6),
    view((6, 6), 36),
    view((36,), 6, 6),
    view((3, 12), 3, 2, 6),
    view((3, 12), 3, 4, 3),
    view((2, 9), 2, 3, 3),
    view((2, 3, 6), 6, 6),
    view((2, 3, 6), 2, 18),
    view((4, 6), 2, 12),
    view((4, 6), 3, 8),
    view((12,), 1, 12, 1),
    view((5, 2, 6), 10, 6),
    view((5, 12), 5, 1, 12),
    view((2, 2, 6), 2, 12),
    view((2, 12), 4, 6),
    view((2, 2, 3, 6), 2, 6, 6),
    view((16,), 2, 8),
    view((1, 16), 1, 2, 8),
    view((3, 12), 3, -1, 6),
    view((3, 12), -1, 6),
    view((0, 12), 0, 3, 4),
    view((0, 5, 12), 0, 5, 4, 3),
    view((0, 3, 4), 0, 12),
    view((0, 3, 12), 0, 12),
    view((0, 4, 6), 0),
]


def sections(source: tuple[int, ...], dim: int, *shape: int) -> Case:
    """Sections of two heads, two heads and one more, of 20 features in 5 heads."""
    unit = source[dim] // 5
    by_head: list[Layout] = [
        Shard(dim, sections=((2 * unit, deal(2, 2)), (2 * unit, deal(2, 2)), (unit, None))),
        Shard(dim, sections=((2 * unit, deal(2, 2)), (3 * unit, deal(3, 2)))),
        Shard(dim, sections=((unit, None), (4 * unit, deal(4, 2)))),
    ]
    cut_head = Shard(dim, sections=((unit + 1, None), (4 * unit - 1, deal(4 * unit - 1, 2))))
    choices: Callable[[int], list[list[Placed]]] = lambda tp: [[(s, True) for s in (*by_head, cut_head)]]  # noqa: E731
    return Case(
        lambda x: x.view(shape),
        (tensor(*source),),
        tps=(2,),
        choices=choices,
        takes=tuple((s,) for s in by_head),
    )


SECTIONS = [
    sections((2, 20), 1, 2, 5, 4),
    sections((2, 5, 4), 1, 2, 20),
    sections((1, 5, 4), 1, 1, 1, 20),
    sections((3, 20), 1, 3, 1, 20),
    sections((2, 3, 20), 2, 6, 20),
]

CASES = {
    "reshape": Case(lambda x: x.transpose(0, 1).reshape(6, 12), (tensor(6, 3, 4),)),
    "flatten": Case(lambda x: x.flatten(1), (tensor(3, 4, 6),)),
    "ravel": Case(lambda x: x.ravel(), (tensor(3, 4),)),
    "unflatten": Case(lambda x: x.unflatten(1, (3, -1)), (tensor(2, 12),)),
    "unflatten from the end": Case(lambda x: x.unflatten(-1, (4, 3)), (tensor(2, 12),)),
    "view_as": Case(lambda x, y: x.view_as(y), (tensor(3, 4), tensor(12)), takes=((cut(0, 3), cut(0, 3)),)),
    "view_as, wider": Case(lambda x, y: x.view_as(y), (tensor(12), tensor(3, 4))),
    "reshape_as": Case(lambda x, y: x.reshape_as(y), (tensor(12), tensor(3, 4))),
    "unsafe view": Case(lambda x: torch.ops.aten._unsafe_view(x, [2, 6]), (tensor(12),)),
    "transpose": Case(lambda x: x.transpose(0, -1), (tensor(3, 4, 6),)),
    "swapaxes": Case(lambda x: x.swapaxes(0, 2), (tensor(3, 4, 6),)),
    "swapdims": Case(lambda x: x.swapdims(0, 2), (tensor(3, 4, 6),)),
    "t": Case(lambda x: x.t(), (tensor(4, 6),)),
    "T": Case(lambda x: x.T, (tensor(4, 6),)),
    "H": Case(lambda x: x.H, (tensor(4, 6),)),
    "mT": Case(lambda x: x.mT, (tensor(2, 4, 6),)),
    "mH": Case(lambda x: x.mH, (tensor(2, 4, 6),)),
    "adjoint": Case(lambda x: x.adjoint(), (tensor(2, 4, 6),)),
    "permute": Case(lambda x: x.permute(2, 0, -2), (tensor(3, 4, 6),)),
    "movedim": Case(lambda x: x.movedim((0, 1), (-1, 0)), (tensor(3, 4, 6),)),
    "moveaxis": Case(lambda x: x.moveaxis(0, 2), (tensor(3, 4, 6),)),
    "unsqueeze": Case(lambda x: x.unsqueeze(-2), (tensor(4, 6),)),
    "squeeze": Case(lambda x: x.squeeze(1), (tensor(4, 1, 6),)),
    # A rank that holds one element must keep the dim.
    "squeeze every dim": Case(lambda x: x.squeeze(), (tensor(4, 1, 6, 1),)),
    "squeeze some dims": Case(lambda x: x.squeeze((0, -1)), (tensor(4, 1, 6, 1),)),
    "expand": Case(lambda x: x.expand(5, 6, 4), (tensor(6, 1),)),
    "expand, -1": Case(lambda x: x.expand(6, -1, 4), (tensor(6, 1),)),
    "broadcast_to": Case(lambda x: x.broadcast_to(5, 6, 4), (tensor(6, 1),)),
    "expand_as": Case(
        lambda x, y: x.expand_as(y),
        (tensor(6, 1), tensor(6, 9)),
        takes=((cut(0), cut(0)), (PARTIAL, INVARIANT)),
    ),
    "expand_as, more dims": Case(lambda x, y: x.expand_as(y), (tensor(9), tensor(6, 9))),
    "repeat": Case(lambda x: x.repeat(2, 1, 3), (tensor(6, 4),)),
    "tile": Case(lambda x: x.tile(2), (tensor(3, 6),)),
    "repeat_interleave": Case(lambda x: x.repeat_interleave(2, -2), (tensor(2, 6, 2),)),
    "repeat_interleave, flat": Case(lambda x: x.repeat_interleave(2), (tensor(6, 2),)),
    "repeat_interleave, size given": Case(
        lambda x: torch.repeat_interleave(x, 2, dim=0, output_size=12), (tensor(6, 2),)
    ),
    "repeat_interleave by a tensor": Case(
        lambda x, n: torch.repeat_interleave(x, n, dim=0, output_size=6),
        (tensor(3, 4), torch.tensor([1, 2, 3])),
    ),
}


@pytest.mark.parametrize("case", VIEWS, ids=lambda c: f"{list(c.inputs[0].shape)}")
def test_views(case: Case) -> None:
    hold(case)


@pytest.mark.parametrize("case", SECTIONS, ids=lambda c: f"{list(c.inputs[0].shape)}")
def test_views_of_unequal_sections_keep_whole_units(case: Case) -> None:
    tally = hold(case)
    assert len(tally.taken) <= 4


@pytest.mark.parametrize("name", CASES)
def test_the_same_elements_in_another_shape(name: str) -> None:
    hold(CASES[name])


def test_a_head_is_never_cut_whatever_number_was_dealt() -> None:
    # 16 features over 4 ranks, seen as 2 heads of 8: two ranks would share each head.
    by_four: Layout = Shard(1, Deal(4, tuple((r, r + 1) for r in range(4)), declared=4))
    case = Case(
        lambda x: x.view(3, 2, 8),
        (tensor(3, 16),),
        tps=(4,),
        choices=lambda tp: [[(by_four, True)]],
        never=True,
    )
    assert hold(case).refused == 1
