"""The seam between ranks: real and simulated groups do the same, and disagreement is an error."""

from __future__ import annotations

import copy
import io
import pickle
import random
import time
from functools import partial

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autotp import mappings
from autotp.comm import Group, GroupOfOne, group_of, simulate
from autotp.comm.simulated import SimulatedGroup
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


# ---- which group a mesh means ----


def meshes(rank: int, size: int) -> list[tuple[int, int]]:
    world = dist.group.WORLD
    flat = init_device_mesh("cpu", (size,))
    named = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    outer = init_device_mesh("cpu", (size, 1), mesh_dim_names=("dp", "tp"))
    found = [group_of(mesh) for mesh in (None, world, flat, named, named["tp"], outer)]
    assert group_of(None) is group_of(None)
    assert group_of(found[0]) is found[0]
    return [(group.rank, group.size) for group in found]


def test_group_of_every_kind_of_mesh(ranks) -> None:
    assert ranks(2)(meshes) == [[(r, 2)] * 5 + [(0, 1)] for r in range(2)]
    group = group_of(None)
    assert (group.rank, group.size) == (0, 1)
    assert isinstance(group, Group)
    assert isinstance(SimulatedGroup(0, 2), Group)


def refused_meshes(rank: int, size: int) -> list[str]:
    found = []
    only_first = dist.new_group([0])
    for mesh in (
        init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "model")),
        init_device_mesh("cpu", (1, size)),
        only_first,
        DeviceMesh("cpu", [0]),
        "tp",
    ):
        try:
            group_of(mesh)
            found.append("fine")
        except UsageError as error:
            found.append(str(error))
    return found


def test_meshes_that_mean_no_group_are_refused_by_name(ranks) -> None:
    first, second = ranks(2)(refused_meshes)
    remedy = "name the axis in init_device_mesh(…, mesh_dim_names=…), or pass the 1-D mesh of the axis"
    shared = [
        f"a DeviceMesh with 2 axes ('dp', 'model') has none named 'tp': {remedy}",
        f"a DeviceMesh with 2 axes (no names) has none named 'tp': {remedy}",
    ]
    wrong = "a mesh is a DeviceMesh, a ProcessGroup, a Group or None, not str ('tp')"
    with pytest.raises(UsageError) as caught:
        group_of(2)
    assert str(caught.value) == wrong.replace("str ('tp')", "int (2); autotp.initialize(tp=…) makes a mesh")
    assert first == [*shared, "fine", "fine", wrong]
    assert second == [
        *shared,
        "rank 1 is not in the group that it was given",
        "rank 1 is not in the mesh, which has ranks [0]",
        wrong,
    ]


# ---- copies ----


def copies(group: Group) -> bool:
    return copy.deepcopy([group])[0] is group and same(pickle.loads(pickle.dumps(group)), group)


def same(a: Group, b: Group) -> bool:
    return (type(a), a.rank, a.size) == (type(b), b.rank, b.size)


def test_a_group_survives_deepcopy_and_pickle(run) -> None:
    assert run(copies) == [True] * run.size
    assert copies(GroupOfOne())


def pickled(rank: int, size: int, sent: bytes | None) -> bytes | str:
    if sent is None:
        buffer = io.BytesIO()
        torch.save(group_of(None), buffer)
        return buffer.getvalue()
    try:
        return str(torch.load(io.BytesIO(sent), weights_only=False) is group_of(None))
    except UsageError as error:
        return str(error)


def test_a_group_is_loaded_on_its_own_rank_only(ranks) -> None:
    of_rank_0, of_rank_1 = ranks(2)(pickled, None)
    assert ranks(2)(pickled, of_rank_0) == [
        "True",
        "this object was pickled on rank 0 and is loaded on rank 1",
    ]
    assert ranks(2)(pickled, of_rank_1)[1] == "True"
    with pytest.raises(UsageError) as caught:
        torch.load(io.BytesIO(of_rank_1), weights_only=False)
    assert str(caught.value) == (
        "this object was pickled on rank 1 of a group of 2 ranks: initialise torch.distributed before it is "
        "loaded"
    )


# ---- simulation ----


def fails_with(function, message: str, tp: int = 3, error: type[BaseException] = UsageError) -> None:
    with pytest.raises(error) as caught:
        simulate(tp, function)
    assert str(caught.value) == message


def test_ranks_that_do_not_call_alike_are_an_error() -> None:
    fails_with(
        lambda group: group.all_reduce(torch.ones(2 + group.rank)),
        "the ranks do not make the same collective call: rank 0: all_reduce(float32[2]); "
        "rank 1: all_reduce(float32[3]); rank 2: all_reduce(float32[4])",
    )
    fails_with(
        lambda group: group.all_reduce(torch.ones(2, dtype=[torch.float32, torch.int64][group.rank])),
        "the ranks do not make the same collective call: rank 0: all_reduce(float32[2]); "
        "rank 1: all_reduce(int64[2])",
        tp=2,
    )
    fails_with(
        lambda group: group.all_reduce(torch.ones(2)) if group.rank else group.exchange(1),
        "the ranks do not make the same collective call: rank 0: exchange; rank 1: all_reduce(float32[2])",
        tp=2,
    )
    fails_with(
        lambda group: group.all_gather(torch.ones(2, 2), group.rank, [2, 2]),
        "the ranks do not make the same collective call: rank 0: all_gather(float32[2, 2], dim=0, "
        "sizes=[2, 2]); rank 1: all_gather(float32[2, 2], dim=1, sizes=[2, 2])",
        tp=2,
    )
    fails_with(
        lambda group: group.all_gather(torch.ones(3), 0, [2, 3]),
        "all_gather on dim 0: rank 0 brings 3, but its size is 2 of [2, 3]",
        tp=2,
    )
    fails_with(
        lambda group: group.reduce_scatter(torch.ones(4), 0, [2, 3]),
        "reduce_scatter on dim 0: 4 elements for blocks of [2, 3]",
        tp=2,
    )


def test_ranks_that_return_early_are_an_error() -> None:
    fails_with(
        lambda group: group.all_reduce(torch.ones(1)) if group.rank == 0 else None,
        "rank 0 waits in all_reduce(float32[1]), but rank 1 has returned without that call",
    )
    fails_with(
        lambda group: group.all_reduce(torch.ones(1)) if group.rank == 2 else None,
        "rank 2 waits in all_reduce(float32[1]), but rank 0 has returned without that call",
    )


def test_an_exception_in_one_rank_ends_all() -> None:
    reached = []

    def function(group: Group) -> None:
        group.all_reduce(torch.ones(1))
        if group.rank == 1:
            raise KeyError("fault")
        group.all_reduce(torch.ones(1))
        reached.append(group.rank)

    with pytest.raises(KeyError) as caught:
        simulate(3, function)
    assert caught.value.__notes__ == ["in simulated rank 1 of 3"]
    assert reached == []


def test_no_rank_goes_on_after_a_failure_that_it_keeps() -> None:
    def function(group: Group) -> None:
        if group.rank == 1:
            raise KeyError("fault")
        try:
            group.all_reduce(torch.ones(1))
        except Exception:
            raise AssertionError("the end of the simulation was taken for a fault of this rank") from None

    with pytest.raises(KeyError):
        simulate(2, function)


def test_a_group_outside_of_its_simulation_or_rank_is_an_error() -> None:
    groups = simulate(2, lambda group: group)
    with pytest.raises(UsageError) as caught:
        groups[1].all_reduce(torch.ones(2))
    assert str(caught.value) == (
        "simulated rank 1 of 2 calls all_reduce(float32[2]) outside of a simulation: "
        "run it in autotp.comm.simulate"
    )
    fails_with(
        lambda group: groups[0].all_reduce(torch.ones(2)),
        "simulated rank 1 of 2 uses the group of rank 0 of 2",
        tp=2,
    )
    later = simulate(2, lambda group: groups[group.rank].all_reduce(torch.ones(1)).item())
    assert later == [2.0, 2.0]
    with pytest.raises(UsageError, match="tp must be at least 1, not 0"):
        simulate(0, lambda group: None)


def test_random_states_belong_to_the_ranks_and_the_callers_stay() -> None:
    def draw(group: Group) -> tuple[list[float], list[float]]:
        def numbers() -> list[float]:
            return [torch.rand(()).item(), random.random(), numpy.random.rand()]

        for _ in range(group.rank):
            torch.rand(3)
        first = numbers() if group.rank == 0 else []
        group.all_reduce(torch.ones(1))
        torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
        group.all_reduce(torch.ones(1))
        return first, numbers()

    torch.manual_seed(3), random.seed(3), numpy.random.seed(3)
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    results = simulate(3, draw)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())
    assert results[0][1] == results[1][1] == results[2][1]
    assert results[0][0] == [torch.rand(()).item(), random.random(), numpy.random.rand()]


def test_modes_of_the_caller_hold_in_every_rank_and_changes_stay_in_it() -> None:
    def modes(group: Group) -> tuple[object, ...]:
        group.all_reduce(torch.ones(1))
        seen = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.get_default_dtype(),
            torch.get_default_device(),
        )
        torch.set_grad_enabled(group.rank == 0)
        torch.set_default_dtype([torch.float64, torch.float16][group.rank])
        group.exchange(None)
        assert torch.is_grad_enabled() == (group.rank == 0)
        assert torch.get_default_dtype() == [torch.float64, torch.float16][group.rank]
        return seen

    plain = (True, False, False, torch.bfloat16, torch.float32, torch.device("cpu"))
    assert simulate(2, modes) == [plain] * 2
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        assert simulate(2, modes) == [(False, False, True, torch.float16, *plain[4:])] * 2
    with torch.inference_mode():
        assert simulate(2, modes) == [(False, True, *plain[2:])] * 2
    with torch.device("meta"):
        assert simulate(2, modes) == [(*plain[:5], torch.device("meta"))] * 2


def test_a_simulated_rank_computes_with_the_callers_number_of_threads() -> None:
    """The last bits of a matmul depend on it."""
    x, weight = torch.randn(5, 16, dtype=torch.float64), torch.randn(32, 16, dtype=torch.float64)
    for y in simulate(2, lambda group: torch.nn.functional.linear(x, weight)):
        assert torch.equal(y, torch.nn.functional.linear(x, weight))


def test_one_rank_runs_at_a_time() -> None:
    inside = []

    def function(group: Group) -> None:
        for _ in range(20):
            inside.append(group.rank)
            time.sleep(0.0005)
            assert inside[-1] == group.rank
            group.all_reduce(torch.ones(1))

    simulate(4, function)
    assert len(inside) == 80


def test_a_simulation_inside_a_simulated_rank() -> None:
    def outer(group: Group) -> float:
        inner = simulate(3, lambda g: g.all_reduce(torch.ones(())).item())
        return group.all_reduce(torch.tensor(inner[0])).item()

    assert simulate(2, outer) == [6.0, 6.0]
