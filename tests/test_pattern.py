"""Patterns: whole segments from the end, the stronger wins, and the nearest real names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotp.pattern import fault, literals, matches, nearest, segments, shortest, strongest

SEGMENT = st.sampled_from(["a", "b", "fc1", "0", "12", "layers"])
NAME = st.lists(SEGMENT, min_size=1, max_size=6).map(".".join)
PATTERN = (
    st.lists(SEGMENT | st.just("*"), min_size=1, max_size=5).map(".".join).filter(lambda p: not fault(p))
)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("fc1", "fc1", True),
        ("fc1", "layers.3.mlp.fc1", True),
        ("fc1", "layers.3.mlp.fc11", False),
        ("fc1", "my_fc1", False),
        ("fc1", "fc1.weight", False),
        ("mlp.fc1", "fc1", False),
        ("output.dense", "layer.0.attention.output.dense", True),
        ("attention.output.dense", "layer.0.output.dense", False),
        ("attention.output.dense", "layer.0.crossattention.output.dense", False),
        ("layers.*.mlp.fc1", "model.layers.3.mlp.fc1", True),
        ("layers.*.mlp.fc1", "model.layers.3.extra.mlp.fc1", False),
        ("layers.*.mlp.fc1", "layers.mlp.fc1", False),
        ("*.fc1", "fc1", False),
        ("*.fc1", "mlp.fc1", True),
        ("mlp.*", "layers.0.mlp.fc1", True),
        ("mlp.*", "layers.0.mlp", False),
        ("self_attn.sinks", "model.layers.0.self_attn.sinks", True),
        ("0", "0", True),
        ("0", "10", False),
    ],
)
def test_matches(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


@given(PATTERN, NAME)
def test_a_match_is_the_tail_segment_by_segment(pattern: str, name: str) -> None:
    wanted, parts = pattern.split("."), name.split(".")
    tail = parts[-len(wanted) :]
    expected = len(tail) == len(wanted) and all(w in ("*", t) for w, t in zip(wanted, tail, strict=True))
    assert matches(pattern, name) is expected


@given(NAME)
def test_a_name_and_all_its_tails_match_it(name: str) -> None:
    parts = segments(name)
    assert all(matches(".".join(parts[i:]), name) for i in range(len(parts)))
    assert not matches(f"more.{name}", name)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("", "it is empty"),
        ("a..b", "it has an empty segment: names are joined by single dots"),
        (".a", "it has an empty segment: names are joined by single dots"),
        ("a.", "it has an empty segment: names are joined by single dots"),
        ("gate_*", "`*` stands for one whole segment, not for a part of `gate_*`"),
        ("a.**.b", "`*` stands for one whole segment, not for a part of `**`"),
        ("*", "it has no name: `*` alone matches everything"),
        ("*.*", "it has no name: `*` alone matches everything"),
        (" a", "it has blanks at an end or characters that cannot be printed"),
        ("a\n", "it has blanks at an end or characters that cannot be printed"),
        ("a\x00b", "it has blanks at an end or characters that cannot be printed"),
        ("a" * 513, "it is longer than 512 characters"),
        ("layers.*.fc 1-b:é", None),
        ("a" * 512, None),
    ],
)
def test_faults(pattern: str, why: str | None) -> None:
    assert fault(pattern) == why


def test_the_more_literal_segments_win_and_equally_many_tie() -> None:
    name = "model.layers.0.attention.output.dense"
    assert strongest(["dense", "output.dense", "attention.output.dense", "key"], name) == (
        "attention.output.dense",
    )
    assert strongest(["*.*.dense", "dense"], name) == ("*.*.dense", "dense")
    assert strongest(["layers.*.*.output.*", "output.dense"], name) == ("layers.*.*.output.*", "output.dense")
    assert strongest(["key"], name) == ()
    assert strongest([], name) == ()


@given(st.lists(PATTERN, max_size=6, unique=True), NAME)
def test_the_strongest_match_and_none_is_stronger(patterns: list[str], name: str) -> None:
    winners = strongest(patterns, name)
    matching = [p for p in patterns if matches(p, name)]
    assert set(winners) <= set(matching) and bool(winners) == bool(matching)
    assert len({literals(p) for p in winners}) <= 1
    assert all(literals(p) < literals(winners[0]) for p in matching if p not in winners)


LLAMA = [
    f"model.layers.{layer}.{name}"
    for layer in range(3)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj", "input_layernorm")
] + ["model.embed_tokens", "lm_head"]


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("gate_prj", "gate_proj"),
        ("layers.*.mlp.gate_prj", "layers.*.mlp.gate_proj"),
        ("layer.*.mlp.gate_proj", "layers.*.mlp.gate_proj"),
        ("self_atn.q_proj", "self_attn.q_proj"),
        ("layers.*.gate_proj", "layers.*.mlp.gate_proj"),
        ("embed_token", "embed_tokens"),
        ("lmhead", "lm_head"),
        ("layers.7.mlp.gate_proj", "layers.2.mlp.gate_proj"),
    ],
)
def test_nearest_shows_what_was_meant_first(slip: str, meant: str) -> None:
    assert nearest(slip, LLAMA)[0] == meant


@given(PATTERN, st.lists(NAME, max_size=6))
def test_what_nearest_shows_does_match(pattern: str, names: list[str]) -> None:
    for shown in nearest(pattern, names):
        assert fault(shown) is None
        assert any(matches(shown, name) for name in names)


def test_nearest_of_something_else_is_nothing_and_many_names_cost_no_minutes() -> None:
    assert nearest("word_embeddings", LLAMA) == ()
    assert nearest("x" * 400, (f"{'y' * 300}{n}" for n in range(200_000))) == ()


@given(st.lists(NAME, min_size=1, max_size=8, unique=True))
def test_shortest_matches_its_name_and_no_name_of_another_kind(names: list[str]) -> None:
    def kind(name: str) -> str:
        return ".".join("*" if part.isdigit() else part for part in segments(name))

    for name in names:
        pattern = shortest(name, names)
        assert matches(pattern, name)
        alike = {other for other in names if kind(other) == kind(name)}
        rest = [other for other in names if other not in alike and matches(pattern, other)]
        assert not rest or pattern == name  # only a whole name may fit others, as their tail
