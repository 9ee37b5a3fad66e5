"""torch.export gives the same trace as the recorder."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autotp.trace.export import export
from autotp.trace.graph import GRADIENT, TraceError
from autotp.trace.recorder import record
from tests import architectures, models

X = torch.randn(3, 4)
SLOW = [
    "qwen3", "gemma2", "phi", "gpt_neox", "gpt2", "opt", "bloom", "mixtral",
    "bert", "distilbert", "albert", "t5", "bart", "whisper", "vit", "mamba",
]  # fmt: skip
# Ops that say something of a tensor, or hand it on as it is: their presence depends on strides, and on
# how a constant is held.
SILENT = ("aten._assert_tensor_metadata", "aten.contiguous", "aten.lift_fresh")


def _start(trace, back):
    """The gradient from which a backward that ends in `back` was recorded."""
    order = list(trace.graph.nodes)
    return next(n for n in reversed(order[: order.index(back)]) if n.target is GRADIENT)


def told(trace, gradients=True):
    """All that a proof reads: op, place, results, gradients, which values go in."""
    ids, lines = {}, []
    ends = {back: gradient for _, _, back in trace.gradients for gradient in [_start(trace, back)]}
    until = None  # the last op of a recorded backward, which export does not show
    for node in trace.graph.nodes:
        until = next((back for back, start in ends.items() if start is node), until)
        if until is not None:
            until = None if node is until else until
            continue
        if node.op == "call_function" and str(node.target).startswith(SILENT):
            ids[node] = ids[node.all_input_nodes[0]]
            continue
        ids[node] = node.meta["name"] if node.op in ("placeholder", "get_attr") else len(lines)
        if node.op == "get_attr" and node.meta["origin"] == "constant":
            ids[node] = "constant"
        if node.op == "call_function":
            grads = sorted(str(ids[n]) for n in node.meta["grads"])
            inputs = [ids[n] for n in node.all_input_nodes]
            val = node.meta["val"]
            vals = val if isinstance(val, list) else [val]
            shapes = [(v.shape, v.grad and gradients) for v in vals if v is not None]
            grads = grads if gradients else []
            lines.append((str(node.target), node.meta["module"], node.meta["call"], shapes, inputs, grads))
    borders = [
        {
            path: [[(name, ids[n]) for name, n in call] for call in calls]
            for path, calls in table.items()
            if any(calls)
        }
        for table in (trace.entered, trace.left)
    ]
    stacks = [n.meta["stack"] for n in trace.ops() if not str(n.target).startswith(SILENT)]
    return lines, [(o.name, ids[o.node]) for o in trace.outputs], borders, stacks


def same(model, args=(), kwargs=None, **options):
    kwargs = kwargs or {}
    ours, theirs = record(model, args, kwargs, **options), export(model, args, kwargs, **options)
    assert theirs.route == "export"
    # What happens inside of an autograd.Function is known to the recorder alone.
    gradients = not ours.gradients and not any(n.meta["custom"] for n in ours.ops())
    for one, other in zip(told(ours, gradients)[0], told(theirs, gradients)[0], strict=True):
        assert one == other
    assert told(ours)[1:3] == told(theirs)[1:3]
    if not ours.gradients:
        assert told(ours)[3] == told(theirs)[3]
    assert ours.calls == theirs.calls
    return ours, theirs


@pytest.mark.parametrize("grad", [True, False])
def test_an_mlp(grad):
    ours, theirs = same(models.MLP(), (torch.randn(2, 16),), grad=grad)
    sources = [(n.meta["source"].file, n.meta["source"].line) for n in ours.ops()]
    assert [(n.meta["source"].file, n.meta["source"].line) for n in theirs.ops()] == sources


def test_llama():
    model = architectures.build("llama")
    same(model, (), architectures.inputs(model))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_architectures(name):
    model = architectures.build(name)
    same(model, (), architectures.inputs(model))


class Regions(nn.Module):
    """Regions without gradients, shared modules, in-place ops, items, constants, detach."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.again = self.fc
        self.register_buffer("table", torch.ones(4))
        self.scale = torch.ones(4)

    def forward(self, x, *, y):
        with torch.no_grad():
            z = self.fc(x) * self.table
        h = self.again(self.fc(x)) + z + self.scale
        h = h.clone()
        h.add_(1)
        a, b = h.chunk(2, -1)
        return {"a": a + y.detach(), "b": [b, z]}


def test_regions_and_shared_modules():
    ours, _ = same(Regions(), (X,), {"y": torch.randn(3, 2)})
    assert [n.meta["call"] for n in ours.ops() if n.meta["module"] == "fc"] == [0, 1, 2]


def test_local_shapes_and_boundaries():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))

    def after(path, out):
        return out.narrow(-1, 0, 1).expand(3, 6).clone() if path == "0" else None

    def before(path, args):
        return (args[0].narrow(-1, 0, 3).clone(),) if path == "1" else None

    shapes = {"0.weight": (2, 4), "0.bias": (2,), "1.weight": (4, 3)}
    _, theirs = same(model, (X,), {}, shapes=shapes, before=before, after=after)
    assert [n.meta["val"].shape for n in theirs.ops()] == [(3, 2), (3, 4)]


def test_a_large_model_takes_no_memory():
    with torch.device("meta"):
        model = nn.Linear(1 << 20, 1 << 20)
    trace = export(model, (torch.empty(2, 1 << 20, device="meta"),), {})
    assert trace.ops()[0].meta["val"].shape == (2, 1 << 20)


def test_errors_name_module_and_line():
    class Broken(nn.Module):
        def forward(self, x):
            return x.view(5, 5)

    with pytest.raises(TraceError) as caught:
        export(nn.Sequential(nn.Identity(), Broken()), (X,), {})
    assert caught.value.module == "1"
    assert caught.value.source.text.strip() == "return x.view(5, 5)"
