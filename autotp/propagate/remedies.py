"""What the solver may add by itself to resolve a conflict: reads, regions, free layouts, parts, mappings.

Each is tried where its kind of conflict stands; the next walk shows whether it does resolve it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import fx

from autotp.placement import INVARIANT, REPLICATE, Layout, Partial, is_whole
from autotp.propagate.call import Call, Conflict
from autotp.propagate.flexible import Grant
from autotp.propagate.heads import CopiedIn, copied_in
from autotp.propagate.mapped import Mapped, copies_of, sums_of
from autotp.propagate.operands import Part, parts_for
from autotp.propagate.ops import draws
from autotp.propagate.planned import PlannedLayers
from autotp.propagate.propagation import Propagation
from autotp.propagate.reads import Read, Unshared, solve
from autotp.propagate.regions import Region, regions_around, regions_for

__all__ = ["Remedies", "Remedy"]

Remedy = Read | Unshared | Grant | Part | CopiedIn | Mapped | Region
_READABLE = ("AT305", "AT306")  # a whole value meets a shard
_LEAVING = ("AT310", "AT311", "AT314")  # a partial sum is used


@dataclass(frozen=True)
class Remedies:
    """The remedies of one walk. `kinds` maps a tensor to the kind of its module, `origins` a value to the
    layers that it comes from; `seen(value, reader)` is a layout, `bind(node)` a call with its values, and
    `attempt(node, layouts)` what an op would give if some of its inputs had these. `at_use`: what meets a
    shard is copied for the op that it meets it in, so that others have it whole."""

    result: Propagation
    kinds: Mapping[str, str]
    layers: PlannedLayers
    origins: Mapping[fx.Node, frozenset[str]]
    seen: Callable[[fx.Node, fx.Node | None], Layout]
    bind: Callable[[fx.Node], Call]
    attempt: Callable[[fx.Node, Mapping[fx.Node, Layout]], list[Layout]]
    at_use: bool = False

    def of(self, node: fx.Node, conflict: Conflict) -> list[Remedy]:
        """The remedies of a conflict at an op."""
        code = conflict.code
        found: list[Remedy] = []
        if code in _READABLE and node.op != "output":
            found += copied_in(self.bind(node), conflict, self.layers.tables)
            if self.at_use and not found:
                # A part of a sum that has left its module is reduced there, and meets nothing.
                found += self._regions(node, leaving=True) or self._at_use(node)
        if code == "AT310":
            found += self._unshared(node) or self._solved(node, sums=True)
        if not found and code in ("AT305", *_LEAVING):
            found += self._regions(node, leaving=True)
        if not found and code == "AT305":  # a copy at the border serves whatever comes in
            found += self._regions(node, leaving=False)
        if not found and code in _READABLE and node.op != "output":
            found += self._solved(node, sums=False)
        if not found and code == "AT306":
            found += self._regions(node, leaving=False)
        if not found and code == "AT305" and node.op != "output":
            found += regions_around(
                node,
                self.result.trace,
                self.result.layouts,
                known=self.result.regions,
                layers=self.layers.placed,
                meets_part=node in self.result.grants
                or not all(is_whole(self.seen(n, node)) for n in node.all_input_nodes),
            )
        if not found and code == "AT306" and node.op != "output":
            found += parts_for(node, self.result.layouts, self.attempt, draws)
        if not found and code in ("AT303", *_LEAVING):
            found += sums_of(node, self.bind, self.result.layouts, conflict)
        if not found and code == "AT305":
            found += copies_of(
                node, self.seen, self.result.layouts, self.result.mapped, self._is_read_by_itself
            )
        return found

    def _at_use(self, node: fx.Node) -> list[CopiedIn]:
        """Copies of the whole values of an op where it is given them, and nowhere else."""
        whole = [n for n in node.meta["grads"] if self.seen(n, node) == INVARIANT]
        try:
            self.attempt(node, dict.fromkeys(whole, REPLICATE))
        except Conflict:
            return []
        return [CopiedIn(node, value) for value in node.all_input_nodes if value in whole]

    def _unshared(self, node: fx.Node) -> list[Unshared]:
        """The shared parameters of an op that is given no other part of a sum: that one is reduced by now."""
        names = []
        for value in (n for n in node.all_input_nodes if isinstance(self.seen(n, node), Partial)):
            read = self.result.reads.get(value.meta["name"]) if value.op == "get_attr" else None
            if read is None or not read.shared:
                return []
            names.append(read.name)
        return [Unshared(name) for name in names]

    def _is_read_by_itself(self, node: fx.Node) -> bool:
        name = node.meta["name"]
        layer = self.kinds.get(name) in ("linear", "conv1d")
        return node.meta["origin"] == "parameter" and not layer and name not in self.result.cuts

    def _solved(self, node: fx.Node, *, sums: bool) -> list[Read | Grant]:
        found = solve(node, self.result.layouts, self.attempt, self.bind, self.seen, self.kinds, sums=sums)
        # What is cut is no whole tensor that could be read in another form.
        cut = any(isinstance(one, Read) and one.name in self.result.cuts for one in found)
        return [] if cut else found

    def _regions(self, node: fx.Node, *, leaving: bool) -> list[Region]:
        return regions_for(
            node,
            self.result.trace,
            self.result.layouts,
            self.origins,
            tensors=self.result.cuts.keys() - self.layers.owners.keys(),
            known=self.result.regions,
            leaving=leaving,
        )
