"""The pool of workers itself: results, exceptions, workers that hang or end."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from autotp.diagnostic import UsageError
from tests.ranks import Pool, RankError


def total(rank: int, size: int, value: float) -> tuple[int, float]:
    x = torch.tensor([value + rank])
    dist.all_reduce(x)
    return os.getpid(), x.item()


def fails(rank: int, size: int) -> None:
    if rank == 1:
        raise UsageError("a fault of rank 1")


def fails_unpicklably(rank: int, size: int) -> None:
    class Local(Exception):
        pass

    raise Local("a fault")


def hangs(rank: int, size: int) -> None:
    time.sleep(60 * rank)


def fails_while_the_other_waits(rank: int, size: int) -> None:
    if rank == 1:
        raise UsageError("a fault of rank 1")
    dist.all_reduce(torch.ones(1))


def ends(rank: int, size: int) -> None:
    os._exit(3)


def warns(rank: int, size: int) -> None:
    import warnings

    warnings.warn("a warning of a rank", UserWarning, stacklevel=1)


def test_results_come_in_rank_order_and_workers_are_kept(ranks) -> None:
    first, second = ranks(2)(total, 1.0), ranks(2)(total, 2.0)
    assert [value for _, value in first] == [3.0, 3.0]
    assert [value for _, value in second] == [5.0, 5.0]
    assert [pid for pid, _ in first] == [pid for pid, _ in second]


def test_an_exception_comes_back_with_its_traceback_and_the_pool_goes_on(ranks) -> None:
    with pytest.raises(UsageError, match="a fault of rank 1") as caught:
        ranks(2)(fails)
    assert "on rank 1 of 2" in caught.value.__notes__[0]
    assert "in fails" in caught.value.__notes__[0]
    with pytest.raises(RankError, match="Local: a fault"):
        ranks(2)(fails_unpicklably)
    with pytest.raises(UserWarning, match="a warning of a rank"):
        ranks(2)(warns)
    assert [value for _, value in ranks(2)(total, 0.0)] == [1.0, 1.0]


@pytest.mark.slow
def test_ranks_that_hang_or_end_are_replaced(monkeypatch) -> None:
    """Each call after a fault starts new ranks; the last one shows that they work."""
    monkeypatch.setattr("tests.ranks.AFTER_A_FAILURE", 3.0)
    pool = Pool(2)
    try:
        pool.start()
        with pytest.raises(RankError, match=r"ranks \[1\] of 2 did not answer within 5 s"):
            pool.call(hangs, timeout=5)
        with pytest.raises(UsageError, match="a fault of rank 1"):
            pool.call(fails_while_the_other_waits)
        with pytest.raises(RankError, match="ended in ends"):
            pool.call(ends)
        assert [value for _, value in pool.call(total, 0.0)] == [1.0, 1.0]
    finally:
        pool.stop()
