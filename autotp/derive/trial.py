"""Try an assignment on every trace of a model: the first conflict, or how much it moves."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from autotp.derive.assignment import Assignment, Board
from autotp.derive.fused import heads_seen
from autotp.placement import Shard
from autotp.propagate.engine import Walk, propagate
from autotp.propagate.heads import GATHER
from autotp.propagate.ops import op_name
from autotp.propagate.planned import raw_modules
from autotp.propagate.propagation import Finding, Propagation
from autotp.propagate.sparse import sparse
from autotp.styles import is_norm
from autotp.trace.graph import Trace
from autotp.units import Fault

__all__ = ["Outcome", "Trials"]


@dataclass(frozen=True)
class Outcome:
    """A conflict and the layouts up to it, or a fault of names and shapes, or neither: what is moved then.

    `moved` counts elements that go through a collective in one forward; `statistics` says whether those of
    a norm do.
    """

    propagation: Propagation | None = None
    finding: Finding | None = None
    fault: Fault | None = None
    moved: int = 0
    statistics: bool = False

    @property
    def clean(self) -> bool:
        """Whether nothing speaks against the assignment."""
        return self.finding is None and self.fault is None


class Trials:
    """The traces of a model, ready for many tries. `count` is how many were made."""

    def __init__(self, board: Board, traces: list[Trace]) -> None:
        self.board = board
        self.traces = traces
        self.kinds = {t.name: m.kind for m in board.inventory.modules.values() for t in m.tensors.values()}
        self.norms = {path for path, module in board.inventory.modules.items() if is_norm(module)}
        self.count = 0
        self._heads: dict[str, int] | None = None
        self._walks: list[Walk] = [sparse(trace, until_conflict=True) for trace in traces]
        self._full: list[Walk] = [sparse(trace) for trace in traces]

    @property
    def heads(self) -> Mapping[str, int]:
        """How many heads the views behind each layer make of its output, by the layer's path."""
        if self._heads is None:
            self._heads = {}
            for node in (n for trace in self.traces for n in trace.ops()):
                if op_name(node) in ("linear", "addmm"):
                    number = heads_seen(node)
                    if number is not None:
                        self._heads.setdefault(node.meta["module"], number)
        return self._heads

    def run(self, assignment: Assignment) -> Outcome:
        """Propagate an assignment through every trace, until the first conflict."""
        self.count += 1
        outcomes = self._outcomes(assignment, self._walks)
        return next((o for o in outcomes if not o.clean), outcomes[0])

    def conflicts(self, assignment: Assignment) -> list[Finding] | Fault:
        """Every conflict of an assignment in the traces."""
        self.count += 1
        found: list[Finding] = []
        for outcome in self._outcomes(assignment, self._full):
            if outcome.fault is not None:
                return outcome.fault
            if outcome.propagation is not None:
                found += outcome.propagation.findings
        return found

    def _tensors_of(self, paths: Collection[str]) -> list[str]:
        modules = self.board.inventory.modules
        return [t.name for path in paths if path in modules for t in modules[path].tensors.values()]

    def _outcomes(self, assignment: Assignment, walks: list[Walk]) -> list[Outcome]:
        matches = self.board.matches(assignment)
        if isinstance(matches, Fault):
            return [Outcome(fault=matches)]
        cuts: Mapping[str, Shard] = {self.board.canonical(n): cut for n, cut in matches.layouts.items()}
        reads: Mapping[str, Any] = {}
        regions: Mapping[str, Any] = {}
        norms = any(key in self.norms for key in assignment)
        raw = raw_modules(matches)
        kinds = self.kinds if not raw else {**self.kinds, **dict.fromkeys(self._tensors_of(raw), "other")}
        outcomes = []
        for trace, walk in zip(self.traces, walks, strict=True):
            found = propagate(
                trace, matches, cuts,
                aliases=self.board.first, kinds=kinds, reads=reads, regions=regions, engine=walk,
            )  # fmt: skip
            finding = found.findings[0] if found.findings else None
            moved = 0 if finding else _moved(found)
            statistics = norms or any(how != GATHER for how in found.mapped.values())
            outcomes.append(Outcome(found, finding, moved=moved, statistics=statistics))
            if finding is not None:
                break
            cuts, reads, regions = found.cuts, found.reads, found.regions
        return outcomes


def _moved(found: Propagation) -> int:
    """The elements that collectives take in one forward and its backward, by the layers and regions."""
    total = 0
    inputs = {node for nodes in found.copied.values() for node in nodes}
    total += sum(map(_elements, inputs))
    for path in found.reached:
        rule = found.matches.placed[path].rule
        for calls in found.trace.left.get(path, ()):
            if rule.style in ("row", "vocab") or rule.gather_output:
                total += sum(_elements(node) for _, node in calls)
    for path, region in found.regions.items():
        for table, places in ((found.trace.entered, region.copied), (found.trace.left, region.reduced)):
            for calls in table.get(path, ()):
                total += sum(_elements(node) for place, node in calls if place in places)
    return total + 2 * sum(len(how) * _elements(node) for node, how in found.mapped.items())


def _elements(node: fx.Node) -> int:
    val = node.meta["val"]
    return sum(abs(math.prod(v.shape)) for v in (val if isinstance(val, list) else [val]) if v is not None)
