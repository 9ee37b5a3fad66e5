"""Find the edits with which every rank runs its part of the whole model, in every mode.

    dual trace ──► wrong number ──► guided traces, all modes and ranks ──► edits ──► dual trace, edited ──► …

Only the dual trace of the edited model is the proof: what the search tried does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import combinations
from typing import Any

from torch import fx, nn

from autotp.diagnostic import UnprovenPath
from autotp.propagate import dual
from autotp.propagate.call import Conflict
from autotp.propagate.propagation import Finding, Propagation
from autotp.propagate.repeated import Unlike
from autotp.rewrite.edits.bind import KnownBranches, Observed, bound, reopened, unreached
from autotp.rewrite.edits.edit import Edit, Edits, Items, Local, Size, TwoNeeds, Whole, Wrapper
from autotp.rewrite.edits.guide import Guide
from autotp.rewrite.edits.slow import by_itself, slow
from autotp.rewrite.edits.text import NoSource
from autotp.trace.graph import Trace, TraceError, Val
from autotp.trace.modes import Mode
from autotp.trace.remembered import Forgotten
from autotp.trace.sameness import Different

__all__ = ["Modes", "as_it_runs", "failing", "solve"]

ROUNDS = 12  # a check of the model's own stops a trace, so each takes a round
TRIES = 12  # edits that may let a run go on which raised
_EDITABLE = ("AT303", "AT305", "AT312", "AT313", "AT315")

Run = Callable[[Mode, Propagation, int, Any], Trace]  # (mode, its layouts, rank, guide)
Modes = list[tuple[Mode, Propagation]]


def solve(
    module: nn.Module, modes: Modes, ranks: Iterable[int], run: Run
) -> tuple[Edits, str, Finding | None]:
    """The edits, and the finding that is left, with its mode: None when every rank is proven.

    `run` records the module as a rank; `ranks` are those that differ. Layers that repeat each other are
    edited alike.

    Raises Unlike where they are not alike on a rank.
    """
    return _Search(module, modes, list(ranks), run).run()


def failing(
    module: nn.Module, modes: Modes, ranks: Iterable[int], run: Run, edits: Edits
) -> tuple[str, int, Finding] | None:
    """The first finding of a rank's own trace of the edited model, with its mode and rank."""
    return _Search(module, modes, list(ranks), run).first(edits, Observed())


def as_it_runs(
    module: nn.Module, modes: Modes, ranks: Iterable[int], run: Run, edits: Edits
) -> tuple[Edits, tuple[str, int, Finding] | None]:
    """The first finding where everything raises that was not met before, as it does when the sharded model
    runs. Where all that is new are branches that no trace took, and these are proven: the edits without them.
    """
    search = _Search(module, modes, list(ranks), run)
    failed = search.first(edits, None)
    if failed is None or not search.misplaced:
        return edits, failed
    observed = Observed(as_it_runs=True)
    if search.first(edits, observed) is not None:
        return edits, failed
    for repeat in (repeat for _, whole in modes for repeat in whole.trace.repeats):
        for path, *place in list(observed.reached):
            twin = repeat.renamed(str(path))
            observed.reached |= {(twin, *place)} if twin is not None else set()
    return reopened(module, edits, observed), None


class _Search:
    def __init__(self, module: nn.Module, modes: Modes, ranks: list[int], run: Run) -> None:
        self.module, self.modes, self.ranks, self.record = module, modes, ranks, run
        self.missing: list[tuple[fx.Node, str]] = []
        self.misplaced = False  # whether an edit of ours is what raised
        self.plain: tuple[str, int, Finding] | None = None  # what is found before any edit
        self.branches: KnownBranches = {}

    def run(self) -> tuple[Edits, str, Finding | None]:
        """Search; a text that cannot be edited is why the first finding stays."""
        try:
            return self._searched()
        except NoSource as error:
            mode, node = self.modes[0][0].name, self.modes[0][1].trace.ops()[0]
            if self.plain is None:
                return Edits(), mode, Finding(node, Conflict("AT315", str(error)), ())
            mode, _, finding = self.plain
            self.missing.append((finding.node, str(error)))
            return Edits(), mode, self._explained(finding)

    def _searched(self) -> tuple[Edits, str, Finding | None]:
        try:
            edits = Edits() | slow(self.module, {name for _, whole in self.modes for name in whole.cuts})
        except NoSource as error:
            what = f"a fused kernel of torch would read cut tensors past their mappings: {error}"
            first = next(n for n in self.modes[0][1].trace.ops())
            return Edits(), self.modes[0][0].name, Finding(first, Conflict("AT312", what), ())
        for _ in range(ROUNDS):
            self.missing = []
            observed = Observed(known=self.branches)
            try:
                failed = self.first(edits, observed)
                if failed is None:
                    return self._closed(edits, observed), "", None
                self.plain = self.plain or failed
                mode, rank, finding = failed
                if self.misplaced:
                    return Edits(), self.plain[0], self._explained(self.plain[2])
                more = edits | self._guided(edits, rank) if finding.conflict.code in _EDITABLE else edits
                more |= by_itself(more)
            except TwoNeeds as error:
                return edits, mode, _two_needs(finding, error)
            if more == edits:
                return edits, mode, self._explained(finding)
            edits = more
        return edits, mode, self._explained(finding)

    def _closed(self, edits: Edits, observed: Observed) -> Edits:
        """The edits with all that the proof of them showed."""
        proven = _with_observed(edits, observed, self._given())
        return proven | unreached(self.module, edits, observed)

    def _given(self) -> set[int]:
        """The sizes of what the forward was given, and of two of its dims as one: a batch may have another
        size when the model runs."""
        found = set()
        for _, whole in self.modes:
            for node in whole.trace.graph.nodes:
                if node.op == "placeholder" and isinstance(node.meta.get("val"), Val):
                    shape = node.meta["val"].shape
                    found |= {*shape, *(a * b for a, b in combinations(shape, 2))}
        return found

    def first(self, edits: Edits, observed: Observed | None) -> tuple[str, int, Finding] | None:
        """The first finding of a rank's own trace, in any mode."""
        for mode, whole in self.modes:
            for rank in self.ranks:
                with bound(self.module, edits, rank, observed):
                    try:
                        local = self.record(mode, whole, rank, None)
                    except TraceError as error:
                        self.misplaced = isinstance(error.__cause__, UnprovenPath)
                        return mode.name, rank, dual.failed(whole, error, rank)
                found = dual.compare(whole, local, rank)
                if found is not None:
                    return mode.name, rank, found
        return None

    def _guided(self, edits: Edits, rank: int) -> list[Edit]:
        """The edits that the guided traces of a rank find, in every mode. They hold numbers for all ranks; a
        rank that needs others is found by its own dual trace."""
        found: list[Edit] = []
        for mode, whole in self.modes:
            if whole.trace.route != "recorder":
                continue
            guide, tried = self._guide(edits, mode, whole, rank)
            found += _alike(guide.edits, whole.trace)
            found += self._first_that_helps(tried, guide, edits, mode, whole, {guide.stopped})
            self.missing += [(m.node, m.why) for m in guide.missing]
        return found

    def _guide(self, edits: Edits, mode: Mode, whole: Propagation, rank: int) -> tuple[Guide, list[Edit]]:
        """The guide of one run, and the edits of which one may help where the run raised."""
        guide = Guide(self.module, whole, rank, edits.edits)
        with bound(self.module, edits, rank, Observed(known=self.branches)):
            try:
                self.record(mode, whole, rank, guide)
                guide.finished = True
            except Forgotten:
                pass
            except TraceError as error:
                try:
                    return guide, guide.raised(error.__cause__)
                except NoSource as lacking:
                    self.missing.append((whole.trace.ops()[0], str(lacking)))
                return guide, []
            except Different as error:
                raise Unlike from error
            else:
                return guide, []
        return self._guide(edits, mode, whole, rank)  # nothing is remembered now

    def _first_that_helps(
        self,
        tried: list[Edit],
        guide: Guide,
        edits: Edits,
        mode: Mode,
        whole: Propagation,
        stops: set[tuple[str, int, int] | None],
    ) -> list[Edit]:
        """The first edit with which a run that raised goes further: to another op, or through the checks that
        follow each other before it. `stops` are those that raised so far."""
        for edit in tried[:TRIES]:
            more = _alike([*guide.edits, edit], whole.trace)
            further, then = self._guide(edits | more, mode, whole, guide.rank)
            found = _alike([edit, *further.edits], whole.trace)
            if further.progress > guide.progress or further.finished:
                return found
            if further.stopped in stops:
                continue
            stops.add(further.stopped)
            rest = self._first_that_helps(then, further, edits | more, mode, whole, stops)
            if rest:
                return found + rest
        return []

    def _explained(self, finding: Finding) -> Finding:
        """With why no edit makes it right."""
        raised = finding.conflict.code == "AT315"
        reasons = [why for node, why in self.missing if node is finding.node or raised]
        notes = (*finding.conflict.notes, *(f"no edit of the code makes it right: {w}" for w in reasons[:1]))
        conflict = finding.conflict
        return replace(
            finding,
            conflict=Conflict(
                conflict.code, conflict.message, blame=conflict.blame, notes=notes, help=conflict.help
            ),
        )


def _alike(edits: list[Edit], trace: Trace) -> list[Edit]:
    """The edits, and those of the layers that repeat the ones that are edited."""
    found = list(edits)
    for repeat in trace.repeats:
        twins = ((edit, repeat.renamed(edit.module)) for edit in edits)
        found += [replace(edit, module=path) for edit, path in twins if path is not None]
    return list(dict.fromkeys(found))


def _with_observed(edits: Edits, observed: Observed, given: set[int]) -> Edits:
    """The edits with what passed through their wrappers and was proven as it is.

    Raises TwoNeeds for a number of the input (`given`): when the model runs it may be the very number that
    is cut, and nobody could tell which one is meant.
    """
    by_site = {e.site: e for e in edits.edits}
    more: list[Edit] = []
    passed = []
    for site, values in observed.met.items():
        edit = by_site.get(site)
        if edit is None:
            passed += [(*site, value) for value in values]
        else:
            for value in values:
                number = value[2] if isinstance(value, tuple) else value
                if number in given and (isinstance(value, tuple) or isinstance(edit.wrapper, (Local, Whole))):
                    two = TwoNeeds(f"{number}, a size of the input, would have to stay, whatever it is")
                    two.edit = edit
                    raise two
            more += [replace(edit, wrapper=_as_it_is(edit.wrapper, value)) for value in values]
    return replace(edits | more, passed=tuple(passed))


def _as_it_is(wrapper: Wrapper, value: Any) -> Wrapper:
    if isinstance(wrapper, Items) and isinstance(value, tuple):
        length, place, number = value
        parts = (number,) * len(wrapper.items[0][2].parts)
        return Items(((length, place, Size(number, parts)),))
    if isinstance(wrapper, Items):
        return Items((), (value,))
    assert isinstance(wrapper, (Local, Whole))
    return type(wrapper)((Size(value, (value,) * len(wrapper.sizes[0].parts)),))


def _two_needs(finding: Finding, error: TwoNeeds) -> Finding:
    edit = error.edit
    where = f"{edit.function.name} in {edit.module or 'the model'}" if edit is not None else "the model"
    conflict = Conflict(
        "AT327",
        f"one expression of {where} would have to be two things on a rank: {error}",
        help=("let the two uses be two expressions",),
    )
    return replace(finding, conflict=conflict)
