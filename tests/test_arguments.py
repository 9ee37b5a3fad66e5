"""What an argument must be on a rank, calculated by hand. test_rules_* hold the same against execution."""

from __future__ import annotations

from typing import Any

import pytest

from autotp.placement import INVARIANT, Layout, Shard, deal
from autotp.propagate.arguments import Local, expected, local_shape

HEADS = Shard(2, deal(3, 2))  # 3 heads over 2 ranks: 2 + 1
FUSED = Shard(1, deal(3, 2), groups=2)  # gate|up, each of 3 parts: 2 + 1
QKV = Shard(1, sections=((6, deal(3, 2)), (2, deal(2, 2)), (2, None)))  # q, k dealt, v whole
END = 9223372036854775807


def local(
    rank: int, layout: Layout, source: tuple[int, ...], *results: tuple[int, ...], **arguments: Any
) -> Local:
    return Local(rank, arguments, source, layout, results)


def test_the_local_shape_of_a_value() -> None:
    assert local_shape((5, 7, 12), HEADS, 0) == (5, 7, 8)
    assert local_shape((5, 7, 12), HEADS, 1) == (5, 7, 4)
    assert local_shape((5, 7, 12), INVARIANT, 1) == (5, 7, 12)


@pytest.mark.parametrize(
    ("got", "want"),
    [([5, 7, 3, 4], [5, 7, 1, 4]), ([5, 7, -1, 4], [5, 7, -1, 4]), ([5, -1, 3, 4], [5, -1, 1, 4])],
)
def test_a_view_has_the_rank_s_heads_where_the_code_gives_a_number(got: list[int], want: list[int]) -> None:
    view = local(1, HEADS, (5, 7, 12), (5, 7, 1, 4), size=[5, 7, 3, 4])
    assert expected("view", "size", view, got) == want


def test_unflatten_s_sizes() -> None:
    one = local(0, HEADS, (5, 7, 12), (5, 7, 2, 4), dim=-1, sizes=[3, 4])
    assert expected("unflatten", "sizes", one, [3, 4]) == [2, 4]
    assert expected("unflatten", "sizes", one, [-1, 4]) == [-1, 4]


def test_split_sizes_are_the_rank_s_own() -> None:
    half = local(0, FUSED, (4, 12), (4, 4), (4, 4), split_size=6, dim=-1)
    assert expected("split", "split_size", half, 6) == 4
    parts = local(1, QKV, (4, 10), (4, 2), (4, 1), (4, 2), split_sizes=[6, 2, 2], dim=1)
    assert expected("split_with_sizes", "split_sizes", parts, [6, 2, 2]) == [2, 1, 2]
    elsewhere = local(1, QKV, (4, 10), (2, 5), (2, 5), split_size=2, dim=0)
    assert expected("split", "split_size", elsewhere, 2) == 2


def test_tensor_split_s_places() -> None:
    one = local(0, QKV, (4, 10), (4, 4), (4, 1), (4, 2), indices=[6, 8], dim=-1)
    assert expected("tensor_split", "indices", one, [6, 8]) == [4, 5]


@pytest.mark.parametrize(
    ("rank", "start", "end", "want"),
    [(0, 0, 6, (0, 4)), (1, 0, 6, (0, 2)), (0, 6, 8, (4, 5)), (1, 6, 8, (2, 3)), (1, 8, END, (3, END))],
)
def test_a_slice_s_bounds_are_the_elements_before_them(
    rank: int, start: int, end: int, want: tuple[int, int]
) -> None:
    one = local(rank, QKV, (4, 10), dim=1, start=start, end=end, step=1)
    assert (expected("slice", "start", one, start), expected("slice", "end", one, end)) == want


def test_bounds_that_mean_the_same_are_left_as_they_are() -> None:
    one = local(1, QKV, (4, 10), dim=1, start=8, end=10, step=1)
    assert expected("slice", "start", one, -2) == -2  # the whole section at the end
    assert expected("slice", "end", one, END) == END
    assert expected("slice", "end", one, 10) == 10  # beyond the rank's 5 elements is the end


def test_a_step_starts_where_it_started() -> None:
    # Every rank's part begins with a step: `gate_up[..., 1::2]` starts at 1 on all of them, never at 0.
    for rank in (0, 1):
        one = local(rank, Shard(1, deal(3, 2)), (4, 12), dim=-1, start=1, end=END, step=2)
        assert expected("slice", "start", one, 0) == 1
        assert expected("slice", "step", one, 2) == 2


def test_narrow() -> None:
    one = local(0, QKV, (4, 10), (4, 1), dim=1, start=6, length=2)
    assert expected("narrow", "start", one, 6) == 4
    assert expected("narrow", "length", one, 2) == 1
    rows = local(0, QKV, (4, 10), (2, 7), dim=0, start=1, length=2)
    assert (expected("narrow", "start", rows, 1), expected("narrow", "length", rows, 2)) == (1, 2)


def test_a_depthwise_convolution_has_the_rank_s_channels_as_groups() -> None:
    mixed = Shard(1, sections=((6, deal(3, 2)), (2, None)))
    assert expected("conv1d", "groups", local(0, mixed, (2, 8, 5), groups=8), 8) == 6
    assert expected("conv1d", "groups", local(1, mixed, (2, 8, 5), groups=8), 8) == 4
    assert expected("conv1d", "groups", local(1, mixed, (2, 8, 5), groups=1), 1) == 1
    assert (
        expected("conv1d", "groups", local(1, Shard(0, deal(2, 2)), (2, 8, 5), groups=8), 8) == 8
    )  # by samples
    assert (
        expected("conv1d", "groups", local(1, Shard(0, deal(4, 2)), (8, 5), groups=8), 8) == 4
    )  # one sample
    assert (
        expected("group_norm", "num_groups", local(0, Shard(1, deal(3, 2)), (2, 12, 5), num_groups=6), 6) == 4
    )


def test_a_repetition_s_size_where_it_is_given() -> None:
    one = local(1, HEADS, (5, 7, 3), (5, 7, 2), repeats=2, dim=-1, output_size=6)
    assert expected("repeat_interleave", "output_size", one, 6) == 2
    without = local(1, HEADS, (5, 7, 3), (5, 7, 2), repeats=2, dim=-1, output_size=None)
    assert expected("repeat_interleave", "output_size", without, None) is None


def test_every_other_argument_is_what_the_whole_run_used() -> None:
    one = local(1, HEADS, (5, 7, 12), (5, 7, 4), other=12**-0.5, dim=-1)
    assert expected("mul", "other", one, 4**-0.5) == 12**-0.5
    assert expected("softmax", "dim", one, 1) == -1
