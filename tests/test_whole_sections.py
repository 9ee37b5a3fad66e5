"""One weight of parts that are dealt and parts that are whole on every rank: q|k|v with one kv head, a mixer
whose B and C serve all heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autotp
from tests.grouped import Mixer, Packed, mixer_plan

INPUTS = torch.zeros(3, 7, 12)
ROW = {"style": "row"}


def packed(queries: int, **changes: Any) -> dict[str, Any]:
    return {"qkv": {"style": "column", "heads": [queries, 1, 1]} | changes, "o": ROW}


@pytest.mark.parametrize(("queries", "tp"), [(3, 2), (4, 3), (6, 4)])
@pytest.mark.parametrize("path", ["positions", "slices", "split"])
def test_queries_beside_one_kv_head(path, queries, tp):
    result = autotp.verify(Packed(queries, path), packed(queries), tp=tp, inputs=INPUTS)
    assert result.ok and result.max_grad_diff < 1e-10, str(result)


@pytest.mark.parametrize(("heads", "tp"), [(3, 2), (4, 3), (6, 4)])
def test_a_mixer_with_one_group(heads, tp):
    model = Mixer(heads)
    result = autotp.verify(model, mixer_plan(heads), tp=tp, inputs=INPUTS)
    assert result.ok and result.max_grad_diff < 1e-10, str(result)
    found = autotp.analyze(model, mixer_plan(heads), tp=tp, inputs=INPUTS)
    assert [read.name for read in found.reads if read.held] == ["kernel", "shift"]


def mixed(**changes: Any) -> dict[str, Any]:
    """The plan of a mixer of six heads, with some options of one rule changed."""
    plan = mixer_plan(6)
    for name, options in changes.items():
        if options is None:
            del plan[name]
        else:
            plan[name] = plan[name] | options
    return plan


JUDGED: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "in one piece": (Packed(6, "slices"), {"qkv": "column", "o": ROW}),
    "three equal parts": (Packed(6, "slices"), {"qkv": {"style": "column", "sections": 3}, "o": ROW}),
    "eight heads": (Packed(6, "slices"), {"qkv": {"style": "column", "heads": 8}, "o": ROW}),
    "k, v, q": (Packed(6, "slices"), packed(6, heads=[1, 1, 6])),
    "k, q, v": (Packed(6, "slices"), packed(6, heads=[1, 6, 1])),
    "two kv heads": (Packed(6, "slices"), packed(6, sections=[24, 4, 4], heads=[6, 2, 2])),
    "k whole, v dealt": (Packed(6, "split"), packed(6, sections=[24, 4, 4], heads=[6, 1, 4])),
    "q whole": (Packed(6, "split"), packed(6, sections=[24, 8], heads=[1, 8])),
    "fewer queries": (Packed(6, "split"), packed(6, sections=[24, 4, 4], heads=[4, 1, 1])),
    "o by other heads": (Packed(6, "split"), packed(6) | {"o": {"style": "row", "heads": 4}}),
    "kernel forgotten": (Mixer(6), mixed(kernel=None)),
    "kernel and shift forgotten": (Mixer(6), mixed(kernel=None, shift=None)),
    "shift forgotten": (Mixer(6), mixed(shift=None)),
    "step forgotten": (Mixer(6), mixed(step=None)),
    "B and C dealt": (Mixer(6), mixed(inside={"heads": [6, 6, 5, 5, 6]})),
    "B dealt in the kernel": (Mixer(6), mixed(kernel={"heads": [6, 5, 1]})),
    "sections in another order": (
        Mixer(6), mixed(inside={"sections": [24, 24, 6, 5, 5], "heads": [6, 6, 6, 1, 1]})
    ),
    "by features": (Mixer(6), mixed(inside={"heads": [24, 24, 1, 1, 6]})),
    "out by other heads": (Mixer(6), mixed(out={"heads": 4})),
}  # fmt: skip
EXACT = {"by features", "shift forgotten", "step forgotten", "kernel and shift forgotten", "kernel forgotten"}


@pytest.mark.parametrize("name", JUDGED)
def test_another_plan_is_refused_or_exact(name):
    model, plan = JUDGED[name]
    for tp in (2, 4):  # over 2 ranks half the heads are half of any even number of units
        if autotp.analyze(model, plan, tp=tp, inputs=INPUTS).ok:
            assert tp == 2 or name in EXACT
            result = autotp.verify(model, plan, tp=tp, inputs=INPUTS)
            assert result.ok and result.max_grad_diff < 1e-10, str(result)
