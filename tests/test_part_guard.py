"""What looks at whole parameters is refused where ranks hold parts of them."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from transformers import initialization

import autotp
from autotp import part_guard, parts
from autotp.comm import simulate
from autotp.diagnostic import UsageError
from autotp.nn import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, VocabParallelEmbedding


def trained(group, make, plan=True):
    """The whole bias after two steps: a rank that stepped otherwise has another."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    autotp.shard(model, {"0": "column", "2": "row"} if plan else None, group) if plan else None
    optimizer = make(model.parameters())

    def loss():
        optimizer.zero_grad()
        value = model(torch.linspace(-1, 1, 12).view(3, 4)).square().sum()
        value.backward()
        return value

    for _ in range(2):
        optimizer.step(loss)
    return model[2].bias.detach().clone()


@pytest.mark.parametrize("name", sorted(part_guard.ELEMENTWISE - {"SparseAdam"}))
def test_elementwise_optimizers_step_as_in_one_process(name):
    kind = getattr(torch.optim, name)
    want = trained(None, lambda p: kind(p, lr=0.01), plan=False)
    for bias in simulate(2, lambda g: trained(g, lambda p: kind(p, lr=0.01))):
        torch.testing.assert_close(bias, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "takes"), [
    ("Adafactor", "means of rows and columns"), ("LBFGS", "products and a line search"),
    ("Muon", "an orthogonalisation of the whole matrix"),
])  # fmt: skip
def test_optimizers_of_whole_parameters_are_refused(name, takes):
    kind = getattr(torch.optim, name)

    def made(parameters):
        return kind([p for p in parameters if p.ndim == 2 or name != "Muon"])

    with pytest.raises(UsageError, match=f"^{name} takes {takes}.* this rank holds a part"):
        simulate(2, lambda g: trained(g, made))
    trained(None, made, plan=False)  # a model that is whole is nobody's business


class Own(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


class Renamed(torch.optim.SGD):
    pass


def test_an_optimizer_that_is_not_known_is_told_of_once():
    with pytest.warns(
        UserWarning, match="Own is not an optimizer of torch: it is right on cut parameters if"
    ):
        simulate(2, lambda g: trained(g, lambda p: Own(p, lr=0.1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        simulate(2, lambda g: trained(g, lambda p: Own(p, lr=0.1)))
        simulate(2, lambda g: trained(g, lambda p: Renamed(p, lr=0.1)))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_state_of_whole_parameters_is_refused(kind):
    def here(group):
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        optimizer = kind(model.parameters())
        for step in range(2):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            if step == 0:
                autotp.shard(model, {"0": "column", "2": "row"}, group)

    torch.manual_seed(0)
    with pytest.raises(UsageError) as caught:
        simulate(2, here)
    assert str(caught.value) == (
        f"{kind.__name__} has state of the whole 0.weight, of which this rank holds [4, 4]: it stepped "
        "before the model was sharded, or loaded a whole state\n  = help: save it before by "
        "autotp.checkpoint.optimizer's save_optimizer, and let load_optimizer take the parts of it"
    )


class Normed(nn.Module):
    """A parametrization of a person's own, which looks at the whole."""

    def forward(self, weight):
        return weight / weight.norm()


@pytest.mark.parametrize(("made", "right"), [
    (Normed, False), (nn.Tanh, True), (lambda: nn.Softmax(0), False), (nn.PReLU, False),
])  # fmt: skip
def test_a_parametrization_that_is_not_known(made, right):
    def here(group):
        layer = ColumnParallelLinear(8, 8, group=group)
        parametrize.register_parametrization(layer, "weight", made())
        return layer(torch.ones(2, 8))

    if right:
        assert len(simulate(2, here)) == 2
        return
    name = type(made()).__name__
    with pytest.raises(UsageError, match=f"its weight is made by {name} from this rank's part of its dim 0"):
        simulate(2, here)


@pytest.mark.parametrize("fill", [
    nn.init.normal_, nn.init.xavier_uniform_, nn.init.kaiming_normal_, nn.init.trunc_normal_,
    initialization.uniform_, nn.Linear.reset_parameters, lambda weight: nn.init.orthogonal_(weight),
])  # fmt: skip
def test_a_part_is_not_filled_as_if_it_were_whole(fill):
    def here(group):
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        autotp.shard(model, {"0": "column", "2": "row"}, group)
        nn.init.zeros_(model[0].weight)
        nn.init.normal_(model[2].bias)
        fill(model[0] if fill is nn.Linear.reset_parameters else model[0].weight)

    with pytest.raises(UsageError) as caught:
        simulate(2, here)
    assert str(caught.value).startswith(
        "torch.nn.init is given this rank's part of 0.weight, [4, 4] of [8, 4]: the ranks would "
    )


def test_nobody_else_waits_for_the_guard(monkeypatch):
    """The parts of a model are told once for a step, and not for each tensor of another model."""
    told = []
    original = parts.parts_of
    monkeypatch.setattr(parts, "parts_of", lambda model: told.append(model) or original(model))
    plan = {"0": {"style": "column", "gather_output": True}}
    models = simulate(2, lambda g: autotp.shard(nn.Sequential(nn.Linear(4, 8)), plan, g))
    told.clear()
    nn.Sequential(nn.Linear(4, 8), nn.Embedding(5, 4), nn.Conv1d(2, 3, 4))
    assert told == []
    optimizer = torch.optim.AdamW(models[0].parameters())
    for _ in range(3):
        for parameter in models[0].parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert all(told.count(model) <= 2 for model in models)


def test_a_weight_that_is_made_from_a_part():
    def here(group, layer, make, dim):
        made = make(layer(8, 8, group=group), **({} if dim is None else {"dim": dim}))
        return made(torch.ones(2, 8))

    norm = parametrizations.weight_norm
    for layer, make, dim in [
        (RowParallelLinear, norm, 0), (ColumnParallelLinear, norm, 1),
        (RowParallelLinear, parametrizations.spectral_norm, None),
        (ColumnParallelLinear, parametrizations.orthogonal, None),
    ]:  # fmt: skip
        with pytest.raises(
            UsageError, match=f"^{layer.__name__}: its weight is made by .* from this rank's part"
        ):
            simulate(2, lambda g, given=(layer, make, dim): here(g, *given))
    for layer, dim in ((RowParallelLinear, 1), (ColumnParallelLinear, 0)):  # norms inside of the part
        assert len(simulate(2, lambda g, given=(layer, norm, dim): here(g, *given))) == 2


@pytest.mark.filterwarnings("ignore:.*(weight|spectral)_norm:FutureWarning")
@pytest.mark.parametrize(("make", "layer", "kind"), [
    (torch.nn.utils.weight_norm, RowParallelLinear, "WeightNorm"),
    (torch.nn.utils.weight_norm, ColumnParallelLinear, None),
    (torch.nn.utils.weight_norm, ParallelEmbedding, "WeightNorm"),
    (torch.nn.utils.weight_norm, VocabParallelEmbedding, None),
    (torch.nn.utils.spectral_norm, ColumnParallelLinear, "SpectralNorm"),
    (partial(prune.l1_unstructured, name="weight", amount=0.5), VocabParallelEmbedding, "L1Unstructured"),
    (partial(prune.random_unstructured, name="weight", amount=1), RowParallelLinear, "RandomUnstructured"),
    (partial(prune.l1_unstructured, name="bias", amount=0.5), ColumnParallelLinear, "L1Unstructured"),
    (partial(prune.l1_unstructured, name="bias", amount=0.5), RowParallelLinear, None),  # a whole bias
    (partial(prune.identity, name="weight"), ColumnParallelLinear, None),
])  # fmt: skip
def test_a_weight_that_a_hook_makes_from_a_part(make, layer, kind):
    """torch's older weight_norm and spectral_norm, and pruning: hooks before each forward."""

    def here(group):
        module = layer(8, 8, group=group)
        make(module)
        ids = "Embedding" in layer.__name__
        return module(torch.ones(2, 8, dtype=torch.long if ids else None))

    if kind is None:
        assert len(simulate(2, here)) == 2
        return
    with pytest.raises(UsageError) as caught:
        simulate(2, here)
    name = "bias" if "bias" in str(make) else "weight"
    dim = 1 if layer in (RowParallelLinear, ParallelEmbedding) else 0
    assert str(caught.value) == (
        f"{layer.__name__}: its {name} is made by {kind} from this rank's part of its dim {dim} alone; take "
        "the hook away, or leave the layer whole"
    )


def averaged(rank, size):
    """Refused over the tensor ranks, by layers and by a sharded model; right over an axis of its own."""
    found = []
    model = nn.Sequential(ColumnParallelLinear(4, 8), nn.Linear(8, 4))
    plain = autotp.shard(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), {"0": "column", "1": "row"}, None)
    for whole in (model, plain):
        try:
            nn.parallel.DistributedDataParallel(whole)
        except UsageError as error:
            found.append(str(error))
    alone = [dist.new_group([one]) for one in range(size)][rank]
    x = torch.ones(2, 4)
    assert torch.equal(nn.parallel.DistributedDataParallel(model, process_group=alone)(x), model(x))
    return found


def test_averages_of_different_parts(ranks):
    text = (
        "DistributedDataParallel over the ranks [0, 1] would make one of what the ranks [0, 1] hold: "
        "different parts of 0.weight\n  = help: give it the group of the data-parallel axis, "
        "process_group=mesh.get_group('dp') of autotp.initialize(tp=…)"
    )
    assert ranks(2)(averaged) == [[text] * 2] * 2
