"""Row layers and the column layers before them, by names and shapes alone."""

from __future__ import annotations

import pytest

from autotp.checkpoint import convert
from autotp.diagnostic import PlanError, errors
from autotp.inventory import Inventory, ModuleInfo, TensorInfo
from autotp.plan import Plan
from autotp.shapes import analyze_shapes
from tests.checkpoints import llama, write_checkpoint


def stock(**layers):
    """Linear layers of these [out, in], by paths with `__` for the dots."""
    return Inventory({
        path: ModuleInfo(path, "linear", {"weight": TensorInfo(f"{path}.weight", shape, "F32", 4)})
        for path, shape in ((name.replace("__", "."), shape) for name, shape in layers.items())
    })  # fmt: skip


ATTENTION = stock(a__q=(24, 20), a__k=(8, 20), a__v=(8, 20), a__o=(20, 24))
QUERIES = {"q": {"style": "column", "heads": 6}}
KEYS = {"style": "column", "heads": 2}
COLUMNS = QUERIES | {"k": KEYS, "v": KEYS}


def faults(stock, rules, tp):
    return errors(analyze_shapes(stock, Plan(rules=rules), tp=tp).diagnostics)


@pytest.mark.parametrize(
    ("heads", "tp", "right"), [(6, 2, True), (2, 2, True), (3, 2, False), (None, 4, True)]
)
def test_a_row_layer_is_cut_as_its_queries(heads, tp, right):
    rules = COLUMNS | {"o": {"style": "row", "heads": heads}}
    if heads is None:
        rules["o"] = "row"  # 6 features a rank, and heads of 4: the proof will say
    found = faults(ATTENTION, rules, tp)
    assert [d.code for d in found] == ([] if right else ["AT204"])


def test_the_words_of_a_row_layer_that_is_cut_otherwise():
    (found,) = faults(ATTENTION, COLUMNS | {"o": {"style": "row", "heads": 3}}, 2)
    assert found.module == "a.o" and found.message == (
        "its 24 input features are cut 16 + 8, and the 24 that a.q gives 12 + 12: each rank would multiply "
        "features that do not belong together"
    )
    assert found.help == ("cut it as the column layer before it: `q` says {'style': 'column', 'heads': 6}",)


def test_sections_and_layers_of_the_module_around():
    fused = stock(b__self__qkv=(40, 20), b__output__dense=(20, 24))
    column = {"style": "column", "heads": [6, 2, 2]}
    assert not faults(fused, {"qkv": column, "dense": {"style": "row", "heads": 6}}, 2)
    assert faults(fused, {"qkv": column, "dense": {"style": "row", "heads": 3}}, 2)
    gated = stock(m__both=(66, 20), m__down=(20, 33))
    assert not faults(gated, {"both": {"style": "column", "sections": 2}, "down": "row"}, 2)


def test_layers_of_the_model_itself():
    flat = stock(q=(24, 20), k=(8, 20), v=(8, 20), o=(20, 24))
    assert not faults(flat, COLUMNS | {"o": {"style": "row", "heads": 6}}, 2)
    (found,) = faults(flat, COLUMNS | {"o": {"style": "row", "heads": 3}}, 2)
    assert found.code == "AT204" and "the 24 that q gives 12 + 12" in found.message


def test_what_nothing_beside_feeds_is_nobodys_business():
    row = {"style": "row", "heads": 3}
    assert not faults(stock(a__q=(12, 20), a__o=(20, 24)), QUERIES | {"o": row}, 2)
    gathered = {"q": {"style": "column", "heads": 6, "gather_output": True}}
    assert not faults(ATTENTION, gathered | {"o": row | {"split_input": True}}, 2)


def test_a_checkpoint_is_not_converted_so(tmp_path):
    tensors, config = llama(layers=1, kv=2)
    write_checkpoint(tmp_path / "in", tensors, config=config)
    rules = {"q_proj": COLUMNS["q"], "k_proj": KEYS, "v_proj": KEYS, "o_proj": {"style": "row", "heads": 3}}
    with pytest.raises(PlanError, match=r"its 24 input features are cut 16 \+ 8"):
        convert(tmp_path / "in", tmp_path / "out", plan=rules, tp=2, check="shapes")
    assert not (tmp_path / "out").exists()


def test_a_proof_says_what_feeds_a_row_layer():
    rules = COLUMNS | {"o": {"style": "row", "heads": 3}}
    assert analyze_shapes(ATTENTION, Plan(rules=rules), tp=2, before_proof=True).ok
