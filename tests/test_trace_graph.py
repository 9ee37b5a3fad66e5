"""What a recording gives, and how tensors are found in any result."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
from torch import fx

from autotp.trace.graph import OPAQUE, Output, Trace, Val, tensors_in

A, B = torch.ones(1), torch.ones(2)


class Bound:
    def __init__(self):
        self.held = A

    def method(self):
        return self.held


def places(value):
    return [name for name, _, _ in tensors_in(value)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (A, [""]),
        ([A, (B, {"x": A})], ["[0]", "[1][0]", "[1][1].x"]),
        ({"a": A, 3: B}, ["a", "3"]),
        (functools.partial(print, A, key=B), ["[0]", "[1]"]),
        (Bound().method, ["__self__.held"]),
        ("text", []),
        (None, []),
        (torch.nn.Linear(2, 2), []),
        (torch.distributions.Normal(A, A), ["loc", "scale"]),
    ],
)
def test_places(value, expected):
    assert places(value) == expected


def test_one_tensor_at_two_places_is_found_at_both():
    assert places([A, A]) == ["[0]", "[1]"]


def test_objects_that_hold_themselves_end():
    value = [A]
    value.append(value)
    assert places(value) == ["[0]"]


def test_model_outputs_name_each_field_once():
    from transformers.modeling_outputs import CausalLMOutputWithPast

    assert places(CausalLMOutputWithPast(logits=A, hidden_states=(B,))) == ["logits", "hidden_states[0]"]


def test_what_a_cache_holds_is_marked():
    from transformers import DynamicCache

    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2, 3), 0)
    found = list(tensors_in({"logits": A, "cache": cache}))
    assert [(name, cached) for name, _, cached in found] == [
        ("logits", False),
        ("cache.layers[0].keys", True),
        ("cache.layers[0].values", True),
    ]


def test_ops_leave_out_the_items():
    trace = Trace()
    node = trace.graph.placeholder("x")
    split = trace.graph.call_function(torch.ops.aten.chunk.default, (node, 2))
    trace.graph.call_function(operator.getitem, (split, 0))
    assert trace.ops() == [split]
    assert Output("x", node, False).node is node and Val((1,), torch.bool, False).shape == (1,)


def test_an_opaque_node_prints_and_does_not_run():
    graph = fx.Graph()
    node = graph.call_function(OPAQUE, (graph.placeholder("x"),))
    graph.output(node)
    assert str(OPAQUE) == "opaque" and node.name.startswith("opaque")
    with pytest.raises(RuntimeError, match="there is no op to run for opaque"):
        OPAQUE(A)
