"""Fixtures for all tests: real gloo ranks, and every way to be several ranks."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from autotp.comm import group_of, simulate
from tests import ranks as workers
from tests.command_line import here, mlp, models  # noqa: F401  (fixtures)

torch.set_num_threads(1)  # as the workers: a matmul's last bits depend on the number of threads

collect_ignore = [] if importlib.util.find_spec("fairscale") else ["test_fairscale.py"]


def pytest_report_header() -> str:
    """Which comparison is left out, so that nobody takes it for passed."""
    return (
        "fairscale: not installed, tests/test_fairscale.py is left out"
        if collect_ignore
        else "fairscale: there"
    )


# Files of a few long tests begin first, so that no worker waits for another's at the end.
LONG = (
    "test_shipped_plans.py", "test_equivalence.py", "test_zoo.py", "test_mutants.py", "test_kv_families.py",
    "test_trace_export.py", "test_demo.py", "test_prove.py", "test_checkpoint_assembled.py",
    "test_examples.py", "test_trace_capture.py", "test_cases.py", "test_regions.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files first, the others as they stand."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


def pytest_collection_finish() -> None:
    """What is imported and collected is no garbage, and not looked through again and again; what traces make
    is many objects, and seldom any."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Callable[..., list[Any]]]]:
    """`ranks(2)(function, *args)` runs `function(rank, size, *args)` on two gloo workers."""

    def of(size: int) -> Callable[..., list[Any]]:
        return workers.pool(size).call

    yield of
    workers.stop_all()


@dataclass(frozen=True)
class Run:
    """Runs a scenario `scenario(group, *args)` as every rank of a group: `run(scenario, *args)`."""

    kind: str
    size: int
    ranks: Callable[[int], Callable[..., list[Any]]]

    def __call__(self, scenario: Callable[..., Any], *args: Any) -> list[Any]:
        if self.kind == "gloo":
            return self.ranks(self.size)(as_rank, scenario, *args)
        torch.manual_seed(0)
        return simulate(self.size, lambda group: scenario(group, *args))


def as_rank(rank: int, size: int, scenario: Callable[..., Any], *args: Any) -> Any:
    """A scenario on a worker, with the worker's group."""
    return scenario(group_of(None), *args)


@pytest.fixture(
    params=[("gloo", 2), ("simulated", 2), ("simulated", 3), ("simulated", 4)],
    ids=lambda param: f"{param[1]}-{param[0]}",
)
def run(request: pytest.FixtureRequest, ranks: Callable[[int], Callable[..., list[Any]]]) -> Run:
    """Every way to be several ranks: two real ones, and 2, 3 and 4 simulated."""
    return Run(*request.param, ranks)
