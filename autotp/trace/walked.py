"""Loops over what values decide: `for expert in hit.nonzero()` is recorded for the first few rows.

A recording knows no values, so it does not know how many rows `nonzero` gives. A loop over them runs the
same code for each: three show what the first one does to what it meets, and what each later one does to what
the one before it left. The last element is left out where there are others: the experts of transformers
count one class more than there are, that of tokens which go to none. A function that decides anything by an
`if` may do something else with other rows: its loop is not looked into.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

__all__ = ["rows_of"]

_FEW = 3
_UNBIND, _NONZERO = torch.ops.aten.unbind.int, torch.ops.aten.nonzero.default


def rows_of(
    func: Any, args: tuple[Any, ...], node: Callable[[torch.Tensor], fx.Node]
) -> list[list[int]] | None:
    """The first rows of `x.nonzero()`, of an `x` of one dim, where an op takes its rows apart; None of any
    other op."""
    if func is not _UNBIND or (args[1] if len(args) > 1 else 0) != 0:
        return None
    made = node(args[0])
    if made.target is not _NONZERO or _decides():
        return None
    mask = made.args[0]
    assert isinstance(mask, fx.Node)
    shape = mask.meta["val"].shape
    if len(shape) != 1 or shape[0] < 1:
        return None
    return [[place] for place in range(min(_FEW, max(1, shape[0] - 1)))]


def _decides() -> bool:
    """Whether the function that walks has a branch of its own, besides its loops."""
    frame = sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith(
        ("torch.", "autotp.")
    ):
        frame = frame.f_back
    last = ""
    for each in dis.get_instructions(frame.f_code):
        jumps = "JUMP" in each.opname and "_IF_" in each.opname
        if jumps and last != "WITH_EXCEPT_START":
            return True
        last = each.opname
    return False
