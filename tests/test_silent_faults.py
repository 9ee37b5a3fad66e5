"""Models that once were accepted with a wrong number on some rank. Each is refused, or exact."""

from __future__ import annotations

import functools
import types
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotp
from autotp.comm import simulate
from tests import models
from tests.models import MLP

PLAN = {"fc1": "column", "fc2": "row"}
LAYERS = {"layers.*.fc1": "column", "layers.*.fc2": "row"}
X = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))


def codes(model: nn.Module, plan: Any = PLAN, tp: int = 2) -> set[str]:
    found = autotp.analyze(model, plan, tp=tp, inputs=X).diagnostics
    return {d.code for d in found if d.severity == "error"}


# -- layers that look alike


class Block(nn.Module):
    def __init__(self, act: Any = None) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(16, 32), nn.Linear(32, 16), act

    def forward(self, x: Tensor, whole: bool = False) -> Tensor:
        h = self.fc1(x)
        h = self.act(h) if self.act is not None else h
        return x + self.fc2(h.softmax(-1) if whole else h)


class Flags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer, flag in zip(self.layers, [False] * 3 + [True], strict=True):
            x = layer(x, flag)
        return x


class Sliced(Flags):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:3]:
            x = layer(x)
        for layer in list(self.layers)[3:]:
            x = layer(x, whole=True)
        return x


class Callables(Flags):
    def __init__(self, last: Any) -> None:
        super().__init__()
        first = functools.partial(torch.softmax, dim=0)
        self.layers = nn.ModuleList([*(Block(first) for _ in range(3)), Block(last)])

    def forward(self, x: Tensor) -> Tensor:
        return functools.reduce(lambda h, layer: layer(h), self.layers, x)


@pytest.mark.parametrize(
    "model", [Flags, Sliced, lambda: Callables(functools.partial(torch.softmax, dim=-1))]
)
def test_each_layer_is_proven(model):
    assert codes(model(), LAYERS) == {"AT303"}


# -- tensors made of local sizes


TABLE = {size: torch.tensor(1.0 / size) for size in (33, 17, 16)}


class Tensors(MLP):
    make: Any

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        return self.fc2(h * type(self).make(h))


@pytest.mark.parametrize(
    "make",
    [
        lambda h: torch.tensor(float(h.shape[-1])),
        lambda h: h.new_tensor(1.0 / h.shape[-1]),
        lambda h: torch.as_tensor(np.float32(1.0 / h.shape[-1])),
        lambda h: TABLE[h.shape[-1]],
    ],
)
def test_numbers_in_tensors_are_compared(make):
    assert codes(type("Made", (Tensors,), {"make": staticmethod(make)})()) == {"AT313"}


class Counted(MLP):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        return self.fc2(h) * torch.where(h > 0)[0].shape[0]


def test_counting_places_of_a_shard_is_refused():
    assert codes(Counted()) == {"AT304"}


# -- a parameter that is read as a copy, and more


class Scaled(MLP):
    def __init__(self) -> None:
        super().__init__(hidden=32)
        self.scale = nn.Parameter(torch.tensor(0.5))


class Returned(Scaled):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.fc2(torch.tanh(self.fc1(x) * self.scale)), self.scale.exp()


class IntoColumn(MLP):
    def __init__(self) -> None:
        super().__init__(hidden=32)
        self.query = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.fc1(self.query)).unflatten(-1, (-1, 16)) * self.query
        return self.fc2(h.flatten()) + x


class PastTheModule(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)) * dict(self.named_parameters())["scale"])


class PastTheTable(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)) * self._parameters["scale"])


@pytest.mark.parametrize(
    ("model", "code"),
    [(PastTheModule, "AT312"), (PastTheTable, "AT312")],
)
def test_a_copied_parameter_is_used_as_a_copy_alone(model, code):
    assert codes(model()) == {code}


def test_a_parameter_that_is_returned_as_well_is_copied_where_it_meets_a_shard():
    assert autotp.verify(Returned(), PLAN, tp=2, inputs=X).ok


def test_a_copied_parameter_into_a_column_layer_is_copied_once():
    result = autotp.verify(IntoColumn(), PLAN, tp=2, inputs=X)
    assert result.ok and result.max_grad_diff < 1e-12


class Listed(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.fc1.weight]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.01 * self.kept[0].pow(2).sum()


class Closed(MLP):
    def __init__(self) -> None:
        super().__init__()
        weight = self.fc1.weight
        self.penalty = lambda: weight.pow(2).sum()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.01 * self.penalty()


@pytest.mark.parametrize("model", [Listed, Closed])
def test_a_cut_weight_that_is_held_elsewhere_is_refused(model):
    assert codes(model()) == {"AT312"}


# -- borders


class Raw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(32, 16)), nn.Parameter(torch.randn(16, 32))

    def ffn(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, self.w1)), self.w2)


class Skipping(Raw):
    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        return x if skip else self.ffn(x)


class InTraining(Raw):
    def forward(self, x: Tensor) -> Tensor:
        return self.ffn(x) if self.training else x


class Through(Raw):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.ffn(x), y


class Around(nn.Module):
    def __init__(self, inner: nn.Module, call: Any) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x: Tensor) -> Any:
        return self.call(self.inner, x)


@pytest.mark.parametrize(
    ("inner", "call"),
    [
        (Skipping, lambda inner, x: inner(x) + inner(x, skip=True)),
        (InTraining, lambda inner, x: inner(x) + x),
        (Through, lambda inner, x: sum(inner(x, x))),
    ],
)
def test_a_border_that_is_right_in_some_calls_only_is_refused(inner, call):
    plan = {"inner.w1": {"style": "column", "dim": 0}, "inner.w2": {"style": "row", "dim": 1}}
    assert codes(Around(inner(), call), plan) == {"AT319"}


class TakesItsOwn(Raw):
    given: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn(self.given) + 0 * self.ffn(x)


class LeavesItsOwn(Raw):
    def forward(self, x: Tensor) -> Tensor:
        self.last = self.ffn(x)
        return self.last


def past_the_argument(inner: Any, x: Tensor) -> Tensor:
    inner.given = x
    return inner(x) + x


def past_the_result(inner: Any, x: Tensor) -> Tensor:
    return inner(x) + inner.last.tanh() + x


@pytest.mark.parametrize(
    ("inner", "call"), [(TakesItsOwn, past_the_argument), (LeavesItsOwn, past_the_result)]
)
def test_what_passes_a_border_by_is_refused(inner, call):
    plan = {"inner.w1": {"style": "column", "dim": 0}, "inner.w2": {"style": "row", "dim": 1}}
    assert codes(Around(inner(), call), plan) & {"AT319", "AT311"}


# -- what a forward changes, keeps, hooks and draws


@pytest.mark.parametrize("name", ["fc1", "fc2"])
def test_a_patched_layer_is_refused(name):
    model = MLP()
    layer = getattr(model, name)
    layer.forward = types.MethodType(lambda self, x: F.linear(x, self.weight, self.bias) * 2, layer)
    assert codes(model) == {"AT206"}


class Running(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("run", torch.zeros(33))

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.fc1(x))
        with torch.no_grad():
            self.run.mul_(0.9).add_(h.mean(0) * 0.1)
        return self.fc2(h - self.run)


def test_a_buffer_that_is_read_in_part_and_written_is_refused():
    assert codes(Running()) == {"AT317"}


class Auxiliary(MLP):
    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.fc1(x))
        self.loss = h.pow(2).sum()
        return self.fc2(h)


def test_a_part_of_a_sum_left_on_the_model_is_refused():
    assert codes(Auxiliary()) == {"AT311"}


class Hooked(MLP):
    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.fc1(x))
        if h.requires_grad:
            h.register_hook(lambda g: g / (g.norm() + 1e-6))
        return self.fc2(h)


class Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)  # runs no op
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / (g.norm() + 1e-6)


class Own(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(Normed.apply(F.gelu(self.fc1(x))))


@pytest.mark.parametrize("model", [Hooked, Own])
def test_a_backward_of_its_own_on_a_shard_is_refused(model):
    assert codes(model()) == {"AT323"}


class AlwaysDropped(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.dropout(self.fc1(x), 0.5))


class Drawn(MLP):
    """Masks drawn by hand, by other ops than dropout."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.rrelu(self.fc1(x), training=True)
        h = h * torch.bernoulli(torch.full_like(h, 0.5)) * (torch.rand_like(h) < 0.7)
        return self.fc2(h * h.new_empty(h.shape).bernoulli_(0.9))


@pytest.mark.parametrize("dropped", [AlwaysDropped, Drawn])
def test_dropout_that_ignores_eval_draws_by_rank_in_eval(dropped):
    def rank(group):
        model = models.randomised(dropped(hidden=32))
        autotp.shard(model, PLAN, group)
        seen: list[Tensor] = []
        model.fc2.register_forward_pre_hook(lambda m, a: seen.append(a[0] == 0))
        torch.manual_seed(0)
        model.eval()(torch.ones(8, 16, dtype=torch.float64))
        return seen[0]

    first, second = simulate(2, rank)
    assert not torch.equal(first, second)


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.norm = MLP(), nn.LayerNorm(16)
        self.block.__class__ = AskingBlock

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.block(x))


class AskingBlock(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


def test_a_branch_on_a_value_is_named_as_such():
    assert codes(Asking()) == {"AT326"}


class AskingInEval(nn.Module):
    """A part that asks for values is traced at the second attempt, in the same mode as at the first."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.mlp = AskingWhole(), TrainedOtherwise()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.block(x))


class AskingWhole(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class TrainedOtherwise(MLP):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        return self.fc2(h.softmax(-1) if self.training else h)


def test_a_second_attempt_is_traced_in_the_same_mode():
    assert codes(AskingInEval().eval()) == {"AT303"}


# -- around the model


@pytest.mark.slow
def test_a_sharded_transformers_model_does_not_save_parts():
    def rank(group):
        model = autotp.shard(models.llama(num_hidden_layers=1), "llama", group)
        with pytest.raises(autotp.UsageError) as caught:
            model.save_pretrained("never")
        return str(caught.value)

    for message in simulate(2, rank):
        assert message.endswith("call autotp.save_pretrained(model, folder) on every rank")


def test_ranks_that_were_started_and_not_initialised(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(autotp.UsageError, match=r"torch\.distributed is not initialised on this one"):
        autotp.shard(MLP(), PLAN)


# -- what is no tensor, and what only some ranks or modes do


class Counting(MLP):
    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, int]]:
        h = F.gelu(self.fc1(x))
        return self.fc2(h), {"width": h.shape[-1]}


class Noting(MLP):
    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.fc1(x))
        self.width = h.shape[-1]
        return self.fc2(h)


@pytest.mark.parametrize(
    ("model", "said"),
    [(Counting, "returns 17 at [1].width on rank 0, and 33"), (Noting, "leaves on the model 17 at width on")],
)
def test_numbers_that_a_forward_gives_back_are_compared(model, said):
    (found,) = autotp.analyze(model(), PLAN, tp=2, inputs=X).diagnostics
    assert found.code == "AT313" and said in found.message


class WhenTraining(MLP):
    compiling: bool

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        if self.training and torch.compiler.is_compiling() is type(self).compiling:
            h = h.softmax(-1)
        return self.fc2(h)


@pytest.mark.parametrize("compiling", [False, True])
def test_a_train_forward_is_traced_as_it_is_compiled_and_as_it_runs(compiling):
    assert codes(type("Made", (WhenTraining,), {"compiling": compiling})()) == {"AT303"}


def hooked(register: str = "register_hook") -> nn.Module:
    model = MLP()
    getattr(model.fc1.weight, register)(lambda g: g)
    getattr(model.fc2.bias, register)(lambda g: g)  # whole
    return model


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_the_gradient_of_a_cut_parameter_is_refused(register):
    (found,) = autotp.analyze(hooked(register), PLAN, tp=2, inputs=X).diagnostics
    assert found.code == "AT226" and "the gradient of fc1.weight" in found.message


def test_ranks_whose_forwards_differ_by_a_hook_are_refused():
    def rank(group):
        model = MLP()
        model.register_forward_hook(lambda module, args, out: out * 2 if group.rank else out)
        with pytest.raises(autotp.UsageError, match="different forwards"):
            autotp.shard(model, PLAN, group, inputs=X)
        return type(model.fc1)

    assert simulate(2, rank) == [nn.Linear] * 2


class Switch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(33, 16)), nn.Parameter(torch.randn(16, 33))

    def forward(self, x: Tensor, normed: bool = False, times: int = 3, mask: Tensor | None = None) -> Tensor:
        h = F.linear(x, self.w1)
        h = h.softmax(-1) if normed else h
        return h * times @ self.w2.T + (0 if mask is None else mask)


class Switched(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.switch = Switch()

    def forward(self, x: Tensor, *flags: Any) -> Tensor:
        return self.switch(self.fc2(self.fc1(x)), *flags)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((True, 3, None), "normed=True"),
        ((False, 4, None), "times=4"),
        ((False, 3, X), "mask=a tensor of 2 dims"),
    ],
)
def test_a_border_is_called_as_it_was_traced(flags, said):
    plan = {**PLAN, "switch.w1": {"style": "column", "dim": 0}, "switch.w2": {"style": "row", "dim": 1}}

    def rank(group):
        model = autotp.shard(Switched(), plan, group, inputs=(X, False, 3, None))
        assert model(X[:2], False).shape == model.switch(x=X[:2]).shape == (2, 16)  # the defaults
        with pytest.raises(autotp.UnprovenPath) as caught:
            model.switch.forward.__wrapped__(X, *flags)  # past the guard of calls by itself
        return str(caught.value)

    with torch.random.fork_rng():
        assert all(f"than when its plan was proven: with {said};" in m for m in simulate(2, rank))


# -- code of an edited function that no trace ran


class Views(MLP):
    """Heads by hand, so that the function is edited."""

    def __init__(self) -> None:
        super().__init__(hidden=32)
        self.heads, self.scale = 4, nn.Parameter(torch.ones(8))


class ScaledThere(Views):
    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        h = self.fc1(x).view(len(x), self.heads, 8)
        if other:
            h = h * self.scale
        return self.fc2(h.flatten(1))


class GatedThere(Views):
    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        gate = x[:, :1, None]
        h = self.fc1(x).view(len(x), self.heads, 8)
        if other:
            h *= gate
        return self.fc2(h.flatten(1))


class WrittenThere(Views):
    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        h = self.fc1(x).view(len(x), self.heads, 8).clone()
        if other:
            h[:, 0] = 0
        return self.fc2(h.flatten(1))


class LoopedThere(Views):
    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        h = self.fc1(x).view(len(x), self.heads, 8)
        return self.fc2(sum((h.roll(1, 1) for _ in range(int(other))), h).flatten(1))


class InsideThere(Views):
    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        h = self.fc1(x).view(len(x), self.heads, 8)

        def mixed(t: Tensor) -> Tensor:
            if other:
                return t.softmax(1)
            return t

        return self.fc2(mixed(h).flatten(1))


class LambdaThere(Views):
    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        h = self.fc1(x).view(len(x), self.heads, 8)
        mixed = (lambda t: t.softmax(1)) if other else (lambda t: t)
        return self.fc2(mixed(h).flatten(1))


class AndThere(Views):
    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        h = self.fc1(x).view(len(x), self.heads, 8)
        mixed = other and h.roll(1, 1)
        return self.fc2((h if mixed is False else mixed).flatten(1))


class ComparedThere(Views):
    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        h = self.fc1(x).view(len(x), self.heads, 8)
        return self.fc2((h > 0 if other else h).to(x.dtype).flatten(1))


@pytest.mark.parametrize(
    "model",
    [ComparedThere, ScaledThere, GatedThere, WrittenThere, LoopedThere, InsideThere, LambdaThere, AndThere],
)
def test_code_of_an_edited_function_that_no_trace_ran_raises(model):
    plan = {name: {"style": style, "heads": 4} for name, style in PLAN.items()}
    whole = models.randomised(model())

    def rank(group):
        mine = autotp.shard(models.randomised(model()), plan, group, inputs=X)
        with pytest.raises(autotp.UnprovenPath, match="no traced forward took this branch"):
            type(mine).forward(mine, X[:2].double(), True)  # past the guard of the model's calls
        return mine(X[:2].double())

    for out in simulate(2, rank):
        assert torch.allclose(out, whole(X[:2].double()), rtol=1e-10)


class WritesIntoOutputs(MLP):
    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.fc1(x[None]), inplace=True)
        y = self.fc2(h)
        y += x
        y[0, :, 0].tanh_()
        return y


def test_outputs_of_parallel_layers_are_written_into():
    result = autotp.verify(WritesIntoOutputs(), PLAN, tp=2, inputs=X)
    assert result.ok, str(result)


class HeadsAndBatch(Views):
    """One expression is a number of heads, and a batch that may be as large when the model runs."""

    def parts(self, h: Tensor, n: int, dim: int) -> Tensor:
        return h.unflatten(dim, (n, -1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.parts(self.parts(self.fc1(x), len(x), 0).sum(1), self.heads, 1)
        return self.fc2(h.tanh().flatten(1))


class ShapesOfBoth(Views):
    """Shapes of one length: a number of heads at a place, and another number that stays."""

    def shaped(self, t: Tensor, shape: tuple[int, ...]) -> Tensor:
        return t.reshape(shape)

    def forward(self, x: Tensor) -> Tensor:
        h = self.shaped(self.fc1(x), (len(x), self.heads, 8)).cumsum(-1)
        return self.shaped(self.fc2(h.flatten(1)), (len(x), self.other, 16 // self.other)).cumsum(1)

    other = 8


def test_a_number_that_stays_among_shapes_runs_as_it_was_proven():
    plan = {name: {"style": style, "heads": 4} for name, style in PLAN.items()}
    result = autotp.verify(ShapesOfBoth(), plan, tp=2, inputs=X)
    assert result.ok, str(result)


def test_a_size_of_the_input_that_may_equal_a_number_of_heads_is_refused():
    plan = {name: {"style": style, "heads": 4} for name, style in PLAN.items()}
    (found,) = autotp.analyze(HeadsAndBatch(), plan, tp=2, inputs=X).diagnostics
    assert found.code == "AT327" and "5, a size of the input, would have to stay" in found.message
