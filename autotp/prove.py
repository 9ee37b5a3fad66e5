"""Prove a matched plan on the traced graph: every mode, every rank, before anything is touched.

    matches ──► for each mode: record ──► propagate ──► dual trace of each distinct rank ──► Proof

A trace proves one path, so each mode that a model has is traced: inference (no gradients), eval (with
gradients) and train.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from autotp.diagnostic import Diagnostic
from autotp.inventory import Inventory
from autotp.match import Matches
from autotp.placement import Shard
from autotp.propagate import dual
from autotp.propagate.diagnose import diagnose, rule_line
from autotp.propagate.engine import Finding, Propagation, draws, propagate
from autotp.trace.inputs import Samples
from autotp.trace.recorder import TraceError, record

__all__ = ["MODES", "Proof", "prove"]

# name -> (gradients are recorded, module.training)
MODES: dict[str, tuple[bool, bool]] = {
    "inference": (False, False),
    "eval": (True, False),
    "train": (True, True),
}


@dataclass
class Proof:
    """What the traces showed. `cuts` is how each tensor is cut, by its first name; `calls` how often each
    layer runs; `copied` the column layers whose input needs its gradient summed; `random` the modules that
    draw random numbers on a shard."""

    cuts: dict[str, Shard]
    diagnostics: list[Diagnostic] = field(default_factory=list)
    modes: list[str] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    copied: set[str] = field(default_factory=set)
    random: set[str] = field(default_factory=set)


def prove(module: nn.Module, matches: Matches, inventory: Inventory, samples: Samples) -> Proof:
    """Trace `module` in every mode and give every value a layout, on every rank.

    Never raises for a plan or a model that cannot be proven: the proof's diagnostics say so.
    """
    first = dict(inventory.aliases)
    # On one rank nothing is cut, and the traces only show that the model runs.
    cuts = matches.layouts if matches.tp > 1 else {}
    proof = Proof({first.get(n, n): cut for n, cut in cuts.items()})
    shapes = {n: t.shape for n, t in inventory.tensors().items()}
    settled: dict[str, Shard] = {}
    reached: set[str] = set()
    for mode, (grad, training) in MODES.items():
        with _training(module, training):
            try:
                trace = record(module, samples.args, samples.kwargs, grad=grad)
            except TraceError as error:
                proof.diagnostics.append(_untraceable(error, mode, samples, warning=bool(proof.modes)))
                if not proof.modes:
                    return proof
                continue
            whole = propagate(trace, matches, proof.cuts, first)
            reached |= whole.reached if cuts else trace.calls.keys()
            _random(whole)
            if not whole.findings and cuts:
                whole.findings += _ranks(module, matches, whole, samples, shapes, first, grad)
            if not whole.findings:
                whole.findings += _resettled(settled, whole)
        if whole.findings:
            proof.diagnostics += diagnose(whole)
            return proof
        settled = proof.cuts = whole.cuts
        proof.modes.append(mode)
        proof.calls.update({k: max(v, proof.calls.get(k, 0)) for k, v in trace.calls.items()})
        proof.copied |= whole.copied
        proof.random |= whole.random
    proof.diagnostics += _unreached(matches, reached)
    return proof


def _ranks(
    module: nn.Module,
    matches: Matches,
    whole: Propagation,
    samples: Samples,
    shapes: Mapping[str, tuple[int, ...]],
    aliases: Mapping[str, str],
    grad: bool,
) -> list[Finding]:
    placed = {p.path: p for p in matches.placed.values() if p.target == "module"}
    for rank in dual.distinct_ranks(shapes, whole.cuts, matches.tp):
        try:
            local = dual.trace_rank(
                module, samples.args, samples.kwargs,
                grad=grad, shapes=shapes, cuts=whole.cuts, placed=placed, aliases=aliases, rank=rank,
            )  # fmt: skip
        except TraceError as error:
            return [dual.failed(whole, error, rank)]
        found = dual.compare(whole, local, rank)
        if found is not None:
            return [found]
    return []


def _resettled(before: Mapping[str, Shard], whole: Propagation) -> list[Finding]:
    """A row layer that follows its input must follow it alike in every mode."""
    return [
        dual.finding_at(
            whole, name, "AT307", f"{name} would have to be cut differently in two modes of the model"
        )
        for name, cut in before.items()
        if whole.cuts[name] != cut
    ]


def _random(whole: Propagation) -> None:
    """Random numbers on a shard differ by rank: whole modules switch their stream, so they may not mix."""
    for path in sorted(whole.random):
        mixed = sorted(p for p in whole.random_whole if p == path or p.startswith(f"{path}." if path else ""))
        if mixed:
            whole.findings.append(
                dual.finding_in(
                    whole, path, "AT316",
                    "random numbers are drawn both on sharded values, where ranks must differ, and on whole "
                    "ones, where they must agree",
                    only=draws,
                )
            )  # fmt: skip


def _unreached(matches: Matches, reached: set[str]) -> Iterator[Diagnostic]:
    for placed in matches.placed.values():
        if placed.target == "module" and placed.layouts and placed.path not in reached:
            yield Diagnostic(
                "AT322",
                "no traced forward runs this layer, so nothing is proven about it",
                module=placed.path,
                plan=placed.span,
                notes=() if placed.span else (f"the rule: {rule_line(placed.pattern, placed.rule)}",),
                help=("pass inputs= with which the forward runs it, or leave it whole",),
            )


def _untraceable(error: TraceError, mode: str, samples: Samples, *, warning: bool) -> Diagnostic:
    return Diagnostic(
        "AT320",
        f"the forward cannot be traced in {mode} mode: {error}",
        severity="warning" if warning else "error",
        module=error.module or None,
        source=error.source,
        notes=(f"the inputs of the trace were {samples.origin}: {_spoken(samples)}",),
        help=(
            (f"the sharded model will refuse to run in {mode} mode",)
            if warning
            else (
                "pass inputs= with which the forward runs",
                'check="shapes" goes on without a proof, on names and shapes only',
            )
        ),
    )


def _spoken(samples: Samples) -> str:
    def one(value: object) -> str:
        shape = getattr(value, "shape", None)
        return (
            repr(value)
            if shape is None
            else f"{list(shape)} {str(getattr(value, 'dtype', '')).removeprefix('torch.')}"
        )

    named = [one(a) for a in samples.args] + [f"{k}={one(v)}" for k, v in samples.kwargs.items()]
    return ", ".join(named)


@contextlib.contextmanager
def _training(module: nn.Module, training: bool) -> Iterator[None]:
    """Set train or eval mode, and put every module's own flag back."""
    flags = [(m, m.training) for m in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for owner, flag in flags:
            owner.training = flag
