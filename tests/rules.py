"""Rules against execution: run an op on every rank's part, put the parts together, compare with the whole.

A case is a function of tensors. It is recorded like a model's forward; every layout of its inputs is given
to the engine; where the engine accepts, each rank runs the recorded ops on its own parts, with the arguments
that `arguments.expected` predicts, and forward values and gradients must be those of the whole run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autotp.placement import Joint, Layout, Partial, Shard
from tests.layouts import Placed, cut, cuts, placements, tensor
from tests.replay import Recorded

__all__ = ["Case", "Placed", "Tally", "cut", "cuts", "hold", "placements", "tensor"]

Choices = Callable[[int], Sequence[Sequence[Placed]]]


@dataclass(frozen=True, eq=False)
class Case:
    """A function of tensors to try.

    `few` limits the cuts of each dim, `choices(tp)` gives the placements of each input instead. `takes`
    are layouts at tp 2 that must be accepted; `never` says that nothing but whole values may be.
    """

    function: Callable[..., Any]
    inputs: tuple[Any, ...]
    few: int = 9
    choices: Choices | None = None
    tps: tuple[int, ...] = (2, 3)
    tolerance: float = 1e-10
    takes: tuple[tuple[Layout, ...], ...] = ()
    never: bool = False

    @cached_property
    def recorded(self) -> Recorded:
        """The recorded ops, and the whole run."""
        return Recorded(self.function, self.inputs, self.tolerance)


@dataclass(frozen=True)
class Tally:
    """How many layout combinations an op took and refused, all whole ones left out."""

    accepted: int
    refused: int
    taken: frozenset[tuple[Layout, ...]]


def hold(case: Case) -> Tally:
    """Try a case on every combination of layouts; each accepted one must be exact."""
    accepted = refused = 0
    taken: set[tuple[Layout, ...]] = set()
    for tp in case.tps:
        tensors = case.recorded.tensors
        per_input = case.choices(tp) if case.choices else [placements(t, tp, few=case.few) for t in tensors]
        for combination in itertools.product(*per_input):
            layouts = tuple(layout for layout, _ in combination)
            went = case.recorded.run(combination, tp)
            if any(isinstance(layout, (Joint, Partial, Shard)) for layout in layouts):
                accepted, refused = accepted + went, refused + (not went)
            if went:
                taken.add(layouts)
    tally = Tally(accepted, refused, frozenset(taken))
    assert (accepted == 0) if case.never else accepted, f"{tally.accepted} accepted, {tally.refused} refused"
    missing = [layouts for layouts in case.takes if layouts not in taken]
    assert not missing, f"refused: {[[str(x) for x in layouts] for layouts in missing]}"
    return tally
