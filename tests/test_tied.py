"""Tied tensors: one placement under all names, or a finding that prints the line to add."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autotp.diagnostic import render
from autotp.match import match
from autotp.placement import Shard, deal
from autotp.plan import Plan, as_plan
from tests.inventories import GATHERED, clean, linear, model, module, only

TIED = {"head.weight": "emb.weight"}


EMBEDDING = module("emb", "embedding", weight=(97, 8))


HEAD = linear("head", 8, 97, bias=False)


def test_both_ruled_alike() -> None:
    found = clean({"emb": "vocab", "head": GATHERED}, model(EMBEDDING, HEAD, aliases=TIED), 4)
    assert found.layouts == {"emb.weight": Shard(0, deal(97, 4)), "head.weight": Shard(0, deal(97, 4))}


def test_two_placements() -> None:
    text = "rules:\n  emb: vocab\n  head: {style: row, split_input: true}\n"
    found = match(Plan.loads(text, file="p.yaml"), model(EMBEDDING, HEAD, aliases=TIED), 2)
    assert render(found.diagnostics) == (
        "error[AT210]: emb.weight: tied to head.weight, which is placed in another way\n"
        "  --> p.yaml:2:3\n"
        "   |\n"
        " 2 |   emb: vocab\n"
        "   |   ^^^\n"
        "  = note: emb.weight: shard(dim 0: 49+48 of 97), by `emb` at p.yaml:2:3: `emb: vocab`\n"
        "  = note: head.weight: shard(dim 1: 2 equal parts), by `head` at p.yaml:3:3: "
        "`head: {style: row, split_input: true}`\n"
        "  = help: one tensor has one placement: make the rules agree"
    )


def test_one_cut_and_one_whole() -> None:
    inventory = model(EMBEDDING, HEAD, aliases=TIED)
    text = only({"emb": "vocab", "head": "replicate"}, inventory)
    assert text.startswith("error[AT210]") and "head.weight: whole, by `head`: replicate" in text


@pytest.mark.parametrize(
    ("plan", "told", "untold", "line"),
    [
        ({"emb": "vocab"}, "emb", "head", "add the rule `head: {style: column, gather_output: true}`"),
        ({"head": GATHERED}, "head", "emb", "add the rule `emb: vocab`"),
        ({"head": "row"}, "head", "emb", "no style cuts both; write `head: replicate`"),
    ],
)
@pytest.mark.parametrize("unknown", [False, True])
def test_one_ruled(plan: Any, told: str, untold: str, line: str, unknown: bool) -> None:
    modules = [replace(m, kind="unknown") if unknown else m for m in (EMBEDDING, HEAD)]
    (finding,) = match(as_plan(plan), model(*modules, aliases=TIED), 2).diagnostics
    assert finding.code == "AT211" and finding.module == f"{told}.weight"
    assert finding.message == f"tied to {untold}.weight, which has no rule"
    assert finding.notes[1] == f"{untold}.weight: no rule"
    if unknown and told == "head" and plan["head"] == GATHERED:
        line = "add the rule `emb: {style: column, gather_output: true}`, or `emb: vocab` if it is an "
        line += "embedding"
    assert finding.help == (line,)


def test_a_whole_tied_tensor_needs_no_second_rule() -> None:
    assert not clean({"emb": "replicate"}, model(EMBEDDING, HEAD, aliases=TIED), 2).layouts


def test_modules_of_one_kind_take_the_same_rule() -> None:
    inventory = model(
        EMBEDDING,
        module("dec.emb2", "embedding", weight=(97, 8)),
        aliases={"dec.emb2.weight": "emb.weight"},
    )
    found = clean({"emb": "vocab"}, inventory, 2)
    assert set(found.layouts) == {"emb.weight", "dec.emb2.weight"}
    assert found.placed["dec.emb2"].pattern == "emb" and found.placed["dec.emb2"].target == "module"


def test_a_shared_block_ruled_under_one_path() -> None:
    inventory = model(
        linear("a.fc", 8, 8),
        linear("b.fc", 8, 8),
        aliases={"b.fc.weight": "a.fc.weight", "b.fc.bias": "a.fc.bias"},
    )
    found = clean({"a.fc": "column"}, inventory, 2)
    assert len(found.layouts) == 4 and set(found.placed) == {"a.fc", "b.fc"}


def test_a_bare_parameter_takes_the_same_cut() -> None:
    inventory = model(
        module("cls", "other", bias=(97,)),
        linear("cls.decoder", 8, 97),
        aliases={"cls.decoder.bias": "cls.bias"},
    )
    found = clean({"cls.decoder": GATHERED}, inventory, 2)
    assert found.layouts["cls.bias"] == found.layouts["cls.decoder.bias"] == Shard(0, deal(97, 2))
    assert "cls.bias" not in found.placed


def test_a_rule_that_does_not_fit_is_told_once() -> None:
    plan = {"emb": "vocab", "head": {"style": "column", "heads": 5}}
    assert only(plan, model(EMBEDDING, HEAD, aliases=TIED)).startswith("error[AT204]: head:")


def test_a_tied_name_that_two_patterns_dispute_is_told_once() -> None:
    head = linear("a.out.head", 8, 97, bias=False)
    inventory = model(EMBEDDING, head, aliases={"a.out.head.weight": "emb.weight"})
    plan = {"emb": "vocab", "out.head": "row", "a.*.head": GATHERED}
    assert [d.code for d in match(as_plan(plan), inventory, 2).diagnostics] == ["AT208"]
