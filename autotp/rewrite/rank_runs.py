"""Each rank that differs runs the module once in every mode: the search for edits, and the proof of them.

Where layers that repeat each other are left out, each rank must leave out the same ones, and there must be
nothing to edit or to say: that is said of every layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from autotp.match import Matches
from autotp.propagate import dual
from autotp.propagate.as_rank import distinct_ranks, trace_rank
from autotp.propagate.propagation import Propagation
from autotp.propagate.repeated import Unlike, same_repeats
from autotp.rewrite.edits.bind import Observed
from autotp.rewrite.edits.edit import Edits
from autotp.rewrite.edits.slow import slow
from autotp.rewrite.edits.solve import Modes, failing, solve
from autotp.trace.graph import Trace
from autotp.trace.layers import Layers
from autotp.trace.modes import Mode
from autotp.trace.recorder import Guide

__all__ = ["RankRuns"]


@dataclass(frozen=True)
class RankRuns:
    """How the module is run as a rank. `shapes` are those of its whole tensors, `aliases` the first names of
    shared ones, `layers` those that repeat each other, where the whole model's traces leave them out."""

    module: nn.Module
    matches: Matches
    shapes: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]
    layers: Layers | None

    def solve(self, modes: Modes) -> Edits:
        """The edits with which every rank runs its part in these modes; a finding goes to its mode.

        Raises Unlike where repeated layers are left out, and there is anything to edit or to say.
        """
        if not modes or self.layers is not None:
            if modes and any(slow(self.module, modes[0][1].cuts)):
                raise Unlike  # an edit of every layer
            self.check(modes, Edits())
            return Edits()
        edits, failed, finding = solve(self.module, modes, self._ranks(modes), self._run)
        if finding is not None:
            next(whole for mode, whole in modes if mode.name == failed).findings.append(finding)
        return edits

    def check(self, modes: Modes, edits: Edits, *, as_it_runs: bool = False) -> None:
        """Prove each rank's run with these edits; a finding goes to its mode. `as_it_runs` an edit raises for
        what it has not met.

        Raises Unlike where repeated layers are left out, and a rank does not run its part.
        """
        ranks = self._ranks(modes)
        if self.layers is None:
            failed = failing(self.module, modes, ranks, self._run, edits, None if as_it_runs else Observed())
            if failed is not None:
                next(whole for mode, whole in modes if mode.name == failed[0]).findings.append(failed[2])
            return
        for mode, whole in modes:
            for rank in ranks:
                local = self._run(mode, whole, rank, None)
                if not same_repeats(whole.trace, local) or dual.compare(whole, local, rank) is not None:
                    raise Unlike

    def _ranks(self, modes: Modes) -> list[int]:
        return distinct_ranks(self.shapes, modes[0][1].cuts, self.matches.tp) if modes else []

    def _run(self, mode: Mode, whole: Propagation, rank: int, guide: Guide | None) -> Trace:
        placed = {p.path: p for p in self.matches.placed.values() if p.target == "module"}
        return trace_rank(
            self.module, mode, whole,
            shapes=self.shapes, placed=placed, aliases=self.aliases, rank=rank, guide=guide,
            layers=self.layers,
        )  # fmt: skip
