"""Claims: which pattern decides, and the slips of a plan that names what is not there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotp.diagnostic import errors, render
from autotp.match import match
from autotp.placement import Shard, deal
from autotp.plan import Plan
from tests.inventories import ATTENTION, MLP, clean, linear, model, only


def test_the_stronger_pattern_decides() -> None:
    inventory = model(linear("l.0.attention.output.dense", 8, 8), linear("l.0.output.dense", 32, 8))
    plan = {"output.dense": "row", "attention.output.dense": {"style": "row", "heads": 2}}
    found = clean(plan, inventory, 2)
    assert not found.diagnostics
    assert found.placed["l.0.attention.output.dense"].pattern == "attention.output.dense"
    assert found.placed["l.0.output.dense"].pattern == "output.dense"


PLAN = """version: 1
rules:
  fc1: column
  layers.*.fc2: row
  fc_2: {style: row, heads: 3}
"""


def test_a_plan_for_another_model_says_so_once_and_patterns_are_no_expressions() -> None:
    inventory = replace(model(linear("l.0.fc1", 8, 12)), config={"model_type": "gpt2"})
    plan = {"model_type": "bert", "rules": {"fc1": "column", r"l\.\d+\.fc2": "row", "zzz": "row"}}
    found = [one for one in match(Plan.model_validate(plan), inventory, 2).diagnostics if one.code == "AT201"]
    assert [one.notes for one in found] == [("the plan is for model_type bert, and the model's is gpt2",), ()]
    said = "patterns are no regular expressions: `*` is one name, and the end of a path will do"
    assert [said in one.help for one in found] == [True, False]


def test_a_finding_shows_the_line_of_the_plan() -> None:
    found = match(
        Plan.loads(PLAN, file="plan.yaml"),
        model(linear("layers.0.fc1", 8, 12), linear("layers.0.fc2", 12, 8)),
        2,
    )
    assert render(found.diagnostics) == (
        "error[AT201]: rule `fc_2` matches nothing in Model\n"
        "  --> plan.yaml:5:3\n"
        "   |\n"
        " 5 |   fc_2: {style: row, heads: 3}\n"
        "   |   ^^^^\n"
        "  = help: did you mean `fc2`?"
    )
    assert found.placed["layers.0.fc1"].span == Plan.loads(PLAN, file="plan.yaml").span("fc1")


def test_a_plan_that_matches_nothing() -> None:
    plan = Plan(model_type="bert", rules={"query": "column", "embed": "vocab"}, optional=["embed"])
    inventory = model(
        linear("layers.0.wq", 8, 8), linear("layers.0.wk", 8, 8), config={"model_type": "llama"}
    )
    assert render(match(plan, inventory, 2).diagnostics) == (
        "error[AT201]: rule `query` matches nothing in Model\n"
        "\n"
        "error[AT202]: the plan matches nothing in Model\n"
        "  = note: the plan is for model_type bert, and the model's is llama\n"
        "  = help: its layers: `wq`, `wk`"
    )
    whole = Plan(rules={"embed": "vocab"}, optional=["embed"])
    assert [d.code for d in errors(match(whole, inventory, 2).diagnostics)] == ["AT202"]


def test_optional_rules_may_match_nothing_and_are_named() -> None:
    plan = Plan(rules={"fc1": "column", "lm_head": "column", "head": "column"}, optional=["lm_head", "head"])
    assert only(plan, MLP) == "note[AT215]: optional rules that match nothing in Model: `lm_head`, `head`"
    assert not errors(match(plan, MLP, 2).diagnostics)


REFUSED = {
    "a container": (
        {"layers.0": "column"},
        2,
        "error[AT213]: layers.0: a container has no tensors of its own\n"
        "  = help: name its layers: `0.self_attn.q_proj`, `0.self_attn`",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_word_for_word(case: str) -> None:
    plan, tp, text = REFUSED[case]
    assert only(plan, ATTENTION, tp) == text


def test_a_module_without_parameters() -> None:
    inventory = replace(MLP, paths=(*MLP.paths, "act"))
    plan = {"fc1": "column", "act": "column"}
    assert only(plan, inventory) == (
        "error[AT213]: act: a module without parameters has nothing to cut\n  = help: leave the rule out"
    )


def test_nothing_is_whole() -> None:
    inventory = replace(MLP, paths=(*MLP.paths, "act"))
    assert not clean({"fc1": "column", "fc2": "row", "act": "replicate"}, inventory, 2).diagnostics


def test_a_star_at_the_end_passes_over_what_has_no_tensors() -> None:
    inventory = replace(
        model(linear("l.mlp.fc1", 8, 8), linear("l.mlp.fc2", 8, 8)),
        paths=("l", "l.mlp", "l.mlp.act", "l.mlp.fc1"),
    )
    assert not clean({"mlp.*": "column", "mlp.fc2": "row"}, inventory, 2).diagnostics


def test_a_tie_shows_both_lines() -> None:
    text = "rules:\n  mlp.fc1: column\n  layers.*.*.fc1: row\n"
    inventory = model(linear("layers.0.mlp.fc1", 8, 8), linear("layers.1.mlp.fc1", 8, 8))
    found = match(Plan.loads(text, file="plan.yaml"), inventory, 2)
    assert render(found.diagnostics) == (
        "error[AT208]: layers.0.mlp.fc1: patterns `mlp.fc1` and `layers.*.*.fc1` are equally strong, and say "
        "different things\n"
        "  --> plan.yaml:2:3\n"
        "   |\n"
        " 2 |   mlp.fc1: column\n"
        "   |   ^^^^^^^\n"
        "  = note: `layers.*.*.fc1` at plan.yaml:3:3: `layers.*.*.fc1: row`\n"
        "  = note: and 1 more: layers.1.mlp.fc1\n"
        "  = help: the pattern with more names wins: add a name to the one that is meant"
    )
    assert not found.layouts


def test_a_tie_of_equal_rules_is_a_warning() -> None:
    plan = {"mlp.fc1": "column", "layers.*.*.fc1": "colwise"}
    inventory = model(linear("layers.0.mlp.fc1", 8, 8))
    assert only(plan, inventory) == (
        "warning[AT208]: layers.0.mlp.fc1: patterns `mlp.fc1` and `layers.*.*.fc1` are equally strong, and "
        "say the same\n"
        "  = note: `layers.*.*.fc1`: column\n"
        "  = help: one of them is enough"
    )
    assert clean(plan, inventory, 2).layouts["layers.0.mlp.fc1.weight"] == Shard(0, deal(8, 2))


def test_a_rule_that_never_decides_is_a_warning() -> None:
    plan = {"fc1": "row", "mlp.fc1": "column"}
    inventory = model(linear("mlp.fc1", 8, 8))
    assert only(plan, inventory) == (
        "warning[AT212]: rule `fc1` decides nothing: wherever it matches, another pattern is stronger\n"
        "  = note: stronger: `mlp.fc1`"
    )
