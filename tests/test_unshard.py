"""The way back: a sharded model is the whole one again, in place."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import autotp
from autotp.comm import Group, simulate
from tests import architectures, models
from tests.conftest import as_rank
from tests.whole import MODELS, build, outcome

PLAN = {"fc1": "column", "fc2": "row"}


def hooks_of(model: nn.Module) -> dict[str, dict[str, int]]:
    return {
        path: {key: len(value) for key, value in module.__dict__.items() if "hooks" in key and value}
        for path, module in model.named_modules()
    }


def there_and_back(group: Group, name: str) -> None:
    _, plan, inputs = MODELS[name]
    model = build(name)
    classes = {path: type(module) for path, module in model.named_modules()}
    attributes = {path: set(module.__dict__) for path, module in model.named_modules()}
    identities = {n: id(p) for n, p in model.named_parameters()}
    hooks = hooks_of(model)
    out, gradients = outcome(model, name)
    model.zero_grad()
    assert autotp.unshard(autotp.shard(model, plan, group, inputs=inputs)) is model
    assert {path: type(module) for path, module in model.named_modules()} == classes
    assert {path: set(module.__dict__) for path, module in model.named_modules()} == attributes
    assert {n: id(p) for n, p in model.named_parameters()} == identities
    assert hooks_of(model) == hooks
    original = build(name)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), original.parameters(), strict=True))
    again, gradients_again = outcome(model, name)
    assert torch.equal(again, out)
    assert all(torch.equal(gradients_again[n], g) for n, g in gradients.items())
    autotp.shard(model, plan, group, inputs=inputs)  # and once more
    outcome(model, name)
    autotp.unshard(model)
    largest = max(float(g.abs().max()) for g in gradients.values())
    for n, p in model.named_parameters():
        if n in gradients:
            torch.testing.assert_close(p.grad, gradients[n], rtol=0, atol=1e-10 * largest)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "edited" else n for n in MODELS]
)
def test_classes_weights_gradients_and_hooks_come_back(ranks, name: str) -> None:
    ranks(2)(as_rank, there_and_back, name)
    simulate(3, lambda group: there_and_back(group, name))


def trained(group: Group) -> list[torch.Tensor]:
    """Two steps sharded, two whole, by one optimizer without state."""
    model = build("uneven")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        if step == 0 and group.size > 1:
            autotp.shard(model, PLAN, group)
        if step == 2 and group.size > 1:
            autotp.unshard(model)
        outcome(model, "uneven")
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_an_optimizer_goes_on() -> None:
    (wanted,) = simulate(1, trained)
    for found in simulate(3, trained):
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_what_the_user_added_since_stays() -> None:
    def rank(group: Group) -> None:
        model = build("random")
        autotp.shard(model, MODELS["random"][1], group)
        model.inner.note = "kept"
        model.inner.register_forward_hook(lambda *_: None)
        autotp.unshard(model)
        assert model.inner.note == "kept" and len(model.inner._forward_hooks) == 1
        assert not model.inner._forward_pre_hooks

    simulate(2, rank)


def test_copies_and_pickles_come_back_too() -> None:
    def rank(group: Group) -> None:
        model = build("reads")
        autotp.shard(model, PLAN, group)
        twin = copy.deepcopy(model)
        autotp.unshard(twin)
        assert type(model) is not type(twin) is models.PerFeature
        assert torch.equal(twin.fc1.weight, build("reads").fc1.weight)

    simulate(2, rank)


def pickled(rank: int, size: int) -> bool:
    model = pickle.loads(pickle.dumps(autotp.shard(build("reads"), PLAN)))
    return torch.equal(autotp.unshard(model).fc1.weight, build("reads").fc1.weight)


def test_a_pickled_model_comes_back(ranks) -> None:
    assert ranks(2)(pickled) == [True, True]


@pytest.mark.slow
def test_transformers_saves_again() -> None:
    def rank(group: Group) -> None:
        model = models.bert(num_hidden_layers=1)
        autotp.shard(model, "bert", group)
        with pytest.raises(autotp.UsageError, match=r"call autotp\.save_pretrained"):
            model.save_pretrained("nowhere")
        autotp.unshard(model)
        assert "save_pretrained" not in model.__dict__

    simulate(2, rank)


def test_a_meta_model() -> None:
    def rank(group: Group) -> tuple[int, ...]:
        with torch.device("meta"):
            model = models.MLP()
        return tuple(autotp.unshard(autotp.shard(model, PLAN, group)).fc1.weight.shape)

    assert simulate(2, rank) == [(33, 16)] * 2


# -- refusals


def refused(spoil) -> str:
    def rank(group: Group) -> None:
        model = autotp.shard(build("uneven"), PLAN, group)
        spoil(model, group)
        weight = model._modules["fc2"].weight.detach().clone()
        try:
            autotp.unshard(model)
        finally:
            assert torch.equal(model._modules["fc2"].weight, weight)

    with pytest.raises(autotp.UsageError) as caught:
        simulate(2, rank)
    return str(caught.value)


def test_a_model_that_is_not_sharded() -> None:
    with pytest.raises(autotp.UsageError) as caught:
        autotp.unshard(models.MLP())
    assert str(caught.value) == "MLP: nothing of it was sharded by autotp.shard"


def test_a_model_that_changed_since() -> None:
    def replace(model: nn.Module, group: Group) -> None:
        model.fc1 = nn.Linear(16, 17)

    def remove(model: nn.Module, group: Group) -> None:
        del model.fc1

    def cut(model: nn.Module, group: Group) -> None:
        model.fc1.weight.data = model.fc1.weight.data[:3]

    assert refused(replace) == (
        "MLP: its fc1 was autotp.nn.linear.ColumnParallelLinear when the model was sharded and is "
        "torch.nn.modules.linear.Linear now, so nothing is put back"
    )
    assert refused(remove) == "MLP: its fc1 is gone since the model was sharded, so nothing is put back"
    assert refused(cut).startswith(
        "fc1.weight on dim 0: its local size 3 is not a part of shard(dim 0: 17+16 of 33) on rank "
    )


def gpt2() -> nn.Module:
    return models.randomised(architectures.build("gpt2")).eval()


def shared_heads() -> nn.Module:
    """Each kv head is held by two of four ranks."""
    return models.randomised(models.llama(num_hidden_layers=1, num_key_value_heads=2)).eval()


CONV1D = {"mlp.c_fc": {"style": "column", "dim": 1}, "mlp.c_proj": {"style": "row", "dim": 0}}


@pytest.mark.slow
@pytest.mark.parametrize(("factory", "plan", "tp"), [(gpt2, CONV1D, 2), (shared_heads, "llama", 4)])
def test_conv1d_and_kv_heads_of_several_ranks(factory, plan, tp: int) -> None:
    def rank(group: Group) -> None:
        model, whole = factory(), factory().state_dict()
        classes = [type(module) for module in model.modules()]
        autotp.shard(model, plan, group)
        other = {n: v + 1 if v.is_floating_point() else v for n, v in whole.items()}
        autotp.load_state_dict(model, other)
        found = autotp.gather_state_dict(model)
        assert list(found) == list(other) and all(torch.equal(found[n], v) for n, v in other.items())
        autotp.load_state_dict(model, whole)
        autotp.unshard(model)
        assert [type(module) for module in model.modules()] == classes
        assert all(torch.equal(v, whole[n]) for n, v in model.state_dict().items())

    simulate(tp, rank)
