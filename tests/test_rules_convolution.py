"""Convolutions: rules against execution."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from autotp.placement import INVARIANT, PARTIAL, REPLICATE, Shard, deal
from tests.rules import Case, cut, hold, tensor

# A fused x|B whose B is whole on every rank, as Mamba-2 with one group has it.
MIXED = Shard(1, sections=((4, deal(2, 2)), (2, None)))
X, X2 = tensor(2, 6, 5), tensor(2, 4, 5, 5)

CASES = {
    "depthwise": Case(
        lambda x, w, b: F.conv1d(x, w, b, padding=2, groups=6),
        (X, tensor(6, 1, 3), tensor(6)),
        few=4,
        takes=((cut(1), cut(0), cut(0)), (cut(0), REPLICATE, REPLICATE)),
    ),
    "depthwise, one section whole": Case(
        lambda x, w, b: F.conv1d(x, w, b, padding=2, groups=6),
        (X, tensor(6, 1, 3), tensor(6)),
        tps=(2,),
        choices=lambda tp: [
            [(MIXED, True), (cut(1), True)],
            *[[(MIXED.at(0), True), (cut(0), True), (INVARIANT, True)]] * 2,
        ],
        takes=((MIXED, MIXED.at(0), MIXED.at(0)),),
    ),
    "depthwise, one sample": Case(
        lambda x, w: F.conv1d(x, w, groups=6), (tensor(6, 5), tensor(6, 1, 3)), takes=((cut(0), cut(0)),)
    ),
    "depthwise, two filters a channel": Case(
        lambda x, w: F.conv1d(x, w, groups=6), (X, tensor(12, 1, 3)), never=True, few=3, tps=(2,)
    ),
    "groups of channels": Case(
        lambda x, w: F.conv1d(x, w, groups=2), (tensor(1, 6, 5), tensor(4, 3, 3)), never=True, few=3, tps=(2,)
    ),
    "channels": Case(
        lambda x, w, b: F.conv1d(x, w, b, stride=2),
        (X, tensor(4, 6, 3), tensor(4)),
        few=3,
        takes=((REPLICATE, cut(0), cut(0)), (cut(1), cut(1), PARTIAL)),
    ),
    "channels, no bias": Case(
        lambda x, w: F.conv1d(x, w), (X, tensor(4, 6, 3)), takes=((cut(1), cut(1)), (PARTIAL, INVARIANT))
    ),
    "in two dims": Case(
        lambda x, w: F.conv2d(x, w), (X2, tensor(6, 4, 3, 3)), few=3, takes=((cut(1), cut(1)),)
    ),
    "in three dims": Case(
        lambda x, w: F.conv3d(x, w, groups=4),
        (tensor(1, 4, 2, 2, 2), tensor(4, 1, 2, 2, 2)),
        few=3,
        takes=((cut(1), cut(0)),),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rank_s_channels_are_its_part_of_the_whole(name: str) -> None:
    hold(CASES[name])
