"""The recorder: op sequence, identity of values, gradients, sources, places, and what it leaves alone."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autotp.trace import recorder
from autotp.trace.recorder import TraceError, record
from tests import architectures

X = torch.randn(3, 4)


def names(trace):
    return [str(n.target).removeprefix("aten.") for n in trace.ops()]


def node(trace, name):
    return next(n for n in trace.graph.nodes if n.op == "get_attr" and n.meta["name"] == name)


def op(trace, name):
    return next(n for n in trace.ops() if str(n.target).startswith(f"aten.{name}"))


def origins(trace):
    return {n.meta["name"]: n.meta["origin"] for n in trace.graph.nodes if n.op == "get_attr"}


class Layer(nn.Module):
    """One linear layer, and a function of its output."""

    def __init__(self, function=None):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.function = function

    def forward(self, x):
        return self.function(self, self.fc(x))


def test_a_layer():
    trace = record(nn.Sequential(nn.Linear(4, 5), nn.ReLU()), (X,), {})
    assert names(trace) == ["linear.default", "relu.default"]
    linear, relu = trace.ops()
    assert [n.meta["name"] for n in linear.args] == ["[0][0]", "0.weight", "0.bias"]
    assert linear.meta["module"] == "0" and relu.meta["module"] == "1" and relu.args == (linear,)
    assert linear.meta["val"] == recorder.Val((3, 5), torch.float32, True)
    assert [(o.name, o.node, o.cached) for o in trace.outputs] == [("", relu, False)]
    assert trace.calls == {"": 1, "0": 1, "1": 1} and trace.route == "recorder"
    trace.graph.lint()


def test_shared_modules_are_called_many_times():
    shared = nn.Linear(4, 4)
    trace = record(Twice(shared), (X,), {})
    assert [(n.meta["module"], n.meta["call"]) for n in trace.ops()] == [("a", 0), ("a", 1), ("", 0)]
    assert trace.calls == {"": 1, "a": 2}
    first, second, _ = trace.ops()
    assert first.args[1] is second.args[1]


class Twice(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.a, self.b = shared, shared

    def forward(self, x):
        return self.a(x) + self.b(x)


def test_tied_weights_are_one_node():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    trace = record(Tied(), (torch.zeros(2, 3, dtype=torch.long),), {})
    embedding, linear = trace.ops()
    assert embedding.args[0] is linear.args[1] is node(trace, "embed.weight")


def test_a_parameter_that_is_an_input_stays_a_parameter():
    layer = nn.Linear(4, 4)
    trace = record(Functional(layer), (X, layer.weight), {})
    assert op(trace, "linear").args[1] is node(trace, "layer.weight")
    assert [n.meta["name"] for n in trace.graph.nodes if n.op == "placeholder"] == ["[0][0]"]


class Functional(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, weight):
        return F.linear(x, weight)


def test_a_forward_that_is_called_directly_counts_as_a_call():
    trace = record(Layer(lambda m, h: m.fc.forward(h)), (X,), {})
    assert [(n.meta["module"], n.meta["call"]) for n in trace.ops()] == [("fc", 0), ("fc", 1)]


def test_in_place_ops_say_what_they_write():
    def write(module, h):
        h = h.clone()
        h[:, 0] = 1.0
        h.mul_(2)
        return h

    trace = record(Layer(write), (X,), {})
    clone, select, multiply = op(trace, "clone"), op(trace, "select"), op(trace, "mul_")
    written = next(n for n in trace.ops() if n.meta["mutates"])
    assert written.args[0] is select and written.meta["mutates"] == [select] and select.args[0] is clone
    assert multiply.meta["mutates"] == [clone]
    assert trace.outputs[0].node is multiply


def test_an_op_that_writes_and_returns_nothing_is_what_it_wrote():
    def write(module, h):
        parts = [h.clone(), h.clone()]
        torch._foreach_add_(parts, 1.0)
        return parts[0]

    trace = record(Layer(write), (X,), {})
    written = op(trace, "_foreach_add_")
    assert len(written.meta["mutates"]) == 2


def test_factory_functions_keep_their_identity():
    def made(module, h):
        table = torch.arange(4)
        mask = torch.ones(4, 4).tril().to(h.dtype)
        return h @ mask + table + h.new_zeros(4) + torch.full_like(h, 2)

    trace = record(Layer(made), (X,), {})
    assert origins(trace) == {"fc.weight": "parameter", "fc.bias": "parameter"}
    assert op(trace, "tril").args[0] is op(trace, "ones")


@pytest.mark.parametrize(
    "read",
    [
        lambda m, h: h @ m.fc.weight.data,
        lambda m, h: h @ m.fc.weight.detach(),
        lambda m, h: h + m.table.data,
        lambda m, h: h.data + 1,
    ],
)
def test_data_and_detach_keep_the_identity_and_lose_the_gradient(read):
    model = Layer(read)
    model.register_buffer("table", torch.ones(4))
    trace = record(model, (X,), {})
    assert "unknown" not in origins(trace).values()
    last = trace.ops()[-1]
    assert len(last.all_input_nodes) >= 1
    parameters = {n for n in last.meta["grads"] if n.op == "get_attr"}
    assert not parameters


def test_no_grad_regions_have_no_gradient():
    def scaled(module, h):
        with torch.no_grad():
            scale = module.fc(h).abs().amax()
        return h / scale

    trace = record(Layer(scaled), (X,), {})
    first, second = (n for n in trace.ops() if n.meta["module"] == "fc")
    assert {n.meta.get("name") for n in first.meta["grads"]} == {"[0][0]", "fc.weight", "fc.bias"}
    assert second.meta["grads"] == set() and not second.meta["val"].grad
    divide = op(trace, "div")
    assert divide.meta["grads"] == {first} and divide.meta["val"].grad
    assert not any(n.meta["grads"] for n in record(Layer(scaled), (X,), {}, grad=False).ops())


def test_a_frozen_parameter_counts_as_trained():
    layer = nn.Linear(4, 4).requires_grad_(False)
    assert len(op(record(layer, (X,), {}), "linear").meta["grads"]) == 3
    assert not layer.weight.requires_grad


# -- autograd.Function: no value may lose its identity in one


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x

    @staticmethod
    def backward(ctx, g):
        return g


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return -g


class _View(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view(2, 6)

    @staticmethod
    def backward(ctx, g):
        return g.view(3, 4)


class _Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return g * 2


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x + 1, x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, a, b):
        return a + b


class _Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = x.exp()
        ctx.save_for_backward(out)
        ctx.mark_non_differentiable(x.argmax(-1))
        return out

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("function", [_Square, _Same, _View, _Dirty, _Saved])
def test_a_value_keeps_its_identity_through_a_function(function, grad):
    trace = record(Layer(lambda m, h: function.apply(h + 1) + 2), (X,), {}, grad=grad)
    assert "unknown" not in origins(trace).values()
    inside = [n for n in trace.ops() if n.meta["custom"]]
    # Where its backward is recorded too, or never runs, its ops are like any others.
    recorded = [name for name, _, _ in trace.gradients]
    assert recorded in ([], [function.__name__]) and (grad or not recorded)
    assert {n.meta["custom"] for n in inside} == ({function.__name__} if grad and not recorded else set())
    assert not any(n.meta["grads"] for n in inside)
    reached, todo = set(), [trace.outputs[0].node]
    while todo:
        current = todo.pop()
        reached.add(current)
        todo += current.all_input_nodes
    assert op(trace, "linear") in reached
    assert bool(trace.ops()[-1].meta["grads"]) == grad


def test_a_function_with_two_results():
    trace = record(Layer(lambda m, h: sum(_Pair.apply(h))), (X,), {})
    assert set(origins(trace)) == {"fc.weight", "fc.bias"}
    assert [n.meta["custom"] for n in trace.ops()] == [None, "_Pair", "_Pair", None, None]


def test_functions_are_as_they_were():
    before = torch.autograd.Function.__dict__["apply"]
    record(Layer(lambda m, h: _Square.apply(h)), (X,), {})
    assert torch.autograd.Function.__dict__["apply"] is before
    out = _Square.apply(torch.ones(2, requires_grad=True))
    out.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_is_looked_into(reentrant):
    def checkpointed(module, h):
        return torch.utils.checkpoint.checkpoint(module.fc, h, use_reentrant=reentrant)

    trace = record(Layer(checkpointed), (X,), {})
    inner = trace.ops()[1]
    assert {n.meta.get("name") for n in inner.meta["grads"]} >= {"fc.weight", "fc.bias"}
    assert inner.meta["custom"] is None and inner.meta["module"] == "fc"


def test_a_number_read_from_a_tensor_is_an_op():
    trace = record(Layer(lambda m, h: h * h.abs().max().item()), (X,), {})
    item = op(trace, "item")
    assert item.meta["val"] is None and item.args == (op(trace, "max"),)


def test_a_value_from_nowhere_is_unknown(monkeypatch):
    made = []

    def foreign(module, h):
        recorder_of = made[0]
        return h + recorder_of.paused(lambda: torch.ones(4) * 2)

    real = recorder._Recorder.__init__

    def noted(self, *args):
        real(self, *args)
        made.append(self)

    monkeypatch.setattr(recorder._Recorder, "__init__", noted)
    assert origins(record(Layer(foreign), (X,), {}))["_constant0"] == "unknown"


def test_tensors_of_numpy_and_of_lists_are_constants():
    import numpy

    trace = record(
        Layer(lambda m, h: h + torch.from_numpy(numpy.ones(4)) + torch.tensor([1.0] * 4)), (X,), {}
    )
    assert sorted(origins(trace).values()) == ["constant", "constant", "parameter", "parameter"]


# -- outputs


@dataclasses.dataclass
class Result:
    logits: Tensor
    extra: Any = None


class Slotted:
    __slots__ = ("hidden", "unset")

    def __init__(self, hidden):
        self.hidden = hidden


class Holder:
    def __init__(self, hidden):
        self.hidden, self.again = hidden, self


@pytest.mark.parametrize(
    ("wrap", "place"),
    [
        (lambda h: h, ""),
        (lambda h: (h, None), "[0]"),
        (lambda h: {"a": [h]}, "a[0]"),
        (lambda h: Result(h), "logits"),
        (lambda h: Result(torch.zeros(1), extra=(1, Result(h))), "extra[1].logits"),
        (lambda h: Holder(h), "hidden"),
        (lambda h: Slotted(h), "hidden"),
        (lambda h: lambda: h, "<closure 0>"),
    ],
)
def test_outputs_are_found_wherever_they_are(wrap, place):
    trace = record(Layer(lambda m, h: wrap(h.relu())), (X,), {})
    found = {o.name: o.node for o in trace.outputs}
    assert found[place] is op(trace, "relu")


def test_a_deep_result_is_found():
    def deep(module, h):
        for _ in range(40):
            h = [h]
        return h

    assert len(record(Layer(deep), (X,), {}).outputs) == 1


def test_a_forward_that_is_a_generator_is_refused():
    class Lazy(nn.Module):
        def forward(self, x):
            yield x

    with pytest.raises(TraceError, match="the forward is a generator, which runs after it has returned"):
        record(Lazy(), (X,), {})


def test_caches_are_marked():
    model = architectures.build("llama")
    trace = record(model, (), {**architectures.inputs(model), "use_cache": True}, grad=False)
    cached = {o.name for o in trace.outputs if o.cached}
    assert "past_key_values.layers[0].keys" in cached and "logits" not in cached
    assert [o.name for o in trace.outputs if not o.cached] == ["logits"]


def test_what_a_forward_leaves_on_modules_is_noted():
    def keep(module, h):
        module.last = h.relu()
        module.seen = [h]
        module.plain = 3
        return h

    trace = record(Layer(keep), (X,), {})
    assert {o.name: str(o.node.target) for o in trace.stored} == {
        "last": "aten.relu.default",
        "seen[0]": "aten.linear.default",
    }


# -- errors


def test_an_error_names_module_and_line():
    def broken(module, h):
        return h.view(5, 5)

    model = nn.Sequential(nn.Identity(), Layer(broken))
    with pytest.raises(TraceError) as caught:
        record(model, (X,), {})
    assert str(caught.value) == "RuntimeError: shape '[5, 5]' is invalid for input of size 12"
    assert caught.value.module == "1" and not caught.value.dynamic
    assert caught.value.source.text.strip() == "return h.view(5, 5)"
    assert caught.value.source.file.endswith("test_trace_recorder.py")


def test_an_error_that_is_caught_by_the_model_is_none():
    def careful(module, h):
        try:
            module.inner(h)
        except ValueError:
            h = h + 1
        return h

    def bad(module, h):
        raise ValueError("no")

    model = Layer(careful)
    model.inner = Layer(bad)
    trace = record(model, (X,), {})
    assert trace.ops()[-1].meta["module"] == ""
    model.function = lambda m, h: careful(m, h).view(5, 5)
    with pytest.raises(TraceError) as caught:
        record(model, (X,), {})
    assert caught.value.module == ""


@pytest.mark.parametrize(
    "decides",
    [
        lambda h: h.sum() > 0,
        lambda h: (h > 0).sum().item() <= h.shape[0],
        lambda h: h.shape[0] < (h > 0).sum().item(),
        lambda h: h.shape[0] - 2 * (h > 0).sum().item() + h.shape[1] > 1,
    ],
)
def test_a_branch_on_values_is_dynamic(decides):
    with pytest.raises(TraceError) as caught:
        record(Layer(lambda m, h: h if decides(h) else -h), (X,), {})
    assert caught.value.dynamic and "data-dependent" in str(caught.value)


# -- hooks, boundaries, compiled parts


def test_users_hooks_run_and_belong_to_the_module_that_calls():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    model[0].register_forward_hook(lambda m, args, out: out * 2)
    trace = record(model, (X,), {})
    assert names(trace) == ["add.Tensor", "linear.default", "mul.Tensor"]
    assert [n.meta["module"] for n in trace.ops()] == ["", "0", ""]


def test_boundaries_stand_directly_around_the_layer():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_hook(lambda m, args, out: out * 2)

    def after(path, out):
        return out.narrow(-1, 0, 1).expand(3, 8).clone() if path == "0" else None

    def before(path, args):
        return (args[0].narrow(-1, 0, 2).clone(),) if path == "0" else None

    trace = record(model, (X,), {}, shapes={"0.weight": (4, 2)}, before=before, after=after)
    linear, multiply = trace.ops()
    assert linear.args[0].op == "placeholder" and multiply.args[0] is linear
    assert multiply.meta["val"].shape == (3, 8)


def test_compiled_parts_run_as_they_are_written():
    @torch.compile(backend="eager")
    def scaled(h):
        return h * 2

    assert names(record(Layer(lambda m, h: scaled(h)), (X,), {})) == ["linear.default", "mul.Tensor"]


def test_local_shapes():
    trace = record(nn.Linear(4, 6), (X,), {}, shapes={"weight": (2, 4), "bias": (2,)})
    assert op(trace, "linear").meta["val"].shape == (3, 2)


def test_meta_models_and_their_plain_tensors():
    with torch.device("meta"):
        model = Layer(lambda m, h: h + m.table)
        model.table = torch.ones(4)
    trace = record(model, (X,), {})
    assert origins(trace)["table"] == "constant" and model.table.is_meta


def test_a_second_forward_on_what_the_first_gave():
    model = architectures.build("llama")
    ids = architectures.inputs(model)["input_ids"]

    def step(out, before):
        return (), {"input_ids": torch.zeros(2, 1, dtype=torch.long), "past_key_values": out.past_key_values}

    trace = record(model, (), {"input_ids": ids, "use_cache": True}, grad=False, then=step)
    assert trace.calls["model.layers.1.self_attn.q_proj"] == 1
    linears = [n for n in trace.ops() if n.meta["module"] == "model.layers.1.self_attn.q_proj"]
    assert [(n.meta["call"], n.meta["val"].shape[1]) for n in linears] == [(0, 7), (1, 1)]
    assert "unknown" not in origins(trace).values()
    assert [o.node.meta["val"].shape[1] for o in trace.outputs if o.name == "logits"] == [7, 1]
    trace.graph.lint()


def test_opaque_modules():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), nn.ReLU())
    trace = record(model, (X,), {}, opaque=frozenset({"1"}))
    assert names(trace) == ["linear.default", "opaque", "relu.default"]
    opaque = trace.ops()[1]
    assert opaque.args[0] is trace.ops()[0] and opaque.meta["val"].shape == (3, 4)
    assert [n.meta["name"] for n in opaque.args[1:]] == ["1.0.weight", "1.0.bias", "1.1.weight", "1.1.bias"]
    assert trace.opaque == ("1",) and "1.0" not in trace.calls


def test_a_missing_hook_is_said(monkeypatch):
    monkeypatch.setattr(recorder, "MISSING", "no module named x")
    with pytest.raises(
        TraceError, match=r"this torch lacks a hook that the recorder needs \(no module named x\)"
    ):
        record(nn.Linear(4, 4), (X,), {})


@pytest.mark.parametrize("draw", [lambda: torch.rand([]), lambda: torch.rand(1), lambda: random.random()])
def test_a_forward_that_draws_to_decide_goes_on(draw):
    def dropped(module, h):
        return h if draw() < 0.1 else h * 2

    first, second = (record(Layer(dropped), (X,), {}) for _ in range(2))
    assert names(first)[-1] == "mul.Tensor" and names(first) == names(second)


def test_the_flags_of_a_run_time_trace():
    seen = []

    def look(module, h):
        seen.append((torch.compiler.is_compiling(), torch.compiler.is_exporting()))
        return h

    model = Layer(look)
    record(model, (X,), {})
    record(model, (X,), {}, exporting=False)
    record(model, (X,), {}, exporting=False, compiling=True)
    assert seen == [(True, True), (False, False), (True, False)]
