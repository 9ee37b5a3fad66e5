"""Settle how a plan's tensors are cut, read and mapped, alike in every mode of a model.

What one mode finds holds for the others: each is propagated with what all have found, until none finds more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from autotp.inventory import Inventory
from autotp.match import Matches
from autotp.placement import Shard
from autotp.proof import Proof
from autotp.propagate.borders import borders, mixed_random
from autotp.propagate.compared import comparisons
from autotp.propagate.engine import propagate
from autotp.propagate.findings import finding_at
from autotp.propagate.merged import Sum
from autotp.propagate.planned import raw_modules
from autotp.propagate.propagation import Propagation
from autotp.propagate.reads import Read
from autotp.propagate.regions import Region
from autotp.propagate.repeated import spread
from autotp.trace.graph import Trace

__all__ = ["Known", "Sums", "decisions", "let_out", "put_back", "settle"]

ROUNDS = 8  # until nothing more is found; two suffice for what was seen
Decisions = tuple[dict[str, Shard], dict[str, Read], dict[str, Region]]


@dataclass(frozen=True)
class Known:
    """A plan on a model: further names of tied tensors, and the kind of module that holds each tensor."""

    matches: Matches
    aliases: Mapping[str, str]
    kinds: Mapping[str, str]

    @staticmethod
    def of(matches: Matches, inventory: Inventory) -> Known:
        """What is known before any trace."""
        raw = raw_modules(matches)
        kinds = {
            tensor.name: "other" if module.path in raw else module.kind
            for module in inventory.modules.values()
            for tensor in module.tensors.values()
        }
        return Known(matches, dict(inventory.aliases), kinds)


@dataclass(frozen=True)
class Sums:
    """The row layers that leave their outputs partial, and where each mode reduces the sums of them."""

    rows: frozenset[str]
    of: Mapping[str, Mapping[fx.Node, Sum]]


def settle(
    proof: Proof, traces: Mapping[str, Trace], known: Known, sums: Sums | None, *, choose: bool
) -> tuple[dict[str, Propagation], Propagation | None]:
    """Every mode's layouts (of one mode alone, where it has findings); the decisions are left on `proof`.

    Where a value is used whole and on shards, what meets a shard is copied at that use, and not where it is
    read, if `choose`: then the other is what is found without.
    """
    before = decisions(proof)
    found = _settled(proof, traces, known, sums)
    findings = [finding for whole in found.values() for finding in whole.findings]
    if not choose or proof.at_use or all(finding.conflict.code != "AT305" for finding in findings):
        return found, None
    after = decisions(proof)
    put_back(proof, before)
    proof.at_use = True
    again = _settled(proof, traces, known, sums)
    if not any(whole.findings for whole in again.values()):
        return again, next(whole for whole in found.values() if whole.findings)
    put_back(proof, after)
    proof.at_use = False
    return found, None


def _settled(
    proof: Proof, traces: Mapping[str, Trace], known: Known, sums: Sums | None
) -> dict[str, Propagation]:
    whole: Propagation | None = None
    for _ in range(ROUNDS):
        before = decisions(proof)
        found: dict[str, Propagation] = {}
        for mode, trace in traces.items():
            cuts = proof.cuts
            found[mode] = whole = propagate(
                trace,
                known.matches,
                cuts,
                aliases=known.aliases,
                kinds=known.kinds,
                reads=proof.reads,
                regions=proof.regions,
                unreduced=sums.rows if sums is not None else frozenset(),
                sums=sums.of[mode] if sums is not None else None,
                at_use=proof.at_use,
            )
            if not whole.findings:
                spread(whole, cuts)
            mixed_random(whole)
            if not whole.findings:
                whole.findings += [*borders(whole), *comparisons(whole)]
            if whole.findings:
                return {mode: whole}
            proof.cuts, proof.reads, proof.regions = whole.cuts, whole.reads, whole.regions
        if decisions(proof) == before:
            return found
    assert whole is not None
    changing = next(n for n, cut in proof.cuts.items() if before[0][n] != cut)
    message = f"{changing} would have to be cut differently in two modes of the model"
    whole.findings.append(finding_at(whole, changing, "AT307", message))
    return {mode: whole}


def decisions(proof: Proof) -> Decisions:
    """What is decided so far."""
    return dict(proof.cuts), dict(proof.reads), dict(proof.regions)


def put_back(proof: Proof, before: Decisions) -> None:
    """Decide as it was."""
    proof.cuts, proof.reads, proof.regions = before


def let_out(proof: Proof, rows: frozenset[str]) -> None:
    """The regions among these leave what they give as parts of a sum."""
    none: frozenset[str] = frozenset()
    proof.regions = {
        path: replace(region, reduced=none) if path in rows else region
        for path, region in proof.regions.items()
    }
