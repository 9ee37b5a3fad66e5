"""Walk a recorded graph in order and give every value a layout, or say why that cannot be.

Each op's rule is looked up in a table by the op's name. All inputs the same on all ranks: the output
too. An op that has no rule and meets a sharded or partial value is refused. After a conflict the value is
unknown and so is all that follows from it: only first causes are reported.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autotp.match import Matches
from autotp.placement import INVARIANT, PARTIAL, REPLICATE, Joint, Layout, Shard, describe, is_whole
from autotp.propagate.call import Call, Conflict, Value, needs_copy
from autotp.propagate.ends import gradients, outputs
from autotp.propagate.flexible import Grant, grantable
from autotp.propagate.heads import GATHER, CopiedIn, gathers, reads_table
from autotp.propagate.joint import joint
from autotp.propagate.mapped import Mapped, after, mapped_statistic
from autotp.propagate.merged import Sum
from autotp.propagate.operands import Part
from autotp.propagate.ops import arguments_of, draws, op_name, rests, spoken
from autotp.propagate.planned import PlannedLayers
from autotp.propagate.pointwise import POINTWISE
from autotp.propagate.propagation import Finding, Propagation
from autotp.propagate.reads import Read, Unshared
from autotp.propagate.regions import Region, border, copied_around
from autotp.propagate.remedies import Remedies, Remedy
from autotp.propagate.rules import RULES
from autotp.propagate.shapes import VIEWS
from autotp.propagate.writes import written
from autotp.trace.graph import GRADIENT, OPAQUE, REPEATED, Trace, Val
from autotp.trace.seeds import SEEDED

__all__ = ["Engine", "Walk", "propagate"]

Walk = Callable[[Propagation, Mapping[str, str]], "Engine"]


def propagate(
    trace: Trace,
    matches: Matches,
    cuts: Mapping[str, Shard],
    *,
    aliases: Mapping[str, str],
    kinds: Mapping[str, str],
    reads: Mapping[str, Read],
    regions: Mapping[str, Region],
    unreduced: frozenset[str] = frozenset(),
    sums: Mapping[fx.Node, Sum] | None = None,
    engine: Walk | None = None,
    at_use: bool = False,
) -> Propagation:
    """Give every value of `trace` a layout, where the tensors named in `cuts` are shards.

    `aliases` maps each further name of a shared tensor to its first name, under which `cuts` holds it;
    `kinds` maps a tensor to the kind of the module that owns it. Starts from the `reads` and `regions` that
    are known, and adds those that resolve a conflict. The row layers in `unreduced` leave their outputs
    partial, and the `sums` of these are reduced. With `at_use` whole values are copied at each use on
    a shard.
    """
    known, around = dict(reads), dict(regions)
    whole: set[str] = set()
    grants: dict[fx.Node, Layout] = {}
    parts: dict[tuple[fx.Node, fx.Node], Shard] = {}
    sums = sums or {}
    mapped: dict[fx.Node, tuple[str, ...]] = dict.fromkeys(sums, ("reduce",))
    around_them: dict[str, Region] = {}  # places that are given what a region around them has copied
    copies: set[tuple[fx.Node, fx.Node]] = set()
    shared = frozenset(pair for one in sums.values() for pair in one.shared)
    dropouts = frozenset(node for one in sums.values() for node in one.dropouts)
    while True:
        start = Propagation(
            trace, matches, dict(cuts), aliases, dict(known), dict(around), dict(grants), dict(parts),
            dict(mapped), unreduced, shared, dropouts, frozenset(copies), at_use,
        )  # fmt: skip
        result = (engine or Engine)(start, kinds).run()
        before = (dict(known), dict(around), dict(grants), dict(parts), dict(mapped), set(copies))
        for wanted in result.wanted:
            if isinstance(wanted, Unshared):
                if wanted.name not in reads:  # no other mode needs it so
                    whole.add(wanted.name)
                    known.pop(wanted.name, None)
            elif isinstance(wanted, Read):
                if not (wanted.shared and wanted.name in whole):
                    known.setdefault(wanted.name, wanted)
            elif isinstance(wanted, Grant):
                grants.setdefault(wanted.node, wanted.layout)
            elif isinstance(wanted, Part):
                parts.setdefault((wanted.reader, wanted.value), wanted.shard)
            elif isinstance(wanted, CopiedIn):
                copies.add((wanted.reader, wanted.value))
            elif isinstance(wanted, Mapped):
                mapped[wanted.node] = max(wanted.how, mapped.get(wanted.node, ()), key=len)
            else:
                grown = around.get(wanted.path, wanted) | wanted
                around[wanted.path] = grown - around_them.get(wanted.path, Region(wanted.path))
        if (known, around, grants, parts, mapped, copies) == before:
            twice = copied_around(trace, around, result.layouts, regions)
            if not twice:
                return result
            for region in twice:
                around_them[region.path] = around_them.get(region.path, region) | region
                around[region.path] -= region


class Engine:
    """One walk through a trace: fills in the layouts of a `Propagation`."""

    def __init__(self, result: Propagation, kinds: Mapping[str, str]) -> None:
        self.result = result
        self.kinds = kinds
        self.overrides: Mapping[fx.Node, Layout] = {}
        self.origins: dict[fx.Node, frozenset[str]] = {}
        self.layers = PlannedLayers(result)

    def run(self) -> Propagation:
        """Walk the whole graph, in order."""
        for node in self.result.trace.graph.nodes:
            if node.op == "placeholder":
                self._set(node, [INVARIANT])
            elif node.op == "get_attr":
                self._attribute(node)
            elif node.op == "call_function":
                self._guarded(node)
        self._outputs()
        self._foreign_backward()
        return self.result

    # -- nodes

    def _set(
        self,
        node: fx.Node,
        layouts: list[Layout],
        origins: frozenset[str] = frozenset(),
        *,
        op: list[Layout] | None = None,
    ) -> None:
        self.result.layouts[node] = layouts
        self.result.computed[node] = layouts if op is None else op
        self.origins[node] = origins

    def _attribute(self, node: fx.Node) -> None:
        name = node.meta["name"]
        cut = self.result.cuts.get(name)
        if node.meta["origin"] == "unknown":
            self._find(
                node,
                Conflict("AT321", "a tensor comes from an operation that the recorder does not see"),
                frozenset(),
            )
        elif cut is not None and cut.deal is not None and cut.deal.whole and name not in self.layers.owners:
            self._set(node, [REPLICATE])  # one head, on every rank: each has a part of its gradient
        elif cut is not None:
            owners = [p.path for p in self.layers.owners.get(name, ())] or [name]
            self._set(node, [cut], frozenset(owners))
        elif name in self.result.reads:
            read = self.result.reads[name]
            whole = PARTIAL if read.shared else REPLICATE if read.copied else INVARIANT
            self._set(node, [read.shard or whole])
        else:
            self._set(node, [INVARIANT])

    def _guarded(self, node: fx.Node) -> None:
        """One op call; a conflict is noted and leaves the value unknown."""
        if any(n not in self.result.layouts for n in node.all_input_nodes):
            return
        cut = (n for n in node.all_input_nodes if not is_whole(self._seen(n, node)))
        origins = frozenset().union(*(self.origins[n] for n in cut))
        try:
            if node.target in (
                REPEATED,
                GRADIENT,
            ):  # a shard's gradient is a shard alike: `_foreign_backward`
                (repeated,) = node.all_input_nodes
                self._set(node, [self._seen(repeated, node)], origins)
                return
            if node.target is operator.getitem:
                source, index = node.args
                assert isinstance(source, fx.Node) and isinstance(index, int)
                layout = self.result.layouts[source][index]
                self._set(node, [layout], origins if not is_whole(layout) else frozenset())
                return
            layouts, computed = self._call(node)
            whole = all(is_whole(layout) for layout in layouts)
            self._set(node, layouts, frozenset() if whole else origins, op=computed)
        except Conflict as conflict:
            self._find(node, conflict, origins)
            self.result.wanted += self.remedies(node, conflict)
        except Exception as error:
            unknown = Conflict(
                "AT304",
                f"{op_name(node)} with arguments that its layout rule does not know",
                notes=(f"{type(error).__name__}: {error}",),
            )
            self._find(node, unknown, origins)

    def remedies(self, node: fx.Node, conflict: Conflict) -> list[Remedy]:
        """What the solver may add by itself to resolve a conflict; the next walk shows whether it does."""
        known = Remedies(
            self.result,
            self.kinds,
            self.layers,
            self.origins,
            self._seen,
            self._bind,
            self._attempt,
            self.result.at_use,
        )
        return known.of(node, conflict)

    def _find(self, node: fx.Node, conflict: Conflict, origins: frozenset[str]) -> None:
        blamed = [o for value in conflict.blame for o in sorted(value.origins)]
        ordered = tuple(dict.fromkeys([*blamed, *sorted(origins)]))
        self.result.findings.append(Finding(node, conflict, ordered))

    # -- one call

    def _call(self, node: fx.Node) -> tuple[list[Layout], list[Layout]]:
        call = self._bind(node)
        layer = self.layers.layer(call)
        if layer is not None:
            return layer
        if call.name == "opaque" and any(not v.whole for v in call.values):
            cut = next(v for v in call.values if not v.whole)
            raise Conflict(
                "AT326",
                "its forward asks for the value of a tensor (an `if` on it, `.item()`), so it cannot be "
                "traced, and nothing sharded may be in it",
                blame=(cut,),
                notes=(f"{cut}",),
                help=("write the branch with torch.where, or leave the layers of this module whole",),
            )
        foreign = [
            v for v in call.values if v.node.op == "get_attr" and v.node.meta["name"] in self.layers.owners
        ]
        if any(not self.layers.tables.issuperset(v.origins) or not reads_table(call) for v in foreign):
            name = foreign[0].node.meta["name"]
            owner = self.layers.owners[name][0]
            help = [f"leave {owner.path} whole, or call the layer itself"]
            if name in owner.layouts and owner.style in ("row", "column"):
                tensor = f"{owner.pattern}.{name.rpartition('.')[2]}"
                line = f"{tensor}: {{style: {owner.style}, dim: {owner.layouts[name].dim}}}"
                help.append(f"or cut the tensor by itself, in the place of the layer: `{line}`")
            raise Conflict(
                "AT312",
                f"{foreign[0].name} is sharded by its layer {owner.path}, and is used outside of that "
                "layer's own forward",
                blame=(foreign[0],),
                notes=("the mappings of a parallel layer stand in its forward; here they would be missing",),
                help=tuple(help),
            )
        self._traced_backward(call)
        how = self.result.mapped.get(node)
        statistic = mapped_statistic(call, how) if how is not None else None
        layouts = statistic or self._granted(call) or self._dropped(call) or self._rule(call)
        self._random(call, layouts[0])
        for alias in written(self.result, call, layouts[0], self._seen):
            self._set(alias, [layouts[0]], self.origins[alias])
        if how is None and gathers(call, layouts[0], self.layers.tables):
            how = self.result.mapped[node] = GATHER
            self.result.wanted.append(Mapped(node, how))
        if how is not None:
            return after(layouts, how), layouts
        return ([INVARIANT] if self.layers.gathered(node) else layouts), layouts

    def _dropped(self, call: Call) -> list[Layout] | None:
        """A part of a sum, of which each rank zeroes the same elements: they are drawn from the common
        stream."""
        alike = call.node in self.result.dropouts and any(v.partial for v in call.values)
        return [PARTIAL] if alike else None

    def _granted(self, call: Call) -> list[Layout] | None:
        """The layout that a fresh or expanded value takes for free; what it expands is copied."""
        layout = self.result.grants.get(call.node)
        if layout is None or not grantable(call, layout):
            return None
        for value in call.values:
            if value.grad and value.layout == INVARIANT and call.differentiable:
                raise needs_copy(call, value, replace(value, layout=layout, name=f"{value.name}, expanded"))
        return [layout]

    def _traced_backward(self, call: Call) -> None:
        """An autograd.Function has a backward of its own, which no trace shows."""
        custom = call.node.meta.get("custom")
        bound = [v for v in call.values if v.layout != INVARIANT]
        if custom and bound:
            raise Conflict(
                "AT323",
                f"{call.name} runs inside of {custom}, an autograd.Function, on a value that is not whole: "
                "its backward is not traced, so its gradients cannot be proven",
                blame=(bound[0],),
                notes=(f"{bound[0]}",),
            )

    def _attempt(self, node: fx.Node, overrides: Mapping[fx.Node, Layout]) -> list[Layout]:
        """What the op's rule says when some of its inputs had other layouts."""
        self.overrides = overrides
        try:
            return self._rule(self._bind(node))
        except Conflict:
            raise
        except Exception as error:
            raise Conflict("AT304", str(error)) from error
        finally:
            self.overrides = {}

    def _rule(self, call: Call) -> list[Layout]:
        same = call.same_everywhere()
        if same is not None:
            return [same] * len(call.results)
        self.layers.whole_layer(call)
        rule = RULES.get(call.name)
        if rule is None:
            value = next(v for v in call.values if not v.whole)
            raise Conflict(
                "AT304",
                f"{call.name} of a value that is not whole, and autotp has no layout rule for it",
                blame=(value,),
                notes=(f"{value}",),
            )
        jointly = any(isinstance(v.layout, Joint) for v in call.values) and call.name not in VIEWS
        found = joint(call, rule, POINTWISE) if jointly else rule(call)
        return found if isinstance(found, list) else [found] * len(call.results)

    def _bind(self, node: fx.Node) -> Call:
        """The call's arguments by the names of its schema, nodes replaced by values."""
        grads: set[fx.Node] = node.meta["grads"]
        values: list[Value] = []

        def value(argument: Any) -> Any:
            if isinstance(argument, fx.Node):
                made = self._value(argument, node, grad=argument in grads)
                values.append(made)
                return made
            if isinstance(argument, (list, tuple)):
                return [value(a) for a in argument]
            return argument

        arguments = {name: value(argument) for name, argument in arguments_of(node).items()}
        vals = node.meta["val"]
        results = tuple(
            v.shape if v is not None else () for v in (vals if isinstance(vals, list) else [vals])
        )
        return Call(node, op_name(node), arguments, results, tuple(values))

    def _seen(self, node: fx.Node, reader: fx.Node | None) -> Layout:
        if reader is not None and (reader, node) in self.result.parts:
            return self.result.parts[reader, node]
        if reader is not None and (reader, node) in self.result.shared:
            return PARTIAL
        layout = self.result.layouts[node][0]
        layout = border(self.result.trace, self.result.regions, node, layout, reader)
        if reader is None or not is_whole(layout):
            return layout
        if layout == INVARIANT and (reader, node) in self.result.copied_in:
            return REPLICATE
        if layout == REPLICATE and node in reader.meta.get("grads", ()):
            return layout
        return self.layers.scattered(node, reader) or layout

    def _value(self, node: fx.Node, reader: fx.Node | None, *, grad: bool) -> Value:
        val: Val = node.meta["val"]
        return Value(
            node,
            val.shape,
            self.overrides.get(node, self._seen(node, reader)),
            grad,
            spoken(node),
            self.origins[node],
            mask=val.dtype in (torch.bool, torch.uint8),
        )

    def _random(self, call: Call, layout: Layout) -> None:
        """Random numbers on a shard must differ from rank to rank, on whole values be the same."""
        if call.node.target is OPAQUE:  # a way that no trace had may draw
            self.result.random_whole.add(call.node.meta["module"])
            return
        if not draws(call.node):
            if not is_whole(layout) and rests(call.node):
                self.result.resting.add(call.node.meta["module"])
            return
        common = is_whole(layout) or layout == PARTIAL
        wrong, help = "", tuple[str, ...]()
        if isinstance(layout, Shard) and layout.shared:
            wrong = "random numbers on elements that several ranks hold, and every rank draws others"
        elif not common and call.node.meta.get(SEEDED):
            wrong = (
                "on a shard from a generator that the forward has set: every rank would draw the same "
                "numbers, and not those of the whole"
            )
            help = ("draw before the sharded layers, or let the caller set the generator",)
        if wrong:
            raise Conflict(
                "AT316", f"{call.name} draws {wrong}",
                blame=tuple(call.sharded()), notes=(describe(layout),), help=help,
            )  # fmt: skip
        found = self.result.random_whole if common else self.result.random
        found.add(call.node.meta["module"])

    # -- what comes out

    def _outputs(self) -> None:
        for node, conflict in outputs(self.result, self._seen, self._whole_value):
            self._find(node, conflict, self.origins[node])
            if conflict.code == "AT311":
                end = next(n for n in self.result.trace.graph.nodes if n.op == "output")
                self.result.wanted += self.remedies(end, conflict)

    def _foreign_backward(self) -> None:
        for node, conflict, of in gradients(self.result, self._whole_value):
            self._find(node, conflict, self.origins[of])

    def _whole_value(self, node: fx.Node) -> Value:
        return self._value(node, None, grad=False)
