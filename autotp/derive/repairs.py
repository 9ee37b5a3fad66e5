"""What may resolve a conflict: another assignment, one step away.

| conflict | step |
|---|---|
| a whole layer reads sharded features | make it a row layer |
| a whole value meets a shard | cut what makes it |
| a view cuts a unit | deal the units, or sections, that the view has |
| a split cuts across | sections where it splits |
| two cuts differ | give one the units of the other |
| a shard is returned | gather the output of its layer |
| a layer's weight is used outside of it | rules on the tensors in place of one on the layer |

No step decides that something is right: each is tried, and the end is proven.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from torch import fx

from autotp.derive.assignment import Assignment, Board
from autotp.derive.fused import (
    Form,
    cuts_of,
    dealt,
    forms_of_view,
    refined,
    sizes_of,
    with_whole_sections,
)
from autotp.derive.producers import parts, producers
from autotp.derive.trial import Outcome
from autotp.placement import Partial, Shard
from autotp.plan import Rule
from autotp.propagate.call import Value
from autotp.propagate.engine import Finding, Propagation, arguments_of, op_name

__all__ = ["further", "repairs", "units_declared"]

Grown = dict[str, Rule]
WAYS = 6  # producers of one value that are tried
BLOCK = 16  # bytes, of which a grouped product takes whole multiples


def further(outcome: Outcome, assignment: Assignment, board: Board) -> Iterator[Grown]:
    """The assignments that cut, too, what a clean one has whole and slices where it is read."""
    for read in outcome.propagation.reads.values() if outcome.propagation is not None else ():
        tensor = board.tensors.get(read.name)
        if read.shard is None or tensor is None or tensor.role != "parameter" or len(tensor.shape) < 2:
            continue
        options = _options(read.shard, tensor.shape[read.shard.dim])
        rule = Rule(style="column", dim=read.shard.dim).model_copy(update=options)
        grown = board.extended(assignment, read.name, rule) if board.key(read.name) == read.name else None
        if grown is not None:
            yield grown


def units_declared(assignment: Assignment, board: Board, heads: Mapping[str, int]) -> Grown | None:
    """The assignment with the heads that views tell of each column layer: ranks may share heads, or follow
    those of another layer, only where both are declared."""
    grown: Grown | None = dict(assignment)
    for key, rule in assignment.items():
        if rule.style == "column" and rule.heads is None and rule.sections is None and key in heads:
            changed = rule.model_copy(update={"heads": heads[key]})
            grown = None if grown is None else board.extended(grown, key, changed)
    return grown


def repairs(outcome: Outcome, assignment: Assignment, board: Board, known: Assignment) -> Iterator[Grown]:
    """The assignments that may not have this outcome's conflict, the likeliest first.

    `known` are rules that were found before: where one of their keys is needed its rule is tried first.
    """
    if outcome.finding is None or outcome.propagation is None:
        return
    repair = _Repair(outcome.finding, outcome.propagation, assignment, board, known)
    for found in repair.steps():
        if found is not None and found != dict(assignment):
            yield found


class _Repair:
    def __init__(
        self,
        finding: Finding,
        propagation: Propagation,
        assignment: Assignment,
        board: Board,
        known: Assignment,
    ) -> None:
        self.known = known
        self.finding, self.propagation, self.assignment, self.board = finding, propagation, assignment, board
        self.node, self.conflict = finding.node, finding.conflict
        self.cut = next((v for v in self.conflict.blame if v.shard is not None), None)

    def steps(self) -> Iterator[Grown | None]:
        code = self.conflict.code
        if code == "AT301":
            yield from self._row()
        elif code == "AT306":
            yield from self._cut_the_whole()
        elif code == "AT308":
            yield from self._units()
        elif code == "AT309":
            yield from self._sections()
        elif code == "AT303":
            yield from self._apart()
        elif code == "AT307":
            yield from self._alike()
            yield from self._cut_the_whole()
        elif code == "AT311":
            yield from self._gathered()
        elif code == "AT312":
            yield from self._tensors()
        elif code == "AT314":
            yield from self._turned()
        elif code == "AT318":
            yield from self._blocks()
        if code in ("AT303", "AT305", "AT307", "AT310"):
            yield from self._whole_sections()

    # -- another module or tensor takes part

    def _row(self) -> Iterator[Grown | None]:
        """The whole layer that reads sharded features."""
        named = arguments_of(self.node)
        weight = named.get("mat2") if op_name(self.node) == "addmm" else named.get("weight")
        if (
            isinstance(weight, fx.Node)
            and weight.op == "get_attr"
            and weight.meta["name"] in self.board.tensors
        ):
            name = weight.meta["name"]
            key = self.board.key(name)
            if key != name:
                yield self._with(key, Rule(style="row"))
            else:
                yield self._with(key, Rule(style="row", dim=0 if op_name(self.node) == "addmm" else 1))
            return
        if isinstance(weight, fx.Node):
            yield from self._cut_behind(weight)

    def _cut_the_whole(self) -> Iterator[Grown | None]:
        """What makes the first whole value that meets the shard."""
        for value in self.node.all_input_nodes:
            layouts = self.propagation.layouts.get(value, [])
            vals = value.meta["val"]
            if any(isinstance(x, (Shard, Partial)) for x in layouts) or isinstance(vals, list):
                continue
            found = [step for step in self._cut_behind(value) if step is not None]
            if found:
                yield from found
                return

    def _cut_behind(self, value: fx.Node) -> Iterator[Grown | None]:
        found = list(islice(producers(value, self.board), WAYS))
        for name in sorted(found, key=lambda n: len(self.board.tensors[n].shape) < 2):  # vectors last
            key, kind = self.board.key(name), self.board.owner(name).kind
            if key in self.assignment:
                continue
            if key in self.known:
                yield self._with(key, self.known[key])
            if key != name:
                if kind != "embedding":
                    yield self._with(key, Rule(style="column"))
                continue
            shape = self.board.tensors[name].shape
            sizes = {self.cut.shape[self.cut.shard.dim]} if self.cut is not None and self.cut.shard else set()
            dims = [d for d, n in enumerate(shape) if n in sizes] or [
                d for d, n in enumerate(shape) if n >= self.board.tp
            ]
            for dim in dims:
                yield self._with(key, self._like(Rule(style="column", dim=dim), shape[dim]))

    def _like(self, rule: Rule, size: int) -> Rule:
        """A rule with the sections of the shard that it is to meet, where the dims are of one size."""
        if self.cut is None or self.cut.shard is None or self.cut.shape[self.cut.shard.dim] != size:
            return rule
        return rule.model_copy(update=_options(self.cut.shard, size))

    # -- a rule gets other units or sections

    def _units(self) -> Iterator[Grown | None]:
        if self.cut is None or self.cut.shard is None:
            return
        for form in forms_of_view(self.node, self.cut):
            yield self._formed(self.cut, form)

    def _sections(self) -> Iterator[Grown | None]:
        if self.cut is not None:
            yield self._cut_at(self.cut, cuts_of(self.node, self.cut))

    def _apart(self) -> Iterator[Grown | None]:
        """Single elements of a sharded dim are taken, or every n-th: sections, or units of n."""
        if self.cut is None or self.cut.shard is None:
            return
        size = self.cut.shape[self.cut.shard.dim]
        if op_name(self.node) in ("select", "unbind"):
            yield self._cut_at(self.cut, list(range(1, size)))
        elif op_name(self.node) == "slice":
            step = arguments_of(self.node).get("step") or 1
            if step > 1 and size % step == 0:
                yield self._formed(self.cut, (None, size // step))

    def _formed(self, value: Value, form: Form) -> Grown | None:
        """The rules behind a value with these sections and units."""
        assert value.shard is not None
        grown: Grown | None = dict(self.assignment)
        sections, heads = form
        for part in parts(value.node, self.propagation.layouts, self.propagation.cuts):
            key = self.board.key(part.name)
            rule = self.assignment.get(key)
            if rule is None or (rule.style == "row" and rule.dim is None):
                continue
            if sections is not None and rule.sections not in (None, sections):
                return None
            size = self.board.tensors[part.name].shape[self.propagation.cuts[part.name].dim]
            elements = value.shape[value.shard.dim] * part.scale // (sections or 1)
            found: Rule | None = rule if sections is None else rule.model_copy(update={"sections": sections})
            if heads is not None and found is not None:
                found = dealt(found, size, elements // heads)
            if found is None:
                return None
            grown = self._replaced(grown, key, found)
        return grown

    def _cut_at(self, value: Value, edges: list[int]) -> Grown | None:
        """The rules behind a value with sections that end at these elements of its sharded dim."""
        grown: Grown | None = dict(self.assignment)
        for part in parts(value.node, self.propagation.layouts, self.propagation.cuts):
            key = self.board.key(part.name)
            rule = self.assignment.get(key)
            if rule is None or (rule.style == "row" and rule.dim is None):
                continue
            tensor = self.board.tensors[part.name]
            size = tensor.shape[self.propagation.cuts[part.name].dim]
            ends = [0, *edges, value.shape[value.shard.dim if value.shard else 0]]
            finer = refined(rule, size, [part.start + edge * part.scale for edge in ends])
            if finer is not None:
                grown = self._replaced(grown, key, finer)
        return grown

    def _whole_sections(self) -> Iterator[Grown | None]:
        """Some sections of a fused layer may be for all ranks: one key and value head, B and C of a group."""
        fused = {
            key: next(self.board.tensors[n].shape[cut.dim] for n, cut in placed.layouts.items())
            for key, placed in self.propagation.matches.placed.items()
            if isinstance(self.assignment[key].sections, tuple) and placed.layouts
        }
        sizes = {n for key, size in fused.items() for n in sizes_of(self.assignment[key], size)}
        for whole in sorted(sizes):
            grown: Grown | None = dict(self.assignment)
            for key, size in fused.items():
                changed = with_whole_sections(self.assignment[key], size, whole)
                if changed is not None:
                    grown = self._replaced(grown, key, changed)
            yield grown

    def _alike(self) -> Iterator[Grown | None]:
        """Two values that are cut differently: one takes the units of the other."""
        cut = [v for v in self.conflict.blame if v.shard is not None]
        for one, other in ((a, b) for a in cut for b in cut if a is not b):
            keys, theirs = self._keys(one), self._keys(other)
            for source in theirs:
                rule = self.assignment[source]
                if isinstance(rule.heads, tuple) and any(self._size(k) != self._size(source) for k in keys):
                    continue  # numbers for other sections
                grown: Grown | None = dict(self.assignment)
                for key in keys:
                    changed: dict[str, Any] = {"heads": rule.heads}
                    if self._size(key) == self._size(source):
                        changed["sections"] = rule.sections
                    grown = self._replaced(grown, key, self.assignment[key].model_copy(update=changed))
                yield grown

    def _size(self, key: str) -> int | None:
        placed = self.propagation.matches.placed.get(key)
        for name, cut in placed.layouts.items() if placed is not None else ():
            return self.board.tensors[name].shape[cut.dim]
        return None

    def _blocks(self) -> Iterator[Grown | None]:
        """Widths of whole 16-byte blocks."""
        if self.cut is None or self.cut.shard is None:
            return
        shard, size = self.cut.shard, self.cut.shape[self.cut.shard.dim]
        block = max(1, BLOCK // self.cut.node.meta["val"].dtype.itemsize)
        if all(length % block == 0 for length, _ in shard.pieces(size)):
            yield self._formed(self.cut, (None, size // block))

    # -- a rule becomes another

    def _gathered(self) -> Iterator[Grown | None]:
        if self.cut is None:
            return
        layers = [k for k in self._keys(self.cut) if k not in self.board.tensors]
        columns = [k for k in layers if self.assignment[k].style == "column"]
        if len(columns) + sum(self.assignment[k].style == "vocab" for k in layers) < len(
            self._keys(self.cut)
        ):
            return  # what is returned also comes from elsewhere
        grown: Grown | None = dict(self.assignment)
        for key in columns:
            gathers = self.assignment[key].model_copy(update={"gather_output": True})
            grown = self._replaced(grown, key, gathers)
        yield grown

    def _tensors(self) -> Iterator[Grown | None]:
        """A layer whose weight is used outside of its own forward: rules on its tensors."""
        name = self.conflict.blame[0].node.meta["name"]
        layer = self.board.key(name)
        rule = self.assignment.get(layer)
        if rule is None or layer == name or rule.gather_output or rule.split_input:
            return
        placed = self.propagation.matches.placed[layer]
        grown: Grown | None = {k: r for k, r in self.assignment.items() if k != layer}
        for tensor, cut in placed.layouts.items():
            own = Rule(style=rule.style, dim=cut.dim, sections=rule.sections, heads=rule.heads)
            grown = self._replaced(grown, tensor, own)
        yield grown

    def _turned(self) -> Iterator[Grown | None]:
        """A column layer that is given a shard may be a row layer."""
        key = self.node.meta["module"]
        rule = self.assignment.get(key)
        if rule is not None and rule.style == "column" and not rule.gather_output:
            yield self._with(key, Rule(style="row"))

    # --

    def _keys(self, value: Value) -> list[str]:
        return list(self.board.keys_of(tuple(sorted(value.origins)), self.assignment))

    def _with(self, key: str, rule: Rule) -> Grown | None:
        return self.board.extended(self.assignment, key, rule)

    def _replaced(self, grown: Grown | None, key: str, rule: Rule) -> Grown | None:
        return None if grown is None else self.board.extended(grown, key, rule)


def _options(shard: Shard, size: int) -> Mapping[str, object]:
    """How a rule says the pieces and units of a cut."""
    pieces = shard.pieces(size)
    units = {deal.declared for _, deal in pieces if deal is not None}
    heads = next(iter(units)) if len(units) == 1 else None
    if heads is not None and any(length % heads for length, _ in pieces):
        heads = None  # units of what it was cut from
    sizes = [n for n, _ in pieces]
    sections = None if len(sizes) == 1 else len(sizes) if len(set(sizes)) == 1 else tuple(sizes)
    return {"sections": sections, "heads": None if heads == sizes[0] else heads}
