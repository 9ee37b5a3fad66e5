"""A sharded model's own state_dict is of a rank's parts, and its load_state_dict takes no others."""

from __future__ import annotations

import io
from collections import OrderedDict

import pytest
import torch
from torch import nn

import autotp
from autotp.comm import simulate
from autotp.diagnostic import UsageError
from autotp.rewrite.own_state import WHOSE

PLAN = {"0": "column", "2": "row"}


def mlp(group, wrapped=False):
    torch.manual_seed(0)
    model = autotp.shard(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), PLAN, group)
    return nn.ModuleDict({"inner": model}) if wrapped else model


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_parts_of_another_rank_are_refused(wrapped):
    saved = io.BytesIO()

    def here(group):
        model = mlp(group, wrapped)
        if group.rank == 0:
            torch.save(model.state_dict(), saved)
        group.exchange(None)
        saved.seek(0)
        return model.load_state_dict(torch.load(saved))

    with pytest.raises(UsageError) as caught:
        simulate(2, here)
    assert str(caught.value) == (
        "Sequential.load_state_dict: the state holds the parts of rank 0 of 2, and this is rank 1 of 2\n  = "
        "help: autotp.load_state_dict(model, state) takes the unsharded model's state, as "
        "autotp.gather_state_dict(model) gives it"
    )


def test_whole_tensors_are_refused_with_the_way_to_load_them():
    state = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).state_dict()
    with pytest.raises(UsageError) as caught:
        simulate(2, lambda group: mlp(group).load_state_dict(state, strict=False))
    assert str(caught.value).startswith(
        "Sequential.load_state_dict: 0.weight [8, 4] is whole, and so are 2 more; rank "
    )
    assert "autotp.load_state_dict(model, state)" in str(caught.value)


def test_own_parts_are_loaded_and_a_whole_state_is_nobody_s():
    def here(group):
        model = mlp(group)
        state = OrderedDict((name, value * 2) for name, value in model.state_dict().items())
        model.load_state_dict(model.state_dict(), assign=True)
        model.load_state_dict(state)
        whole = autotp.gather_state_dict(model)
        autotp.unshard(model)
        assert not any(WHOSE in each for each in model.state_dict()._metadata.values())
        return whole

    torch.manual_seed(0)
    wanted = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).state_dict()
    for whole in simulate(2, here):
        assert not any(WHOSE in each for each in whole._metadata.values())
        assert all(torch.equal(whole[name], value * 2) for name, value in wanted.items())
