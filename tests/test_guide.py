"""The guide for users of other libraries names what there is, and its example runs."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from autotp.nn import ColumnParallelLinear, RowParallelLinear

GUIDE = (Path(__file__).parent.parent / "docs" / "layers.md").read_text()


def found(name: str) -> Any:
    """The object of a dotted name."""
    value: Any = importlib.import_module("autotp")
    for at, part in enumerate(name.split(".")[1:], start=2):
        try:
            value = getattr(value, part)
        except AttributeError:
            value = importlib.import_module(".".join(name.split(".")[:at]))
    return value


@pytest.mark.parametrize("name", sorted(set(re.findall(r"autotp(?:\.[A-Za-z_]+)+", GUIDE))))
def test_every_name_of_the_guide_exists(name: str) -> None:
    assert found(name) is not None


def test_the_example_of_the_guide() -> None:
    code = re.search(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert code is not None
    lines = [line for line in code[1].splitlines() if "initialize" not in line]  # needs torchrun's ranks
    names: dict[str, Any] = {
        "ColumnParallelLinear": ColumnParallelLinear,
        "RowParallelLinear": RowParallelLinear,
        "F": F,
        "mesh": None,
        "x": torch.ones(2, 1024),
    }
    exec("\n".join(lines), names)
    assert names["y"].shape == (2, 1024)
