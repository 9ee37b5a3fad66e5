"""Random modules with random plans: each is refused, or exact in outputs and in every gradient.

`python -m tests.test_equivalence FIRST COUNT` runs the seeds FIRST … FIRST + COUNT - 1 and prints counts.
"""

from __future__ import annotations

import copy
import random
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autotp
from autotp.analysis import Analysis
from autotp.comm import Group, simulate
from autotp.decide import decide
from autotp.diagnostic import render
from autotp.rewrite.apply import apply
from autotp.trace import modes
from tests.grammar import PRODUCTIONS, Sentence, sentence

TOLERANCE = 1e-9


def outcome(made: Sentence, *, every_mode: bool = False) -> tuple[str, str]:
    """What a sentence ends in: exact, whole (nothing is cut), refused, or WRONG; and what was said."""
    model = made.build()
    try:
        with _modes(None if every_mode else 1):
            analysis = decide(model, made.plan, tp=made.tp, inputs=made.inputs(3, 5))
    except autotp.PlanError as error:
        return "refused", str(error)
    if not analysis.ok:
        return "refused", render(d for d in analysis.diagnostics if d.severity == "error")
    wanted = run(copy.deepcopy(model), made)
    assert all(bool(t.isfinite().all()) for t in wanted[0]), "the grammar writes finite numbers"

    def rank(group: Group) -> Any:
        mine = _Counted(group)
        return *run(apply(copy.deepcopy(model), analysis, mine), made), mine.calls

    worst = 0.0
    found = simulate(made.tp, rank)
    for number, (outputs, gradients, _) in enumerate(found):
        worst = max([worst, *(far(a, b) for a, b in zip(wanted[0], outputs, strict=True))])
        largest = max([1.0, *(float(g.abs().max()) for g in wanted[1].values())])
        assert gradients.keys() == wanted[1].keys(), gradients.keys() ^ wanted[1].keys()
        for name, gradient in gradients.items():
            whole = part(wanted[1][name], analysis, name, number)
            worst = max(worst, far(whole, gradient, max(float(wanted[1][name].abs().max()), 1e-3 * largest)))
    if not worst <= TOLERANCE:
        return "WRONG", f"off by {worst:.1e}"
    return "exact" if analysis.layouts and any(calls for *_, calls in found) else "whole", ""


def fault(made: Sentence, end: str, words: str) -> bool:
    """Whether that end must not be: a wrong number, a right plan refused, an error of ours in a rule."""
    return end == "WRONG" or (made.right and end == "refused") or "does not know" in words


def run(model: nn.Module, made: Sentence) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs and gradients of one forward and backward, of another size than the trace's."""
    x = made.inputs(2, 4)
    x.requires_grad_(x.is_floating_point())
    out = model(x)
    outputs = list(out.values() if isinstance(out, dict) else out if isinstance(out, tuple) else [out])
    weights = torch.Generator().manual_seed(2)
    sum(
        (o * torch.randn(o.shape, generator=weights, dtype=o.dtype)).sum() for o in outputs if o.requires_grad
    ).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return [o.detach() for o in outputs], gradients | ({"input": x.grad} if x.grad is not None else {})


def part(whole: Tensor, analysis: Analysis, name: str, rank: int) -> Tensor:
    """A rank's part of a tensor, cut by hand."""
    cut = analysis.layouts.get(name)
    if cut is None:
        return whole
    ranges = cut.ranges(whole.shape[cut.dim], rank)
    return torch.cat([whole.narrow(cut.dim, a, b - a) for a, b in ranges], cut.dim)


def far(wanted: Tensor, got: Tensor, scale: float | None = None) -> float:
    """How far two tensors are apart, relative to the largest element."""
    if wanted.shape != got.shape:
        return float("inf")
    largest = max(1.0, float(wanted.abs().max())) if scale is None else scale
    found = float((wanted - got).abs().max()) / (largest or 1.0)
    return found if found == found else float("inf")


@contextmanager
def _modes(count: int | None) -> Iterator[None]:
    """Only so many modes are traced: these modules run alike in all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modes, "modes", lambda *args, every=modes.modes: every(*args)[:count])
        yield


class _Counted:
    """A group that counts its collectives."""

    def __init__(self, group: Group) -> None:
        self._group, self.calls = group, 0

    def __getattr__(self, name: str) -> Any:
        self.calls += name.startswith(("all_", "reduce_"))
        return getattr(self._group, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


@dataclass
class Counts:
    """What examples ended in; of the accepted ones, how many hold each production."""

    ends: Counter[str] = field(default_factory=Counter)
    productions: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)

    def add(self, made: Sentence, end: str, words: str) -> None:
        self.ends[end] += 1
        self.productions.update(made.productions if end == "exact" else ())
        self.codes.update([words[6:11]] if end == "refused" else [])

    def __str__(self) -> str:
        shares = ", ".join(f"{p} {self.productions[p] / self.ends['exact']:.0%}" for p in PRODUCTIONS)
        codes = ", ".join(f"{code} {count}" for code, count in self.codes.most_common())
        return f"{dict(self.ends)}\nof the exact ones: {shares}\nrefused by: {codes}"


class _Drawn:
    """Choices that hypothesis makes, and can shrink."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def choice(self, seq: Any, /) -> Any:
        return seq[self._data.draw(st.integers(0, len(seq) - 1))]


@pytest.mark.slow
def test_random_modules_are_refused_or_exact(capsys):
    counts = Counts()

    @settings(max_examples=2000, deadline=None, derandomize=True, database=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.data())
    def hold(data: st.DataObject) -> None:
        choose = _Drawn(data)
        made = sentence(choose)
        end, words = outcome(made, every_mode=choose.choice(range(20)) == 0)
        counts.add(made, end, words)
        assert not fault(made, end, words), f"{end}\n{made}\n{words}"

    hold()
    with capsys.disabled():
        print(f"\n{counts}")
    assert counts.ends.total() >= 2000
    assert counts.ends["exact"] >= 0.4 * counts.ends.total()
    assert [p for p in PRODUCTIONS if counts.productions[p] < 0.05 * counts.ends["exact"]] == []


def test_some_random_modules_are_refused_or_exact():
    counts = Counts()
    for seed in range(40):
        made = sentence(random.Random(seed))
        end, words = outcome(made)
        counts.add(made, end, words)
        assert not fault(made, end, words), f"{end}\n{made}\n{words}"
    assert counts.ends["exact"] >= 12 and counts.ends["refused"] >= 12


def hunt(first: int, count: int) -> None:
    """Print what many seeds end in, and every fault with its module and plan."""
    counts = Counts()
    for seed in range(first, first + count):
        made = sentence(random.Random(seed))
        try:
            end, words = outcome(made, every_mode=seed % 20 == 0)
        except Exception:
            end, words = "error", traceback.format_exc()
        counts.add(made, end, words)
        if end == "error" or fault(made, end, words):
            print(f"==== seed {seed}: {end}\n{made}\n{words}", flush=True)
    print(counts)


if __name__ == "__main__":
    hunt(int(sys.argv[1]), int(sys.argv[2]))
