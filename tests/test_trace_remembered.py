"""Ops that are not run again give what a run would have given, and what notices it is recorded without."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.decide import decide_with_proof
from autotp.rewrite.edits.edit import Edits
from autotp.rewrite.edits.solve import _Search
from autotp.trace import hooks
from autotp.trace.inputs import make
from autotp.trace.layers import Layers
from autotp.trace.modes import capture_modes, signature
from autotp.trace.recorder import record
from autotp.trace.remembered import Forgotten, Remembered
from tests import models

X = torch.randn(3, 5, 4)


class Runs(nn.Module):
    """A module of one function."""

    def __init__(self, function):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(4, 4)), function

    def forward(self, x):
        return self.function(x, self.weight)


def traced(module, x=X):
    """A trace of a module whose ops are known from two earlier ones; and whether they stayed so."""
    plain = record(module, (x,), {}, layers=Layers(remember=False))
    layers = Layers()
    for _ in range(2):
        again = record(module, (x,), {}, layers=layers)
        assert signature(again) == signature(plain)
    return again, layers.remember


@pytest.fixture
def compared(monkeypatch):
    """Each op that is not run again runs after all, and the results are compared. Gives how many did."""
    found = []

    def run(self, func, args, kwargs):
        out = real(self, func, args, kwargs)
        with torch.random.fork_rng(devices=()):
            wanted = func(*args, **kwargs)
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        for one, two in zip(*map(torch.utils._pytree.tree_leaves, (out, wanted)), strict=True):
            assert type(one) is type(two)
            if isinstance(one, torch.Tensor):
                found.append(func)
                assert hooks.like(one) == hooks.like(two)
                assert [one is t for t in tensors] == [two is t for t in tensors]
                same = [[hooks.storage(o) == hooks.storage(t) for t in tensors] for o in (one, two)]
                assert same[0] == same[1]
            else:
                assert one == two
        return out

    def written(self, written, inputs):  # it would be written twice
        self._on = False

    real = Remembered.run
    monkeypatch.setattr(Remembered, "run", run)
    monkeypatch.setattr(Remembered, "written", written)
    return found


def many(x, weight):
    """Ops that view, ops that copy, ops with several results, ops that give what they are given."""
    y = torch.nn.functional.linear(x, weight).to(torch.float32).contiguous()
    a, b = y.chunk(2, -1)
    c, d, e = y.split([1, 1, 2], -1)
    values, places = y.topk(2, -1)
    parts = [t.unsqueeze(0) for t in y.unbind(1)]
    mean, variance = torch.var_mean(y, -1)
    z = torch.cat([a, b.flip(-1), values, e.expand(3, 5, 2)], -1).transpose(1, 2).reshape(3, -1)
    z = torch.where(z > 0, z, z.new_zeros(())).masked_fill(z.isnan(), 0.0)
    ones = torch.ones(5, 5, dtype=torch.bool).tril()[None] & torch.arange(5).lt(4)
    w = torch.einsum("bsd,btd->bst", y, y).masked_fill(~ones, -1.0).softmax(-1) @ y
    w = torch.nn.functional.layer_norm(w, (4,)) + torch.nn.functional.dropout(w, 0.5, training=False)
    w = w + torch.nn.functional.dropout(w, 0.5) + (c * d).squeeze(-1)[..., None] + y.detach()
    with torch.no_grad():
        v = y.view(3, 20).t()[:2]
    half = y.bfloat16() @ weight.bfloat16()
    return z, w, mean.sum() + variance.mean(), places, v, half, *parts


@pytest.mark.parametrize(
    "build", [lambda: Runs(many), lambda: models.llama(num_hidden_layers=1)], ids=["many", "llama"]
)
def test_what_is_made_is_what_a_run_gives(build, compared):
    model = build()
    if isinstance(model, Runs):
        for _ in range(2):
            record(model, (X,), {})
    else:
        ids = torch.zeros(2, 7, dtype=torch.long)
        for _ in range(2):
            record(model, (), {"input_ids": ids})
    assert len(compared) > 60


def test_ops_are_not_run_again(monkeypatch):
    ran = []
    real = Remembered._found
    monkeypatch.setattr(Remembered, "_found", lambda *given: ran.append(given) or real(*given))
    module = Runs(lambda x, w: (x @ w).tanh().view(15, 4))
    trace, remembered = traced(module)
    assert remembered and len(trace.ops()) == 3
    del ran[:]
    record(module, (X,), {})
    assert not ran


def gradient_inside(x, weight):
    y = (x @ weight).sum()
    (slope,) = torch.autograd.grad(y, weight, create_graph=True, allow_unused=True)
    return y if slope is None else x @ slope


def history(x, weight):
    y = x @ weight
    return y if y.grad_fn is None else y.relu()


def leaf(x, weight):
    y = x @ weight
    return y if y.is_leaf else y.relu()


def base(x, weight):
    y = (x @ weight).view(15, 4)
    return y if y._base is None else y.relu()


def caught(x, weight):
    y = x @ weight
    try:
        other = y.grad_fn
    except BaseException:
        other = None
    return y if other is None else y.relu()


def written_below_a_view(x, weight):
    """A write gives a view of what is written a gradient."""
    whole = torch.zeros(3, 5, 4)
    row = whole[0]
    whole.copy_(x @ weight)
    return row * 2


def written_view(x, weight):
    y = x.clone()
    y[:, 0].copy_((x @ weight)[:, 0])
    return y + 1


def kept_gradient(x, weight):
    y = x @ weight
    y.retain_grad()
    return y + 1


@pytest.mark.parametrize(
    "function",
    [gradient_inside, history, leaf, base, caught, written_below_a_view, written_view, kept_gradient],
    ids=lambda function: function.__name__,
)
def test_what_notices_it_is_recorded_without(function):
    trace, remembered = traced(Runs(function))
    assert not remembered
    if function in (history, leaf, base, caught):
        assert str(trace.ops()[-1].target) == "aten.relu.default"


def test_a_write_that_changes_no_history_is_not_noticed():
    def function(x, weight):
        mask = torch.ones(5, 5)
        mask[0].fill_(0.0)
        with torch.no_grad():
            weight[0].mul_(1.0)
        return (x @ weight) * mask[0, :4]

    assert traced(Runs(function))[1]


class Counts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def in_another_mode(x, weight):
    with Counts() as counts:
        y = x @ weight
    return y.relu() if counts.count else y


def hooked_saving(x, weight):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = (x @ weight).tanh()
    return y.relu() if saved else y


def transformed(x, weight):
    return torch.vmap(lambda row: row @ weight)(x)


def derived_forward(x, weight):
    return torch.func.jvp(lambda t: t @ weight, (x,), (x,))[1]


def in_inference(x, weight):
    with torch.inference_mode():
        mask = torch.ones(4).mul(2.0)
    return x @ weight.detach() * mask.clone()


def conjugated(x, weight):
    z = torch.complex(x @ weight, x)
    return z.conj().imag.neg() + torch.view_as_real(z)[..., 0]


def cast(x, weight):
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ weight
    return y, x @ weight


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch, in jvp
@pytest.mark.parametrize(
    "function",
    [in_another_mode, hooked_saving, transformed, derived_forward, in_inference, conjugated, cast],
    ids=lambda function: function.__name__,
)
def test_torchs_state_is_a_part_of_what_is_known(function):
    module = Runs(function)
    record(Runs(lambda x, w: (x @ w).tanh()), (X,), {})  # known outside of it
    trace, _ = traced(module)
    if function in (in_another_mode, hooked_saving):
        assert str(trace.ops()[-1].target) == "aten.relu.default"
    if function is cast:
        first, second = (o.node.meta["val"].dtype for o in trace.outputs)
        assert (first, second) == (torch.bfloat16, torch.float32)


def read_otherwise(x, weight):
    return (x @ weight).view(torch.int32).view(torch.float32), (x @ weight).view(15, 4)


def negative(x, weight):
    y = torch._neg_view(x @ weight)
    return y.resolve_neg(), (x @ weight).resolve_neg()


def sparse(x, weight):
    return x @ torch.sparse.mm(torch.eye(4).to_sparse(), weight)


@pytest.mark.parametrize("function", [read_otherwise, negative, sparse], ids=lambda f: f.__name__)
def test_what_an_op_is_known_by_without_gradients_is_right_with_them(function):
    module = Runs(function)
    record(module, (X,), {}, grad=False)
    traced(module)


def test_numbers_that_are_equal_but_of_other_types_are_told_apart():
    def dtype(number):
        trace, _ = traced(Runs(lambda x, w: torch.full((2,), number)), X)
        return trace.outputs[0].node.meta["val"].dtype

    assert [dtype(n) for n in (1, 1.0, True)] == [torch.int64, torch.float32, torch.bool]


def test_a_tensor_without_values_is_told_from_one_with():
    """What is made of numbers keeps them, and a forward may ask for them."""

    def function(x, weight):
        flag = torch.tensor(3.0) + 1
        return x @ weight if flag.item() > 3 else x

    for _ in range(2):
        assert len(record(Runs(function), (X,), {}).ops()) > 1


def test_the_data_of_repeated_layers_is_not_confused():
    """Tensors that stand for those of other layers see one memory: it does not tell which one it is."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc, self.out = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.out(self.fc(self.norm(x)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x):
            states = []
            for block in self.blocks:
                x = block(x)
                states.append(x)
            return x, states[1].data * 2

    model = Model()
    layers = Layers.of(model)
    trace = record(model, (X,), {}, layers=layers)
    assert layers.groups and not trace.repeats
    read = trace.outputs[1].node.all_input_nodes[0]
    assert read.meta["module"] == "blocks.1.out"


def test_modes_of_a_model_whose_forward_notices(monkeypatch):
    """It is recorded anew once, not in each mode."""
    forgotten = []
    real = Remembered.forget
    monkeypatch.setattr(Remembered, "forget", lambda self: forgotten.append(bool(self._made)) or real(self))
    module = Runs(history)
    found = capture_modes(module, make(module, X), Layers())
    assert found.traces and sum(forgotten) == 1


class Asks(nn.Module):
    """A model whose forward asks for a history, and which is edited to run on ranks."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.heads = nn.Linear(8, 12), nn.Linear(12, 8), 6

    def forward(self, x):
        h = self.fc1(x)
        return self.fc2(h.view(-1, self.heads, 2).flatten(1) if h.grad_fn is None else h * 2)


def test_that_a_forward_notices_is_found_once(monkeypatch):
    """Not by each rank, mode and guided trace again."""
    forgotten = []
    real = Remembered.forget
    monkeypatch.setattr(Remembered, "forget", lambda self: forgotten.append(bool(self._made)) or real(self))
    plan = {"fc1": {"style": "column", "heads": 6}, "fc2": {"style": "row", "heads": 6}}
    analysis = autotp.analyze(Asks(), plan, tp=4, inputs=torch.randn(3, 8))
    assert analysis.ok and len(analysis.modes) > 2 and "local(self.heads)" in analysis.edits
    assert sum(forgotten) == 1


def test_a_guided_run_that_notices_is_made_anew():
    plan = {"fc1": {"style": "column", "heads": 6}, "fc2": {"style": "row", "heads": 6}}
    proof = decide_with_proof(Asks(), autotp.Plan(rules=plan), tp=2, inputs=torch.randn(3, 8))[1]
    whole, guides = next(iter(proof.propagations.values())), []

    def run(mode, of, rank, guide):
        guides.append(guide)
        if len(guides) == 1:
            raise Forgotten
        return of.trace

    guide, tried = _Search(Asks(), [], [0], run)._guide(Edits(), None, whole, 0)
    assert guide is guides[1] is not guides[0] and guide.finished and not tried
