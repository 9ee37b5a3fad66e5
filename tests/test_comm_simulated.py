"""Simulated ranks: calls that do not go together, failures, what belongs to a rank and to the caller."""

from __future__ import annotations

import random
import time

import numpy
import pytest
import torch

from autotp.comm import Group, simulate
from autotp.diagnostic import UsageError


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
