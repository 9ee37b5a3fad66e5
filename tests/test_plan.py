"""Plans and rules: what they accept, that they come back as they were written, and their words."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from autotp.diagnostic import PlanError
from autotp.pattern import fault
from autotp.plan import Plan, Rule, as_plan, plan_for, shipped_plans
from autotp.planschema import PATTERN
from autotp.rule import OPTIONS, STYLES

NAMES = st.one_of(
    st.from_regex(r"[A-Za-z0-9_]{1,8}", fullmatch=True),
    st.sampled_from(
        ["no", "on", "yes", "true", "null", "~", "0", "12", "1e999", "y", "-", "a b", "#x", "a:", "<<"]
    ),
    st.text(min_size=1, max_size=6).filter(lambda text: "." not in text and "*" not in text),
)
PATTERNS = (
    st.lists(NAMES | st.just("*"), min_size=1, max_size=5)
    .map(".".join)
    .filter(lambda text: fault(text) is None)
)
CONFIG_KEYS = st.from_regex(r"[a-z_][a-z0-9_]{0,10}", fullmatch=True).filter(str.isidentifier)
COUNTS = st.integers(1, 2**31 - 1) | CONFIG_KEYS


@st.composite
def rules(draw: Any) -> Rule:
    style = draw(st.sampled_from(STYLES))
    values: dict[str, Any] = {
        "gather_output": draw(st.booleans()),
        "split_input": draw(st.booleans()),
        "sections": draw(st.none() | st.integers(2, 9) | st.lists(COUNTS, min_size=2, max_size=4)),
        "heads": draw(st.none() | COUNTS),
        "dim": draw(st.none() | st.integers(-4, 4)),
    }
    return Rule(style=style, **{name: values[name] for name, styles in OPTIONS.items() if style in styles})


@st.composite
def plans(draw: Any) -> Plan:
    chosen = draw(st.dictionaries(PATTERNS, rules(), min_size=1, max_size=5))
    optional = draw(st.lists(st.sampled_from(list(chosen)), unique=True))
    model_type = draw(st.none() | st.sampled_from(["bert", "no", "12", "true", "gpt 2"]))
    return Plan(rules=chosen, optional=optional, model_type=model_type)


@given(plans())
@settings(max_examples=150, deadline=None)
def test_a_plan_comes_back_from_its_text(plan: Plan) -> None:
    for again in (
        Plan.loads(plan.dumps()),
        Plan.loads(plan.dumps(format="json")),
        Plan.loads(plan.dumps(format="json"), file="plan.json"),
        as_plan(plan.to_data()),
        Plan.model_validate_json(plan.model_dump_json()),
        pickle.loads(pickle.dumps(plan)),
        copy.deepcopy(plan),
    ):
        assert again == plan and hash(again) == hash(plan)
        assert list(again.rules) == list(plan.rules)
        assert again.dumps() == plan.dumps()


@given(plans())
@settings(max_examples=50, deadline=None)
def test_each_rule_knows_its_line(plan: Plan) -> None:
    text = plan.dumps()
    read = Plan.loads(text, file="plan.yaml")
    for pattern in plan.rules:
        span = read.span(pattern)
        assert span is not None and span.file == "plan.yaml"
        piece = text.split("\n")[span.line - 1][span.column - 1 :][: span.length]
        assert list(Plan.loads(f"rules: {{{piece}: row}}").rules) == [pattern]
        assert plan.span(pattern) is None


@pytest.mark.parametrize("name", ["plan.yaml", "plan.yml", "plan.json", "plan"])
def test_save_and_load(tmp_path: Path, name: str) -> None:
    plan = Plan(
        model_type="gpt2",
        rules={"c_attn": {"style": "column", "sections": 3, "heads": "n_head", "dim": 1}, "*.c_proj": "row"},
        optional=["c_attn"],
    )
    plan.save(tmp_path / name)
    assert Plan.load(tmp_path / name) == plan
    assert (tmp_path / name).read_text().startswith("{" if name.endswith("json") else "version: 1\n")


def test_dumps_is_a_plan_file_as_one_would_write_it() -> None:
    plan = Plan(
        model_type="bert",
        rules={
            "query": "colwise",
            "key": {"style": "column", "heads": "num_attention_heads"},
            "layers.*.fc2": Rule(style="row", split_input=True),
            "*.norm": "replicate",
            "qkv": {"style": "column", "sections": [96, "kv_size", 48]},
            "no": "row",
        },
        optional=["query"],
    )
    assert plan.dumps() == (
        "version: 1\n"
        "model_type: bert\n"
        "rules:\n"
        "  query: column\n"
        "  key: {style: column, heads: num_attention_heads}\n"
        "  layers.*.fc2: {style: row, split_input: true}\n"
        '  "*.norm": replicate\n'
        "  qkv: {style: column, sections: [96, kv_size, 48]}\n"
        '  "no": row\n'
        "optional: [query]\n"
    )


def test_equality_is_about_what_is_said() -> None:
    plan = Plan(rules={"a": "column", "b": "row"})
    assert plan == Plan.loads("rules:\n  b: rowwise\n  a: {style: colwise, gather_output: false}\n")
    assert plan != Plan(rules={"a": "column", "b": "row"}, model_type="x")
    assert plan != Plan(rules={"a": "column", "b": "row"}, optional=["a"])
    assert plan != Plan(rules={"a": "column"})
    assert plan != {"a": "column", "b": "row"}
    assert len({plan, Plan(rules={"b": "row", "a": "column"})}) == 1


def test_plans_and_rules_are_frozen() -> None:
    plan = Plan(rules={"a": "column"})
    with pytest.raises(ValidationError):
        plan.model_type = "bert"  # type: ignore[misc]
    with pytest.raises(ValidationError):
        plan.rules["a"].heads = 3  # type: ignore[misc]


def test_as_plan_reads_whatever_stands_for_a_plan(tmp_path: Path) -> None:
    plan = Plan(rules={"fc1": "column", "fc2": "row"})
    plan.save(tmp_path / "p.yaml")
    assert as_plan(plan) is plan
    assert as_plan({"fc1": "column", "fc2": Rule(style="row")}) == plan
    assert as_plan({"rules": {"fc1": "column", "fc2": "row"}}) == plan
    assert as_plan({"version": 1, "rules": {"fc1": "column", "fc2": "row"}}) == plan
    assert as_plan(tmp_path / "p.yaml") == as_plan(str(tmp_path / "p.yaml")) == plan
    assert as_plan("bert").model_type == "bert"
    assert as_plan({"rules": "column"}) == Plan(rules={"rules": "column"})  # a layer of that name


def words(error: PlanError) -> list[tuple[str, str, tuple[str, ...], tuple[str, ...]]]:
    return sorted((d.code, d.message, d.notes, d.help) for d in error.diagnostics)


@pytest.mark.parametrize(
    "data",
    [
        {"rules": {"fc1": "colum"}},
        {"rules": {"fc1": "Column", "fc2": {"style": "row", "gather_output": True, "heds": 3}}},
        {"rules": {"fc1": None, "fc2": [1], "fc3": 5, "fc4": {"heads": 0}}},
        {"rules": {"fc1": {"style": "column", "heads": True, "sections": [4], "dim": "x"}}},
        {"rules": {"gate_*": "column", "": "row", "a..b": "row"}},
        {"rules": {}},
        {"rules": [1]},
        {"version": 2, "model_type": "bert"},
        {"version": True, "rules": {"a": "row"}},
        {"rules": {"a": "row"}, "optional": ["b", "a"], "modeltype": "x"},
        {"rules": {"norm": {"style": "replicate", "sections": 2, "heads": 2, "dim": 0}}},
    ],
    ids=str,
)
def test_faults_have_the_same_words_however_a_plan_is_made(data: dict[str, Any]) -> None:
    import json

    with pytest.raises(PlanError) as by_hand:
        Plan(**data)
    with pytest.raises(PlanError) as by_dict:
        Plan.model_validate(data)
    with pytest.raises(PlanError) as by_text:
        Plan.loads(json.dumps(data))
    assert words(by_hand.value) == words(by_dict.value) == words(by_text.value)
    assert all(d.plan is None for d in by_hand.value.diagnostics)
    assert all(d.plan is not None for d in by_text.value.diagnostics)


def test_a_rule_by_itself_has_the_same_words() -> None:
    with pytest.raises(PlanError) as caught:
        Rule(style="colum", heads=0)
    assert str(caught.value) == (
        "error[AT109]: unknown style `colum`\n"
        "  = note: styles: column, row, vocab, replicate\n"
        "  = help: did you mean `column`?\n"
        "\n"
        "error[AT111]: heads is at least 1, not `0`"
    )
    with pytest.raises(PlanError, match=r"error\[AT110\]: unknown option `head`"):
        Rule(style="column", head=3)  # type: ignore[call-arg]


def test_keys_that_are_no_text_in_a_dict() -> None:
    with pytest.raises(PlanError) as caught:
        as_plan({1: "column"})  # type: ignore[dict-item]
    assert str(caught.value) == 'error[AT108]: a pattern is text, not `1`\n  = help: write "1"'
    with pytest.raises(PlanError, match=r"AT1\d\d"):
        as_plan({"rules": {"a": "row"}, 5: 1})  # type: ignore[dict-item]


def test_a_refused_plan_leaves_no_trace_in_the_next() -> None:
    for _ in range(2):
        with pytest.raises(PlanError):
            Plan(rules={"a": "colum"})
        with pytest.raises(PlanError):
            Rule(style="colum")
        assert Plan(rules={"a": "column"}).rules["a"] == Rule(style="column")


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("style", STYLES)
def test_each_option_stands_with_its_styles_only(style: str, option: str) -> None:
    value = True if option in ("gather_output", "split_input") else 2
    if style in OPTIONS[option]:
        assert getattr(Rule(style=style, **{option: value}), option) == value
        return
    with pytest.raises(PlanError) as caught:
        Rule(style=style, **{option: value})
    (finding,) = caught.value.diagnostics
    assert finding.message == f"style {style} has no {option}"
    assert finding.notes == (f"{option} belongs to {' and '.join(OPTIONS[option])}",)


def test_an_option_that_says_nothing_is_no_fault() -> None:
    assert Rule(style="row", gather_output=False, heads=None) == Rule(style="row")


def test_the_schema_names_the_fields_that_there_are() -> None:
    schema = Plan.json_schema()
    assert set(schema["properties"]) == set(Plan.model_fields)
    style, rule = schema["properties"]["rules"]["additionalProperties"]["anyOf"]
    assert set(rule["properties"]) == set(Rule.model_fields)
    assert style["enum"] == [*STYLES, "colwise", "rowwise"]
    assert all(Rule(style=word).style in STYLES for word in style["enum"])


@given(st.lists(NAMES | st.sampled_from(["*", "", "**", "a*"]), max_size=4).map(".".join))
def test_the_schema_knows_the_same_patterns(text: str) -> None:
    import re

    by_schema = re.search(PATTERN, text) is not None
    readable = text == text.strip() and text.isprintable()
    assert (by_schema and readable) == (fault(text) is None)


def test_shipped_plans_load_and_are_found_by_model_type() -> None:
    assert {"bert", "llama"} <= set(shipped_plans())
    for name in shipped_plans():
        plan = Plan.load(name)
        assert plan.model_type is not None and plan_for(plan.model_type) == plan
        assert Plan.loads(plan.dumps()) == plan
        assert all(plan.span(pattern) is not None for pattern in plan.rules)
    assert plan_for("no-such-type") is None
