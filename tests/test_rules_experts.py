"""Grouped matmuls: rules against execution, under every name of the op."""

from __future__ import annotations

import pytest
import torch

from autotp.placement import INVARIANT, PARTIAL, REPLICATE, Shard
from tests.rules import Case, Placed, cut, hold, tensor

pytest.importorskip("transformers.integrations.moe")  # registers its fallback

GATE_UP = cut(2, 2, groups=2)
WHOLE: list[Placed] = [(INVARIANT, True), (INVARIANT, False), (REPLICATE, True), (PARTIAL, True)]
KERNEL: list[list[Placed]] = [
    [*WHOLE, (cut(0), True), (cut(1), True)],
    [*WHOLE, (cut(0), True), (cut(1), True), (cut(2), True), (GATE_UP, True)],
    [(INVARIANT, False)],
]
CASES = {
    # torch's own kernel wants bfloat16 on the CPU, and rows of a multiple of 16 bytes.
    "kernel": Case(
        lambda x, w, ends: torch._grouped_mm(x, w, offs=ends),
        (
            tensor(8, 16, dtype=torch.bfloat16),
            tensor(2, 16, 32, dtype=torch.bfloat16),
            torch.tensor([3, 8], dtype=torch.int32),
        ),
        tps=(2,),
        tolerance=3e-2,
        choices=lambda tp: KERNEL,
        takes=((REPLICATE, GATE_UP, INVARIANT), (cut(1), cut(1), INVARIANT)),
    ),
    "fallback": Case(
        lambda x, w, ends: torch.ops.transformers.grouped_mm_fallback(x, w, ends),
        (tensor(6, 4), tensor(3, 4, 12), torch.tensor([2, 2, 6], dtype=torch.int32)),
        few=4,
        takes=(
            (REPLICATE, cut(2), INVARIANT),
            (REPLICATE, GATE_UP, INVARIANT),
            (cut(1), cut(1), INVARIANT),
            (PARTIAL, REPLICATE, INVARIANT),
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rank_s_features_are_its_part_of_the_whole(name: str) -> None:
    tally = hold(CASES[name])
    assert not any(isinstance(x, Shard) and x.dim == 0 for layouts in tally.taken for x in layouts[:2])
