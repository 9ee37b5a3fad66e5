"""What goes wrong quietly when a model is made parallel, tried on two gloo ranks: names that say nothing,
collectives that differ by rank, second derivatives, hooks, modes, copies, other models in the process."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.comm import group_of
from tests import models
from tests.test_reads import qwen3
from tests.test_regions import PLAN as RAW
from tests.test_regions import Net
from tests.test_shard import whole

PLAN = {"fc1": "column", "fc2": "row"}
X = torch.randn(5, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def weighed(out: Tensor) -> Tensor:
    """A number with a gradient at every element."""
    return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def hold(wanted: dict[str, Tensor], found: list[dict[str, Tensor]], tolerance: float = 1e-10) -> None:
    """Each rank's tensors are the whole ones, or its parts of them."""
    largest = max(float(w.abs().max()) for w in wanted.values())
    cut = 0
    for name, want in wanted.items():
        parts = [rank[name] for rank in found]
        merged = whole(parts, want)
        cut += merged is not None
        for got in parts if merged is None else [merged]:
            assert float((got - want).abs().max()) <= tolerance * max(
                float(want.abs().max()), 1e-3 * largest
            ), name
    assert cut >= 2


# -- names


def renamed(source: str, names: dict[str, str]) -> str:
    """A class's source with other names for its submodules."""
    return re.sub(r"\b(" + "|".join(names) + r")\b", lambda found: names[found[0]], source)


def test_names_mean_nothing():
    """Llama's MLP and attention under other names: the same plan under those names, and the same numbers."""
    names = {"fc1": "zz1", "fc2": "blob", "between": "b"}
    space: dict[str, Any] = {"nn": nn, "F": torch.nn.functional, "Callable": Any, "Tensor": Tensor}
    exec(renamed(inspect.getsource(models.MLP), names), space)
    model = space["MLP"]()
    derived = autotp.analyze(model, "auto", tp=2, inputs=X.float())
    assert {k: r.style for k, r in derived.plan.rules.items()} == {"zz1": "column", "blob": "row"}
    assert autotp.verify(model, {"zz1": "column", "blob": "row"}, tp=2, inputs=X).ok


# -- collectives


class _Noted:
    """A group that writes down what it is asked for."""

    def __init__(self) -> None:
        self._group, self.calls = group_of(None), []
        self.rank, self.size = self._group.rank, self._group.size

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._group, name)
        if not name.startswith(("all_", "reduce_")):
            return method

        def noted(x: Tensor, *more: Any) -> Any:
            # A gather brings each rank's own size; what all must say alike is the dim and all sizes.
            self.calls.append((name, str(x.dtype), *(more or x.shape)))
            return method(x, *more)

        return noted


def _noted(rank, size):
    group = _Noted()
    model = autotp.shard(models.randomised(qwen3(num_hidden_layers=1)), "qwen3", group)
    group.calls.clear()
    loss = weighed(model(input_ids=torch.arange(14).view(2, 7)).logits)
    forward, group.calls = group.calls, []
    loss.backward()
    return forward, group.calls


@pytest.mark.slow
def test_ranks_run_the_same_collectives_in_the_same_order(ranks):
    first, second = ranks(2)(_noted)
    assert first[0] == second[0] and len(first[0]) >= 4
    assert first[1] == second[1] and len(first[1]) >= 4


# -- second derivatives


def _penalised(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of the squared gradient of an input."""
    x = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x.requires_grad_()
    loss = weighed(model(inputs_embeds=x).logits)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (gradient.square().sum() + loss).backward()
    return gradients(model) | {"x": x.grad}


def _twice(rank, size):
    model = models.randomised(qwen3(num_hidden_layers=1, attn_implementation="eager"))
    return _penalised(autotp.shard(model, "qwen3"))


@pytest.mark.slow
def test_a_gradient_of_a_gradient(ranks):
    model = models.randomised(qwen3(num_hidden_layers=1, attn_implementation="eager"))
    hold(_penalised(model), ranks(2)(_twice), 1e-6)  # its norms compute in float32


# -- hooks


def _hooked(rank, size):
    model = models.randomised(models.MLP())
    seen: list[tuple[str, Tensor]] = []
    model.fc1.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    model.fc2.register_forward_hook(lambda m, args, out: seen.append(("before", out.detach())) or out + 1)
    autotp.shard(model, PLAN, inputs=X)
    seen.clear()  # hooks run in a trace as well
    model.fc2.register_forward_hook(lambda m, args, out: seen.append(("after", out.detach())))
    model.fc2.register_full_backward_hook(lambda m, i, o: seen.append(("backward", o[0].detach().clone())))
    model.fc1.weight.register_hook(lambda g: seen.append(("weight", g.detach().clone())))
    weighed(model(X)).backward()
    return seen, gradients(model)


def test_hooks_run_as_often_and_see_the_same(ranks):
    reference = models.randomised(models.MLP())
    out = reference.fc2(reference.between(reference.fc1(X * 2)))
    weighed(out + 1).backward()
    found = ranks(2)(_hooked)
    hold(gradients(reference), [g for _, g in found])
    for seen, _ in found:
        assert [name for name, _ in seen] == ["before", "after", "backward", "weight"]
        assert torch.allclose(seen[0][1], out) and torch.allclose(seen[1][1], out + 1)
    assert torch.equal(found[0][0][2][1], found[1][0][2][1])


# -- modes


class OnlyInTraining(models.MLP):
    """Looks over all features, in training only."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        return self.fc2(h.softmax(-1) if self.training else h)


def test_a_model_in_eval_mode_is_proven_for_training_too():
    model = OnlyInTraining().eval()
    found = autotp.analyze(model, PLAN, tp=2, inputs=X.float()).diagnostics
    assert [d.code for d in found if d.severity == "error"] == ["AT303"]
    assert not model.training


def _then_trained(rank, size):
    model = models.randomised(models.Dropped(rate=0.5)).eval()
    autotp.shard(model, PLAN)
    with torch.no_grad():
        model(X)
    model.train()
    model.inner.p = model.outer.p = 0.0
    weighed(model(X)).backward()
    model.inner.p = model.outer.p = 0.5
    torch.manual_seed(5)
    kept: list[Tensor] = []
    for layer in (model.inner, model.outer):
        layer.register_forward_hook(lambda m, args, out: kept.append(out != 0))
    return gradients(model), model(X).detach(), kept


def test_training_after_evaluation(ranks):
    reference = models.randomised(models.Dropped(rate=0.0))
    weighed(reference(X)).backward()
    found = ranks(2)(_then_trained)
    hold(gradients(reference), [g for g, _, _ in found])
    (_, out, (inner, outer)), (_, out_, (inner_, outer_)) = found
    assert torch.equal(outer, outer_) and torch.equal(out, out_)
    assert not torch.equal(inner[:, :16], inner_[:, :16])


# -- copies


def _copied(rank, size):
    model = autotp.shard(models.randomised(Net()), RAW, inputs=X.float())
    results = []
    for again in (model, copy.deepcopy(model), pickle.load(io.BytesIO(pickle.dumps(model)))):
        again.zero_grad()
        weighed(again(X)).backward()
        results.append(gradients(again))
    return results


def test_copies_and_pickles_train_alike(ranks):
    reference = models.randomised(Net())
    weighed(reference(X)).backward()
    first, second = ranks(2)(_copied)
    for pair in zip(first, second, strict=True):
        hold(gradients(reference), list(pair))


# -- other models of the process

SECOND = {"fc1": {"style": "column", "gather_output": True}, "fc2": {"style": "row", "split_input": True}}


def _side_by_side(rank, size):
    plain, first, second = (models.randomised(models.PerFeature(), seed) for seed in (0, 0, 1))
    autotp.shard(first, PLAN)
    autotp.shard(second, SECOND)
    for model in (plain, first, second):
        weighed(model(X)).backward()
    return [gradients(model) for model in (plain, first, second)]


def test_models_of_one_class_with_two_plans_and_one_without(ranks):
    references = [models.randomised(models.PerFeature(), seed) for seed in (0, 1)]
    for reference in references:
        weighed(reference(X)).backward()
    plain, first, second = zip(*ranks(2)(_side_by_side), strict=True)
    for found in plain:
        assert all(torch.equal(found[n], g) for n, g in gradients(references[0]).items())
    hold(gradients(references[0]), list(first))
    hold(gradients(references[1]), list(second))
