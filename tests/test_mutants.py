"""Every right plan, changed in one place: each mutant is refused, or exact. None is silently wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

import autotp
from tests import models
from tests.test_reads import qwen3
from tests.test_regions import PLAN as RAW
from tests.test_regions import Net, mixtral
from tests.test_shipped_plans import build

HEADS = {"style": "column", "heads": "num_key_value_heads"}
EXPERTS = {
    "q_proj": HEADS, "k_proj": HEADS, "v_proj": HEADS, "o_proj": "row",
    "experts.gate_up_proj": {"style": "column", "dim": 1, "sections": 2},
    "experts.down_proj": {"style": "row", "dim": 2},
}  # fmt: skip
LLAMA = dict(autotp.Plan.load("llama").rules)
BERT = {k: v for k, v in autotp.Plan.load("bert").rules.items() if k not in autotp.Plan.load("bert").optional}
OPT = {n: {"style": "column", "heads": 6} for n in "qkv"} | {"out": "row"}

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "mlp": (models.MLP, {"fc1": "column", "fc2": "row"}),
    "fused": (models.FusedGate, {"gate_up": {"style": "column", "sections": 2}, "down": "row"}),
    "raw": (Net, RAW),
    "opt": (models.Opt, OPT),
    "llama": (lambda: models.llama(num_hidden_layers=1), LLAMA),
    "llama_eager_tied": (
        lambda: models.llama(num_hidden_layers=1, tie_word_embeddings=True, attn_implementation="eager"),
        LLAMA,
    ),
    "bert": (lambda: models.bert(num_hidden_layers=1), BERT),
    "qwen3": (lambda: qwen3(num_hidden_layers=1), LLAMA),
    "mixtral": (mixtral, EXPERTS),
}
# With their shipped plans: parallel branches, fused layers, experts, images, norms of heads, two encoders.
SHIPPED = (
    "albert", "apertus", "clip_vision_model", "cohere", "distilbert", "electra", "ernie4_5", "exaone4",
    "gemma2", "glm4", "gpt_neox", "granitemoe", "mistral", "modernbert", "nemotron", "olmo", "phi",
    "qwen2_moe", "roberta", "starcoder2", "vit",
)  # fmt: skip


def mutants(plan: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each rule dropped, of another style, gathered, split, re-sectioned, dealt otherwise; two swapped."""
    rules = {k: autotp.Rule.model_validate(v).to_data() for k, v in plan.items()}
    rules = {k: v if isinstance(v, dict) else {"style": v} for k, v in rules.items()}
    for name, rule in rules.items():
        yield f"drop {name}", {k: v for k, v in rules.items() if k != name}
        for style in ("column", "row", "vocab", "replicate"):
            if style != rule["style"]:
                kept = {k: v for k, v in rule.items() if k == "dim" and style in ("column", "row")}
                yield f"{name} is {style}", rules | {name: {"style": style, **kept}}
        changes: list[dict[str, Any]] = [{"sections": 2}, {"sections": 3}, {"heads": 2}, {"heads": 4}]
        changes += [{"gather_output": not rule.get("gather_output", False)}] * (rule["style"] == "column")
        changes += [{"split_input": not rule.get("split_input", False)}] * (rule["style"] == "row")
        if "dim" in rule:
            changes += [{"dim": d} for d in range(3) if d != rule["dim"]]
        changes += [{o: None} for o in ("heads", "sections") if o in rule]
        for change in changes if rule["style"] in ("column", "row") else []:
            changed = {k: v for k, v in (rule | change).items() if v is not None}
            yield f"{name} with {change}", rules | {name: changed}
    names = list(rules)
    for first, second in pairwise(names):
        yield f"swap {first}, {second}", rules | {first: rules[second], second: rules[first]}


def shipped(name: str) -> tuple[Any, dict[str, Any]]:
    """The tiny model of a shipped plan, and those of the plan's rules that it has layers for."""
    model, plan = build(name), autotp.Plan.load(name)
    found = autotp.analyze(model, plan, tp=2, check="shapes").matches.placed.values()
    return lambda: build(name), {k: v for k, v in plan.rules.items() if k in {p.pattern for p in found}}


def outcome(factory: Any, plan: dict[str, Any], tp: int) -> str:
    torch.manual_seed(0)
    model = factory()
    try:
        analysis = autotp.analyze(model, plan, tp=tp)
    except autotp.PlanError:
        return "refused"
    if not analysis.ok:
        return "refused"
    return "exact" if models.verified(model, analysis).ok else "WRONG"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tp"),
    [(n, tp) for n in ("mlp", "fused", "raw", "opt") for tp in (2, 3)],
)
def test_no_mutant_is_silently_wrong(name, tp):
    hold(name, tp, step=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama_eager_tied", "bert", "qwen3", "mixtral"])
def test_no_mutant_of_a_large_model_is_silently_wrong(name):
    """Every seventh mutant; `python -m tests.test_mutants` runs all of them."""
    hold(name, 2, step=7)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_no_mutant_of_a_shipped_plan_is_silently_wrong(name):
    """Two mutants of each, other ones for each; tests/test_shipped_plans.py holds the right ones."""
    factory, plan = shipped(name)
    every = list(mutants(plan))
    first = 5 * SHIPPED.index(name) % len(every)
    for label, mutant in (every[first], every[(first + len(every) // 2) % len(every)]):
        assert outcome(factory, mutant, 2) != "WRONG", label


def hold(name: str, tp: int, *, step: int) -> None:
    factory, plan = CASES[name] if name in CASES else shipped(name)
    assert outcome(factory, plan, tp) == "exact"
    every = list(mutants(plan))
    found = {label: outcome(factory, mutant, tp) for label, mutant in every[::step]}
    counts = Counter(found.values())
    print(f"{name}, tp {tp}: {len(found)} of {len(every)} mutants, {dict(counts)}", flush=True)
    assert [label for label, result in found.items() if result == "WRONG"] == []
    assert len(found) < 12 or counts["refused"] >= len(found) / 4


def main(step: int, names: list[str]) -> None:
    """These architectures or all, every `step`-th mutant: python -m tests.test_mutants [STEP [NAME…]]."""
    for name in names or (*CASES, *SHIPPED):
        for tp in (2, 4 if name == "mixtral" else 3):  # its experts' kernel takes blocks of 4 of 64 features
            hold(name, tp, step=step)


if __name__ == "__main__":
    import sys

    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1, sys.argv[2:])
