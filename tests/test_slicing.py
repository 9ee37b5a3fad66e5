"""Every cut and its inverse; the expected slices are written out by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotp.diagnostic import CheckpointError, UsageError
from autotp.placement import Deal, Shard, deal
from autotp.slicing import cut, merge, put, rows, split, take, transfer
from tests.layouts import cuts as all_cuts

SHARED = Deal(2, ((0, 1), (0, 1), (1, 2), (1, 2)))  # two kv heads over four ranks


@pytest.mark.parametrize(
    ("shard", "size", "expected"),
    [
        (Shard(0, deal(8, 2)), 8, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (Shard(0, deal(7, 3)), 7, [[0, 1, 2], [3, 4], [5, 6]]),
        (Shard(0, deal(3, 2)), 6, [[0, 1, 2, 3], [4, 5]]),  # whole heads of two
        (Shard(0, deal(2, 2), groups=2), 4, [[0, 2], [1, 3]]),  # gate|up
        (Shard(0, deal(4, 4), groups=2), 8, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (Shard(0, sections=((4, deal(4, 2)), (2, deal(2, 2)))), 6, [[0, 1, 4], [2, 3, 5]]),
        (Shard(0, sections=((4, deal(4, 2)), (2, None))), 6, [[0, 1, 4, 5], [2, 3, 4, 5]]),
        (Shard(0, SHARED), 4, [[0, 1], [0, 1], [2, 3], [2, 3]]),
    ],
)
@pytest.mark.parametrize("kind", [np.arange, torch.arange])
def test_parts_are_these(shard, size, expected, kind):
    whole = kind(size)
    parts = split(whole, shard)
    assert [part.tolist() for part in parts] == expected
    assert merge(parts, shard, check=True).tolist() == whole.tolist()


def test_adjacent_ranges_are_joined():
    assert cut((6,), Shard(0, sections=((2, None), (4, deal(2, 2)))), 0) == [(0, 4)]
    assert cut((6,), Shard(0, sections=((2, None), (4, deal(2, 2)))), 1) == [(0, 2), (4, 6)]


@pytest.mark.parametrize(
    ("heads", "tp", "sizes"), [(14, 4, [4, 4, 3, 3]), (50257, 2, [25129, 25128]), (129, 2, [65, 64])]
)
def test_uneven_sizes_are_exact(heads, tp, sizes):
    shard = Shard(0, deal(heads, tp))
    whole = np.arange(heads)
    parts = split(whole, shard)
    assert [len(part) for part in parts] == sizes
    np.testing.assert_array_equal(merge(parts, shard), whole)


@st.composite
def cuts(draw):
    """A shape and a shard that fits it: tp 1…8, equal groups, unequal sections, whole and shared pieces."""
    tp = draw(st.integers(1, 8))

    def piece(whole_allowed):
        kind = draw(st.sampled_from(["dealt", "shared", "whole"] if whole_allowed else ["dealt", "shared"]))
        unit = draw(st.integers(1, 3))
        if kind == "whole":
            return unit, None
        if kind == "shared":
            units = draw(st.integers(1, tp))
            holder = sorted([*range(units), *draw(st.lists(st.integers(0, units - 1), min_size=tp - units,
                                                           max_size=tp - units))])  # fmt: skip
            return units * unit, Deal(units, tuple((u, u + 1) for u in holder))
        units = draw(st.integers(tp, 2 * tp + 3))
        return units * unit, deal(units, tp)

    shape = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    if draw(st.booleans()):
        size, dealt = piece(False)
        groups = draw(st.integers(1, 3))
        shape[dim], shard = size * groups, Shard(dim, dealt, groups=groups)
    else:
        sections = [piece(False), *(piece(True) for _ in range(draw(st.integers(0, 3))))]
        draw(st.randoms(use_true_random=False)).shuffle(sections)
        shape[dim], shard = sum(size for size, _ in sections), Shard(dim, sections=tuple(sections))
    return tuple(shape), shard


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cuts(), st.sampled_from(["float32", "int64", "bool", "float16"]), st.booleans())
def test_merge_is_the_inverse_of_split(case, dtype, as_torch):
    shape, shard = case
    bits = np.random.default_rng(0).integers(0, 2, (math.prod(shape) * np.dtype(dtype).itemsize,), np.uint8)
    bits = bits if dtype == "bool" else bits * 255  # NaN bit patterns too
    whole = bits.view(dtype).reshape(shape)
    array = torch.from_numpy(whole) if as_torch else whole
    parts = split(array, shard)
    assert [tuple(part.shape) for part in parts] == [shard.local_shape(shape, r) for r in range(shard.tp)]
    back = merge(parts, shard, check=True)
    assert np.asarray(back).tobytes() == whole.tobytes()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cuts())
def test_rows_say_in_bytes_what_cut_says_in_elements(case):
    shape, shard = case
    whole = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    flat = whole.tobytes()
    for rank in range(shard.tp):
        described = rows(shape, 4, shard, rank)
        local = bytearray(described.nbytes)
        for row in range(described.count):
            for start, stop, place in described.ranges:
                at = row * described.local + place
                local[at : at + stop - start] = flat[row * described.length :][start:stop]
        assert bytes(local) == take(whole, shard, rank).tobytes()


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_any_cut_is_read_out_of_any_other(dim):
    """Also parts that several ranks hold, and tensors that are whole on one side."""
    shape = [3, 3, 2]
    shape[dim] = 12
    whole = np.random.default_rng(0).integers(0, 255, math.prod(shape), np.uint8)
    sides = [None, *(shard for tp in (2, 3, 4) for shard in all_cuts(dim, 12, tp))]
    for before in sides:
        parts = [rows(shape, 1, before, rank) for rank in range(before.tp if before else 1)]
        held = [take(whole.reshape(shape), before, r).ravel() if before else whole for r in range(len(parts))]
        for after in sides:
            for rank in range(after.tp if after else 1):
                expected = take(whole.reshape(shape), after, rank).ravel() if after else whole
                found = np.zeros_like(expected)
                for part, plan in zip(held, transfer(parts, rows(shape, 1, after, rank)), strict=True):
                    for row in range(plan.count):
                        for start, stop, place in plan.ranges:
                            piece = part[row * plan.length + start : row * plan.length + stop]
                            found[row * plan.local + place :][: stop - start] = piece
                assert np.array_equal(found, expected), (before, after, rank)


def test_a_whole_tensor_is_one_row():
    described = rows((3, 5), 2, None, 1)
    assert (described.count, described.nbytes, described.whole) == (1, 30, True)
    assert rows((3, 5), 0.5, None, 0).nbytes == 7  # sub-byte: carried whole


def test_a_part_is_its_own_memory():
    whole = np.zeros((4, 4))
    part = take(whole, Shard(0, deal(4, 2)), 0)
    assert part.base is None and not np.shares_memory(part, whole)
    tensor = torch.zeros(4, 4, requires_grad=True)
    cut_tensor = take(tensor, Shard(0, deal(4, 2)), 0)
    assert cut_tensor.untyped_storage().nbytes() == cut_tensor.nbytes and not cut_tensor.requires_grad


def test_meta_tensors_are_cut_too():
    parts = split(torch.empty(5, 3, device="meta", dtype=torch.bfloat16), Shard(0, deal(5, 2)))
    assert [(part.shape, part.dtype) for part in parts] == [
        ((3, 3), torch.bfloat16),
        ((2, 3), torch.bfloat16),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.uint16])
def test_torch_dtypes_that_numpy_lacks(dtype):
    whole = torch.arange(48, dtype=torch.uint8).view(dtype).reshape(3, -1)
    shard = Shard(1, deal(whole.shape[1], 2))
    parts = split(whole, shard)
    assert torch.equal(merge(parts, shard, check=True).view(torch.uint8), whole.view(torch.uint8))


def test_differing_copies_are_named_with_the_largest_difference():
    shard = Shard(0, sections=((2, deal(2, 2)), (2, None)))
    parts = split(np.array([1.0, 2.0, 3.0, 4.0]), shard)
    parts[1][2] = 4.5
    assert merge(parts, shard).tolist() == [1, 2, 3, 4]
    message = (
        r"^rank 1's copy of what several ranks hold differs from the first holder's: largest difference 0.5$"
    )
    with pytest.raises(CheckpointError, match=message):
        merge(parts, shard, check=True)


@pytest.mark.parametrize(
    ("values", "wrong", "apart"),
    [
        (np.array([1, 2, 3, 4], np.uint8), 255, 251),
        (np.array([True, False, True, True]), False, 1),
        (np.array([1j, 2, 3, 4j]), 4j + 0.5, 0.5),
        (torch.tensor([1, 2, 3, 4], dtype=torch.uint8), 255, 251),
        (torch.tensor([True, False, True, True]), False, 1),
        (torch.tensor([1, 2, 3, 4.0]).to(torch.float8_e4m3fn), 3.5, 0.5),
        (torch.tensor([1, 2, 3, 4.0]).to(torch.complex64), 4 + 0.5j, 0.5),
    ],
)
def test_the_difference_of_copies_of_any_dtype(values, wrong, apart):
    shard = Shard(0, sections=((2, deal(2, 2)), (2, None)))
    parts = split(values, shard)
    parts[1][2] = wrong
    with pytest.raises(CheckpointError, match=rf"largest difference {apart:g}$"):
        merge(parts, shard, check=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: cut((5,), Shard(0, deal(2, 2)), 0),
            "shape [5] cannot be cut as shard(dim 0: 2 equal parts)",
        ),
        (
            lambda: cut((4,), Shard(1, deal(2, 2)), 0),
            "shape [4] cannot be cut as shard(dim 1: 2 equal parts)",
        ),
        (lambda: cut((4,), Shard(0, deal(2, 2)), 2), "there is no rank 2 in a cut over 2 ranks"),
        (lambda: merge([np.zeros(2)], Shard(0, deal(2, 2))), "1 parts for a cut over 2 ranks"),
        (lambda: rows((4,), 0.5, Shard(0, deal(2, 2)), 0), "elements of 0.5 bytes cannot be cut"),
        (
            lambda: put(np.zeros(4), np.zeros(3), Shard(0, deal(2, 2)), 1),
            "rank 1's part has shape [3]; [4] cut as shard(dim 0: 2 equal parts) gives it [2]",
        ),
    ],
)
def test_a_wrong_call_says_what_is_wrong(call, message):
    with pytest.raises(UsageError) as raised:
        call()
    assert str(raised.value) == message
