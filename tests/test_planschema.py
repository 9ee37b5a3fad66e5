"""The schema for editors says what plans accept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autotp.pattern import fault
from autotp.plan import Plan, Rule
from autotp.planschema import PATTERN
from autotp.rule import STYLES

NAMES = st.one_of(
    st.from_regex(r"[A-Za-z0-9_]{1,8}", fullmatch=True),
    st.sampled_from(
        ["no", "on", "yes", "true", "null", "~", "0", "12", "1e999", "y", "-", "a b", "#x", "a:", "<<"]
    ),
    st.text(min_size=1, max_size=6).filter(lambda text: "." not in text and "*" not in text),
)


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
