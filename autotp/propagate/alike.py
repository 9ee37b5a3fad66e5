"""Arguments and constants of two traces: whether they are the same, and in words."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

__all__ = ["NOTHING", "equal", "has_node", "plain", "said", "shapes_said", "shown"]

NOTHING = object()


def said(value: object) -> str:
    """What stands at an argument, in words."""
    return "nothing" if value is NOTHING else repr(value)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two constants are the same, NaN included."""
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and torch.equal(one.nan_to_num(), other.nan_to_num())
    )


def shown(value: torch.Tensor | None) -> str:
    """A constant in words: its values, or its shape."""
    return "none" if value is None else str(value.tolist()) if value.numel() <= 4 else str(list(value.shape))


def plain(value: Any) -> Any:
    """Lists for every sequence, so that spellings compare; a number that values decide by its name, as in a
    graph."""
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return str(value)
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def has_node(value: Any) -> bool:
    """Whether a value of the graph is in an argument."""
    return isinstance(value, fx.Node) or (isinstance(value, list) and any(has_node(v) for v in value))


def shapes_said(shapes: tuple[tuple[int, ...], ...]) -> str:
    """Several shapes, in words."""
    return ", ".join(str(list(s)) for s in shapes)
