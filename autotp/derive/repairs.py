"""What may resolve a conflict: another assignment, one step away.

| conflict | step |
|---|---|
| a whole layer reads sharded features | make it a row layer |
| a norm reads sharded features | cut it: its statistics are summed over the ranks |
| a whole value meets a shard | cut what makes it |
| a view cuts a unit | deal the units, or sections, that the view has |
| a split cuts across | sections where it splits |
| two cuts differ | give one the units of the other |
| a shard is returned | gather the output of its layer |
| a layer's weight is used outside of it | rules on the tensors in place of one on the layer |
| a value is copied for raw tensors alone | cut the vectors that are sliced where they are read |

No step decides that something is right: each is tried, and the end is proven.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from torch import fx

from autotp.derive.assignment import Assignment, Board
from autotp.derive.producers import producers
from autotp.derive.recut import Grown, Recut, options_of
from autotp.derive.trial import Outcome
from autotp.placement import Partial, Shard
from autotp.plan import Rule
from autotp.propagate.ops import arguments_of, op_name
from autotp.propagate.propagation import Propagation

__all__ = ["further", "repairs", "units_declared"]

WAYS = 6  # producers of one value that are tried


def further(outcome: Outcome, assignment: Assignment, board: Board) -> Iterator[Grown]:
    """The assignments that cut, too, what a clean one has whole and slices where it is read."""
    for name, rule in _sliced(outcome.propagation, board) if outcome.propagation is not None else ():
        grown = board.extended(assignment, name, rule) if len(board.tensors[name].shape) > 1 else None
        if grown is not None:
            yield grown


def _sliced(found: Propagation, board: Board) -> Iterator[tuple[str, Rule]]:
    """What is whole and sliced where it is read, and the rule that would cut it so."""
    for read in found.reads.values():
        tensor = board.tensors.get(read.name)
        if read.shard is None or tensor is None or not tensor.persistent or board.key(read.name) != read.name:
            continue
        options = options_of(read.shard, tensor.shape[read.shard.dim])
        yield read.name, Rule(style="column", dim=read.shard.dim).model_copy(update=options)


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


class _Repair(Recut):
    def steps(self) -> Iterator[Grown | None]:
        code = self.conflict.code
        if code == "AT301":
            yield from self._row()
        elif code == "AT306":
            yield from self._cut_the_whole()
        elif code == "AT308":
            yield from self.units()
        elif code == "AT309":
            yield from self.sections()
        elif code == "AT303":
            yield from self._norm()
            yield from self.apart()
        elif code == "AT307":
            yield from self.alike()
            yield from self._cut_the_whole()
        elif code == "AT311":
            yield from self._gathered()
        elif code == "AT312":
            yield from self._tensors()
        elif code == "AT314":
            yield from self._turned()
        elif code == "AT318":
            yield from self.blocks()
        if code in ("AT303", "AT305", "AT307", "AT310"):
            yield from self.whole_sections()
        if code == "AT305":
            yield self._vectors()

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
                yield self.with_rule(key, Rule(style="row"))
            else:
                yield self.with_rule(key, Rule(style="row", dim=0 if op_name(self.node) == "addmm" else 1))
            return
        if isinstance(weight, fx.Node):
            yield from self._cut_behind(weight)

    def _norm(self) -> Iterator[Grown | None]:
        """The norm that reads sharded features: its statistics are summed over the ranks."""
        weight = arguments_of(self.node).get("weight")
        named = weight.meta.get("name") if isinstance(weight, fx.Node) and weight.op == "get_attr" else None
        if op_name(self.node) not in ("layer_norm", "rms_norm") or named not in self.board.tensors:
            return
        key = self.board.key(named)
        if key != named:
            yield self.with_rule(key, self._like(Rule(style="column"), self.board.tensors[named].shape[0]))

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
                yield self.with_rule(key, self.known[key])
            if key != name:
                if kind not in ("embedding", "norm"):  # neither gives what is cut of what is whole
                    yield self.with_rule(key, Rule(style="column"))
                continue
            shape = self.board.tensors[name].shape
            sizes = {self.cut.shape[self.cut.shard.dim]} if self.cut is not None and self.cut.shard else set()
            dims = [d for d, n in enumerate(shape) if n in sizes] or [
                d for d, n in enumerate(shape) if n >= self.board.tp
            ]
            for dim in dims:
                yield self.with_rule(key, self._like(Rule(style="column", dim=dim), shape[dim]))

    def _like(self, rule: Rule, size: int) -> Rule:
        """A rule with the sections of the shard that it is to meet, where the dims are of one size."""
        if self.cut is None or self.cut.shard is None or self.cut.shape[self.cut.shard.dim] != size:
            return rule
        return rule.model_copy(update=options_of(self.cut.shard, size))

    # -- a rule becomes another

    def _gathered(self) -> Iterator[Grown | None]:
        if self.cut is None:
            return
        layers = [k for k in self.keys(self.cut) if k not in self.board.tensors]
        columns = [k for k in layers if self.assignment[k].style == "column"]
        if len(columns) + sum(self.assignment[k].style == "vocab" for k in layers) < len(self.keys(self.cut)):
            return  # what is returned also comes from elsewhere
        grown: Grown | None = dict(self.assignment)
        for key in columns:
            gathers = self.assignment[key].model_copy(update={"gather_output": True})
            grown = self.replaced(grown, key, gathers)
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
            style = "row" if rule.style == "row" else "column"
            own = Rule(style=style, dim=cut.dim, sections=rule.sections, heads=rule.heads)
            grown = self.replaced(grown, tensor, own)
        yield grown

    def _vectors(self) -> Grown | None:
        """A module all of whose raw tensors are cut copies what goes in at its border, and nowhere else."""
        grown: Grown | None = dict(self.assignment)
        for name, rule in _sliced(self.propagation, self.board):
            if len(self.board.tensors[name].shape) == 1:
                grown = None if grown is None else self.board.extended(grown, name, rule)
        return grown

    def _turned(self) -> Iterator[Grown | None]:
        """A column layer that is given a shard may be a row layer."""
        key = self.node.meta["module"]
        rule = self.assignment.get(key)
        if rule is not None and rule.style == "column" and not rule.gather_output:
            yield self.with_rule(key, Rule(style="row"))
