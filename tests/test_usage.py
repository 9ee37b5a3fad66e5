"""docs/usage.md runs from its first line to its last on two ranks, and trains as one process does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "usage.md").read_text()


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def read(rank: int, size: int, folder: str) -> tuple[list[float], list[int]]:
    names: dict[str, Any] = {"__name__": "usage", "folder": Path(folder)}
    for block in blocks():
        exec(compile(block, "docs/usage.md", "exec"), names)
    return names["losses"], names["tokens"].flatten().tolist()


def alone() -> list[float]:
    """The losses of the same training in one process."""
    names: dict[str, Any] = {"__name__": "usage"}
    first, training = blocks()[:2]
    exec("\n".join(line for line in first.splitlines() if "mesh" not in line), names)
    exec(training, names)
    return names["losses"]


@pytest.mark.slow
def test_the_page_runs_on_two_ranks(ranks, tmp_path: Path) -> None:
    found = ranks(2)(read, str(tmp_path))
    assert found[0] == found[1]
    losses, tokens = found[0]
    assert losses == pytest.approx(alone(), abs=1e-5)
    assert tokens[:3] == [5, 6, 7] and len(tokens) == 8
    assert {path.name for path in tmp_path.iterdir()} == {
        "step-3", "step-3.optimizer.safetensors", "graph-0.pt", "graph-1.pt",
    }  # fmt: skip
