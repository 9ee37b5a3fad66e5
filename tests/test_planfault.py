"""Faults: the same words whatever way a plan comes in, all at once, and none twice."""

from __future__ import annotations

from typing import Any

import pytest

from autotp.diagnostic import PlanError
from autotp.plan import Plan, Rule


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


def test_a_refused_plan_leaves_no_trace_in_the_next() -> None:
    for _ in range(2):
        with pytest.raises(PlanError):
            Plan(rules={"a": "colum"})
        with pytest.raises(PlanError):
            Rule(style="colum")
        assert Plan(rules={"a": "column"}).rules["a"] == Rule(style="column")


def test_what_could_not_be_read_is_no_second_fault() -> None:
    with pytest.raises(PlanError) as caught:
        Plan.loads("rules:\n  fc1: *how\n  fc2:\n    <<: 1\n  *fc3: row\n")
    assert [d.code for d in caught.value.diagnostics] == ["AT103"] * 3


def test_faults_come_in_the_order_of_the_file() -> None:
    with pytest.raises(PlanError) as caught:
        Plan.loads("version: 2\nrules:\n  a: x1\n  a: row\n  b: {style: row, zz: 1, heads: 0}\nmodel: bert\n")
    places = [(d.plan.line, d.plan.column) for d in caught.value.diagnostics if d.plan]
    assert len(places) == 6 and places == sorted(places)


def test_a_file_that_is_something_else_is_not_told_to_its_end() -> None:
    text = "{" + ", ".join(f'"key_{n}": {n}' for n in range(3000)) + "}"
    with pytest.raises(PlanError) as caught:
        Plan.loads(text)
    assert len(caught.value.diagnostics) == 50
    assert caught.value.diagnostics[-1].notes[-1] == "and 2951 more faults"
    assert len(str(caught.value)) < 10_000  # a line of 50,000 characters is not shown
