"""transformers' own plans of its causal language models: proven and exact where right, else refused.

`python -m tests.test_transformers_plans [KIND …]` tries each that has a plan, on two ranks, and writes what
came out to docs/transformers_plans.md: the rows of the named ones anew, or all.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch

import autotp
from autotp.decide import decide
from autotp.diagnostic import errors
from autotp.verification import compare
from tests.zoo.build import architectures, build

# Wrong plans of transformers 5.18, with the finding that refuses each.
WRONG = {
    "doge": "AT306",  # the mask is made for every head, and the attention has its own ones
    "inkling_text": "AT309",  # gate and up of the experts are one parameter, cut as if they were one layer
}
# Each of another build: two prefixes, scaled embeddings, two models in one.
RIGHT = ("gemma2", "hrm_text", "llama4_text", "olmo2")


def outcome(kind: str, tp: int = 2) -> tuple[str, str]:
    """What a model's own plan ends in (no plan, not built, exact, refused or WRONG), and what was said."""
    try:
        model = build(kind)
    except Exception as error:
        return "not built", f"{type(error).__name__}: {error}"
    if not (model.config.base_model_tp_plan or getattr(model, "_tp_plan", None)):
        return "no plan", ""
    try:
        plan = autotp.Plan.from_transformers(model)
    except autotp.PlanError as error:
        return "refused", str(error)
    analysis = decide(model, plan, tp=tp)
    if not analysis.ok:
        return "refused", "\n\n".join(d.render() for d in errors(analysis.diagnostics))
    result = compare(model, analysis, inputs=None, weights="random", dtype=None)
    return "exact" if result.ok else "WRONG", f"{analysis.sharded_fraction:.0%} sharded; {result}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", RIGHT)
def test_right_plans_of_transformers_are_exact(kind):
    end, words = outcome(kind)
    assert end == "exact", words


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRONG)
def test_wrong_plans_of_transformers_are_refused(kind):
    end, words = outcome(kind)
    assert end == "refused" and words.startswith(f"error[{WRONG[kind]}]"), words


PAGE = Path(__file__).parents[1] / "docs" / "transformers_plans.md"
HEAD = """# transformers' own plans

The `base_model_tp_plan`s of the causal language models of transformers 5.18, each with a tiny random model on
two ranks: read by `Plan.from_transformers`, proven, and every output and gradient compared with the unsharded
model. `python -m tests.test_transformers_plans` writes this page.

"""


def told(end: str, words: str) -> str:
    """What a row says: how much is cut and how close it is, or the first reason."""
    if end in ("exact", "WRONG"):
        cut, _, numbers = words.partition("; ")
        return f"{cut}, {numbers.partition(', tolerance')[0].partition(': ')[2]}"
    return next((line for line in words.splitlines() if line.strip()), "").replace("|", "\\|")


def written(rows: dict[str, tuple[str, str]]) -> str:
    """The page with these rows."""
    counts = Counter(end for end, _ in rows.values())
    told = ", ".join(f"{number} {end}" for end, number in sorted(counts.items()))
    table = "".join(f"| {kind} | {end} | {words} |\n" for kind, (end, words) in sorted(rows.items()))
    return f"{HEAD}{len(rows)} plans: {told}.\n\n| model | | |\n|---|---|---|\n{table}"


def read(page: str) -> dict[str, tuple[str, str]]:
    """The rows of a page."""
    found = re.findall(r"^\| (\S+) \| (exact|refused|WRONG|error) \| (.*) \|$", page, re.M)
    return {kind: (end, words) for kind, end, words in found}


def test_the_page_is_read_as_it_is_written():
    rows = {"a": ("exact", "9% sharded, x"), "b": ("refused", "error[AT306]: c: d \\| e")}
    assert read(written(rows)) == rows and "2 plans: 1 exact, 1 refused." in written(rows)


def test_the_page_tells_of_no_wrong_number_and_of_what_the_samples_say():
    rows = read(PAGE.read_text())
    assert len(rows) >= 79 and sum(end == "exact" for end, _ in rows.values()) >= 71
    assert {end for end, _ in rows.values()} <= {"exact", "refused"}
    assert all(rows[kind][0] == "exact" for kind in RIGHT)
    assert all(rows[kind][1].startswith(f"error[{code}]") for kind, code in WRONG.items())


def main(kinds: list[str]) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows: dict[str, tuple[str, str]] = {}
    for kind in kinds or architectures():
        try:
            end, words = outcome(kind)
        except Exception as error:
            end, words = "error", f"{type(error).__name__}: {error}"
        if end not in ("no plan", "not built"):
            print(f"== {kind}: {end}\n{words}", flush=True)
            rows[kind] = end, told(end, words)
            known = read(PAGE.read_text()) if kinds and PAGE.exists() else {}  # another run may write, too
            PAGE.write_text(written(known | rows))


if __name__ == "__main__":
    main(sys.argv[1:])
