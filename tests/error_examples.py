"""An example of each code that no file of tests/bad_plans or tests/refusals shows: a plan and a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotp
from autotp.diagnostic import Diagnostic, PlanError
from autotp.match import match
from autotp.plan import Plan
from autotp.trace.support import unsupported
from tests import edited, models
from tests import test_compared as compared
from tests import test_silent_faults as faults
from tests.inventories import ATTENTION, MLP, linear, model, module

GOOD = "rules:\n  fc1: column\n  fc2: row\n"


@dataclass(frozen=True)
class Example:
    """What is shown (a plan, or the call) and what finds it."""

    shown: str
    find: Callable[[], Iterable[Diagnostic]]
    language: str = "yaml"


def _raised(call: Callable[[], Any]) -> tuple[Diagnostic, ...]:
    try:
        call()
    except PlanError as refused:
        return refused.diagnostics
    raise AssertionError("nothing was refused")


def _code(shown: str, call: Callable[[], Any]) -> Example:
    return Example(shown, lambda: _raised(call), "python")


def _matched(text: str, inventory: Any, tp: int = 2) -> Example:
    return Example(text, lambda: match(Plan.loads(text, file="plan.yaml"), inventory, tp).diagnostics)


def _live(text: str, made: Callable[[], nn.Module], tp: int = 2, **options: Any) -> Example:
    return Example(
        text,
        lambda: autotp.analyze(made(), Plan.loads(text, file="plan.yaml"), tp=tp, **options).diagnostics,
    )


def _unsupported(shown: str, made: Callable[[], nn.Module]) -> Example:
    return Example(shown, lambda: list(unsupported(made())), "python")


# -- models


class PastForward(nn.Linear):
    """A model that computes what it gives without its forward."""

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class Fourier(models.MLP):
    """An op without a layout rule."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.fft.fft(self.fc1(x)).real)


class Summed(nn.Module):
    """A non-linear function of a sum whose parts are still on the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(16, 33)
        self.down = nn.Parameter(torch.randn(16, 33))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(F.linear(F.gelu(self.fc1(x)), self.down))


class Experts(nn.Module):
    """Three experts, whose rows one kernel multiplies in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 16, 72, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([2, 4, 6], dtype=torch.int32)
        return F.grouped_mm(x, self.up, offs=ends).sum(-1)


class Asks(models.MLP):
    """Decides by a value."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Gated(models.MLP):
    """A module inside decides by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.gate(x))


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient


class Custom(models.MLP):
    """A function of two tensors with a backward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        return self.fc2(_Sum.apply(h, h.relu()))


class Keeps(models.MLP):
    """Leaves a shard on itself."""

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.fc1(x)
        return self.fc2(self.hidden)


class Wide(models.MLP):
    """Next to fc1 and fc2 a large layer that no rule names."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.out = nn.Linear(8, 400)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(super().forward(x))


class Inverted(models.MLP):
    """The inverse of a large matrix is used beside fc1 and fc2."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.out = models.Inverse(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(super().forward(x))


def _weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)))


def _lazy() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.LazyLinear(8))


def _scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Linear(4, 8))


def _other_weights() -> list[Diagnostic]:
    from autotp.shapes import analyze_shapes, as_stored

    analysis = analyze_shapes(MLP, Plan.loads(GOOD), tp=2)
    stored = model(linear("fc1", 16, 35), linear("fc2", 33, 16))
    return [d for d in as_stored(analysis, stored).diagnostics if d.code == "AT420"][:1]


TIED = model(
    module("embed", "embedding", weight=(97, 8)),
    linear("head", 8, 97, bias=False),
    aliases={"head.weight": "embed.weight"},
)

EXAMPLES: dict[str, Example] = {
    "AT101": _code('autotp.Plan.load("plans/mlp.yaml")', lambda: Plan.load("plans/mlp.yaml")),
    "AT114": _code(
        'autotp.Plan.from_transformers({"experts.identity_expert": "moe_identity_expert"})',
        lambda: Plan.from_transformers({"experts.identity_expert": "moe_identity_expert"}),
    ),
    "AT115": _code(
        'autotp.Plan(rules={"fc1": "column"}).to_transformers()',
        lambda: Plan(rules={"fc1": "column"}).to_transformers(),
    ),
    "AT204": _matched("rules:\n  fc1: {style: column, heads: 5}\n", MLP),
    "AT205": _matched("rules:\n  fc1: {style: column, heads: num_heads}\n", MLP),
    "AT206": _matched("rules:\n  fc1: vocab\n", MLP),
    "AT207": _matched("rules:\n  self_attn.sinks: column\n", ATTENTION),
    "AT208": _matched(
        "rules:\n  mlp.fc1: column\n  layers.*.*.fc1: row\n", model(linear("layers.0.mlp.fc1", 8, 8))
    ),
    "AT209": _matched("rules:\n  fc1: column\n  fc1.bias: replicate\n", MLP),
    "AT211": _matched("rules:\n  embed: vocab\n", TIED),
    "AT212": _matched("rules:\n  fc1: row\n  mlp.fc1: column\n", model(linear("mlp.fc1", 8, 8))),
    "AT213": _matched("rules:\n  fc1: column\n  act: column\n", replace(MLP, paths=(*MLP.paths, "act"))),
    "AT214": _matched(
        "rules:\n  fc: column\n", model(module("l.fc", "linear", weight=(8, 4), bias=(8,), mask=(8, 4)))
    ),
    "AT215": _matched("rules:\n  fc1: column\n  lm_head: column\noptional: [lm_head]\n", MLP),
    "AT221": _unsupported("autotp.shard(torch.jit.script(model), plan)", _scripted),
    "AT222": _unsupported("weight_norm(model[0])\nautotp.shard(model, plan)", _weight_norm),
    "AT223": _unsupported(
        "autotp.shard(nn.DataParallel(model), plan)", lambda: nn.DataParallel(nn.Linear(4, 8))
    ),
    "AT224": _unsupported("autotp.shard(nn.Sequential(nn.LazyLinear(8)), plan)", _lazy),
    "AT225": _unsupported("autotp.shard(model, plan)", lambda: PastForward(4, 4)),
    "AT226": _live(GOOD, faults.hooked),
    "AT304": _live(GOOD, Fourier),
    "AT318": _live(
        "rules:\n  up: {style: column, dim: 2}\n", Experts, inputs=torch.zeros(6, 16, dtype=torch.bfloat16)
    ),
    "AT319": _live(
        "rules:\n  inner.w1: {style: column, dim: 0}\n  inner.w2: {style: row, dim: 1}\n",
        lambda: faults.Around(faults.Skipping(), lambda inner, x: inner(x) + inner(x, skip=True)),
        inputs=torch.zeros(5, 16),
    ),
    "AT320": _live(GOOD, Asks, inputs=torch.ones(2, 16)),
    "AT323": _live(GOOD, Custom),
    "AT324": _live(GOOD, Keeps),
    "AT325": _live(GOOD, Gated),
    "AT326": _live(GOOD, faults.Asking, inputs=torch.ones(2, 16)),
    "AT327": _live(GOOD, edited.TwoNeeds),
    "AT328": _live(GOOD, lambda: compared.Between(compared.branch), inputs=torch.zeros(2, 17, 8)),
    "AT390": _live(GOOD, Wide),
    "AT391": _live("rules:\n  fc1: replicate\n", models.MLP),
    "AT392": _live("rules:\n  fc1: column\n  fc2: row\n  out: replicate\n", Wide),
    "AT393": Example(
        'autotp.analyze(model, "auto", tp=2)',
        lambda: autotp.analyze(Inverted(), "auto", tp=2).diagnostics,
        "python",
    ),
    "AT420": Example("# the checkpoint's fc1.weight is [35, 16]\n", _other_weights),
}
