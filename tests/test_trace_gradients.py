"""The backward of an `autograd.Function` of one tensor is recorded, and proven as its forward is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autotp
from autotp.trace.recorder import record
from tests.models import MLP

PLAN = {"fc1": "column", "fc2": "row"}


class Swish(torch.autograd.Function):
    """Elementwise, forward and backward, as Megatron's fused functions are."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return gradient * (s + x * s * (1 - s))


class Averaged(Swish):
    """Its gradient is another one on a part of the features."""

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mean(-1, keepdim=True).expand_as(gradient)


class Broken(Swish):
    """Its backward cannot be recorded."""

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float(gradient.sum())


def test_an_elementwise_function_is_exact():
    result = autotp.verify(MLP(between=Swish.apply), PLAN, tp=2)
    assert result.ok and result.tolerance == 1e-9, str(result)


@pytest.mark.parametrize(("function", "codes"), [(Averaged, {"AT303"}), (Broken, {"AT323"})])
def test_a_backward_that_is_wrong_on_a_shard_or_unknown_is_refused(function, codes):
    analysis = autotp.analyze(MLP(between=function.apply), PLAN, tp=2)
    assert {d.code for d in analysis.diagnostics if d.severity == "error"} == codes


def test_the_gradient_is_a_value_of_the_graph():
    trace = record(nn.Sequential(nn.Linear(3, 4), MLP(4, 5, Swish.apply)), (torch.zeros(2, 3),), {})
    ((name, value, found),) = trace.gradients
    assert name == "Swish" and value.meta["val"].shape == found.meta["val"].shape == (2, 5)
    assert [n for n in trace.ops() if n.meta["custom"]] == []
