"""Derive the rules of a whole model: each matrix in turn, each found set of rules in every layer it fits."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from autotp.cost import LARGE, collapsed
from autotp.derive.assignment import Board
from autotp.derive.instances import Instances
from autotp.derive.naming import plan_of
from autotp.derive.search import Found, search
from autotp.derive.seeds import Seed, seeds
from autotp.derive.trial import Trials
from autotp.diagnostic import Span
from autotp.inventory import Inventory
from autotp.plan import Plan, Rule
from autotp.propagate.ops import op_name
from autotp.trace.graph import Trace
from autotp.units import Fault

__all__ = ["Derived", "Reason", "derive"]


@dataclass(frozen=True)
class Reason:
    """Why a matrix is left whole: its name, what speaks against cutting it, at which op and line."""

    name: str
    nbytes: int
    message: str
    op: str = ""
    source: Span | None = None


@dataclass
class Derived:
    """The rules that were found, by full names; those that go together; what stays whole and why.

    `alike` maps each key to the key of the place where its rule was found, `gathered` are large layers that
    are cut though their output is read whole, and why it is, `large` those that could be. `tries` is how many
    assignments were propagated.
    """

    rules: dict[str, Rule] = field(default_factory=dict)
    groups: dict[str, frozenset[str]] = field(default_factory=dict)
    alike: dict[str, str] = field(default_factory=dict)
    whole: list[Reason] = field(default_factory=list)
    gathered: dict[str, Reason] = field(default_factory=dict)
    large: list[str] = field(default_factory=list)
    plan: Plan | None = None
    tries: int = 0


def derive(
    inventory: Inventory,
    traces: list[Trace],
    *,
    tp: int,
    forbidden: Mapping[str, Reason] | None = None,
    beside: Mapping[str, Reason] | None = None,
    gather: bool = False,
    ungathered: Collection[str] = (),
) -> Derived:
    """The rules that cut the most of a model over `tp` ranks, as far as its traces have no conflict.

    `forbidden` keys (layers or tensors) stay whole, for the reason given; `beside` are those that went with
    them, and the reason if they stay whole, too. With `gather` the large layers that stay whole otherwise are
    cut, and their output is gathered, but for those in `ungathered`. The same model gives the same rules on
    every rank. The plan is not proven here.
    """
    board = Board(inventory, tp)
    named = {
        path: Reason(path, 0, f"no pattern names {path} without naming {other}, too")
        for path, other in board.unspeakable().items()
    }
    deriver = _Deriver(board, traces, {**named, **(forbidden or {})}, beside or {})
    return deriver.run({*named, *ungathered} if gather else None)


class _Deriver:
    def __init__(
        self,
        board: Board,
        traces: list[Trace],
        forbidden: Mapping[str, Reason],
        beside: Mapping[str, Reason],
    ) -> None:
        self.board, self.traces, self.forbidden, self.beside = board, traces, forbidden, beside
        self.trials = Trials(board, traces)
        self.instances = Instances(board)
        self.derived = Derived()
        self.failed: dict[str, Reason] = {}

    def run(self, ungathered: Collection[str] | None) -> Derived:
        todo = list(seeds(self.board, self.traces))
        # What is cut without summing the statistics of a norm comes first: a norm before a column layer is to
        # stay whole, one behind it is not.
        for statistics in (False, True):
            self.failed.clear()
            for seed in todo:
                if seed.name not in self.failed and not self._is_cut(seed):
                    self._seed(seed, statistics=statistics)
        derived, large = self.derived, self._large(todo)
        derived.large = [seed.key for seed in large]
        for seed in large if ungathered is not None else ():
            if not self._is_cut(seed):
                assert ungathered is not None
                self._gather(seed, ungathered)
        self._leave_small_tables()
        todo += self._repeated(todo)
        derived.whole = [self._reason(seed) for seed in todo if not self._is_cut(seed)]
        derived.whole += self._unread({seed.name for seed in todo})
        derived.tries = self.trials.count
        if derived.rules:
            order = {
                key: place for place, key in enumerate((*self.board.inventory.modules, *self.board.tensors))
            }
            derived.rules = dict(sorted(derived.rules.items(), key=lambda item: order[item[0]]))
            derived.plan = plan_of(derived.rules, self.board)
        return derived

    def _leave_small_tables(self) -> None:
        """Leave whole the embeddings that would save next to nothing and cost a sum in every forward: tables
        of positions or token types. Tied ones stay as they are."""
        rules = self.derived.rules
        least = LARGE * self.board.nbytes(rules)
        for key in [k for k, rule in rules.items() if rule.style == "vocab"]:
            name = self.board.canonical(f"{key}.weight")
            alone = name not in self.board.names and self.derived.groups[key] == {key}
            if alone and self.board.nbytes({key: rules[key]}) < least:
                nbytes = self.board.tensors[name].nbytes
                self.failed[name] = Reason(
                    name, nbytes, "a small table, and a sum of its rows in every forward"
                )
                del rules[key], self.derived.groups[key]

    def _repeated(self, todo: list[Seed]) -> list[Seed]:
        """The matrices of the layers that the traces leave out, since they repeat others."""
        repeats = {(r.path, r.of): r for trace in self.traces for r in trace.repeats}
        there = ((repeat.renamed(seed.name), seed) for seed in todo for repeat in repeats.values())
        return [
            replace(seed, name=name, key=self.board.key(name))
            for name, seed in there
            if name is not None and name in self.board.tensors
        ]

    def _unread(self, read: set[str]) -> list[Reason]:
        """The matrices that no trace reads: a cross attention without another input, a head of its own."""
        return [
            Reason(name, tensor.nbytes, "no traced forward reads it")
            for name, tensor in self.board.tensors.items()
            if len(tensor.shape) > 1 and tensor.role == "parameter"
            if name not in read and name not in self.board.first and name not in self.derived.rules
            if self.board.key(name) not in self.derived.rules
        ]

    def _is_cut(self, seed: Seed) -> bool:
        """Whether a matrix has a rule, under any of its names, by its layer or by itself."""
        names = self.board.names.get(seed.name, [seed.name])
        return any(n in self.derived.rules or self.board.key(n) in self.derived.rules for n in names)

    def _seed(self, seed: Seed, *, statistics: bool) -> None:
        derived = self.derived
        if seed.key in self.forbidden:
            return
        found = search(
            seed, self.board, self.trials,
            accepted=derived.groups, rules=derived.rules, forbidden=self.forbidden, statistics=statistics,
        )  # fmt: skip
        if not found.rules:
            self._fail(seed, found)
            return
        places = self._open(found.rules, self.forbidden)
        self._accept(found.rules, self._fitting(found.rules, places))

    def _large(self, todo: list[Seed]) -> list[Seed]:
        """The layers that stayed whole so far and, with those like them, hold much of the model."""
        left = [seed for seed in todo if not self._is_cut(seed)]
        held: dict[str, int] = {}
        for seed in left:
            name = collapsed(seed.name)
            held[name] = held.get(name, 0) + self.board.tensors[seed.name].nbytes
        tensors = self.board.tensors.items()
        least = LARGE * sum(t.nbytes for name, t in tensors if name not in self.board.first)
        layers = {p for p, m in self.board.inventory.modules.items() if m.kind in ("linear", "conv1d")}
        return [seed for seed in left if seed.key in layers and held[collapsed(seed.name)] >= least]

    def _gather(self, seed: Seed, ungathered: Collection[str]) -> None:
        """Cut a layer and gather what it gives: its output is read whole, and no other way was found."""
        alike = {key for mapped in self.instances.of([seed.key]) for key in mapped.values()}
        closed = {*self.forbidden.keys() - alike, *ungathered}
        gathers = replace(seed, rules=(Rule(style="column", gather_output=True),))
        if seed.key in closed:
            return
        found = search(
            gathers, self.board, self.trials,
            accepted=self.derived.groups, rules=self.derived.rules, forbidden=closed,
        )  # fmt: skip
        if found.rules:
            reasons = {key: self._reason(replace(seed, name=name, key=key)) for key, name in self._like(seed)}
            places = self._fitting(found.rules, self._open(found.rules, closed))
            beside = {m[key]: rule for m in places for key, rule in found.rules.items()}
            if self.trials.conflicts({**self.derived.rules, **beside}):
                return  # what reads the whole value is cut, and would add up its gradient
            self._accept(found.rules, places)
            self.derived.gathered |= {k: reasons[k] for k in (m[seed.key] for m in places) if k in reasons}

    def _like(self, seed: Seed) -> Iterator[tuple[str, str]]:
        """The layers like that of a seed, and the first name of the tensor there."""
        for mapped in self.instances.of([seed.key]):
            there = mapped[seed.key]
            name = there if there in self.board.tensors else f"{there}.{seed.name.rpartition('.')[2]}"
            if name in self.board.tensors:
                yield there, self.board.canonical(name)

    def _open(self, rules: Mapping[str, Rule], closed: Collection[str]) -> list[dict[str, str]]:
        """The places like that of some rules where one of them is new and none is on a closed key."""
        places = []
        for mapped in self.instances.of(list(rules)):
            if any(k not in self.derived.rules for k in mapped.values()) and not {*mapped.values()} & {
                *closed
            }:
                places.append(mapped)
        return places

    def _fitting(self, rules: Mapping[str, Rule], places: list[dict[str, str]]) -> list[dict[str, str]]:
        """The places in which the rules have no conflict, tried together."""
        while len(places) > 1:
            everywhere = {mapped[k]: rule for mapped in places for k, rule in rules.items()}
            found = self.trials.conflicts(everywhere)
            if isinstance(found, Fault):
                return places[:1]
            if not found:
                break
            blamed = {k for f in found for k in self.board.keys_of(f.origins, everywhere)}
            kept = [places[0], *(m for m in places[1:] if blamed.isdisjoint(m.values()))]
            if len(kept) == len(places):
                return places[:1]
            places = kept
        return places

    def _accept(self, rules: Mapping[str, Rule], places: list[dict[str, str]]) -> None:
        derived = self.derived
        for mapped in places:
            group = frozenset(mapped.values())
            for key, there in mapped.items():
                derived.rules[there] = rules[key]
                derived.groups[there] = group
                derived.alike[there] = key

    def _fail(self, seed: Seed, found: Found) -> None:
        """Note why a matrix stays whole; the same holds for those like it, which are not tried again."""
        for _, name in self._like(seed):
            self.failed.setdefault(name, self._told(name, found))

    def _reason(self, seed: Seed) -> Reason:
        nbytes = self.board.tensors[seed.name].nbytes
        known = self.forbidden.get(seed.key) or self.beside.get(seed.key) or self.failed.get(seed.name)
        if known is None:
            return Reason(seed.name, nbytes, "nothing was found that could be cut with it")
        return Reason(seed.name, nbytes, known.message, known.op, known.source)

    def _told(self, name: str, found: Found) -> Reason:
        nbytes, dead_end = self.board.tensors[name].nbytes, found.dead_end
        if dead_end is None and found.blocked is not None:
            return self.forbidden[found.blocked]
        if dead_end is not None and dead_end.fault is not None:
            return Reason(name, nbytes, dead_end.fault.message)
        if dead_end is None or dead_end.finding is None:
            return Reason(name, nbytes, "no way of cutting it was found that propagates")
        node, conflict = dead_end.finding.node, dead_end.finding.conflict
        op = op_name(node) if node.op == "call_function" else ""
        return Reason(name, nbytes, conflict.message, op, node.meta.get("source"))
