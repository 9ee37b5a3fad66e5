"""Whole state_dicts out of sharded models, and into them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autotp
from autotp.comm import Group, simulate
from autotp.nn import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, VocabParallelEmbedding
from tests import models
from tests.conftest import as_rank
from tests.whole import MODELS, build, outcome

NAMES = [pytest.param(n, marks=pytest.mark.slow) if n == "edited" else n for n in MODELS]


def same(found, wanted) -> None:
    """The same names, dtypes, ties and bits."""
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    for one in wanted:
        for other in wanted:
            tied = wanted[one].data_ptr() == wanted[other].data_ptr()
            assert (found[one].data_ptr() == found[other].data_ptr()) == tied


def round_trip(group: Group, name: str) -> dict[str, torch.Tensor]:
    """Shard one model, load another's whole state, and gather it; the state of before is in between."""
    _, plan, inputs = MODELS[name]
    model = autotp.shard(build(name), plan, group, inputs=inputs)
    same(autotp.gather_state_dict(model), build(name).state_dict())
    other = build(name, seed=1)
    kept = {n: id(p) for n, p in model.named_parameters()}
    assert autotp.load_state_dict(model, other.state_dict()) == ([], [])
    assert {n: id(p) for n, p in model.named_parameters()} == kept
    out, _ = outcome(model, name)
    wanted, _ = outcome(other, name)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-10)
    return autotp.gather_state_dict(model)


@pytest.mark.parametrize("name", NAMES)
def test_the_whole_state_goes_in_and_comes_out(ranks, name: str) -> None:
    wanted = build(name, seed=1).state_dict()
    for found in (*ranks(2)(as_rank, round_trip, name), *simulate(3, lambda group: round_trip(group, name))):
        same(found, wanted)


def test_only_the_first_rank_keeps_it() -> None:
    def rank(group: Group) -> tuple[int, bool]:
        model = autotp.shard(models.MLP(), {"fc1": "column", "fc2": "row"}, group)
        state = autotp.gather_state_dict(model, rank0_only=True)
        return len(state), hasattr(state, "_metadata")

    assert simulate(3, rank) == [(4, True), (0, True), (0, True)]


def built_from_layers(group: Group | None) -> nn.Module:
    torch.manual_seed(5)
    if group is None:
        return nn.Sequential(
            nn.Embedding(11, 6), nn.Linear(6, 9), nn.Linear(9, 5), nn.Linear(5, 8), nn.Embedding(11, 7)
        )
    return nn.Sequential(
        VocabParallelEmbedding(11, 6, group=group),
        ColumnParallelLinear(6, 9, gather_output=False, group=group),
        RowParallelLinear(9, 5, input_is_parallel=True, group=group),
        ColumnParallelLinear(5, 8, stride=2, group=group),
        ParallelEmbedding(11, 7, group=group),
    )


def of_layers(group: Group) -> dict[str, torch.Tensor]:
    model = built_from_layers(group)
    autotp.load_state_dict(model, built_from_layers(None).state_dict())
    return autotp.gather_state_dict(model)


def test_models_that_are_built_from_parallel_layers(run) -> None:
    wanted = built_from_layers(None).state_dict()
    for found in run(of_layers):
        same(found, wanted)


class Extra(models.MLP):
    """Keeps something that is no tensor in its state_dict."""

    def get_extra_state(self) -> dict[str, int]:
        return getattr(self, "kept", {"steps": 0})

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.kept = state


def test_extra_state_is_kept() -> None:
    def rank(group: Group) -> dict[str, int]:
        model = autotp.shard(Extra(), {"fc1": "column", "fc2": "row"}, group)
        other = Extra()
        other.kept = {"steps": 7}
        autotp.load_state_dict(model, other.state_dict())
        return autotp.gather_state_dict(model)["_extra_state"]

    assert simulate(2, rank) == [{"steps": 7}] * 2


# -- refusals


def refused(function, tp: int = 2) -> str:
    """What the call says when the ranks of a sharded MLP make it."""

    def rank(group: Group) -> str:
        model = autotp.shard(build("tied, vocabulary"), MODELS["tied, vocabulary"][1], group)
        before = {n: p.detach().clone() for n, p in model.state_dict().items()}
        with pytest.raises(autotp.UsageError) as caught:
            function(model, group)
        assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())
        return str(caught.value)

    said = simulate(tp, rank)
    assert len(set(said)) == 1
    return said[0]


def test_every_misfit_is_listed_at_once() -> None:
    def load(model: nn.Module, group: Group) -> None:
        state = build("tied, vocabulary").state_dict()
        del state["mlp.fc1.bias"], state["head.weight"]  # the head is tied: the embedding is enough
        state["extra"] = torch.zeros(1)
        state["embed.weight"] = state["embed.weight"][:19]  # one rank's part
        state["steps"] = torch.tensor(3.0)
        state["mlp.fc2.bias"] = [0.0]
        autotp.load_state_dict(model, state)

    with pytest.raises(autotp.UsageError) as caught:
        load(build("tied, vocabulary"), None)
    said = """\
load_state_dict: TiedLanguageModel does not fit:
  missing: mlp.fc1.bias
  unexpected: extra
  embed.weight: its shape is [19, 12], the unsharded model's [37, 12]
  steps: its dtype is torch.float32, the model's torch.int64
  mlp.fc2.bias: a tensor with values is needed, it is list"""
    assert sorted(str(caught.value).splitlines()) == sorted(said.splitlines())

    def every_rank(group: Group) -> None:
        model = autotp.shard(build("tied, vocabulary"), MODELS["tied, vocabulary"][1], group)
        load(model, group)

    with pytest.raises(autotp.UsageError) as caught:
        simulate(2, every_rank)
    assert sorted(str(caught.value).splitlines()) == sorted(said.splitlines())


def test_what_is_not_strict_is_left_out_and_told() -> None:
    model, state = models.MLP(), models.MLP().state_dict()
    bias = model.fc2.bias.detach().clone()
    del state["fc2.bias"]
    state["other"] = torch.zeros(1)
    assert autotp.load_state_dict(model, state, strict=False) == (["fc2.bias"], ["other"])
    assert torch.equal(model.fc2.bias, bias) and torch.equal(model.fc1.weight, state["fc1.weight"])


def test_ranks_with_other_values_are_told() -> None:
    said = refused(
        lambda model, group: autotp.load_state_dict(model, build("tied, vocabulary", group.rank).state_dict())
    )
    assert said == "load_state_dict: the ranks were given states of different values"


def test_tied_names_with_different_values() -> None:
    def load(model: nn.Module) -> None:
        state = {n: v.clone() for n, v in build("tied, vocabulary").state_dict().items()}
        state["head.weight"] += 1
        autotp.load_state_dict(model, state)

    with pytest.raises(autotp.UsageError) as caught:
        load(build("tied, vocabulary"))
    assert str(caught.value).endswith(
        "\n  head.weight: the model ties it to embed.weight, and the two differ"
    )


def drifted(rank: int, size: int) -> str:
    model = autotp.shard(build("uneven"), MODELS["uneven"][1])
    with torch.no_grad():
        model.fc2.bias += rank
    try:
        autotp.gather_state_dict(model)
    except autotp.UsageError as error:
        return str(error)
    return "gathered"


def test_whole_tensors_that_drifted_apart(ranks) -> None:
    for said in ranks(2)(drifted):
        assert said == (
            "gather_state_dict: fc2.bias must be the same on every rank, and is not: the ranks have drifted "
            "apart"
        )


def test_what_has_no_values_or_no_name() -> None:
    with pytest.raises(autotp.UsageError) as caught:
        autotp.gather_state_dict(nn.Linear(2, 2, device="meta"))
    assert str(caught.value) == "gather_state_dict: 'weight' is on the meta device, it has no values"
    with pytest.raises(autotp.UsageError, match=r"autotp\.from_pretrained fills those"):
        autotp.load_state_dict(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2).state_dict())

    def rank(group: Group) -> None:
        model = autotp.shard(models.MLP(), {"fc1": "column", "fc2": "row"}, group)
        model.register_state_dict_post_hook(
            lambda module, state, prefix, meta: state.update(halves=state["fc1.weight"].detach()[:1])
        )
        autotp.gather_state_dict(model)

    with pytest.raises(autotp.UsageError) as caught:
        simulate(2, rank)
    assert str(caught.value) == (
        "gather_state_dict: 'halves' is no parameter or buffer of the model; a hook made it, "
        "and it is not known how it is cut"
    )
