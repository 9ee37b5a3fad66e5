"""Code that catches what a recording raises and no run does: it would go on as no run does."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.comm import simulate
from autotp.diagnostic import PlanError
from autotp.trace.capture import capture
from autotp.trace.export import export
from autotp.trace.graph import TraceError
from autotp.trace.layers import Layers
from autotp.trace.recorder import record
from tests.stacks import Block as Layer
from tests.stacks import Stack

X = torch.randn(5, 7, 6, generator=torch.Generator().manual_seed(0)).double()
PLAN = {"up": "column", "down": "row"}
LOW = -100

QUESTIONS: dict[str, Callable[[Tensor], Any]] = {
    "if": lambda t: not t.max() < LOW,
    "bool": lambda t: bool((t > LOW).all()),
    "int": lambda t: int(t.max()) > LOW,
    "float": lambda t: float(t.max()) > LOW,
    "item": lambda t: bool(t.max().item() > LOW),
    "tolist": lambda t: sorted(t.flatten().tolist())[0] > LOW,
    "nonzero": lambda t: bool(torch.nonzero(t).shape[0] > 0),
    "len": lambda t: len(torch.nonzero(t)) > 0,
    "range": lambda t: len(range(int(t.abs().max()) + 1)) > 0,
    "mask": lambda t: bool(t[t > LOW].shape[0] > 0),
    "equal": lambda t: torch.equal(t, t.clone()),
    "allclose": lambda t: torch.allclose(t, t.clone()),
    "size": lambda t: torch.ones(int(t.abs().max()) + 1).shape[0] > 0,
    "list": lambda t: [True] * t.shape.numel() and [True, True][(t > LOW).all().long()],
    "word": lambda t: f"{t.max():.3f}" != "",
    "number": lambda t: f"{t.max().item():.3f}" != "",
    "key": lambda t: {t.argmax().item(): True} != {},
    "numpy": lambda t: t.detach().numpy().size > 0,
    "memory": lambda t: t.data_ptr() != 0,
}  # fmt: skip


def bare(ask: Callable[[], bool]) -> bool:
    try:
        return ask()
    except:  # noqa: E722
        return False


def exception(ask: Callable[[], bool]) -> bool:
    try:
        return ask()
    except Exception:
        return False


def suppressed(ask: Callable[[], bool]) -> bool:
    with contextlib.suppress(BaseException):
        return ask()
    return False


def finally_returns(ask: Callable[[], bool]) -> bool:
    answer = False
    try:
        answer = ask()
    finally:
        return answer  # noqa: B012


def by_attribute(ask: Callable[[], bool]) -> bool:
    """The interpreter's own code catches it."""

    class Asks:
        @property
        def answer(self) -> bool:
            try:
                return ask()
            except RuntimeError as error:
                raise AttributeError from error

    return getattr(Asks(), "answer", False)


class Asks(nn.Module):
    """What it gives hangs on a question, whose error is caught."""

    def __init__(self, ask: Callable[[Tensor], Any], catch: Callable[..., bool]) -> None:
        super().__init__()
        self.ask, self.catch = ask, catch

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.catch(lambda: self.ask(x)) else x.flip(-1)


class Block(nn.Module):
    """The question is asked before a module of its own, here, or of what is cut."""

    def __init__(self, ask: Callable[[Tensor], Any], where: str, catch: Callable[..., bool]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6)
        self.asks = Asks(ask, catch) if where == "inside" else nn.Identity()
        self.ask, self.where, self.catch = ask, where, catch

    def forward(self, x: Tensor) -> Tensor:
        x = self.asks(x)
        far = self.where == "root" and self.catch(lambda: self.ask(x))
        h = self.up(x)
        far = self.catch(lambda: self.ask(h)) if self.where == "cut" else far
        return self.down(h.softmax(-1) if far else h)


@pytest.mark.parametrize("ask", QUESTIONS)
def test_a_question_that_is_caught_is_no_answer(ask):
    model = Block(QUESTIONS[ask], "root", exception).double()
    with pytest.raises(TraceError, match="the model's code catches this") as caught:
        capture(model, (X,), {})
    assert caught.value.dynamic and caught.value.source.file.endswith("test_trace_caught.py")
    assert f'"{ask}": lambda' in caught.value.source.text


@pytest.mark.parametrize("catch", (bare, exception, suppressed, finally_returns, by_attribute))
def test_whatever_catches_it(catch):
    with pytest.raises(TraceError, match="the model's code catches this"):
        capture(Block(QUESTIONS["if"], "root", catch), (X.float(),), {})


@pytest.mark.parametrize("where", ("root", "cut"))
def test_it_is_refused_with_the_line(where):
    with pytest.raises(PlanError, match=r"(?s)AT320.*catches this.*not t\.max\(\) < LOW.*of its own"):
        autotp.verify(Block(QUESTIONS["if"], where, exception).double(), PLAN, tp=3, inputs=X)


def test_a_module_whose_truth_is_caught_is_run_on_every_way():
    torch.manual_seed(0)
    model = Block(QUESTIONS["if"], "inside", exception).double()
    assert autotp.analyze(model, PLAN, tp=3, inputs=X).ok
    whole, far = copy.deepcopy(model), X - 1000

    def rank(group) -> list[Tensor]:
        module = autotp.shard(copy.deepcopy(model), PLAN, group, inputs=X)
        return [module(X), module(far)]

    for found in simulate(3, rank):
        for out, x in zip(found, (X, far), strict=True):
            assert (out - whole(x)).abs().max() < 1e-9


@pytest.mark.parametrize("ask", ("int", "item", "nonzero", "len", "mask", "equal", "numpy", "memory", "key"))
def test_a_module_whose_number_is_caught_is_refused(ask):
    model = Block(QUESTIONS[ask], "inside", exception).double()
    with pytest.raises(PlanError, match=r"(?s)AT326.*asks.*it is not known"):
        autotp.verify(model, PLAN, tp=2, inputs=X)


@torch.library.custom_op("autotp_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """An op that no recording can run."""
    return x * 2


class Tries(nn.Module):
    def __init__(self, tries: Callable[[Tensor], Tensor], otherwise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.tries, self.otherwise = nn.Linear(6, 7), nn.Linear(7, 6), tries, otherwise

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.tries(x)
        except (RuntimeError, ValueError):
            x = self.otherwise(x)
        return self.down(self.up(x))


def test_an_op_that_only_a_recording_cannot_run():
    with pytest.raises(TraceError, match="the model's code catches this"):
        capture(Tries(twice, torch.exp), (X.float(),), {})


def test_what_a_run_raises_too_may_be_caught():
    """A view that there is not, of sizes that do not go together."""
    model = Tries(lambda x: x.mT.view(5, -1), lambda x: x.mT.reshape(5, 7, 6)).double()
    assert autotp.verify(model, PLAN, tp=3, inputs=X).ok


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.max() < LOW:
            raise ValueError("low")
        return x * 2


def test_the_refusal_itself_is_not_caught():
    """What a module raises by the answer is an error while it is not looked into, and may be caught, too."""
    with pytest.raises(PlanError, match=r"(?s)AT320\]: tries: .*catches this.*if x\.max\(\) < LOW:"):
        autotp.verify(Tries(Raises(), torch.sin).double(), PLAN, tp=2, inputs=X)


def test_export_goes_on_from_nothing_either():
    for ask in ("if", "len", "equal", "numpy", "memory"):
        with pytest.raises(TraceError, match=r"the model's code catches this") as caught:
            export(Block(QUESTIONS[ask], "inside", exception), (X.float(),), {})
        assert caught.value.module == "asks" and f'"{ask}": lambda' in caught.value.source.text
    assert export(Block(QUESTIONS["if"], "nowhere", exception), (X.float(),), {}).route == "export"


class Writes(Stack):
    """It writes into what a layer gave that repeats another, and catches everything."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        with contextlib.suppress(BaseException):
            x.mul_(3)
        return self.head(x)


def test_what_is_written_into_a_repeated_layer_is_recorded():
    model = Writes(map(Layer, range(3)))
    trace = record(model, (torch.randn(5, 4),), {}, layers=Layers.of(model))
    assert "aten.mul_.Tensor" in [str(n.target) for n in trace.ops()]


class Steps(torch.autograd.Function):
    """A backward that goes by the gradient, if it may."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        try:
            return grad * 2 if grad.max() > LOW else grad
        except RuntimeError:
            return grad * 3


def test_a_backward_that_catches_it_is_unknown():
    trace = record(Tries(Steps.apply, torch.exp), (X.float(),), {})
    assert trace.gradients == []


def is_nan(t: Tensor) -> bool:
    number = t.max().item()
    return number != number


def test_a_number_may_be_none():
    """What is unlike itself is no number, which torch takes for impossible where it does not know it."""
    with pytest.raises(TraceError, match="data-dependent"):
        capture(Block(is_nan, "root", lambda ask: ask()), (X,), {})


@pytest.mark.parametrize(("known", "other"), ((1, 0), (0, 1), (True, False)))
def test_a_truth_is_compared_as_a_number(known, other):
    """`True == 1`, which torch takes for unlike where it does not know the truth."""
    for ask in (lambda t: (t > LOW).all().item() == known, lambda t: known != (t > LOW).all().item()):
        with pytest.raises(TraceError, match="data-dependent"):
            capture(Block(ask, "root", lambda ask: ask()), (X,), {})
    assert torch.SymBool.__eq__(torch.sym_not(True), 0) is True
