"""The plan `"auto"`: derive, prove, and where the proof refuses it, derive again without what it blames.

What the search found propagates; the proof asks more (every mode, each rank's own trace). A rule that it
refuses is left out with all that are like it, and what goes with it is looked for anew. So a user gets the
largest part that is proven, and for each large matrix outside of it a warning with the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from autotp.analysis import Analysis
from autotp.cost import LARGE, LEFT_WHOLE, NOTHING, collapsed
from autotp.derive.assignment import Board
from autotp.derive.derived import Derived, Reason, derive
from autotp.derive.naming import patterns_of
from autotp.diagnostic import Diagnostic, UsageError
from autotp.inventory import Inventory
from autotp.plan import Plan, Rule
from autotp.proof import Proof
from autotp.propagate.ops import op_name
from autotp.trace.layers import Layers
from autotp.trace.modes import Captured

__all__ = ["AUTO", "Decided", "decide_auto"]

AUTO = "auto"
LEFT_BY_AUTO = "AT393"

Decided = tuple[Analysis, Proof | None]


@dataclass(frozen=True)
class _Blamed:
    """A place in the model that a finding speaks of, and what it says."""

    origins: tuple[str, ...]
    module: str
    reason: Reason


class _Refused(Exception):
    """The first plan that was derived is not proven as it stands."""


def decide_auto(
    stock: Inventory,
    capture: Callable[[Layers], Captured],
    layers: Layers,
    tp: int,
    decide: Callable[[Plan, Captured], Decided],
) -> tuple[Decided, Derived]:
    """The analysis of the largest plan that was derived and proven, its proof, and how it was derived.

    `capture` gives the model's traces, with `layers` recorded once where they repeat; they will do where the
    first plan is proven, since what speaks against it may lie in a layer that was left out. `decide` is how
    any plan of this model is decided. Where nothing can be cut the analysis is refused.
    """
    if layers.groups:
        found = capture(layers)
        repeats = [repeat for _, trace in found.traces for repeat in trace.repeats]
        if repeats and all(collapsed(r.path) == collapsed(r.of) for r in repeats):
            with contextlib.suppress(_Refused):
                return _decided(stock, found, tp, decide, at_once=True)
    return _decided(stock, capture(Layers()), tp, decide)


def _decided(
    stock: Inventory,
    captured: Captured,
    tp: int,
    decide: Callable[[Plan, Captured], Decided],
    *,
    at_once: bool = False,
) -> tuple[Decided, Derived]:
    traces = [trace for _, trace in captured.traces]
    ranks = max(tp, 2)  # on one rank anything goes: the plan is then one for two
    forbidden: dict[str, Reason] = {}
    beside: dict[str, Reason] = {}
    ungathered: set[str] = set()
    while True:
        derived = derive(stock, traces, tp=ranks, forbidden=forbidden, beside=beside)
        decided = None if derived.plan is None else decide(derived.plan, captured)
        refused = {} if decided is None or decided[0].ok else _refused(derived, *decided)
        if at_once and (decided is None or not decided[0].ok):
            raise _Refused
        if not refused:
            break
        forbidden |= refused
        ungathered |= {key for key in refused if derived.rules[key].gather_output}
        for key, reason in refused.items():
            beside |= dict.fromkeys(derived.groups[key], reason)
    while derived.large and (
        decided is None or decided[0].ok
    ):  # once more, with large layers whose output is gathered
        more = derive(
            stock, traces, tp=ranks, forbidden=forbidden, beside=beside, gather=True, ungathered=ungathered
        )
        if more.plan is None or not more.gathered:
            break
        found = decide(more.plan, captured)
        if found[0].ok:
            derived, decided = more, found
            break
        ungathered |= more.gathered.keys() & _refused(more, *found).keys() or more.gathered.keys()
    if decided is None:
        decided = decide(_whole(derived, stock, ranks), captured)
    return (_explained(decided[0], derived), decided[1]), derived


def _whole(derived: Derived, stock: Inventory, tp: int) -> Plan:
    """The plan that leaves every matrix whole: what there is to say when nothing can be cut."""
    names = [reason.name for reason in derived.whole] or [
        tensor.name
        for tensor in stock.tensors().values()
        if len(tensor.shape) > 1 and tensor.role != "buffer"
    ]
    if not names:
        raise UsageError('plan "auto": the model has no matrix that could be sharded')
    board = Board(stock, tp)
    nameless = board.unspeakable()
    rules = {key: Rule(style="replicate") for key in map(board.key, names) if key not in nameless}
    return Plan(rules=patterns_of(rules, board))


def _refused(derived: Derived, analysis: Analysis, proof: Proof | None) -> dict[str, Reason]:
    """The keys that the findings blame, with all that were found alike."""
    found: dict[str, Reason] = {}
    for blamed in (*_findings(proof), *_diagnosed(analysis)):
        keys = [k for k in derived.rules if k in blamed.origins or k.rpartition(".")[0] in blamed.origins]
        keys = keys or _around(blamed.module, derived.rules)
        alike = {derived.alike[key] for key in keys}
        for key in derived.rules:
            if derived.alike[key] in alike:
                found.setdefault(key, blamed.reason)
        if found:
            break  # the findings after the first may come of it
    return found


def _findings(proof: Proof | None) -> Iterator[_Blamed]:
    for whole in proof.propagations.values() if proof is not None else ():
        for finding in whole.findings:
            node, conflict = finding.node, finding.conflict
            op = op_name(node) if node.op == "call_function" else ""
            reason = Reason("", 0, conflict.message, op, node.meta.get("source"))
            yield _Blamed(finding.origins, node.meta.get("module") or "", reason)


def _diagnosed(analysis: Analysis) -> Iterator[_Blamed]:
    for told in analysis.diagnostics:
        if told.severity == "error" and told.module:
            yield _Blamed((told.module,), told.module, Reason("", 0, told.message, "", told.source))


def _around(module: str, keys: Iterable[str]) -> list[str]:
    """The keys in the smallest module around a place that has any."""
    parts = module.split(".") if module else []
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        found = [key for key in keys if key == prefix or key.startswith(f"{prefix}.")]
        if found:
            return found
    return list(keys)


def _explained(analysis: Analysis, derived: Derived) -> Analysis:
    """The analysis with a reason for each large matrix that stays whole, in place of `no rule matches it`."""
    findings = [d for d in analysis.diagnostics if d.code != LEFT_WHOLE]
    if derived.plan is None:
        findings = [_nothing(d, derived) if d.code == NOTHING else d for d in findings]
    else:
        findings += _left(analysis, derived)
    return replace(analysis, diagnostics=tuple(findings))


def _nothing(found: Diagnostic, derived: Derived) -> Diagnostic:
    told = list(dict.fromkeys(f"{collapsed(r.name)}: {reason_text(r)}" for r in _by_size(derived)))
    return replace(
        found,
        message='"auto" found nothing to shard: every rank would hold the whole model',
        notes=tuple(told[:8]),
        help=("write a plan: what speaks against it is then told in full",),
    )


def _left(analysis: Analysis, derived: Derived) -> Iterator[Diagnostic]:
    total = sum(
        t.nbytes for n, t in analysis.inventory.tensors().items() if n not in analysis.inventory.aliases
    )
    groups: dict[tuple[str, str], list[Reason]] = {}
    for reason in _by_size(derived):
        groups.setdefault((collapsed(reason.name), reason.message), []).append(reason)
    for (name, message), reasons in groups.items():
        nbytes = sum(reason.nbytes for reason in reasons)
        if nbytes < LARGE * total:
            continue
        many = "" if len(reasons) == 1 else f", {len(reasons)} tensors"
        yield Diagnostic(
            LEFT_BY_AUTO,
            f'"auto" leaves it whole on every rank: {message}',
            severity="warning",
            module=name if len(reasons) > 1 else reasons[0].name,
            source=reasons[0].source,
            notes=(f"{nbytes:,} bytes{many}, {nbytes / total:.1%} of the model",),
        )


def _by_size(derived: Derived) -> list[Reason]:
    return sorted(derived.whole, key=lambda reason: -reason.nbytes)


def reason_text(reason: Reason) -> str:
    """A reason on one line, with the line of the model."""
    return reason.message + (f" ({reason.source})" if reason.source is not None else "")
