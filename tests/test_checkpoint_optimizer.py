"""Optimizer state: training that is resumed at another number of ranks goes on as if never interrupted."""

import copy
import json
import os

import pytest
import torch
from torch import nn

import autotp
from autotp.checkpoint.optimizer import load_optimizer, save_optimizer
from autotp.checkpoint.save import full_tensors
from autotp.comm import simulate
from autotp.diagnostic import CheckpointError, UsageError
from autotp.header import read_header
from autotp.rewrite.apply import sharded
from tests.checkpoints import random_tensor, safetensors_bytes

PLAN = {"fc1": "column", "fc2": "row"}
STEPS = 3


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 33), nn.Linear(33, 16)  # 33: uneven over 2 and 4

    def forward(self, x):
        return self.fc2(nn.functional.gelu(self.fc1(x)))


class Attention(nn.Module):
    """Fused q|k|v of 5 heads, which 2 ranks hold as 3 + 2."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 3 * 20), nn.Linear(20, 16)

    def forward(self, x):
        q, k, v = (part.view(1, len(x), -1, 4).transpose(1, 2) for part in self.fc1(x).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k.tanh(), v)  # else k's bias has no gradient
        return self.fc2(mixed.transpose(1, 2).reshape(len(x), -1))


FUSED = {"fc1": {"style": "column", "sections": 3, "heads": 5}, "fc2": {"style": "row", "heads": 5}}


def mlp(kind=MLP):
    torch.manual_seed(0)
    model = kind().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(
        [{"params": [model.fc1.weight, model.fc2.weight], "weight_decay": 0.1},
         {"params": [model.fc2.bias, model.fc1.bias], "weight_decay": 0.0}], lr=0.01, amsgrad=True,
    ),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True),
    "plain": lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
}  # fmt: skip


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(model):
    memory = sharded(model)
    named = dict(model.named_parameters())
    return {name: t.clone() for name, t in full_tensors(named, memory.layouts, memory.group, {})}


MODELS = {"mlp": (MLP, PLAN), "fused": (Attention, FUSED)}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3), (4, 2)])
def test_resumed_at_another_number_of_ranks(tmp_path, name, kind, before, after):
    made, plan = MODELS[name]
    reference = mlp(made)
    expected = train(reference, OPTIMIZERS[kind](reference), range(2 * STEPS))
    file = tmp_path / "optimizer.safetensors"

    def first(group):
        model = autotp.shard(mlp(made), plan, group, check="shapes")
        optimizer = OPTIMIZERS[kind](model)
        losses = train(model, optimizer, range(STEPS))
        save_optimizer(model, optimizer, file)
        return losses, whole(model)

    (losses, weights), *_ = simulate(before, first)
    torch.testing.assert_close(losses, expected[:STEPS], atol=1e-10, rtol=0)

    def second(group):
        model = mlp(made)
        model.load_state_dict(weights)
        autotp.shard(model, plan, group, check="shapes")
        optimizer = OPTIMIZERS[kind](model)
        for entry in optimizer.param_groups:
            entry["lr"] = 99.0  # the file knows better
        load_optimizer(model, optimizer, file)
        return train(model, optimizer, range(STEPS, 2 * STEPS)), whole(model)

    for losses, found in simulate(after, second):
        torch.testing.assert_close(losses, expected[STEPS:], atol=1e-10, rtol=0)
        torch.testing.assert_close(found, dict(reference.named_parameters()), atol=1e-10, rtol=0)
    assert os.listdir(tmp_path) == ["optimizer.safetensors"]


def saved(tmp_path):
    model = mlp()
    optimizer = OPTIMIZERS["adamw"](model)
    train(model, optimizer, range(1))
    save_optimizer(model, optimizer, tmp_path / "o.safetensors")
    return model, optimizer, tmp_path / "o.safetensors"


def test_what_is_written_is_whole_and_named(tmp_path):
    _, optimizer, file = saved(tmp_path)
    entries = read_header(file).tensors
    keys = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    parameters = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
    assert set(entries) == {f"{name}:{key}" for name in parameters for key in keys}
    assert entries["fc1.weight:exp_avg"].shape == (33, 16) and entries["fc1.weight:step"].shape == ()
    before = copy.deepcopy(optimizer.state_dict())
    model = mlp()
    again = OPTIMIZERS["adamw"](model)
    load_optimizer(model, again, file)
    assert again.state_dict()["param_groups"] == before["param_groups"]
    for index, state in before["state"].items():
        torch.testing.assert_close(again.state_dict()["state"][index], state, atol=0, rtol=0)


def refusal(error, call):
    with pytest.raises(error) as raised:
        call()
    return str(raised.value)


def test_what_does_not_fit_is_named(tmp_path):
    model, _, file = saved(tmp_path)
    other = torch.optim.AdamW([model.fc1.weight])
    message = refusal(CheckpointError, lambda: load_optimizer(model, other, file))
    assert message == f"{file}: holds no group of the parameters fc1.weight"
    stranger = torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
    for call in (save_optimizer, load_optimizer):
        message = refusal(UsageError, lambda call=call: call(model, stranger, file))
        assert message == "the optimizer holds a parameter that is none of the model's"
        message = refusal(UsageError, lambda call=call: call(model, model, file))
        assert message == "an optimizer is one of torch.optim, not MLP"
    odd = torch.optim.SGD([model.fc1.weight], lr=0.1)
    odd.state[model.fc1.weight]["factor"] = torch.zeros(33, 1)
    message = refusal(UsageError, lambda: save_optimizer(model, odd, file))
    assert message == (
        "the optimizer's factor of 'fc1.weight' has shape [33, 1], its parameter [33, 16]: it is not "
        "known how to cut it"
    )
    wider = nn.Module()
    wider.fc1, wider.fc2 = nn.Linear(16, 34), nn.Linear(34, 16)
    message = refusal(CheckpointError, lambda: load_optimizer(wider, OPTIMIZERS["adamw"](wider), file))
    assert message.startswith(f"{file}: ") and "is [33" in message
    autotp.checkpoint.save.save_pretrained(model, tmp_path / "weights")
    weights = tmp_path / "weights" / "model.safetensors"
    message = refusal(CheckpointError, lambda: load_optimizer(model, OPTIMIZERS["adamw"](model), weights))
    assert message == f"{weights}: was not written by save_optimizer"
    missing = tmp_path / "nowhere" / "o.safetensors"
    message = refusal(CheckpointError, lambda: save_optimizer(model, OPTIMIZERS["plain"](model), missing))
    assert message.endswith("cannot be written: No such file or directory")


def test_what_no_file_can_hold_is_named(tmp_path):
    model, optimizer, file = saved(tmp_path)
    before = file.read_bytes()
    for setting, kind in (
        (print, "builtin_function_or_method"),
        (torch.ones(3), "a tensor of [3]"),
        ([1, {2: 3}], "list"),
    ):
        odd = torch.optim.AdamW([{"params": model.parameters(), "extra": setting}])
        assert refusal(UsageError, lambda odd=odd: save_optimizer(model, odd, file)) == (
            f"the optimizer's setting 'extra' is {kind}: numbers, strings, None and lists of them can be "
            "saved; take it out of the group"
        )
    for state, message in (
        (None, "NoneType, neither a tensor nor a number: such state cannot be saved for any number of ranks"),
        (["x"], "list, neither a tensor nor a number: such state cannot be saved for any number of ranks"),
        (torch.zeros(2).to(torch.complex128), "torch.complex128, which .safetensors files have not"),
    ):
        odd = torch.optim.SGD([model.fc1.weight], lr=0.1)
        odd.state[model.fc1.weight]["d"] = state
        found = refusal(UsageError, lambda odd=odd: save_optimizer(model, odd, file))
        assert found == f"the optimizer's d of 'fc1.weight' is {message}"
    found = refusal(CheckpointError, lambda: save_optimizer(model, optimizer, tmp_path))
    assert found == f"{tmp_path}: is a folder; name a file in it"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found = refusal(CheckpointError, lambda: save_optimizer(model, optimizer, pipe))
    assert found == f"{pipe}: exists and is not a regular file; name a new one"
    pipe.unlink()
    assert file.read_bytes() == before and os.listdir(tmp_path) == [file.name]
    optimizer = torch.optim.SGD([model.fc1.weight], lr=0.1)
    groups = json.dumps([{"names": ["fc1.weight"]}])
    content = safetensors_bytes({"fc1.weight:d": random_tensor("F4", (2,))}, {"groups": groups})
    (tmp_path / "odd").write_bytes(content)
    found = refusal(CheckpointError, lambda: load_optimizer(model, optimizer, tmp_path / "odd"))
    assert found == f"{tmp_path / 'odd'}: d of 'fc1.weight' is F4, which torch has no dtype for"


def test_settings_stay_what_they_were(tmp_path):
    """JSON has no tuples and no tensors: betas, and a learning rate of code that is compiled."""
    model = mlp()
    rate = lambda value: torch.tensor(value, dtype=torch.float64)  # noqa: E731
    optimizer = torch.optim.Adam(model.parameters(), lr=rate(0.01), betas=(0.8, 0.9))
    train(model, optimizer, range(1))
    save_optimizer(model, optimizer, tmp_path / "o.safetensors")
    again = torch.optim.Adam(model.parameters(), lr=rate(5.0))
    load_optimizer(model, again, tmp_path / "o.safetensors")
    assert again.param_groups[0]["betas"] == (0.8, 0.9)
    assert torch.equal(again.param_groups[0]["lr"], rate(0.01))


def test_state_that_has_drifted_apart_is_not_saved(tmp_path):
    def run(group):
        model = autotp.shard(mlp(), PLAN, group, check="shapes")
        optimizer = OPTIMIZERS["adamw"](model)
        train(model, optimizer, range(1))
        optimizer.state[model.fc2.bias]["exp_avg"] += group.rank
        save_optimizer(model, optimizer, tmp_path / "o.safetensors")

    with pytest.raises(CheckpointError, match=r"tensor 'fc2.bias:exp_avg' is not the same on ranks 0 and 1"):
        simulate(2, run)
    assert os.listdir(tmp_path) == []
