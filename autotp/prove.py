"""Prove a matched plan on the traced graph: every mode, every rank, before anything is touched.

    matches ──► traces of every mode ──► propagate ──► dual trace of each distinct rank ──► Proof

A trace proves one path, so each mode that a model has is traced (`trace.modes`), every layer of it: two
layers that look alike may be called differently.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from autotp.analysis import Analysis
from autotp.diagnostic import Diagnostic, Span, errors
from autotp.inventory import Inventory
from autotp.match import Matches
from autotp.placement import INVARIANT, is_whole
from autotp.proof import Proof
from autotp.proof_notes import (
    copied_at_times,
    handled,
    left_parts,
    not_run,
    notes,
    read_around,
    reads_left,
    unreached_layers,
    untraceable,
)
from autotp.propagate.compared import asked_of_cuts
from autotp.propagate.diagnose import diagnose
from autotp.propagate.findings import finding_in
from autotp.propagate.given import calls_of, guard_of
from autotp.propagate.mapped import counted
from autotp.propagate.merged import between, meeting, merged, within_layers
from autotp.propagate.ops import draws
from autotp.propagate.propagation import Propagation
from autotp.propagate.reads import held_reads
from autotp.propagate.repeated import Unlike, for_twins, marks, with_twins
from autotp.propagate.size_guards import size_guards
from autotp.random import by_python
from autotp.rewrite.edits.edit import Edits
from autotp.rewrite.parts_of_sums import is_looked_at
from autotp.rewrite.rank_runs import RankRuns
from autotp.settle import Known, Sums, decisions, let_out, put_back, settle
from autotp.trace.branches import unreached
from autotp.trace.carried import carried_in, functions_of
from autotp.trace.consulted import consulted
from autotp.trace.graph import Trace, TraceError, parameters_of
from autotp.trace.handed import handed
from autotp.trace.inputs import Samples
from autotp.trace.layers import Layers
from autotp.trace.modes import Captured, Mode, capture_modes
from autotp.trace.untouched import code_around, untouched
from autotp.trace.witnesses import sizes_said, witnesses

__all__ = ["prove", "prove_call", "uncollected"]


def prove(
    module: nn.Module,
    matches: Matches,
    inventory: Inventory,
    samples: Samples,
    *,
    found: Captured | None = None,
    every: bool = False,
) -> Proof:
    """Trace `module` in every mode and give every value a layout, on every rank.

    `found` are its traces, where there are some already. Layers that repeat each other are recorded once,
    unless the graph of `every` one is wanted or `found`, or there is something to say of any. Never raises
    for a plan or a model that cannot be proven: the proof's diagnostics say so.
    """
    every = every or (found is not None and not found.layers.groups)
    layers = Layers() if every else Layers.of(module, marks(matches))
    known = found if found is not None and found.layers.groups == layers.groups else None
    with untouched(module), uncollected():
        if layers.groups:
            prover = _Prover(module, matches, inventory, samples, layers)
            with contextlib.suppress(Unlike, TraceError):
                prover.run(known or capture_modes(module, samples, layers))
                if not prover.repeats or not errors(prover.proof.diagnostics):
                    return prover.proof
            known = None
        every_layer = Layers(remember=layers.remember)
        prover = _Prover(module, matches, inventory, samples, every_layer)
        prover.run(known or capture_modes(module, samples, every_layer))
        return prover.proof


def prove_call(module: nn.Module, before: Analysis, mode: Mode) -> Proof:
    """Whether one more `mode` of `module` is proven by the decisions of `before`: with their cuts, reads,
    regions and edits. The proof says which others it would take.

    Raises TraceError when it cannot be traced.
    """
    matches, inventory = before.matches, before.inventory
    samples = Samples(mode.args, mode.kwargs, "given") if mode.then is None else Samples((), {}, "given")
    for each in (Layers.of(module, marks(matches)), Layers()):
        with untouched(module), uncollected(), contextlib.suppress(Unlike):
            trace = mode.capture(module, layers=each)
            found = Captured([(mode, trace)], layers=each, given=[(mode, trace.given.get("", []), trace)])
            prover = _Prover(module, matches, inventory, samples, each, (before, mode))
            prover.run(found)
            if not prover.repeats or not errors(prover.proof.diagnostics):
                return prover.proof
    raise AssertionError("without repeated layers nothing is unlike")


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Traces are many objects and no garbage; looking through them again and again takes long."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class _Prover:
    def __init__(
        self,
        module: nn.Module,
        matches: Matches,
        inventory: Inventory,
        samples: Samples,
        layers: Layers,
        stands: tuple[Analysis, Mode] | None = None,
    ) -> None:
        self.stands = stands
        self.module, self.matches, self.samples, self.layers = module, matches, samples, layers
        self.repeats = False  # whether a trace leaves out any layer
        self.first = dict(inventory.aliases)
        tensors = inventory.tensors()
        self.shapes = {n: t.shape for n, t in tensors.items()}
        self.known = Known.of(matches, inventory)
        # On one rank nothing is cut, and the traces only show that the model runs.
        cuts = matches.layouts if matches.tp > 1 else {}
        self.proof = Proof({self.first.get(n, n): cut for n, cut in cuts.items()})
        self.proof.reads = held_reads(matches, self.first)
        if stands is not None:
            before, _ = stands
            self.proof.cuts = {self.first.get(n, n): cut for n, cut in before.layouts.items()}
            self.proof.reads = {read.name: read for read in before.reads}
            self.proof.regions = {region.path: region for region in before.regions}
            self.proof.edits, self.proof.at_use = before.code, before.at_use
        self.otherwise: Propagation | None = None  # what would be found without copies at each use
        self.reached: set[str] = set()
        self.inputs: dict[str, dict[str, tuple[str, ...]]] = {}  # column layer -> mode -> what it reads

    def run(self, found: Captured) -> None:
        """Prove every mode that was traced."""
        proof = self.proof
        self.repeats = any(trace.repeats for _, trace in found.traces)
        self.layers.remember &= found.layers.remember
        own = [(function.__code__, function.__globals__) for function in functions_of(self.module)]
        proof.carried = carried_in(code for code, _ in (*own, *found.watched.spaces))
        if found.traces and proof.cuts:
            proof.read = consulted(found.watched.spaces or own)
        around = proof.read
        if not found.watched.spaces:  # a module that is not looked into may read what it sets
            hidden = {path for _, trace in found.traces for path in trace.changed}
            around = consulted(code_around(self.module, hidden)) if hidden else around
            around = replace(around, any_name=False)  # it names more than what runs
        for mode, error in found.failed if found.traces else found.failed[:1]:
            proof.diagnostics.append(untraceable(error, mode.name, self.samples, warning=bool(found.traces)))
        traces = {mode.name: trace for mode, trace in found.traces}
        propagated = self._propagated(traces)
        modes = [mode for mode, _ in found.traces if mode.name in propagated]
        if not any(whole.findings for whole in propagated.values()):
            propagated = self._merged(traces, modes, propagated) or propagated
        ran = [(mode, propagated[mode.name]) for mode in modes]
        if not proof.unreduced and not any(whole.findings for _, whole in ran):
            self._solve(ran)
        if self.otherwise is not None and any(whole.findings for _, whole in ran):
            proof.diagnostics += diagnose(self.otherwise)
            return
        proof.propagations, proof.covered = propagated, found.covered
        when: dict[str, set[str]] = {}  # in which modes of the module the traces are
        for mode, _, trace in found.given:
            word = "train" if mode.training else "eval"
            when.setdefault(found.covered.get(mode.name, mode.name), set()).add(word)
            proof.draws |= {by_python(word)} if trace.numbers_drawn else set()
        for mode, whole in ran:
            if proof.cuts:  # what several modes show is said once
                told = read_around(whole.trace, around)
                proof.diagnostics += [d for d in told if d not in proof.diagnostics]
            if whole.findings:
                proof.diagnostics += diagnose(whole)
                return
            if self.stands is not None and self.stands[0].given is not None:
                proof.diagnostics += reads_left(whole, self.stands[0].given.left)
            self._keep(mode.name, whole, training=mode.training, when=when[mode.name])
        proof.diagnostics += self._at_other_sizes([whole for _, whole in ran])
        self._guard(found, [*handled(whole for _, whole in ran)])
        if both := sorted(proof.copied & proof.uncopied):
            proof.diagnostics.append(copied_at_times(both[0]))
        proof.modes += found.covered
        proof.branches = unreached(found.watched.ran, handled(whole for _, whole in ran))
        proof.shared = self._shared()
        if found.traces and self.stands is None:
            proof.diagnostics += unreached_layers(self.matches, self.reached, self.first)
        proof.diagnostics += not_run(found)

    def _guard(self, found: Captured, lines: list[Span]) -> None:
        """The model, and a region of raw tensors, may be called as in the traces: another flag may choose
        another way."""
        if found.traces and self.proof.cuts:
            parameters = parameters_of(self.module.forward)
            self.proof.given = calls_of(found, parameters, lines)
            if self.stands is not None:
                ((_, given, trace),) = found.given
                self.proof.sizes = size_guards(trace, len(given) - 1, parameters, lines)
        layers = {n for p in self.matches.placed.values() if p.target == "module" for n in p.layouts}
        self.proof.handed = handed((trace for _, trace in found.traces), layers, self.first)
        for _, trace in found.traces:
            for path, words in trace.gives.items():
                self.proof.gives[path] = self.proof.gives.get(path, frozenset()) | words
        raw = self.proof.cuts.keys() - {self.first.get(n, n) for n in layers}
        for path, region in self.proof.regions.items():
            if any(name.startswith(f"{path}." if path else "") for name in raw):
                guard = guard_of(path, [trace for _, trace in found.traces])
                self.proof.regions[path] = replace(region, guard=guard)

    def _shared(self) -> tuple[tuple[str, ...], ...]:
        """The column layers that read the same values in every mode, where there is more than one."""
        groups: dict[tuple[Any, ...], list[str]] = {}
        for path, inputs in self.inputs.items():
            groups.setdefault(tuple(sorted(inputs.items())), []).append(path)
        return tuple(tuple(readers) for readers in groups.values() if len(readers) > 1)

    def _propagated(self, traces: Mapping[str, Trace], sums: Sums | None = None) -> dict[str, Propagation]:
        """Every mode's layouts; with `sums` those of their row layers are left partial until there."""
        found, otherwise = settle(self.proof, traces, self.known, sums, choose=self.stands is None)
        self.otherwise = otherwise or self.otherwise
        return found

    def _merged(
        self, traces: Mapping[str, Trace], modes: list[Mode], before: Mapping[str, Propagation]
    ) -> dict[str, Propagation] | None:
        """The layouts with one reduce after the sum of parallel branches, proven on every rank; None where
        there are none, or the code cannot be edited so."""
        rows = merged(before.values()) if self.stands is None else frozenset(self.stands[0].unreduced)
        met = meeting(before, rows)
        rows = with_twins(traces.values(), rows | between(met))
        if not rows or (self.stands is None and is_looked_at(self.module, rows)):
            return None
        if self.repeats and not all(
            within_layers(traces[mode], one) for mode, each in met.items() for one in each.values()
        ):
            raise Unlike
        decided = decisions(self.proof)
        let_out(self.proof, rows)
        found = self._propagated(traces, Sums(rows, met))
        ran = [(mode, found[mode.name]) for mode in modes if mode.name in found]
        if len(ran) == len(modes) and not any(whole.findings for _, whole in ran):
            self._solve(ran)
            if not any(whole.findings for _, whole in ran):
                self.proof.unreduced = rows
                return found
        if self.stands is not None:
            return found
        put_back(self.proof, decided)
        self.proof.edits = Edits()
        return None

    def _keep(self, mode: str, whole: Propagation, *, training: bool, when: set[str]) -> None:
        """What a mode showed; `when` says whether it is a train or an eval mode, or covers one."""
        proof = self.proof
        proof.modes.append(mode)
        calls = whole.trace.calls
        proof.calls.update({path: max(n, proof.calls.get(path, 0)) for path, n in calls.items()})
        proof.copied |= whole.copied.keys() | whole.repeated.keys()
        proof.uncopied |= whole.uncopied
        counts = counted([*whole.mapped.items(), *((node, ("copy",)) for node, _ in whole.copied_in)])
        proof.mapped |= for_twins(whole.trace, counts)
        read = {path: tuple(node.name for node in inputs) for path, inputs in whole.copied.items()}
        for path, names in (read | whole.repeated).items():
            self.inputs.setdefault(path, {})[mode] = names
        proof.random |= whole.random
        inside = (p for p in whole.random_whole if any(_within(p, path) for path in whole.random))
        proof.random_common |= set(inside)
        if "train" in when:
            proof.resting |= whole.resting
        if not training:
            proof.random_in_eval |= whole.random
        if any(
            draws(n) and (n in whole.dropouts or is_whole(whole.layouts.get(n, [INVARIANT])[0]))
            for n in whole.trace.graph.nodes
            if n.op == "call_function"
        ):
            proof.draws |= when
        proof.left |= {stored.name for stored in left_parts(whole)}
        told = {d.message for d in proof.diagnostics}
        proof.diagnostics += [d for d in notes(whole) if d.message not in told]
        self.reached |= whole.reached if whole.cuts else calls.keys()

    def _solve(self, ran: list[tuple[Mode, Propagation]]) -> None:
        """Prove every rank, with the edits that it takes, or with those that stand."""
        modes = [(mode, whole) for mode, whole in ran if whole.cuts]
        if self.stands is None:
            self.proof.edits = self._runs().solve(modes)
        else:
            self.proof.edits = self._runs().check_as_it_runs(modes, self.proof.edits)

    def _captured(self, samples: Samples) -> list[tuple[Mode, Trace]]:
        """The traces with other samples."""
        if self.stands is None:
            return capture_modes(self.module, samples, self._left_out()).traces
        mode = replace(self.stands[1], args=samples.args, kwargs=samples.kwargs)
        with contextlib.suppress(TraceError):
            return [(mode, mode.capture(self.module, layers=self._left_out()))]
        return []

    def _left_out(self) -> Layers:
        """The layers that repeat each other, where the traces leave them out."""
        return self.layers if self.repeats else Layers(remember=self.layers.remember)

    def _runs(self) -> RankRuns:
        return RankRuns(self.module, self.matches, self.shapes, self.first, self._left_out())

    def _at_other_sizes(self, ran: list[Propagation]) -> list[Diagnostic]:
        """What is found with inputs of the sizes that the model's code asks anything of."""
        asked = {pair for whole in ran for pair in asked_of_cuts(whole)}
        for samples in witnesses(self.module, self.samples, asked) if asked else ():
            failed = self._failing(self._captured(samples))
            if failed is not None and self.repeats:
                raise Unlike
            if failed is not None:
                note = f"for inputs of other sizes: {sizes_said(samples)}"
                return [replace(d, notes=(*d.notes, note)) for d in diagnose(failed)]
        return []

    def _failing(self, captured: list[tuple[Mode, Trace]]) -> Propagation | None:
        """The first of further traces that is not proven with the decisions that stand."""
        traces, decided = {mode.name: trace for mode, trace in captured}, decisions(self.proof)
        wholes = self._propagated(traces)
        if (rows := self.proof.unreduced) and not any(whole.findings for whole in wholes.values()):
            met = meeting(wholes, rows)
            let_out(self.proof, rows)
            wholes = self._propagated(traces, Sums(rows, met))
        ran = [(mode, wholes[mode.name]) for mode, _ in captured if mode.name in wholes]
        if not any(whole.findings for _, whole in ran):
            if decisions(self.proof) != decided:
                message = "other tensors would have to be cut or mapped for other sizes of the inputs"
                ran[0][1].findings.append(finding_in(ran[0][1], "", "AT307", message))
            else:
                self._runs().check([(mode, whole) for mode, whole in ran if whole.cuts], self.proof.edits)
        return next((whole for _, whole in ran if whole.findings), None)


def _within(path: str, root: str) -> bool:
    return path != root and (not root or path.startswith(f"{root}."))
