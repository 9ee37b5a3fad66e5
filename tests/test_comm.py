"""The seam between ranks: real and simulated groups do the same, and disagreement is an error."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autotp import mappings
from autotp.comm import Group, GroupOfOne, group_of, simulate
from autotp.diagnostic import UsageError

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
]
MOVED = [*DTYPES, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.uint16]


def value(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 9, shape, generator=generator).to(dtype)


def readable(x: torch.Tensor) -> torch.Tensor:
    """As a dtype that can be pickled: 8-bit floats and uint16 cannot."""
    if x.dtype == torch.uint16:
        return x.int()
    return x.float() if x.element_size() == 1 and x.is_floating_point() else x


# ---- collectives ----


def collect(group: Group, dtype: torch.dtype) -> list[torch.Tensor]:
    """Every collective on awkward inputs; inputs must stay as they are, results be contiguous."""
    rank, size = group.rank, group.size
    sizes = [3 + 2 * (r == 0) for r in range(size)]
    plain = value(rank, 4, 3, dtype=dtype)
    local = value(rank, 2, sizes[rank], 3, dtype=dtype)
    wide = value(rank, 2, sum(sizes), 3, dtype=dtype)
    inputs = [plain, plain.t(), plain[0].expand(5, 3), plain[:0], local, wide]
    kept = [x.clone() for x in inputs]
    results = [group.all_gather(local, dim, s) for dim, s in ((1, sizes), (-2, sizes))]
    if dtype in DTYPES:
        results += [group.all_reduce(x) for x in inputs[:4]]
        waits = [group.all_reduce_later(x) for x in inputs[:4]]
        assert all(torch.equal(wait(), x) for wait, x in zip(waits, results[2:6], strict=True))
        results += [group.reduce_scatter(wide, dim, sizes) for dim in (1, -2)]
    assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True))
    assert all(x.is_contiguous() and x.dtype == dtype for x in results)
    return [readable(x) for x in results]


def collect_even(group: Group, dtype: torch.dtype) -> list[torch.Tensor]:
    local = value(group.rank, 2, 4, dtype=dtype)
    gathered = [
        group.all_gather(local.t(), 0, [4] * group.size),
        group.all_gather(local, 0, [2] * group.size),
    ]
    return [readable(x) for x in gathered]


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_collectives_equal_their_definition(run, dtype) -> None:
    size = run.size
    sizes = [3 + 2 * (r == 0) for r in range(size)]
    every = run(collect, dtype)
    gathered = torch.cat([value(r, 2, sizes[r], 3, dtype=dtype) for r in range(size)], 1)
    plain = [value(r, 4, 3, dtype=dtype) for r in range(size)]

    def total(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(parts).sum(0, dtype=dtype)

    for rank, results in enumerate(every):
        want = [gathered, gathered]
        if dtype in DTYPES:
            want += [total(plain), total(plain).t(), total(plain)[0].expand(5, 3), total(plain)[:0]]
            wide = total([value(r, 2, sum(sizes), 3, dtype=dtype) for r in range(size)])
            want += [wide.split(sizes, 1)[rank]] * 2
        assert all(torch.equal(a, readable(b)) for a, b in zip(results, want, strict=True))
    for results in run(collect_even, dtype):
        parts = [readable(value(r, 2, 4, dtype=dtype)) for r in range(size)]
        assert torch.equal(results[0], torch.cat([part.t() for part in parts]))
        assert torch.equal(results[1], torch.cat(parts))


def refused_sums(group: Group) -> list[str]:
    found = []
    for dtype in (torch.float8_e8m0fnu, torch.uint16, torch.uint32, torch.uint64):
        x = torch.ones(2 * group.size).to(dtype)
        for call in (group.all_reduce, partial(group.reduce_scatter, dim=0, sizes=[2] * group.size)):
            with pytest.raises(UsageError) as caught:
                call(x)
            found.append(str(caught.value))
        with pytest.raises(UsageError, match="cannot be summed"):
            mappings.share(x, group)
        whole = mappings.gather(x, group, dim=0)
        assert (whole.dtype, len(whole)) == (dtype, 2 * group.size**2)
    return found


def test_what_torch_does_not_add_is_refused_by_name(run) -> None:
    text = "cannot be summed over the ranks: torch does not add them; gather moves them"
    names = ("float8_e8m0fnu", "uint16", "uint32", "uint64")
    want = [f"values of torch.{name} {text}" for name in names for _ in range(2)]
    assert run(refused_sums) == [want] * run.size


def sums_of_randoms(group: Group) -> torch.Tensor:
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(group.rank))
    return group.all_reduce(x)


def test_simulated_ranks_equal_real_ranks(ranks) -> None:
    from tests.conftest import as_rank

    real = ranks(2)(as_rank, sums_of_randoms)
    simulated = simulate(2, sums_of_randoms)
    for x in [*real, *simulated]:
        assert torch.equal(x, real[0])


def backward_sum(group: Group) -> torch.Tensor:
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return group.all_reduce(dy)

    x = torch.ones(2, 3, requires_grad=True)
    (Sum.apply(x) * (group.rank + 1)).sum().backward()
    return x.grad


def test_collectives_in_backward(run) -> None:
    want = torch.full((2, 3), float(sum(range(1, run.size + 1))))
    assert all(torch.equal(x, want) for x in run(backward_sum))


# ---- exchange ----


def exchange_objects(group: Group) -> list[object]:
    return [group.exchange({"rank": group.rank, "layout": ("a", 1)}), group.exchange(None)]


def test_exchange_gives_every_rank_all_objects(run) -> None:
    objects = [{"rank": r, "layout": ("a", 1)} for r in range(run.size)]
    assert run(exchange_objects) == [[objects, [None] * run.size]] * run.size


def message(group: Group, obj: object, timeout: float = 30) -> tuple[str, str, bool]:
    started = time.monotonic()
    try:
        group.exchange(obj, timeout=timeout)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started < 5
    return "none", "", True


def one_fails(rank: int, size: int) -> tuple[str, str, bool]:
    return message(group_of(None), ValueError("3 heads over 2 ranks") if rank == 1 else "fine")


def test_a_failed_rank_is_an_error_on_all(ranks) -> None:
    assert ranks(2)(one_fails) == [
        ("UsageError", "rank 1 failed: ValueError: 3 heads over 2 ranks", True),
        ("ValueError", "3 heads over 2 ranks", True),
    ]

    def simulated(group: Group) -> None:
        group.exchange(ValueError("3 heads") if group.rank else "fine")

    with pytest.raises(ValueError, match="3 heads"):
        simulate(2, simulated)
    with pytest.raises(ValueError, match="3 heads"):
        GroupOfOne().exchange(ValueError("3 heads"))


def other_group(rank: int, size: int) -> tuple[str, str, bool]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    return message(group_of(mesh if rank else None), "plan")


def test_ranks_with_other_groups_are_an_error_on_all(ranks) -> None:
    assert ranks(2)(other_group) == [
        (
            "UsageError",
            "the ranks do not agree on the group: rank 0 calls with tp 2 on ranks [0, 1], "
            "rank 1 with tp 1 on ranks [1]",
            True,
        ),
        (
            "UsageError",
            "the ranks do not agree on the group: rank 1 calls with tp 1 on ranks [1], "
            "rank 0 with tp 2 on ranks [0, 1]",
            True,
        ),
    ]


def late(rank: int, size: int) -> tuple[str, str, bool]:
    if rank == 1:
        time.sleep(1)
    result = message(group_of(None), "plan", timeout=0.5)
    assert group_of(None).exchange(rank) == [0, 1]  # the next call is in step again
    return result


@pytest.mark.slow
def test_a_rank_that_gave_up_is_not_paired_with_a_late_one(ranks) -> None:
    gave_up = (
        "rank 0 waited 0.5 s for rank 1 of its group [0, 1]: every rank of the group must make the same call"
    )
    assert ranks(2)(late) == [
        ("UsageError", gave_up, True),
        ("UsageError", f"rank 0 failed: {gave_up}", True),
    ]


def part_of_the_job(rank: int, size: int) -> tuple[list[int], float]:
    """A process group of one rank works on its own while the other does something else."""
    groups = [dist.new_group([r]) for r in range(size)]
    started = time.monotonic()
    found = group_of(groups[0]).exchange(7) if rank == 0 else [7]
    return found, time.monotonic() - started


def test_a_process_group_of_its_own_waits_for_nobody_else(ranks) -> None:
    for found, seconds in ranks(2)(part_of_the_job):
        assert found == [7]
        assert seconds < 2
