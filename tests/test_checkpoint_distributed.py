"""torch.distributed.checkpoint of a sharded model and optimizer: no part is lost, at any number of ranks."""

import math

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import autotp
from autotp.checkpoint.chunks import Chunked
from autotp.checkpoint.distributed import LoadPlanner, SavePlanner
from autotp.comm import simulate
from autotp.diagnostic import CheckpointError
from autotp.slicing import take
from tests.layouts import cuts, tensor
from tests.test_checkpoint_optimizer import OPTIMIZERS, PLAN, STEPS, mlp, train

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def state_of(model, optimizer):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": STEPS, "note": "of three"}


def make(kind, rank=0, size=1, zero=False, group=None):
    model = mlp()
    if zero:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    if size > 1:
        autotp.shard(model, PLAN, group, check="shapes")
    return model, OPTIMIZERS[kind](model)


def save(rank, size, kind, folder):
    model, optimizer = make(kind, rank, size)
    losses = train(model, optimizer, range(STEPS))
    dcp.save(state_of(model, optimizer), checkpoint_id=folder, planner=SavePlanner(model), no_dist=size == 1)
    return losses


def resume(rank, size, kind, folder, group=None):
    model, optimizer = make(kind, rank, size, zero=True, group=group)
    state = state_of(model, optimizer) | {"step": 0, "note": ""}
    dcp.load(state, checkpoint_id=folder, planner=LoadPlanner(model), no_dist=size != 2)
    assert (state["step"], state["note"]) == (STEPS, "of three")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return train(model, optimizer, range(STEPS, 2 * STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", "momentum"])
def test_resumed_at_another_number_of_ranks(ranks, tmp_path, kind):
    reference, optimizer = make(kind)
    expected = train(reference, optimizer, range(2 * STEPS))
    places = {
        1: lambda function, *args: [function(0, 1, *args)],
        2: ranks(2),
        3: lambda function, *args: simulate(3, lambda group: function(group.rank, 3, *args, group)),
    }
    for before, places_after in ((2, (1, 3)), (1, (2,))):
        folder = str(tmp_path / f"{before}")
        for losses in places[before](save, kind, folder):
            torch.testing.assert_close(losses, expected[:STEPS], atol=1e-10, rtol=0)
        for after in places_after:
            for losses in places[after](resume, kind, folder):
                torch.testing.assert_close(losses, expected[STEPS:], atol=1e-10, rtol=0)


def save_and_read_whole(rank, size, folder):
    model, optimizer = make("adamw", rank, size)
    train(model, optimizer, range(1))
    dcp.save(state_of(model, optimizer), checkpoint_id=folder, planner=SavePlanner(model))
    return None


@pytest.mark.slow
def test_what_is_stored_is_whole_for_torch_itself(ranks, tmp_path):
    """A checkpoint of shards is read by torch's own planner into an unsharded model."""
    ranks(2)(save_and_read_whole, str(tmp_path / "out"))
    reference, optimizer = make("adamw")
    train(reference, optimizer, range(1))
    expected = state_of(reference, optimizer)
    found = {"model": {name: torch.zeros_like(t) for name, t in expected["model"].items()}}
    dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    torch.testing.assert_close(found["model"], dict(expected["model"]), atol=1e-10, rtol=0)


def refusals(rank, size, folder):
    model, optimizer = make("adamw", rank, size)
    train(model, optimizer, range(1))
    states = {
        "numbered": {"optimizer": optimizer.state_dict()},
        "drifted": {"seed": torch.tensor([rank])},
        "other keys": {"model": {}, f"extra{rank}": torch.zeros(2)},
        "of another shape": {"factored": {"fc1.weight": torch.zeros(3)}},
    }
    said = {}
    for name, state in states.items():
        try:
            dcp.save(state, checkpoint_id=f"{folder}/{name}", planner=SavePlanner(model))
        except dcp.api.CheckpointException as error:
            said[name] = str(error.failures[rank][0])
    return said


@pytest.mark.slow
def test_what_would_be_lost_is_refused(ranks, tmp_path):
    said = ranks(2)(refusals, str(tmp_path))[0]
    tail = (
        "and one copy would be kept: the ranks have drifted apart, or it is a part of a parameter whose name "
        "is not on its way\n  = help: key an optimizer's state by names, as "
        "torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer) does"
    )
    assert said == {
        "numbered": f"'optimizer.state.0.exp_avg' differs on ranks 0 and 1, {tail}",
        "drifted": f"'seed' differs on ranks 0 and 1, {tail}",
        "other keys": "the states of ranks 0 and 1 are not alike: 'extra0' is in one only",
        "of another shape": "'factored.fc1.weight' has shape [3], and rank 0's part of 'fc1.weight' is "
        "[17, 16]: it is not known how to cut it",
    }


def test_all_that_does_not_fit_is_told_together(tmp_path):
    dcp.save(
        {"model": {"a": torch.zeros(2, 3), "b": torch.zeros(2)}, "n": 1},
        checkpoint_id=tmp_path / "out",
        no_dist=True,
    )
    model = mlp()
    wanted = {
        "model": {"a": torch.zeros(2, 4), "b": torch.zeros(2), "c": torch.zeros(1)},
        "n": torch.zeros(1),
    }
    with pytest.raises(dcp.api.CheckpointException) as raised:
        dcp.load(wanted, checkpoint_id=tmp_path / "out", planner=LoadPlanner(model), no_dist=True)
    assert str(raised.value.failures[0][0]) == (
        "3 entries do not fit the checkpoint:\n"
        "  mismatched: model.a is [2, 3], the model's is [2, 4]\n"
        "  missing: model.c\n"
        "  mismatched: n is a tensor on one side only"
    )


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_no_code_is_run(tmp_path):
    dcp.save({"n": Touch(str(tmp_path / "touched"))}, checkpoint_id=tmp_path / "out", no_dist=True)
    with pytest.raises(dcp.api.CheckpointException) as raised:
        dcp.load({"n": 0}, checkpoint_id=tmp_path / "out", planner=LoadPlanner(mlp()), no_dist=True)
    error = raised.value.failures[0][0]
    assert isinstance(error, CheckpointError)
    assert str(error).startswith("'n' is not plain data, and nothing else is read (")
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_chunks_make_up_the_tensor(tp):
    """Every layout: the pieces of all ranks cover each element, and are what the rank holds."""
    value = tensor(3, 12, 2)
    for shard in cuts(1, 12, tp):
        again, places = torch.zeros_like(value), {}
        for rank in range(tp):
            found = Chunked((3, 12, 2), shard, rank)
            local = take(value, shard, rank)
            for chunk, at in found.chunks():
                piece = local.narrow(1, at, chunk.sizes[1])
                window = again.narrow(1, chunk.offsets[1], chunk.sizes[1])
                window.copy_(piece)
                places[chunk.offsets, chunk.sizes] = math.prod(chunk.sizes)
        assert torch.equal(again, value)
