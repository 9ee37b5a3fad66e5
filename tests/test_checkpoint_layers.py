"""What is written of a model that is built from autotp.nn's layers is whole, as of one that `shard` made."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import autotp
from autotp.checkpoint.distributed import LoadPlanner, SavePlanner
from autotp.checkpoint.optimizer import load_optimizer, save_optimizer
from autotp.checkpoint.save import save_pretrained
from autotp.comm import group_of, simulate
from autotp.diagnostic import UsageError
from autotp.nn import ColumnParallelLinear, RowParallelLinear
from tests.test_nn_training import IDS, TARGET, Parallel, Serial


def step(model, optimizer):
    loss = model(torch.tensor(IDS), torch.tensor(TARGET))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return optimizer, [step(model, optimizer) for _ in range(2)]


def test_weights_and_moments_are_whole_and_go_on_at_another_number_of_ranks(tmp_path):
    serial = Serial(torch.float64)
    optimizer, losses = trained(serial)
    weights = copy.deepcopy(serial.state_dict())
    after = step(serial, optimizer)

    def write(group):
        model = Parallel(group, torch.float64)
        optimizer, found = trained(model)
        assert found == pytest.approx(losses, abs=1e-10)
        save_pretrained(model, tmp_path / "model")
        save_optimizer(model, optimizer, tmp_path / "moments.safetensors")

    def resume(group):
        model = Parallel(group, torch.float64)
        optimizer = torch.optim.AdamW(model.parameters())
        autotp.load_state_dict(model, load_file(tmp_path / "model" / "model.safetensors"))
        load_optimizer(model, optimizer, tmp_path / "moments.safetensors")
        assert step(model, optimizer) == pytest.approx(after, abs=1e-10)

    simulate(3, write)
    torch.testing.assert_close(
        load_file(tmp_path / "model" / "model.safetensors"), dict(weights), rtol=1e-10, atol=1e-10
    )
    simulate(2, resume)


def test_halves_and_unequal_heads_keep_their_order_at_any_number_of_ranks(tmp_path):
    """A GLU's halves and q, k, v of 12, 4 and 6 rows: whole in the file, and each section cut anew."""
    cuts = {"stride": 2}, {"sections": [12, 4, 6]}

    def made(group):
        torch.manual_seed(group.rank)
        layers = [ColumnParallelLinear(3, 22, group=group, **cut) for cut in cuts]
        return nn.Sequential(*layers, *(RowParallelLinear(22, 3, group=group, **cut) for cut in cuts))

    def write(group):
        model = made(group)
        save_pretrained(model, tmp_path / "out")
        return [layer.get_master_weight() for layer in model]

    masters, _ = simulate(2, write)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(stored[f"{i}.weight"], master) for i, master in enumerate(masters))

    def read(group):
        model = made(group)
        autotp.load_state_dict(model, stored)
        for i, layer in enumerate(model):
            rows = stored[f"{i}.weight"] if i < 2 else stored[f"{i}.weight"].T
            sizes = [11, 11] if i % 2 == 0 else [12, 4, 6]
            parts = [
                part.tensor_split(bounds(len(part), group.size))[group.rank] for part in rows.split(sizes)
            ]
            assert torch.equal(layer.weight if i < 2 else layer.weight.T, torch.cat(parts))
            assert torch.equal(layer.get_master_weight(), stored[f"{i}.weight"])

    for tp in (1, 2, 3, 4):
        simulate(tp, read)


def bounds(size, tp):
    """Where the parts of a section begin: the first ranks hold one more."""
    return [rank * (size // tp) + min(rank, size % tp) for rank in range(1, tp)]


def test_a_sharded_module_inside_another(tmp_path):
    whole = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 4)).double()

    def write(group):
        outer = nn.ModuleDict({"inner": copy.deepcopy(whole), "norm": nn.LayerNorm(4)})
        autotp.shard(outer["inner"], {"0": "column", "2": "row"}, group, check="shapes")
        save_pretrained(outer, tmp_path / "out")

    simulate(2, write)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(stored[f"inner.{name}"], value) for name, value in whole.state_dict().items())


def test_parts_on_several_groups_are_refused(tmp_path):
    groups = simulate(2, lambda group: group)
    model = nn.Sequential(ColumnParallelLinear(4, 6), ColumnParallelLinear(6, 4))
    for layer, group in zip(model, groups, strict=True):
        layer.group = group
    with pytest.raises(UsageError) as caught:
        save_pretrained(model, tmp_path / "out")
    assert str(caught.value) == (
        f"Sequential: its parts are of 2 groups ({groups[0]} and {groups[1]}), and it is written or read by "
        "one; take the modules of each group by themselves"
    )


def state_of(model, optimizer):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def saved_by_torch(rank, size, folder):
    model = Parallel(group_of(None), torch.float64)
    optimizer, _ = trained(model)
    dcp.save(state_of(model, optimizer), checkpoint_id=folder, planner=SavePlanner(model))


@pytest.mark.slow
def test_no_part_is_lost_by_torchs_checkpoints(ranks, tmp_path):
    ranks(2)(saved_by_torch, str(tmp_path))
    serial = Serial(torch.float64)
    optimizer, _ = trained(serial)
    want = step(serial, optimizer)
    model = Serial(torch.float64)
    again = torch.optim.AdamW(model.parameters())
    state = state_of(model, again)
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(state, checkpoint_id=str(tmp_path), planner=LoadPlanner(model), no_dist=True)
    set_state_dict(model, again, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert step(model, again) == pytest.approx(want, abs=1e-10)
