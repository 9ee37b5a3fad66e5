"""transformers' own plans of its causal language models: proven and exact where right, else refused.

`python -m tests.test_transformers_plans [KIND …]` tries each that has a plan, on two ranks.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter

import pytest
import torch

import autotp
from autotp.diagnostic import errors
from tests.zoo.build import architectures, build

# Wrong plans of transformers 5.18, with the finding that refuses each.
WRONG = {
    "doge": "AT306",  # the mask is made for every head, and the attention has its own ones
    "inkling_text": "AT309",  # gate and up of the experts are one parameter, cut as if they were one layer
}
# Each of another build: two prefixes, scaled embeddings, two models in one.
RIGHT = ("gemma2", "hrm_text", "llama4_text", "olmo2")


def outcome(kind: str, tp: int = 2) -> tuple[str, str]:
    """What an architecture's own plan ends in: no plan, exact, refused, WRONG; and what was said."""
    model = build(kind)
    if not (model.config.base_model_tp_plan or getattr(model, "_tp_plan", None)):
        return "no plan", ""
    try:
        plan = autotp.Plan.from_transformers(model)
    except autotp.PlanError as error:
        return "refused", str(error)
    analysis = autotp.analyze(model, plan, tp=tp)
    if not analysis.ok:
        return "refused", "\n\n".join(d.render() for d in errors(analysis.diagnostics))
    result = autotp.verify(model, plan, tp=tp)
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


def main(kinds: list[str]) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for kind in kinds or architectures():
        try:
            end, words = outcome(kind)
        except Exception as error:
            end, words = "error", f"{type(error).__name__}: {error}"
        counts[end] += 1
        if end != "no plan":
            print(f"== {kind}: {end}\n{words}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main(sys.argv[1:])
