"""Each rank that differs runs the module once in every mode: the search for edits, and the proof of them.

Where layers that repeat each other are left out, each rank must leave out the same ones, edited alike, and
there must be nothing to say: that is said of every layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from autotp.match import Matches
from autotp.propagate.as_rank import distinct_ranks, trace_rank
from autotp.propagate.propagation import Finding, Propagation
from autotp.propagate.repeated import Unlike
from autotp.rewrite.edits.edit import Edits
from autotp.rewrite.edits.solve import Modes, as_it_runs, failing, solve
from autotp.trace.graph import Trace
from autotp.trace.layers import Layers
from autotp.trace.modes import Mode
from autotp.trace.recorder import Guide

__all__ = ["RankRuns"]


@dataclass(frozen=True)
class RankRuns:
    """How the module is run as a rank. `shapes` are those of its whole tensors, `aliases` the first names of
    shared ones, `layers` those that repeat each other and that the whole model's traces leave out."""

    module: nn.Module
    matches: Matches
    shapes: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]
    layers: Layers

    def solve(self, modes: Modes) -> Edits:
        """The edits with which every rank runs its part in these modes; a finding goes to its mode.

        Raises Unlike where repeated layers are left out, and there is anything to say.
        """
        if not modes:
            return Edits()
        edits, failed, finding = solve(self.module, modes, self._ranks(modes), self._run)
        if finding is not None:
            self._unlike()
            next(whole for mode, whole in modes if mode.name == failed).findings.append(finding)
        return edits

    def check(self, modes: Modes, edits: Edits) -> None:
        """Prove each rank's run with these edits; a finding goes to its mode.

        Raises Unlike where repeated layers are left out, and a rank does not run its part.
        """
        self._told(modes, failing(self.module, modes, self._ranks(modes), self._run, edits))

    def check_as_it_runs(self, modes: Modes, edits: Edits) -> Edits:
        """As `check`, but that an edit raises for what it has not met. Gives the edits with what of branches
        that none had taken was proven now."""
        edits, failed = as_it_runs(self.module, modes, self._ranks(modes), self._run, edits)
        self._told(modes, failed)
        return edits

    def _told(self, modes: Modes, failed: tuple[str, int, Finding] | None) -> None:
        if failed is not None:
            self._unlike()
            next(whole for mode, whole in modes if mode.name == failed[0]).findings.append(failed[2])

    def _unlike(self) -> None:
        """What there is to say is said of every layer."""
        if self.layers.groups:
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
