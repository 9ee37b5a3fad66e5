"""Plans: that they come back as they were written, and what stands for one."""

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
@settings(max_examples=80, deadline=None)
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


def test_keys_that_are_no_text_in_a_dict() -> None:
    with pytest.raises(PlanError) as caught:
        as_plan({1: "column"})  # type: ignore[dict-item]
    assert str(caught.value) == 'error[AT108]: a pattern is text, not `1`\n  = help: write "1"'
    with pytest.raises(PlanError, match=r"AT1\d\d"):
        as_plan({"rules": {"a": "row"}, 5: 1})  # type: ignore[dict-item]


def test_shipped_plans_load_and_are_found_by_model_type() -> None:
    assert {"bert", "llama"} <= set(shipped_plans())
    for name in shipped_plans():
        plan = Plan.load(name)
        assert plan.model_type is not None and plan_for(plan.model_type) == plan
        assert Plan.loads(plan.dumps()) == plan
        assert all(plan.span(pattern) is not None for pattern in plan.rules)
    assert plan_for("no-such-type") is None
