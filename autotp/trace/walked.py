"""Loops over what values decide: `for expert in hit.nonzero()` is recorded for the first few rows.

A recording knows no values, so it does not know how many rows `nonzero` gives. A loop over them runs the
same code for each: three show what the first one does to what it meets, and what each later one does to what
the one before it left. The last element is left out where there are others: the experts of transformers
count one class more than there are, that of tokens which go to none.

Other rows may only have other numbers in the same ops. So a row may index a tensor, and nothing else may ask
for its number: who takes `experts[int(row)]` or `if row > 3` may do something else with the rows that are not
recorded, and the module around is not looked into.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

__all__ = ["looks", "rows_of"]

_FEW = 3
_UNBIND, _NONZERO = torch.ops.aten.unbind.int, torch.ops.aten.nonzero.default
_aten = torch.ops.aten
_NUMBERS = (
    _aten.item.default, _aten._local_scalar_dense.default, _aten.is_nonzero.default, _aten.equal.default,
    _aten.allclose.default,
)  # fmt: skip
_INDEX = ("taken", "put")


def rows_of(
    func: Any, args: tuple[Any, ...], node: Callable[[torch.Tensor], fx.Node]
) -> list[list[int]] | None:
    """The first rows of `x.nonzero()`, of an `x` of one dim, where an op takes its rows apart; None of any
    other op."""
    if func is not _UNBIND or (args[1] if len(args) > 1 else 0) != 0:
        return None
    made = node(args[0])
    if made.target is not _NONZERO:
        return None
    mask = made.args[0]
    assert isinstance(mask, fx.Node)
    shape = mask.meta["val"].shape
    if len(shape) != 1 or shape[0] < 1:
        return None
    return [[place] for place in range(min(_FEW, max(1, shape[0] - 1)))]


def looks(func: Any) -> bool:
    """Whether an op that gives a number is asked for by anything but an index of a tensor (`noting.py`)."""
    if func not in _NUMBERS:
        return False
    frame = sys._getframe()
    while frame.f_back is not None and _inside(frame):
        if frame.f_code.co_name in _INDEX and frame.f_globals["__name__"] == "autotp.trace.noting":
            return False
        frame = frame.f_back
    return True


def _inside(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(("torch.", "autotp."))
