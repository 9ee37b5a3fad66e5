"""A rule gets other units or sections: what a conflict says of how a fused dim must be cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
from autotp.derive.producers import parts
from autotp.placement import Shard
from autotp.plan import Rule
from autotp.propagate.call import Value
from autotp.propagate.ops import arguments_of, op_name
from autotp.propagate.propagation import Finding, Propagation

__all__ = ["Grown", "Recut", "options_of"]

Grown = dict[str, Rule]
BLOCK = 16  # bytes, of which a grouped product takes whole multiples


class Recut:
    """The steps from one conflict that change rules which are there already."""

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

    def units(self) -> Iterator[Grown | None]:
        """The units, or sections, that a view has."""
        if self.cut is None or self.cut.shard is None:
            return
        for form in forms_of_view(self.node, self.cut):
            yield self._formed(self.cut, form)

    def sections(self) -> Iterator[Grown | None]:
        """Sections that end where a split, or slices, take the dim apart."""
        if self.cut is not None:
            yield self._cut_at(self.cut, cuts_of(self.node, self.cut))

    def apart(self) -> Iterator[Grown | None]:
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
            grown = self.replaced(grown, key, found)
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
                grown = self.replaced(grown, key, finer)
        return grown

    def whole_sections(self) -> Iterator[Grown | None]:
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
                    grown = self.replaced(grown, key, changed)
            yield grown

    def alike(self) -> Iterator[Grown | None]:
        """Two values that are cut differently: one takes the units of the other."""
        cut = [v for v in self.conflict.blame if v.shard is not None]
        for one, other in ((a, b) for a in cut for b in cut if a is not b):
            keys, theirs = self.keys(one), self.keys(other)
            for source in theirs:
                rule = self.assignment[source]
                if isinstance(rule.heads, tuple) and any(self._size(k) != self._size(source) for k in keys):
                    continue  # numbers for other sections
                grown: Grown | None = dict(self.assignment)
                for key in keys:
                    changed: dict[str, Any] = {"heads": rule.heads}
                    if self._size(key) == self._size(source):
                        changed["sections"] = rule.sections
                    grown = self.replaced(grown, key, self.assignment[key].model_copy(update=changed))
                yield grown

    def _size(self, key: str) -> int | None:
        placed = self.propagation.matches.placed.get(key)
        for name, cut in placed.layouts.items() if placed is not None else ():
            return self.board.tensors[name].shape[cut.dim]
        return None

    def blocks(self) -> Iterator[Grown | None]:
        """Widths of whole 16-byte blocks."""
        if self.cut is None or self.cut.shard is None:
            return
        shard, size = self.cut.shard, self.cut.shape[self.cut.shard.dim]
        block = max(1, BLOCK // self.cut.node.meta["val"].dtype.itemsize)
        if all(length % block == 0 for length, _ in shard.pieces(size)):
            yield self._formed(self.cut, (None, size // block))

    def keys(self, value: Value) -> list[str]:
        """The rules behind a value."""
        return list(self.board.keys_of(tuple(sorted(value.origins)), self.assignment))

    def with_rule(self, key: str, rule: Rule) -> Grown | None:
        """The assignment with one rule more."""
        return self.board.extended(self.assignment, key, rule)

    def replaced(self, grown: Grown | None, key: str, rule: Rule) -> Grown | None:
        """A changed assignment with one rule changed more."""
        return None if grown is None else self.board.extended(grown, key, rule)


def options_of(shard: Shard, size: int) -> Mapping[str, object]:
    """How a rule says the pieces and units of a cut."""
    pieces = shard.pieces(size)
    units = {deal.declared for _, deal in pieces if deal is not None}
    heads = next(iter(units)) if len(units) == 1 else None
    if heads is not None and any(length % heads for length, _ in pieces):
        heads = None  # units of what it was cut from
    sizes = [n for n, _ in pieces]
    sections = None if len(sizes) == 1 else len(sizes) if len(set(sizes)) == 1 else tuple(sizes)
    return {"sections": sections, "heads": None if heads == sizes[0] else heads}
