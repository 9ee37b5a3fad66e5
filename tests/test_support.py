"""Models that are refused by name."""

from __future__ import annotations

import sys
import types
import warnings

import pytest
import torch
from torch import nn

import autotp
from autotp.diagnostic import errors
from autotp.trace.support import unsupported


def lines(model):
    return [d.render() for d in unsupported(model)]


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def test_an_ordinary_model_is_fine():
    built = model()
    built[0].register_forward_hook(lambda m, args, out: out)
    built[1].weight.requires_grad_(False)
    built[1].register_buffer("table", torch.ones(2))
    assert lines(built) == []


def test_scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(model())
    (line,) = lines(scripted)
    assert line == (
        "error[AT221]: RecursiveScriptModule is a ScriptModule: its forward cannot be traced or rewritten\n"
        "  = help: shard the module before it is scripted"
    )


def test_compiled():
    (line,) = lines(torch.compile(model(), backend="eager"))
    assert line == (
        "error[AT221]: the model is compiled\n  = help: shard the model first, then call torch.compile on it"
    )


class PastForward(nn.Linear):
    """A call that comes past what stands in the place of forward."""

    def __call__(self, x):
        return self.computed(x)

    def computed(self, x):
        return nn.functional.linear(x, self.weight)


class ByWay(PastForward):
    def computed(self, x):
        return self.forward(x)


class ByProperty(nn.Linear):
    @property
    def forward(self):
        return super().forward


class Above(PastForward):
    def __call__(self, x):
        return nn.Module.__call__(self, x)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (PastForward, "has a __call__ that does not call forward"),
        (ByProperty, "has a property as its forward"),
        (ByWay, None),
        (Above, None),
    ],
)
def test_called_past_its_forward(kind, told):
    message = (
        f"error[AT225]: {kind.__name__} {told}, so none of its calls could be compared with the proven ones\n"
        "  = help: let forward be a method that computes what a call gives"
    )
    assert lines(kind(4, 4)) == ([message] if told else [])
    assert lines(nn.Sequential(kind(4, 4))) == []


def test_parametrized():
    built = model()
    nn.utils.parametrizations.weight_norm(built[1])
    (line,) = lines(built)
    assert line == (
        "error[AT222]: 1: its weight is parametrized, so it is no tensor of its own\n"
        "  = help: call torch.nn.utils.parametrize.remove_parametrizations first"
    )


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
def test_a_computed_weight_is_said_once(norm):
    built = model()
    norm(built[0])
    found = errors(autotp.analyze(built, {"0": "column", "1": "row"}, tp=2).diagnostics)
    assert [(each.code, each.module) for each in found] == [("AT222", "0")]


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_weight_norm(norm):
    built = model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        norm(built[0])
    assert (
        "error[AT222]: 0: its weight is computed by a weight norm hook\n"
        "  = help: call torch.nn.utils.remove_weight_norm first"
    ) in lines(built)


def test_hooked_by_accelerate():
    built = model()
    built[0]._hf_hook = object()
    assert lines(built) == [
        "error[AT223]: 0: it is hooked by accelerate (device_map)\n"
        "  = help: load the model without device_map"
    ]


def test_wrapped():
    assert lines(nn.DataParallel(model()))[0] == (
        "error[AT223]: it is wrapped by DataParallel\n  = help: shard the model first, then wrap it"
    )


def test_pruned():
    built = model()
    nn.utils.prune.l1_unstructured(built[1], "weight", amount=0.5)
    assert lines(built) == [
        "error[AT222]: 1: its weight is computed by a pruning hook\n"
        "  = help: call torch.nn.utils.prune.remove first"
    ]


def test_quantised():
    package = types.ModuleType("bitsandbytes.nn")
    made = type("Linear4bit", (nn.Linear,), {"__module__": package.__name__})
    assert "bitsandbytes" not in sys.modules
    assert lines(nn.Sequential(made(4, 4))) == [
        "error[AT224]: 0: Linear4bit holds quantised weights, which autotp cannot cut yet\n"
        "  = help: shard the model before it is quantised"
    ]


def test_tensors_that_are_not_plain():
    class Odd(torch.Tensor):
        pass

    built = model()
    built[1].weight = nn.Parameter(torch.ones(4, 4).as_subclass(Odd))
    (line,) = lines(built)
    assert line == (
        "error[AT224]: 1: weight is a Odd, not a plain tensor\n"
        "  = help: autotp shards plain tensors; shard first, then wrap"
    )


def test_lazy_layers():
    assert lines(nn.Sequential(nn.LazyLinear(4))) == [
        "error[AT224]: 0: weight is not yet a tensor: its shape is set by the first forward\n"
        "  = help: run the model once, then shard it",
        "error[AT224]: 0: bias is not yet a tensor: its shape is set by the first forward\n"
        "  = help: run the model once, then shard it",
    ]
