"""Bytes are exact, collectives are counted by style, and what stays whole is said."""

import pytest

from autotp.checkpoint.inventory import describe_tensors
from autotp.cost import collapsed, cost_findings, left_whole, rank_bytes, sharded_fraction
from autotp.header import Entry
from autotp.inventory import Inventory, ModuleInfo, TensorInfo
from autotp.match import match
from autotp.placement import Shard, deal
from autotp.plan import Plan
from tests.sparse import llama_config, llama_shapes

LLAMA = {
    "embed_tokens": "vocab",
    "q_proj": {"style": "column", "heads": "num_attention_heads"},
    "k_proj": {"style": "column", "heads": "num_key_value_heads"},
    "v_proj": {"style": "column", "heads": "num_key_value_heads"},
    "o_proj": {"style": "row", "heads": "num_attention_heads"},
    "gate_proj": "column",
    "up_proj": "column",
    "down_proj": "row",
    "lm_head": {"style": "column", "gather_output": True},
}


def described(shapes, config=None):
    entries, at = [], 0
    for name, shape in shapes.items():
        size = 4
        for length in shape:
            size *= length
        entries.append(Entry(name, "F32", shape, at, at + size))
        at += size
    return describe_tensors(entries, config or {})


def llama(tied=False, **sizes):
    sizes = {"hidden": 48, "inter": 65, "layers": 3, "heads": 6, "kv": 3, "vocab": 99, "tied": tied} | sizes
    return described(llama_shapes(**{**sizes, "tied": False}), llama_config(**sizes))


def by_hand(inventory, layouts, rank):
    """The bytes of the rank's slices, one element at a time through the slice algebra's local shapes."""
    held = 0
    for name, tensor in inventory.tensors().items():
        if name in inventory.aliases:
            continue
        shape = layouts[name].local_shape(tensor.shape, rank) if name in layouts else tensor.shape
        elements = 1
        for length in shape:
            elements *= length
        held += 4 * elements
    return held


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_rank_bytes_are_exact_for_uneven_layouts(tp, tied):
    inventory = llama(tied)
    layouts = match(Plan(rules=LLAMA), inventory, tp).layouts
    assert layouts
    held = rank_bytes(inventory, layouts, tp)
    assert held == tuple(by_hand(inventory, layouts, rank) for rank in range(tp))


def test_ranks_hold_what_the_slices_weigh():
    import numpy

    shard = Shard(0, sections=((4, deal(4, 3)), (3, None), (6, deal(3, 3))))
    weight = numpy.arange(13 * 5, dtype=numpy.float32).reshape(13, 5)
    info = TensorInfo("qkv.weight", weight.shape, "F32", 4)
    inventory = Inventory({"qkv": ModuleInfo("qkv", "linear", {"weight": info})})
    held = rank_bytes(inventory, {"qkv.weight": shard}, 3)
    sizes = []
    for rank in range(3):
        rows = [row for start, stop in shard.ranges(13, rank) for row in weight[start:stop]]
        sizes.append(numpy.stack(rows).nbytes)
    assert held == tuple(sizes) == (140, 120, 120)


def test_a_tied_tensor_counts_once():
    untied, tied = llama(), llama(tied=True)
    assert sum(rank_bytes(untied, {}, 1)) - sum(rank_bytes(tied, {}, 1)) == 99 * 48 * 4


def test_sharded_fraction_counts_matrices_only():
    inventory = described(
        {"fc1.weight": (8, 4), "fc1.bias": (8,), "fc2.weight": (4, 8), "fc3.weight": (4, 4)}
    )
    layouts = {"fc1.weight": Shard(0, deal(8, 2)), "fc1.bias": Shard(0, deal(8, 2))}
    assert sharded_fraction(inventory, layouts) == 32 / 80
    assert sharded_fraction(inventory, {}) == 0.0


def test_sections_that_stay_whole_do_not_count_as_sharded():
    inventory = described({"in_proj.weight": (12, 2)})
    shard = Shard(0, sections=((8, deal(8, 2)), (4, None)))
    assert sharded_fraction(inventory, {"in_proj.weight": shard}) == pytest.approx(2 / 3)


def test_a_model_without_matrices_has_no_fraction():
    assert sharded_fraction(described({"norm.weight": (8,)}), {}) == 0.0


def test_an_empty_tensor_weighs_nothing():
    inventory = described({"fc.weight": (0, 4), "fc1.weight": (4, 4)})
    assert rank_bytes(inventory, {"fc.weight": Shard(0, deal(4, 2))}, 2) == (64, 64)


def test_layers_are_collapsed_by_their_numbers():
    assert collapsed("layers.3.experts.12.w1.weight") == "layers.*.experts.*.w1.weight"


def test_what_stays_whole_is_listed_with_its_reason_largest_first():
    inventory = llama()
    rules = {**LLAMA, "input_layernorm": "replicate"}
    del rules["lm_head"], rules["k_proj"]
    matches = match(Plan(rules=rules), inventory, 2)
    found = [(r.name, r.tensors, r.nbytes, r.why) for r in left_whole(inventory, matches, matches.layouts)]
    assert found == [
        ("lm_head.weight", 1, 99 * 48 * 4, "no rule matches it"),
        ("model.layers.*.self_attn.k_proj.weight", 3, 3 * 24 * 48 * 4, "no rule matches it"),
        ("model.layers.*.input_layernorm.weight", 3, 576, "`input_layernorm: replicate` says so"),
        ("model.layers.*.post_attention_layernorm.weight", 3, 576, "no rule matches it"),
        ("model.norm.weight", 1, 192, "no rule matches it"),
    ]


def test_the_bias_of_a_row_layer_stays_whole_by_its_rule():
    inventory = described({"fc.weight": (4, 8), "fc.bias": (4,)})
    matches = match(Plan(rules={"fc": "row"}), inventory, 2)
    assert [r.why for r in left_whole(inventory, matches, matches.layouts)] == ["`fc: row` leaves it whole"]


def test_a_rule_that_is_refused_is_the_reason_and_no_second_finding():
    inventory = llama()
    matches = match(Plan(rules=LLAMA), inventory, 7)  # 6 query heads over 7 ranks
    found = {r.name: r.why for r in left_whole(inventory, matches, matches.layouts)}
    assert found["model.layers.*.self_attn.k_proj.weight"] == "its rule `k_proj` is refused"
    assert [f.code for f in cost_findings(inventory, matches, matches.layouts)] == []


def findings(inventory, rules, tp=2):
    matches = match(Plan(rules=rules), inventory, tp)
    return cost_findings(inventory, matches, matches.layouts)


def test_a_large_matrix_left_whole_is_a_warning():
    rules = {pattern: rule for pattern, rule in LLAMA.items() if pattern != "v_proj"}
    (found,) = findings(llama(), rules)
    assert found.render() == (
        "warning[AT390]: model.layers.*.self_attn.v_proj.weight: "
        "stays whole on every rank: no rule matches it\n"
        "  = note: 13,824 bytes, 3 tensors, 5.9% of the model\n"
        "  = help: shard it by a rule, or accept it by `self_attn.v_proj: replicate`"
    )


def test_the_help_of_a_warning_is_a_rule_that_ends_it():
    rules = {pattern: rule for pattern, rule in LLAMA.items() if pattern != "v_proj"}
    assert findings(llama(), {**rules, "self_attn.v_proj": "replicate"}) == ()


def test_small_matrices_may_stay_whole_without_a_word():
    inventory = described({"fc1.weight": (80, 80), "fc2.weight": (80, 80), "gate.weight": (1, 80)})
    assert findings(inventory, {"fc1": "column", "fc2": "row"}) == ()


def test_a_plan_that_shards_nothing_is_an_error():
    (found,) = findings(llama(), {"q_proj": "replicate"})
    assert found.render() == (
        "error[AT391]: the plan shards no matrix: every rank would hold the whole model\n"
        "  = note: modules and tensors that its rules match: 3\n"
        "  = help: give the large matrices a column, row or vocab rule"
    )


def test_layers_that_only_have_numbers_are_accepted_by_their_numbers():
    inventory = described({"0.weight": (6, 4), "2.weight": (4, 6)})
    found = next(f for f in findings(inventory, {"0": {"style": "column"}}) if f.code == "AT390")
    assert found.help == ("shard it by a rule, or accept it by `2: replicate`",)


def test_a_tensor_that_is_no_weight_of_a_layer_is_accepted_by_its_own_name():
    inventory = described({"decoder.fc.weight": (6, 4), "decoder.position_embedding": (4, 6)})
    (found,) = findings(inventory, {"fc": {"style": "column"}})
    assert found.help == ("shard it by a rule, or accept it by `decoder.position_embedding: replicate`",)
    assert findings(inventory, {"fc": "column", "decoder.position_embedding": "replicate"}) == ()


def test_a_plan_that_shards_vectors_only_shards_nothing():
    inventory = described({"attn.sinks": (6,), "attn.fc.weight": (6, 4)})
    (found,) = findings(inventory, {"attn.sinks": {"style": "column", "dim": 0}})
    assert found.code == "AT391"


def test_a_plan_that_shards_next_to_nothing_is_a_warning():
    low = next(f for f in findings(llama(), {"k_proj": {"style": "column", "heads": 3}}) if f.code == "AT392")
    assert low.render() == (
        "warning[AT392]: the plan shards 5.9% of the bytes of all matrices\n"
        "  = help: give the large matrices a column, row or vocab rule"
    )
