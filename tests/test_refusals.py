"""Wrong plans, refused before a rank starts, each with its whole message.

The plans and messages lie in tests/refusals: NAME.yaml and NAME.txt. With AUTOTP_WRITE_MESSAGES=1 the
messages are written anew; read the difference before it is committed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import autotp
from autotp.comm import simulate
from autotp.diagnostic import render
from tests import models
from tests import wrong_models as wrong

FOLDER = Path(__file__).parent / "refusals"


def between(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    return lambda: models.MLP(between=function)


CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "softmax": (lambda: models.MLP(between=models.softmax), 2),
    "norm": (models.Normed, 2),
    "cumsum": (lambda: models.MLP(between=models.cumulate), 2),
    "flip": (lambda: models.MLP(between=models.flip), 2),
    "fused_gate": (models.FusedGate, 2),
    "column_without_row": (models.MLP, 2),
    "row_without_column": (models.MLP, 2),
    "gathered_before_row": (models.MLP, 2),
    "row_behind_norm": (models.Normed, 2),
    "swapped": (models.MLP, 2),
    "column_after_column": (models.MLP, 2),
    "split_twice": (models.MLP, 2),
    "k_forgotten": (models.llama, 2),
    "k_and_v_forgotten": (models.llama, 2),
    "gate_without_up": (models.llama, 2),
    "heads_dealt_differently": (models.llama, 4),
    "cut_head": (models.llama, 5),
    "matches_nothing": (models.MLP, 2),
    "rule_matches_nothing": (models.MLP, 2),
    "misspelt": (models.llama, 2),
    "returned": (models.MLP, 2),
    "head_returned": (models.llama, 2),
    "branch_by_size": (models.BySize, 2),
    "size_in_the_numbers": (models.Scaled, 2),
    "functional": (models.Functional, 2),
    "learned": (models.LearnedBoth, 2),
    "mixed_dropout": (models.Mixed, 2),
    "unused": (models.Unused, 2),
    "in_place": (models.InPlace, 2),
    **{name: (between(function), 2) for name, function in wrong.BETWEEN.items()},
    "interleaved_as_sections": (lambda: wrong.Fused(wrong.interleaved), 3),
    "sections_as_interleaved": (lambda: wrong.Fused(wrong.sections), 3),
    "split_across": (lambda: wrong.Fused(wrong.by_size), 3),
    "slice_across": (wrong.Sliced, 2),
    "view_across_sections": (wrong.Viewed, 2),
    "residual_in_the_sum": (wrong.Residual, 2),
    "activation_of_a_sum": (wrong.Activated, 2),
    "local_slopes": (lambda: wrong.Alibi(wrong.local_slopes), 3),
    "tied_two_ways": (wrong.Tied, 2),
    "scale_over_heads": (lambda: wrong.PerHead(whole=True), 3),
    "heads_mixed": (wrong.Tiled, 2),
    "one_mask": (wrong.OneMask, 2),
    "unseen": (wrong.Unseen, 2),
    "norm_of_the_projection": (wrong.NormedHeads, 2),
    "fewer_heads_declared": (wrong.FewHeads, 4),
    "fewer_heads": (wrong.FewHeads, 4),
}


def costly(factory: Callable[[], nn.Module]) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if factory is models.llama else []


@pytest.mark.parametrize("name", [pytest.param(n, marks=costly(f)) for n, (f, _) in CASES.items()])
def test_message(name):
    factory, tp = CASES[name]
    plan = autotp.Plan.load(FOLDER / f"{name}.yaml")
    model = factory()
    inputs = torch.zeros(5, model.fc1.in_features) if isinstance(model, models.MLP) else None
    inputs = torch.zeros(5, 7, 16) if isinstance(model, wrong.Raw) else inputs
    analysis = autotp.analyze(model, plan, tp=tp, inputs=inputs)
    assert not analysis.ok
    text = render(d for d in analysis.diagnostics if d.severity == "error") + "\n"
    text = text.replace(str(FOLDER) + os.sep, "")
    file = FOLDER / f"{name}.txt"
    if os.environ.get("AUTOTP_WRITE_MESSAGES"):
        file.write_text(text)
    assert text == file.read_text()


FOLLOWED = {
    **{name: (*CASES[name], autotp.Plan.load(FOLDER / f"{name}.yaml").to_data()["rules"])
       for name in ("view_across_sections", "swapped", "functional")},
    "of other sizes": (lambda: models.llama(num_hidden_layers=1), 2,
                       autotp.Plan.load("llama").to_data()["rules"]),
    "raw weights": (lambda: nn.TransformerEncoderLayer(24, 4, 50, batch_first=True), 3, {
        "in_proj_weight": {"style": "column", "dim": 0, "sections": 3, "heads": 4},
        "linear1": "column", "linear2": "row"}),
    "raw layer": (lambda: nn.TransformerEncoderLayer(24, 4, 50, batch_first=True), 2, {
        "in_proj_weight": {"style": "column", "dim": 0, "sections": 3}, "out_proj": "row",
        "linear1": "column", "linear2": "row"}),
}  # fmt: skip
del FOLLOWED["of other sizes"][2]["self_attn.v_proj"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLLOWED)
def test_remedies_work_as_they_are_written(name):
    """The first line for the plan that each error gives, until there is none."""
    factory, tp, rules = FOLLOWED[name]
    model, rules = factory(), dict(rules)
    inputs = torch.zeros(5, model.fc1.in_features) if isinstance(model, models.MLP) else None
    for _ in range(4):
        analysis = autotp.analyze(model, rules, tp=tp, inputs=inputs)
        wrong = [one for one in analysis.diagnostics if one.severity == "error"]
        if not wrong:
            break
        for one in wrong:
            lines = next(found for line in one.help if (found := re.findall(r"`(\S+): (.+?)`", line)))
            for pattern, rule in lines:
                rules = {
                    p: r for p, r in rules.items() if not f"{pattern}.".startswith(f"{p}.") or p == pattern
                }
                rules[pattern] = autotp.Plan.loads(f"rules:\n  {pattern}: {rule}").to_data()["rules"][pattern]
    assert analysis.ok, analysis


def test_every_file_is_a_case():
    assert {f.stem for f in FOLDER.glob("*.yaml")} == set(CASES)


@pytest.mark.parametrize("name", ["softmax", "k_forgotten", "branch_by_size"])
def test_shard_and_verify_raise_and_touch_nothing(name):
    factory, tp = CASES[name]
    model = factory()
    before = {n: (id(p), p.detach().clone()) for n, p in model.named_parameters()}
    classes = {n: type(m) for n, m in model.named_modules()}
    plan = autotp.Plan.load(FOLDER / f"{name}.yaml")
    with pytest.raises(autotp.PlanError):
        autotp.verify(model, plan, tp=tp)
    with pytest.raises(autotp.PlanError):
        simulate(tp, lambda group: autotp.shard(model, plan, group))
    assert {n: type(m) for n, m in model.named_modules()} == classes
    for n, p in model.named_parameters():
        assert before[n][0] == id(p)
        assert p.equal(before[n][1])


@pytest.mark.parametrize(
    ("factory", "plan", "tp"),
    [
        (models.MLP, {"fc1": "column", "fc2": "row"}, 2),
        (models.Twice, {"fc1": "column", "fc2": "row"}, 3),
        (models.Fresh, {"fc1": "column", "fc2": "row"}, 3),
        (models.Dropped, {"fc1": "column", "fc2": "row"}, 2),
        (models.FusedGate, {"gate_up": {"style": "column", "sections": 2}, "down": "row"}, 4),
        (models.llama, "llama", 2),
        pytest.param(models.llama, "llama", 3, marks=pytest.mark.slow),
        pytest.param(models.llama, "llama", 4, marks=pytest.mark.slow),
        pytest.param(lambda: models.llama(tie_word_embeddings=True), "llama", 3, marks=pytest.mark.slow),
        pytest.param(lambda: models.llama(attn_implementation="eager"), "llama", 2, marks=pytest.mark.slow),
        (models.bert, "bert", 2),
        (models.bert, "bert", 5),
        (lambda: models.bert(attn_implementation="eager"), "bert", 3),
    ],
)
def test_right_plans_are_not_refused(factory, plan, tp):
    analysis = autotp.analyze(factory(), plan, tp=tp)
    assert analysis.ok, render(analysis.diagnostics)
    assert analysis.certainty == "layouts"
    assert set(analysis.modes) >= {"eval", "train"}
