"""Collectives: what each mapping runs, and what the styles imply."""

from autotp.collectives import OPERATIONS, Collective, collectives_of, expected_collectives
from autotp.match import match
from autotp.plan import Plan
from tests.test_cost import LLAMA, described, llama


def test_every_mapping_says_what_it_runs():
    ran = {
        mapping: [(c.operation, c.direction) for c in collectives_of(mapping, "m")] for mapping in OPERATIONS
    }
    assert ran == {
        "copy": [("all-reduce", "backward")],
        "copy_shared": [("all-reduce", "backward")],
        "reduce": [("all-reduce", "forward")],
        "gather": [("all-gather", "forward")],
        "scatter": [("all-gather", "backward")],
        "reduce_scatter": [("reduce-scatter", "forward"), ("all-gather", "backward")],
        "all_gather": [("all-gather", "forward"), ("reduce-scatter", "backward")],
        "share": [],
        "slice": [],
    }


def expected(inventory, rules, tp=3):
    found = expected_collectives(inventory, match(Plan(rules=rules), inventory, tp))
    return [
        (c.mapping, c.module, c.direction)
        for c in found
        if "layers." not in c.module or "layers.0" in c.module
    ]


def test_a_llama_layer_has_two_each_way_since_q_k_v_share_one_copy():
    assert sorted(expected(llama(), LLAMA)) == [
        ("copy", "lm_head", "backward"),
        ("copy", "model.layers.0.mlp.gate_proj", "backward"),
        ("copy", "model.layers.0.self_attn.q_proj", "backward"),
        ("gather", "lm_head", "forward"),
        ("reduce", "model.embed_tokens", "forward"),
        ("reduce", "model.layers.0.mlp.down_proj", "forward"),
        ("reduce", "model.layers.0.self_attn.o_proj", "forward"),
    ]


def test_column_layers_that_read_other_values_have_a_copy_each():
    inventory = described({"a.q.weight": (8, 4), "a.k.weight": (8, 6), "b.q.weight": (8, 4)})
    assert expected(inventory, {"q": "column", "k": "column"}) == [
        ("copy", "a.k", "backward"),
        ("copy", "a.q", "backward"),
        ("copy", "b.q", "backward"),
    ]


def test_split_input_gathers_in_backward():
    inventory = described({"fc.weight": (4, 8)})
    assert expected(inventory, {"fc": {"style": "row", "split_input": True}}) == [
        ("scatter", "fc", "backward"),
        ("reduce", "fc", "forward"),
    ]


def test_a_sharded_vector_moves_nothing():
    inventory = described({"attn.sinks": (6,), "attn.fc.weight": (6, 4)})
    assert expected(inventory, {"attn.sinks": {"style": "column", "dim": 0}}) == []


def test_a_collective_names_what_runs():
    assert Collective("reduce_scatter", "norm", "backward").operation == "all-gather"
