"""Fixtures for all tests: real gloo ranks, and a clean torch between tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import ranks as workers


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Callable[..., list[Any]]]]:
    """`ranks(2)(function, *args)` runs `function(rank, size, *args)` on two gloo workers."""

    def of(size: int) -> Callable[..., list[Any]]:
        return workers.pool(size).call

    yield of
    workers.stop_all()
