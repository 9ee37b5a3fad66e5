"""The text of plans: each bad one has its message word for word, and all else is a PlanError too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotp.diagnostic import PlanError, Span
from autotp.plan import Plan
from autotp.plantext import read, write

BAD = Path(__file__).parent / "bad_plans"


BAD_FILES = sorted(path.name for path in BAD.iterdir() if path.suffix in (".yaml", ".json"))


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_plan_has_its_message_word_for_word(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BAD)
    with pytest.raises(PlanError) as caught:
        Plan.load(name)
    assert f"{caught.value}\n" == (BAD / name).with_suffix(".txt").read_text(encoding="utf-8")


def test_each_bad_plan_has_a_message_and_each_message_a_plan() -> None:
    stems = {Path(name).stem for name in BAD_FILES}
    assert len(stems) == len(BAD_FILES) > 40
    assert {path.stem for path in BAD.glob("*.txt")} == stems


def test_every_code_of_plan_files_is_met() -> None:
    import autotp.planfault

    codes = set(re.findall(r"AT1\d\d", autotp.planfault.__doc__ or ""))
    texts = "".join(path.read_text(encoding="utf-8") for path in BAD.glob("*.txt"))
    met = set(re.findall(r"AT1\d\d", texts))
    assert codes - met == {"AT101"}  # files that cannot be read: below
    assert met <= codes


@pytest.mark.parametrize("name", BAD_FILES)
def test_carets_lie_under_the_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BAD)
    with pytest.raises(PlanError) as caught:
        Plan.load(name)
    lines = Path(name).read_text(encoding="utf-8").split("\n")
    for finding in caught.value.diagnostics:
        span = finding.plan
        assert span is not None and span.file == name
        assert 1 <= span.line <= len(lines) and len(span.text) == len(lines[span.line - 1])
        assert 1 <= span.column <= len(span.text) + 1


def test_only_true_and_false_are_booleans_and_dotted_numbers_are_text() -> None:
    text = "a: [true, false, yes, no, on, off, True, null, ~, 12, -3, +4, 012, 0x1F, 1_000, 1.5, 1e999, '7']"
    values = [True, False, "yes", "no", "on", "off", "True", None, None, 12, -3, 4]
    assert read(text).data == {"a": [*values, "012", "0x1F", "1_000", "1.5", "1e999", "7"]}


def test_places_of_keys_and_values() -> None:
    text = "rules:\n  layers.*.fc1: {style: column,\n    heads: 12}\n  'fc 2': row\n"
    source = read(text, "plan.yaml")
    assert not source.faults
    assert str(source.keys["rules", "layers.*.fc1"]) == "plan.yaml:2:3"
    assert source.values["rules", "layers.*.fc1", "heads"] == Span("plan.yaml", 3, 12, 2, "    heads: 12}")
    assert source.keys["rules", "fc 2"] == Span("plan.yaml", 4, 3, 6, "  'fc 2': row")


def test_json_text_may_have_tabs_and_escapes(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(
        '{\n\t"rules": {\n\t\t"f\\u00fc1": "column",\n\t\t"\\ud83d\\ude00": "row"\n\t}\n}\n'
    )
    assert Plan.load(tmp_path / "plan.json") == Plan(rules={"fü1": "column", "😀": "row"})
    plan = Plan.loads('{\n\t"rules": {"a": "row"}}')
    assert str(plan.span("a")) == "<string>:2:12"


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 20_000, "- " * 20_000, "? " * 5_000, "{" * 5000])
@pytest.mark.parametrize("file", ["plan.yaml", "plan.json"])
def test_deep_nesting_is_an_error_and_no_crash(text: str, file: str) -> None:
    with pytest.raises(PlanError):
        Plan.loads(text, file=file)


def test_very_long_numbers_and_keys_are_errors_and_no_crash() -> None:
    for number in ("9" * 5000, "9" * 900):
        with pytest.raises(PlanError, match=r"AT111"):
            Plan.loads("rules: {a: {style: column, heads: " + number + "}}", file="plan.yaml")
        with pytest.raises(PlanError, match=r"AT111"):
            Plan.loads('{"rules": {"a": {"style": "column", "heads": ' + number + "}}}", file="plan.json")
    with pytest.raises(PlanError, match=r"longer than 512 characters"):
        Plan.loads(f"rules: {{{'a' * 600}: column}}")


def test_messages_carry_no_terminal_codes() -> None:
    with pytest.raises(PlanError) as caught:
        Plan.loads('rules: {"a": "\\e[31mred", "b\\ac": row, "\\e": {style: row, "\\e": 1}}')
    assert all(line.isprintable() for line in str(caught.value).split("\n"))


SCALARS = st.sampled_from(
    [
        "column",
        "row",
        "fc1",
        "*",
        "*a",
        "&b",
        "!c",
        "1",
        "1.5",
        "true",
        "no",
        "~",
        "",
        "'q'",
        '"\\x07"',
        "<<",
        "@",
    ]
)


TOKENS = st.sampled_from(
    [": ", ":", "\n", "  ", "- ", "{", "}", "[", "]", ", ", "? ", "#", "---\n", "\t", "|\n", "%"]
)


@given(st.lists(SCALARS | TOKENS | st.text(max_size=3), max_size=40).map("".join), st.booleans())
@settings(max_examples=400, deadline=None)
def test_any_text_is_a_plan_or_a_plan_error(text: str, json: bool) -> None:
    text = f"rules:\n  {text}"
    try:
        plan = Plan.loads(text, file="plan.json" if json else "plan.yaml")
    except PlanError as error:
        assert error.diagnostics
        assert all(d.code.startswith("AT1") and d.plan is not None for d in error.diagnostics)
    else:
        assert Plan.loads(plan.dumps()) == plan


PLAIN_DATA = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.from_regex(r"[ -~]{0,12}", fullmatch=True),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("ab.*-: '\"#&yno1", max_size=6), inner)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["version", "rules", "optional"]), PLAIN_DATA, min_size=1))
@settings(max_examples=100, deadline=None)
def test_what_is_written_is_read_back(data: dict[str, object]) -> None:
    source = read(write(data))
    assert not source.faults
    assert source.data == data
