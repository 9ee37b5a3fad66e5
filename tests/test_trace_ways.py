"""Modules that ask tensors for the truth: what they give is that of every way through them."""

from __future__ import annotations

import copy
from contextvars import ContextVar
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.comm import simulate
from autotp.diagnostic import PlanError, UnprovenPath
from autotp.trace.capture import capture

X = torch.randn(5, 7, 6, generator=torch.Generator().manual_seed(0))


class Turns(nn.Module):
    """Tables that are made anew where positions are far, as dynamic rotary embeddings are."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.fits = 10, True
        self.register_buffer("steps", torch.arange(1.0, 7.0))

    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor, float]:
        far, odd = places.max(), isinstance(self.most, Tensor) and self.most > 90
        if far > self.most:
            self.steps, self.most = self.steps / 2, far
        if far < 3 and self.fits:
            angle = places[..., None] / self.steps
        else:
            angle = places[..., None] * self.steps
        angle = angle[0] if odd else angle
        return angle.cos(), angle.sin(), 2.0


class Turned(nn.Module):
    """A block that is turned by the tables, before it is cut or (`late`) after."""

    def __init__(self, turns: nn.Module, *, late: bool = False) -> None:
        super().__init__()
        self.turns, self.up, self.down = turns, nn.Linear(6, 6), nn.Linear(6, 6)
        self.late = late

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        places = torch.arange(x.shape[1]) + start
        if self.late:
            h = self.up(x)
            return self.down(h * self.turns(h, places)[2])
        cos, sin, size = self.turns(x, places)
        return self.down((self.up(x * cos + sin) * size).relu())


PLAN = {"up": "column", "down": "row"}


def test_what_every_way_gives():
    trace = capture(Turned(Turns()), (X,), {})
    assert trace.opaque == ("turns",)
    node = next(n for n in trace.ops() if str(n.target) == "opaque")
    assert [(v.shape, v.grad) for v in node.meta["val"]] == [((7, 6), False)] * 2
    assert node.meta["grads"] == set()  # no gradient flows through it
    tables = {(f"[{place}]", "a tensor of 2 dims") for place in (0, 1)}
    assert trace.gives == {"turns": {frozenset({("", "tuple of 3"), *tables, ("[2]", "2.0")})}}


@pytest.mark.parametrize("tp", (2, 3))
def test_a_way_that_no_trace_took_is_exact(tp):
    torch.manual_seed(0)
    model = Turned(Turns()).double()
    assert autotp.verify(model, PLAN, tp=tp, inputs=X.double()).ok
    whole, starts = copy.deepcopy(model), (0, 40, 3)

    def run(module: nn.Module) -> list[Tensor]:
        out = [module(X.double(), start) for start in starts]
        module.zero_grad()
        out[1].pow(2).sum().backward()
        return [*out, module.up.bias.grad, module.down.bias.grad]

    def rank(group) -> list[Tensor]:
        return run(autotp.shard(copy.deepcopy(model), PLAN, group, inputs=X.double()))

    want = run(whole)
    parts = simulate(tp, rank)
    for found in parts:
        assert all((a - b).abs().max() < 1e-10 for a, b in zip(found[:3], want, strict=False))
        assert (found[4] - want[4]).abs().max() < 1e-10
    assert (torch.cat([found[3] for found in parts]) - want[3]).abs().max() < 1e-10


def test_nothing_sharded_may_go_in():
    with pytest.raises(PlanError, match=r"AT326.*nothing sharded may be in it"):
        autotp.verify(Turned(Turns(), late=True), PLAN, tp=2, inputs=X)


class Halved(nn.Module):
    """The argument itself, or a copy of it, where it is small."""

    def __init__(self, give):
        super().__init__()
        self.give = give

    def forward(self, x):
        return x / 2 if x.abs().max() > 3 else self.give(x)


def test_an_argument_that_is_given_back_is_unlike_a_new_tensor_and_a_copy_of_it_is_the_remedy():
    def found(give):
        model = nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 6), Halved(give))
        return autotp.analyze(model, {"0": "column", "2": "row"}, tp=2, inputs=torch.ones(5, 6))

    (one,) = [d for d in found(lambda x: x).diagnostics if d.severity == "error"]
    assert (one.code, one.module) == ("AT326", "3") and "x.clone()" in one.help[1]
    assert found(torch.clone).ok


def test_a_later_way_that_gives_something_else_raises():
    """What the module keeps shows a way that no trace had."""
    model = Turned(Turns())

    def rank(group) -> None:
        sharded = autotp.shard(copy.deepcopy(model), PLAN, group, inputs=X)
        sharded(X, 90)
        sharded(X, 90)

    with pytest.raises(
        UnprovenPath, match=r"^turns: it gives a tensor of 1 dims at \[0\], which it gave in no"
    ):
        simulate(2, rank)


class Unlike(nn.Module):
    """Results of other shapes on its two ways, or a number that is asked for."""

    def __init__(self, *, number: bool = False) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor, float]:
        if self.number and places.max().item() > 4:
            return x, x, 2.0
        return (x, x, 2.0) if places.max() > 3 else (x[0], x, 2.0)


@pytest.mark.parametrize("number", (False, True))
def test_what_cannot_be_told_is_refused(number):
    with pytest.raises(PlanError, match="AT320"):
        autotp.verify(Turned(Unlike(number=number)), PLAN, tp=2, inputs=X)


class Numbered(nn.Module):
    """It asks for a number, and reads what another module has."""

    def __init__(self, *, told: bool) -> None:
        super().__init__()
        self.others, self.told = [], told

    def forward(self, x: Tensor, far: dict[str, bool] | None) -> Tensor:
        big = x.max().item() > 5
        if far is not None:
            far["far"] = big
        return x * self.others[0].bias.shape[0] if big and not self.told else x * 2


class Holds(nn.Module):
    def __init__(self, *, told: bool) -> None:
        super().__init__()
        self.asks, self.up, self.down = Numbered(told=told), nn.Linear(6, 7), nn.Linear(7, 6)
        self.told = told
        self.asks.others.append(self.up)

    def forward(self, x: Tensor) -> Tensor:
        far: dict[str, bool] = {}
        h = self.up(self.asks(x, far if self.told else None))
        return self.down(h.softmax(-1) if far.get("far") else h)


@pytest.mark.parametrize(("told", "code"), ((True, "AT326"), (False, "AT326")))
def test_what_a_module_that_asks_for_numbers_may_read_or_change(told, code):
    with pytest.raises(PlanError, match=code):
        autotp.verify(Holds(told=told), PLAN, tp=2, inputs=X)


SIZES = {
    "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 1, "num_attention_heads": 6,
    "num_key_value_heads": 6, "vocab_size": 48, "max_position_embeddings": 32, "pad_token_id": 0,
    "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip


@pytest.mark.slow
def test_rotary_embeddings_that_go_by_the_length():
    """A decode across the length of training, beyond it, and short again."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    model = LlamaForCausalLM(config).double().eval()
    ids = [torch.arange(2 * n).reshape(2, n) * 7 % 47 + 1 for n in (10, 40)]

    def run(module: nn.Module) -> list[Tensor]:
        with torch.no_grad():
            out = module.generate(ids[0], max_new_tokens=30, do_sample=False)
            return [out, *(module(input_ids=each).logits for each in reversed(ids))]

    want = run(copy.deepcopy(model))
    for found in simulate(2, lambda group: run(autotp.shard(copy.deepcopy(model), "llama", group))):
        assert all((a - b).abs().max() < 1e-10 for a, b in zip(found, want, strict=True))


@pytest.mark.slow
def test_rotary_embeddings_of_two_lengths():
    """In a model whose code is edited."""
    from transformers import Phi3Config, Phi3ForCausalLM

    scaling = {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 3.0]}
    config = Phi3Config(**SIZES, original_max_position_embeddings=4, rope_scaling=scaling)
    assert autotp.analyze(Phi3ForCausalLM(config), "phi3", tp=3).ok


class Says(nn.Module):
    """A scale that goes by the values, beside what it leaves behind."""

    def __init__(self, leaves: str) -> None:
        super().__init__()
        self.leaves, self.far, self.last, self.seen = leaves, False, None, []
        self.gain, self.others = nn.Parameter(torch.tensor(1.3)), []

    def forward(self, x: Tensor, told: dict[str, bool]) -> Tensor:
        far = x.max() > 5
        if far and self.leaves == "flag":
            self.far = True
        if self.leaves == "tensor":
            self.last = self.gain * (2 if far else 3)
        if far and self.leaves == "list":
            self.seen.append(1)
        if far and self.leaves == "argument":
            told["far"] = True
        if self.leaves == "size" and far:
            return x * self.others[0].up.bias.shape[0]
        return x * self.gain


class Told(nn.Module):
    """Code around reads what was left, puts it back, and takes a way that no trace took."""

    def __init__(self, leaves: str) -> None:
        super().__init__()
        self.says, self.up, self.down = Says(leaves), nn.Linear(6, 7), nn.Linear(7, 6)
        self.says.others.append(self)

    def forward(self, x: Tensor) -> Tensor:
        told = {"far": False}
        h = self.up(self.says(x, told))
        if self.says.far or self.says.seen or told["far"]:
            h = h.softmax(-1)
        h = h if self.says.last is None else h * self.says.last
        self.says.far, self.says.last = False, None
        self.says.seen.clear()
        return self.down(h)


LEFT = {
    "flag": r"AT326.*says.*it sets far, which code around it reads",
    "tensor": r"AT326.*says.*it sets last, which code around it reads",
    "list": r"AT326.*says.*it sets seen, which code around it reads",
    "argument": "AT320.*cannot be traced",
    "size": r"AT326.*nothing sharded may be in it",
}


@pytest.mark.parametrize("leaves", LEFT)
def test_what_a_way_leaves_is_read_by_nobody(leaves):
    with pytest.raises(PlanError, match=f"(?s){LEFT[leaves]}"):
        autotp.verify(Told(leaves), PLAN, tp=2, inputs=X)


class Dropped(nn.Module):
    """A dropout on what is cut beside one in a module that asks for truth."""

    def __init__(self) -> None:
        super().__init__()
        self.asks, self.up, self.down = Drops(), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.asks(self.down(nn.functional.dropout(self.up(x), 0.5, self.training)))


class Drops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.25 if x.max() > 5 else 0.5, self.training)


def test_whole_values_are_dropped_out_alike_on_every_way():
    def rank(group) -> Tensor:
        torch.manual_seed(0)
        model = autotp.shard(Dropped(), PLAN, group, inputs=X).train()
        torch.manual_seed(1)
        return model(X)

    one, other = simulate(2, rank)
    assert torch.equal(one, other)


class Gives(nn.Module):
    """A factor that goes by the values, in a later call with a gradient; or what comes in, as it is."""

    def __init__(self, *, later: bool) -> None:
        super().__init__()
        self.later, self.called = later, False
        self.gain = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        if not self.later:
            return x if x.max() > 5 else x.view_as(x)
        factor = x.mean(-1, keepdim=True) * (self.gain if self.called else 1) * (2 if x.max() > 5 else 1)
        factor = factor if self.called else factor.detach()
        self.called = True
        return factor


class Given(nn.Module):
    def __init__(self, *, later: bool) -> None:
        super().__init__()
        self.gives, self.up, self.down = Gives(later=later), nn.Linear(6, 7), nn.Linear(7, 6)
        self.later = later

    def forward(self, x: Tensor) -> Tensor:
        if self.later:
            return self.down(self.up(x) * self.gives(x))
        made = torch.zeros_like(x[..., :1])
        self.gives(made).add_(x[..., :1])
        return self.down(self.up(x) * made)


def test_a_later_way_with_a_gradient_raises():
    def rank(group) -> None:
        model = autotp.shard(Given(later=True), PLAN, group, inputs=X)
        model(X)
        model(X)

    with pytest.raises(
        UnprovenPath, match=r"^gives: it gives a tensor of 3 dims with gradient, which it gave"
    ):
        simulate(2, rank)


def test_what_is_given_on_is_not_written():
    """It is one tensor of two names, and two in the trace."""
    with pytest.raises(PlanError, match=r"(?s)AT320.*cannot be traced"):
        autotp.verify(Given(later=False), PLAN, tp=2, inputs=X)


class Leaves(nn.Module):
    """It asks for the truth, and changes what no table of attributes shows."""

    def __init__(self, does: str) -> None:
        super().__init__()
        self.does, self.far, self.box = does, False, SimpleNamespace(far=False)
        self.counts = bytearray(1)

    def forward(self, x: Tensor) -> Tensor:
        far = bool(x.max() > 5)
        if self.does == "tensor":
            x.near = not far
        elif self.does == "variable":
            NEAR.set(not far)
        elif self.does == "bytes":
            self.counts[0] = not far
        elif self.does == "namespace":
            self.box.near = not far
        elif self.does == "gradients":
            torch.set_grad_enabled(not far)
        elif self.does == "raises" and far:
            raise ValueError("far")
        elif self.does == "endless":
            while not x.max() < 5:
                x = x / 2
        elif self.does == "caught":
            try:
                x.tolist()
            except Exception:
                return x * 3
        elif self.does == "same":
            return x if far else x * 2
        elif self.does == "strides":
            return x.mT.contiguous().mT * 2 if far else x.contiguous() * 2
        else:
            self.far = far
        return x * 2


NEAR: ContextVar[bool] = ContextVar("NEAR")
FIELDS = ("far",)


class Sees(nn.Module):
    """It goes by what was changed, and another way than any trace."""

    def __init__(self, does: str) -> None:
        super().__init__()
        self.leaves, self.up, self.down, self.does = Leaves(does), nn.Linear(6, 7), nn.Linear(7, 6), does

    def forward(self, x: Tensor) -> Tensor:
        x, far = x.clone(), False
        try:
            h = self.leaves(x)
        except ValueError:
            h, far = x, True
        if self.does == "tensor":
            far = not x.near
        elif self.does == "variable":
            far = not NEAR.get()
        elif self.does == "bytes":
            far = not self.leaves.counts[0]
        elif self.does == "namespace":
            far = not self.leaves.box.near
        elif self.does == "gradients":
            far = not torch.is_grad_enabled()
        elif self.does == "same":
            far = h is x
        elif self.does == "strides":
            far = not h.is_contiguous()
        elif self.does == "table":
            far = vars(self.leaves)["far"]
        elif self.does == "words":
            far = any(getattr(self.leaves, name) for name in FIELDS)
        h = self.up(h)
        return self.down(h.softmax(-1) if far else h)


HIDDEN = {
    "tensor": "AT320", "variable": "AT326.*sets NEAR", "bytes": "AT326.*sets counts",
    "namespace": "AT326.*sets box", "gradients": "AT320", "raises": "AT320", "same": "AT326.*a number",
    "strides": "AT326.*a number", "endless": "AT326.*a number",
    "caught": "AT326.*a number", "table": "AT326.*sets far", "words": "AT326.*sets far",
}  # fmt: skip


@pytest.mark.parametrize("does", HIDDEN)
def test_what_no_table_shows_is_read_by_nobody(does):
    with pytest.raises(PlanError, match=f"(?s){HIDDEN[does]}"):
        autotp.verify(Sees(does), PLAN, tp=2, inputs=X)
    assert torch.is_grad_enabled()


class Later(nn.Module):
    """In a later call it asks another module for a size that is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.others = 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = x * 2 if x.max() > 5 else x * 3
        return x * self.others[0].bias.shape[0] if self.calls > 3 else x


def test_what_a_later_call_may_read_of_others_is_whole():
    model = Turned(Later())
    model.turns.others.append(model.up)
    model.forward = lambda x: model.down(model.up(model.turns(x)))
    with pytest.raises(PlanError, match=r"(?s)AT326.*nothing sharded may be in it"):
        autotp.verify(model, PLAN, tp=2, inputs=X)
