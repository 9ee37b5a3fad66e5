"""Rules: styles, their options, and their words."""

from __future__ import annotations

import pytest

from autotp.diagnostic import PlanError
from autotp.plan import Rule
from autotp.rule import OPTIONS, STYLES


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
