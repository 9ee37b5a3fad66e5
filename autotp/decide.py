"""Every decision about a live model, made before anything is touched: match, prove, count the cost."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from autotp.analysis import LAYOUTS, Analysis
from autotp.collectives import Collective, collectives_of
from autotp.diagnostic import Diagnostic, UsageError, errors
from autotp.dry_run import PlanLike, check_name, named_plan
from autotp.plan import Plan
from autotp.proof import Proof
from autotp.propagate.given import Proven
from autotp.propagate.reads import held_reads
from autotp.propagate.regions import Region
from autotp.prove import prove, uncollected
from autotp.rewrite.apply import refuse_sharded
from autotp.rewrite.edits.diff import diff
from autotp.shapes import analyze_shapes
from autotp.trace.inputs import make
from autotp.trace.inventory import inventory
from autotp.trace.layers import Layers
from autotp.trace.modes import Captured, capture_modes, signature
from autotp.trace.support import hooked, unsupported

if TYPE_CHECKING:
    from autotp.derive.derived import Derived

__all__ = ["decide", "decide_with_proof", "derive_with_proof"]


def decide(
    model: nn.Module, plan: PlanLike | None, *, tp: int, inputs: Any = None, check: str = "layouts"
) -> Analysis:
    """The analysis of a live model; `Analysis.diagnostics` holds whatever speaks against the plan.

    Raises PlanError for a plan that cannot be read and UsageError for a call that cannot mean anything.
    """
    return decide_with_proof(model, plan, tp=tp, inputs=inputs, check=check)[0]


def decide_with_proof(
    model: nn.Module,
    plan: PlanLike | None,
    *,
    tp: int,
    inputs: Any = None,
    check: str = "layouts",
    every: bool = False,
) -> tuple[Analysis, Proof | None]:
    """What `decide` gives, and the proof it rests on: None where names and shapes already refuse the plan.
    With `every` its traces have every layer, also those that repeat others."""
    check_name(check)
    if not isinstance(model, nn.Module):
        raise UsageError(f"a model is an nn.Module, not {type(model).__name__}")
    refuse_sharded(model)
    stock = inventory(model)
    if plan == "auto":
        return derive_with_proof(model, tp=tp, inputs=inputs, check=check)[:2]
    chosen, name = named_plan(plan, stock.config.get("model_type"))
    analysis = analyze_shapes(stock, chosen, tp=tp, plan_name=name, before_proof=check == "layouts")
    cut = analysis.layouts if tp > 1 else ()
    refused = (*unsupported(model), *hooked(model, cut))
    analysis = replace(analysis, diagnostics=(*_unsaid(analysis.diagnostics, refused), *refused))
    if check == "shapes":
        reads = held_reads(analysis.matches, stock.aliases).values()
        return replace(analysis, reads=tuple(reads)), None
    if not analysis.ok:
        return analysis, None
    samples = make(model, inputs)
    proof = prove(model, analysis.matches, stock, samples, every=every)
    return replace(_proven(analysis, proof), samples=samples), proof


def _unsaid(found: Iterable[Diagnostic], refused: Iterable[Diagnostic]) -> Iterator[Diagnostic]:
    """The findings but for rules that do not fit a module whose weight is computed, which is told itself."""
    computed = {each.module for each in refused if each.code == "AT222"}
    inside = tuple(f"{path}.parametrizations." for path in computed)
    for each in found:
        if each.severity != "error" or not (each.module in computed or f"{each.module}.".startswith(inside)):
            yield each


def derive_with_proof(
    model: nn.Module, *, tp: int, inputs: Any = None, check: str = "layouts"
) -> tuple[Analysis, Proof | None, Derived]:
    """The analysis of the plan that is derived from the model's graph, its proof, and what was found.

    Raises UsageError for a call that cannot mean anything.
    """
    if check != "layouts":
        raise UsageError('plan "auto" is derived from the traced graph, which check="shapes" leaves out')
    from autotp.derive.auto import decide_auto

    stock, refused = inventory(model), tuple(unsupported(model))
    samples = make(model, inputs)

    def decided(plan: Plan, found: Captured) -> tuple[Analysis, Proof | None]:
        analysis = analyze_shapes(stock, plan, tp=tp, plan_name="auto", before_proof=True)
        found_hooks = tuple(hooked(model, analysis.layouts if tp > 1 else ()))
        analysis = replace(analysis, diagnostics=(*analysis.diagnostics, *found_hooks))
        if not analysis.ok and analysis.layouts:
            return analysis, None
        proof = prove(model, analysis.matches, stock, samples, found=found)
        return _proven(analysis, proof), proof

    def captured(layers: Layers) -> Captured:
        return Captured() if refused else capture_modes(model, samples, layers)

    with uncollected():
        (analysis, proof), derived = decide_auto(stock, captured, Layers.of(model), tp, decided)
    analysis = replace(analysis, diagnostics=(*analysis.diagnostics, *refused), samples=samples)
    return analysis, proof, derived


def _proven(analysis: Analysis, proof: Proof) -> Analysis:
    first = analysis.inventory.aliases
    findings = (*proof.diagnostics, *analysis.diagnostics)
    proven = not errors(findings)
    return replace(
        analysis,
        layouts={n: proof.cuts.get(first.get(n, n), cut) for n, cut in analysis.layouts.items()},
        diagnostics=findings,
        certainty=LAYOUTS if proven else analysis.certainty,
        collectives=tuple(_collectives(analysis, proof)) if proven else analysis.collectives,
        modes=tuple(proof.modes),
        random=tuple(sorted(proof.random)),
        random_in_eval=tuple(sorted(proof.random_in_eval)),
        random_common=tuple(sorted(proof.random_common)),
        draws=tuple(sorted(proof.draws)),
        resting=tuple(sorted(proof.resting)) if proven else (),
        reads=tuple(proof.reads.values()) if proven else (),
        regions=tuple(proof.regions.values()) if proven else (),
        shared=proof.shared if proven else (),
        branches=proof.branches if proven else (),
        uncopied=tuple(sorted(proof.uncopied)) if proven else (),
        unreduced=tuple(sorted(proof.unreduced)) if proven else (),
        forward=_digest(proof) if proven else "",
        handed=dict(sorted(proof.handed.items())) if proven else {},
        at_use=proven and proof.at_use,
        gives=dict(sorted(proof.gives.items())) if proven else {},
        edits=diff(proof.edits) if proven else "",
        code=proof.edits if proven else analysis.code,
        given=Proven(proof.given, proof.read, _written(proof), frozenset(proof.left))
        if proven and proof.given
        else None,
    )


def _written(proof: Proof) -> frozenset[str]:
    """The attributes of modules that the forward writes, and never reads what an earlier call left."""
    every = (place for whole in proof.propagations.values() for place in whole.trace.kept)
    return frozenset(place for place in every if place.rpartition(".")[2] not in proof.carried)


def _digest(proof: Proof) -> str:
    """A hash of the traced forwards, the same on every device: what a hook adds on one rank is in it."""
    digest = hashlib.sha256()
    for mode, whole in proof.propagations.items():
        handled = [(n.name, n.meta["backward"]) for n in whole.trace.graph.nodes if n.meta.get("backward")]
        told = repr((mode, signature(whole.trace), handled))
        digest.update(_OF_A_PROCESS.sub("", told).encode())
    return digest.hexdigest()


_OF_A_PROCESS = re.compile(r", index=\d+|(?<=cuda):\d+| at 0x[0-9a-f]+")  # devices and addresses


def _collectives(analysis: Analysis, proof: Proof) -> list[Collective]:
    """What the traced forward runs, and the backward of it: each layer as often as it was called."""
    found: list[Collective] = []
    followers = {path for group in proof.shared for path in group[1:]}  # the first one's copy serves them
    for placed in analysis.matches.placed.values():
        if placed.target != "module" or not placed.layouts:
            continue
        kind = analysis.inventory.modules[placed.path].class_name
        statistics = {"LayerNorm": 2, "RMSNorm": 1}.get(kind, 0)  # each summed forward and backward
        mappings = ["reduce", "copy"] * statistics or {
            "column": ["copy"] * (placed.path in proof.copied - followers)
            + ["copy_shared"] * sum(cut.shared for cut in placed.layouts.values())
            + ["gather"] * placed.rule.gather_output,
            "row": ["scatter"] * placed.rule.split_input + ["reduce"] * (placed.path not in proof.unreduced),
            "vocab": ["reduce"],
        }[placed.style]
        for mapping in mappings:
            found += collectives_of(mapping, placed.path, calls=proof.calls.get(placed.path, 1))
    for read in proof.reads.values():
        owner = read.name.rpartition(".")[0]
        if read.copied or read.held is not None:
            mapping = "copy" if read.copied else "copy_shared"
            found += collectives_of(mapping, owner, calls=proof.calls.get(owner, 1))
    for (path, mapping), calls in proof.mapped.items():
        found += collectives_of(mapping, path, calls=calls * proof.calls.get(path, 1))
    for region in proof.regions.values():
        if copies := _copies(region, proof):
            found += collectives_of("copy", region.path, calls=copies)
        if reduces := len(region.reduced) * proof.calls.get(region.path, 1):
            found += collectives_of("reduce", region.path, calls=reduces)
    return found


def _copies(region: Region, proof: Proof) -> int:
    """How many values are copied at a border in one forward: one that is given twice has one copy."""
    traces = [whole.trace for whole in proof.propagations.values()]
    calls = [trace.entered.get(region.path, []) for trace in traces]
    values = [[{n for place, n in call if place in region.copied} for call in entered] for entered in calls]
    return max((sum(map(len, entered)) for entered in values), default=0)
