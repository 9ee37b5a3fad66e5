"""Walk a recorded graph in order and give every value a layout, or say why that cannot be.

Each op's rule is looked up in a table by the op's name. All inputs the same on all ranks: the output
too. An op that has no rule and meets a sharded or partial value is refused. After a conflict the value is
unknown and so is all that follows from it: only first causes are reported.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autotp.match import Matches, Placed
from autotp.placement import INVARIANT, PARTIAL, REPLICATE, Joint, Layout, Partial, Shard, describe, is_whole
from autotp.propagate.attention import ATTENTION
from autotp.propagate.call import Call, Conflict, Value, counted_once, needs_copy
from autotp.propagate.contract import CONTRACTIONS
from autotp.propagate.convolution import CONVOLUTIONS
from autotp.propagate.creation import CREATION
from autotp.propagate.experts import EXPERTS
from autotp.propagate.flexible import Grant, grantable
from autotp.propagate.indexing import INDEXING
from autotp.propagate.joint import joint
from autotp.propagate.moving import MOVING
from autotp.propagate.operands import Part, parts_for
from autotp.propagate.pointwise import POINTWISE
from autotp.propagate.reads import Read, solve
from autotp.propagate.reductions import REDUCTIONS
from autotp.propagate.regions import Region, border, regions_around, regions_for
from autotp.propagate.shapes import SHAPES, VIEWS
from autotp.propagate.splitting import SPLITTING
from autotp.trace.graph import GRADIENT, REPEATED, Trace, Val

__all__ = [
    "Engine", "Finding", "Propagation", "Walk", "arguments_of", "draws", "name_of", "named_arguments",
    "op_name", "propagate",
]  # fmt: skip

Rule = Callable[[Call], Layout | list[Layout]]
RULES: dict[str, Rule] = {
    **POINTWISE,
    **SHAPES,
    **SPLITTING,
    **MOVING,
    **CONTRACTIONS,
    **ATTENTION,
    **CONVOLUTIONS,
    **EXPERTS,
    **REDUCTIONS,
    **INDEXING,
    **CREATION,
}


Walk = Callable[["Propagation", Mapping[str, str]], "Engine"]
_READABLE = ("AT305", "AT306")  # a whole value meets a shard
_LEAVING = ("AT310", "AT311", "AT314")  # a partial sum is used


@dataclass(frozen=True)
class Finding:
    """A conflict at a node, with the layers that its values come from."""

    node: fx.Node
    conflict: Conflict
    origins: tuple[str, ...]


@dataclass
class Propagation:
    """The layouts of one trace.

    `layouts` holds what a node's value is for its readers, `computed` what the op itself gives on a rank
    (they differ where a layer gathers its output). A node that is in neither is unknown, because of a
    finding before it. `cuts` is how each tensor is cut, after row layers took the cut of their input.
    `reads` are the whole tensors that are transformed where they are read, `wanted` further ones that would
    resolve a finding, `regions` the modules with mappings at their border, `grants` the fresh or expanded
    values that take a layout for free, `parts` (reader, value) the whole values of which an op is given only
    a rank's part. `random` and `random_whole` are the modules that draw random numbers
    on a shard and on whole values, `reached` the layers of the plan that ran, `copied` the column layers
    whose input has a gradient to sum, with those inputs, `uncopied` those whose input's gradient is a part;
    `repeated` are the copied layers that repeat others, with their inputs' names.
    """

    trace: Trace
    matches: Matches
    cuts: dict[str, Shard]
    aliases: Mapping[str, str]
    reads: dict[str, Read] = field(default_factory=dict)
    regions: dict[str, Region] = field(default_factory=dict)
    grants: dict[fx.Node, Layout] = field(default_factory=dict)
    parts: dict[tuple[fx.Node, fx.Node], Shard] = field(default_factory=dict)
    wanted: list[Read | Grant | Part | Region] = field(default_factory=list)
    layouts: dict[fx.Node, list[Layout]] = field(default_factory=dict)
    computed: dict[fx.Node, list[Layout]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    random: set[str] = field(default_factory=set)
    random_whole: set[str] = field(default_factory=set)
    reached: set[str] = field(default_factory=set)
    copied: dict[str, list[fx.Node]] = field(default_factory=dict)
    uncopied: set[str] = field(default_factory=set)
    repeated: dict[str, tuple[str, ...]] = field(default_factory=dict)


def op_name(node: fx.Node) -> str:
    """The op's name without namespace (for aten), overload, and the underscore of an in-place form."""
    return name_of(node.target)


def name_of(target: Any) -> str:
    """The same of the op itself."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return str(target)
    space, _, name = schema.name.partition("::")
    if space != "aten":
        return str(schema.name)
    return str(name[:-1] if name.endswith("_") and not name.endswith("__") else name)


def draws(node: fx.Node) -> bool:
    """Whether an op call draws random numbers: not the dropout of an eval forward, or of rate 0."""
    named = arguments_of(node)
    if op_name(node) == "scaled_dot_product_attention":
        return bool(named["dropout_p"])
    if "p" in named and "train" in named:
        return bool(named["train"] and named["p"])
    if op_name(node) == "rrelu":
        return bool(named["training"])
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """A call's arguments by the names of the op's schema, with the schema's defaults."""
    return named_arguments(node.target, node.args, node.kwargs)


def named_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a call that is no node."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return {str(position): value for position, value in enumerate(args)} | dict(kwargs)
    given = dict(zip((p.name for p in schema.arguments), args, strict=False)) | dict(kwargs)
    named = {}
    for parameter in schema.arguments:
        if parameter.name in given or parameter.has_default_value():
            named[parameter.name] = given.get(parameter.name, parameter.default_value)
    return named


def propagate(
    trace: Trace,
    matches: Matches,
    cuts: Mapping[str, Shard],
    *,
    aliases: Mapping[str, str],
    kinds: Mapping[str, str],
    reads: Mapping[str, Read],
    regions: Mapping[str, Region],
    engine: Walk | None = None,
) -> Propagation:
    """Give every value of `trace` a layout, where the tensors named in `cuts` are shards.

    `aliases` maps each further name of a shared tensor to its first name, under which `cuts` holds it;
    `kinds` maps a tensor to the kind of the module that owns it. Starts from the `reads` and `regions` that
    are known, and adds those that resolve a conflict.
    """
    known, around = dict(reads), dict(regions)
    grants: dict[fx.Node, Layout] = {}
    parts: dict[tuple[fx.Node, fx.Node], Shard] = {}
    while True:
        start = Propagation(
            trace, matches, dict(cuts), aliases, dict(known), dict(around), dict(grants), dict(parts)
        )
        result = (engine or Engine)(start, kinds).run()
        before = (dict(known), dict(around), dict(grants), dict(parts))
        for wanted in result.wanted:
            if isinstance(wanted, Read):
                known.setdefault(wanted.name, wanted)
            elif isinstance(wanted, Grant):
                grants.setdefault(wanted.node, wanted.layout)
            elif isinstance(wanted, Part):
                parts.setdefault((wanted.reader, wanted.value), wanted.shard)
            else:
                around[wanted.path] = around.get(wanted.path, wanted) | wanted
        if (known, around, grants, parts) == before:
            return result


class Engine:
    """One walk through a trace: fills in the layouts of a `Propagation`."""

    def __init__(self, result: Propagation, kinds: Mapping[str, str]) -> None:
        self.result = result
        self.kinds = kinds
        self.overrides: Mapping[fx.Node, Layout] = {}
        self.origins: dict[fx.Node, frozenset[str]] = {}
        self.aliases = result.aliases
        self.placed = {p.path: p for p in result.matches.placed.values() if p.target == "module"}
        # A layer's cut tensors may be used by that layer alone (tied tensors: by each of their layers).
        self.owners: dict[str, list[Placed]] = {}
        for placed in self.placed.values():
            for name in map(self._canonical, placed.layouts):
                if name in result.cuts:
                    self.owners.setdefault(name, []).append(placed)
        self.followed: set[str] = set()  # row layers whose cut is settled by a call

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
        elif cut is not None and cut.deal is not None and cut.deal.whole and name not in self.owners:
            self._set(node, [REPLICATE])  # one head, on every rank: each has a part of its gradient
        elif cut is not None:
            owners = [p.path for p in self.owners.get(name, ())] or [name]
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
            self.result.wanted += self._remedies(node, conflict)
        except Exception as error:
            unknown = Conflict(
                "AT304",
                f"{op_name(node)} with arguments that its layout rule does not know",
                notes=(f"{type(error).__name__}: {error}",),
            )
            self._find(node, unknown, origins)

    def _remedies(self, node: fx.Node, conflict: Conflict) -> list[Read | Grant | Part | Region]:
        """What the solver may add by itself to resolve a conflict; the next walk shows whether it does."""
        code = conflict.code
        found: list[Read | Grant | Part | Region] = []
        if code == "AT310":
            found += self._solved(node, sums=True)
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
                layers=self.placed,
                meets_part=node in self.result.grants
                or not all(is_whole(self._seen(n, node)) for n in node.all_input_nodes),
            )
        if not found and code == "AT306" and node.op != "output":
            found += parts_for(node, self.result.layouts, self._attempt, draws)
        return found

    def _solved(self, node: fx.Node, *, sums: bool) -> list[Read | Grant]:
        found = solve(node, self.result.layouts, self._attempt, self._bind, self._seen, self.kinds, sums=sums)
        # What is cut is no whole tensor that could be read in another form.
        cut = any(isinstance(one, Read) and one.name in self.result.cuts for one in found)
        return [] if cut else found

    def _regions(self, node: fx.Node, *, leaving: bool) -> list[Region]:
        return regions_for(
            node,
            self.result.trace,
            self.result.layouts,
            self.origins,
            tensors=self.result.cuts.keys() - self.owners.keys(),
            known=self.result.regions,
            leaving=leaving,
        )

    def _find(self, node: fx.Node, conflict: Conflict, origins: frozenset[str]) -> None:
        blamed = [o for value in conflict.blame for o in sorted(value.origins)]
        ordered = tuple(dict.fromkeys([*blamed, *sorted(origins)]))
        self.result.findings.append(Finding(node, conflict, ordered))

    # -- one call

    def _call(self, node: fx.Node) -> tuple[list[Layout], list[Layout]]:
        call = self._bind(node)
        layer = self._layer(call)
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
        foreign = [v for v in call.values if v.node.op == "get_attr" and v.node.meta["name"] in self.owners]
        if foreign:
            owner = self.owners[foreign[0].node.meta["name"]][0]
            raise Conflict(
                "AT312",
                f"{foreign[0].name} is sharded by its layer {owner.path}, and is used outside of that "
                "layer's own forward",
                blame=(foreign[0],),
                notes=("the mappings of a parallel layer stand in its forward; here they would be missing",),
                help=(f"leave {owner.path} whole, or call the layer itself",),
            )
        self._traced_backward(call)
        layouts = self._granted(call) or self._rule(call)
        self._random(call, layouts[0])
        self._written(call, layouts[0])
        return ([INVARIANT] if self._gathered(node) else layouts), layouts

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

    def _foreign_backward(self) -> None:
        """Gradient hooks and functions with a backward of their own see a part of the gradient."""
        for node in self.result.trace.graph.nodes:
            layouts = self.result.layouts.get(node)
            if not node.meta.get("backward") or layouts is None or layouts[0] == INVARIANT:
                continue
            value = self._value(node, None, grad=False)
            conflict = Conflict(
                "AT323",
                f"{node.meta['backward'][0]} handles the gradient of {value.name}, of which each rank has a "
                "part: what it does is not traced, so the gradients cannot be proven",
                blame=(value,),
                notes=(f"{value}",),
            )
            self._find(node, conflict, self.origins[node])
        for name, into, found in self.result.trace.gradients:
            # A gradient is laid out as its value is: of a whole value whole, of a shard a shard.
            held, got = (self.result.layouts.get(n, [])[:1] for n in (into, found))
            if not held or not got or (held == got and held[0] not in (REPLICATE, PARTIAL)):
                continue
            given = self._value(into, None, grad=False)
            conflict = Conflict(
                "AT323",
                f"the backward of {name} gives a gradient of {given.name} that is not laid out as the value "
                "itself",
                blame=(given,),
                notes=(f"{given}", f"its gradient: {describe(got[0])}"),
            )
            self._find(found, conflict, self.origins[into])

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
        self._whole_layer(call)
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
        layout = self.result.layouts[node][0]
        layout = border(self.result.trace, self.result.regions, node, layout, reader)
        if reader is None or not is_whole(layout):
            return layout
        if layout == REPLICATE and node in reader.meta.get("grads", ()):
            return layout
        return self._scattered(node, reader) or layout

    # A Conv1D has views around its product, so its scatter and gather stand at the module's border.

    def _scattered(self, node: fx.Node, reader: fx.Node) -> Shard | None:
        """What a Conv1D that splits its input sees of it."""
        placed = self.placed.get(reader.meta.get("module", ""))
        if placed is None or not placed.rule.split_input or node.op == "get_attr":
            return None
        inside = (placed.path, reader.meta["call"]) in node.meta.get("stack", ())
        cut = None if inside else self._conv1d_cut(placed)
        return None if cut is None else cut.at(len(node.meta["val"].shape) - 1)

    def _gathered(self, node: fx.Node) -> bool:
        """Whether the value leaves a Conv1D that gathers its output."""
        placed = self.placed.get(node.meta["module"])
        if placed is None or not placed.rule.gather_output or self._conv1d_cut(placed) is None:
            return False
        left = self.result.trace.left.get(placed.path, [])
        return any(value is node for call in left for _, value in call)

    def _conv1d_cut(self, placed: Placed) -> Shard | None:
        """The cut of a Conv1D's weight [in, out]; None for other layers."""
        name = f"{placed.path}.weight" if placed.path else "weight"
        cut = self.result.cuts.get(self._canonical(name))
        turned = cut is not None and cut.dim == {"column": 1, "row": 0}.get(placed.style)
        return cut if turned else None

    def _value(self, node: fx.Node, reader: fx.Node | None, *, grad: bool) -> Value:
        val: Val = node.meta["val"]
        return Value(
            node,
            val.shape,
            self.overrides.get(node, self._seen(node, reader)),
            grad,
            _spoken(node),
            self.origins[node],
            mask=val.dtype in (torch.bool, torch.uint8),
        )

    def _written(self, call: Call, layout: Layout) -> None:
        """An in-place op must leave what it writes with the layout that it had: other names see it too."""
        if call.name in _RENAMES:  # the elements stay, and other names see them as before
            return
        for node in call.node.meta["mutates"]:
            had = self._seen(node, call.node)
            if had == layout:
                continue
            aliases = self._fresh(node) if (had, layout) == (INVARIANT, REPLICATE) else []
            if not aliases or node in call.node.meta["grads"]:
                raise Conflict(
                    "AT317",
                    f"{call.name} writes in place, into a tensor that is laid out differently",
                    blame=call.values,
                    notes=tuple(str(v) for v in call.values),
                )
            # Without a gradient until now, it is as good as a value with a part of its gradient.
            for alias in aliases:
                self._set(alias, [layout], self.origins[alias])

    def _fresh(self, node: fx.Node) -> list[fx.Node]:
        """The names of one memory, where an op of the forward made it; none where it came from outside."""
        root = _memory(node)
        if root.op != "call_function" or root.target is operator.getitem:
            return []
        names = [n for n in self.result.layouts if n.op == "call_function" and _memory(n) is root]
        return names if all(self.result.layouts[n] == [INVARIANT] for n in names) else []

    def _random(self, call: Call, layout: Layout) -> None:
        """Random numbers on a shard must differ from rank to rank, on whole values be the same."""
        if not draws(call.node):
            return
        if isinstance(layout, Shard) and layout.shared:
            raise Conflict(
                "AT316",
                f"{call.name} draws random numbers on elements that several ranks hold, and every rank draws "
                "others",
                blame=tuple(call.sharded()),
                notes=(describe(layout),),
            )
        found = self.result.random_whole if is_whole(layout) else self.result.random
        found.add(call.node.meta["module"])

    # -- the layers of the plan, with their mappings around the op

    def _layer(self, call: Call) -> tuple[list[Layout], list[Layout]] | None:
        placed = self.placed.get(call.node.meta["module"])
        if placed is None or not placed.layouts or call.name not in _LAYERS:
            return None
        own = {self._canonical(name) for name in placed.layouts}
        used = {v.node.meta["name"] for v in call.values if v.node.op == "get_attr"} & self.result.cuts.keys()
        if not used or not used <= own:
            return None
        self.result.reached.add(placed.path)
        return _LAYERS[call.name](self, call, placed)

    def _canonical(self, name: str) -> str:
        return self.aliases.get(name, name)

    def _whole_layer(self, call: Call) -> None:
        """A layer that no rule shards, given only a part of its features."""
        if call.name not in ("linear", "addmm"):
            return
        value: Value = call["mat1"] if call.name == "addmm" else call["input"]
        weight: Value = call["mat2"] if call.name == "addmm" else call["weight"]
        if value.shard is not None and value.shard.dim == value.rank - 1 and weight.whole:
            raise Conflict(
                "AT301",
                "a layer that is whole reads all features of its input; here they are sharded",
                blame=(value,),
                notes=(f"{value}",),
            )

    def _linear(self, call: Call, placed: Placed) -> tuple[list[Layout], list[Layout]]:
        transposed = call.name == "addmm"
        value: Value = call["mat1"] if transposed else call["input"]
        weight: Value = call["mat2"] if transposed else call["weight"]
        assert weight.shard is not None
        last = len(call.shape) - 1
        if placed.style == "column":
            return self._column(call, placed, value, weight.shard.at(last))
        return self._row(call, placed, value, weight)

    def _column(
        self, call: Call, placed: Placed, value: Value, cut: Shard
    ) -> tuple[list[Layout], list[Layout]]:
        if not value.whole:
            what = "a sum whose parts are still on the ranks" if value.partial else "a sharded value"
            raise Conflict(
                "AT314",
                f"a column layer reads its whole input on every rank; here it is given {what}",
                blame=(value,),
                notes=(f"{value}",),
            )
        if value.grad and value.layout == REPLICATE:  # its gradient is summed where it was copied
            self.result.uncopied.add(placed.path)
        conv1d = call.name == "addmm"
        if value.grad and value.layout == INVARIANT:
            entered = value.node.all_input_nodes[0] if conv1d else value.node
            self.result.copied.setdefault(placed.path, []).append(entered)
        if (
            cut.deal is not None and cut.deal.whole
        ):  # one head, on every rank: each has a part of its gradient
            return ([INVARIANT] if placed.rule.gather_output and not conv1d else [REPLICATE]), [REPLICATE]
        return ([INVARIANT] if placed.rule.gather_output and not conv1d else [cut]), [cut]

    def _row(
        self, call: Call, placed: Placed, value: Value, weight: Value
    ) -> tuple[list[Layout], list[Layout]]:
        assert weight.shard is not None
        last = value.rank - 1
        if value.partial:
            raise Conflict(
                "AT310", "a row layer is given a sum whose parts are still on the ranks", blame=(value,)
            )
        if value.shard is None:
            if value.grad and value.layout == REPLICATE:
                raise needs_copy(call, value, value)
            if placed.rule.split_input:
                return [INVARIANT], [INVARIANT]
            raise Conflict(
                "AT302",
                "a row layer reads its own part of the input on each rank; here the input is whole",
                blame=(weight,),
                notes=(f"{value.name}: {list(value.shape)} replicate",),
            )
        if value.shard.dim != last:
            raise Conflict(
                "AT307",
                "a row layer reads its own features on each rank; here dim "
                f"{value.shard.dim} of the input is sharded",
                blame=(value, weight),
                notes=(f"{value}",),
            )
        if placed.rule.split_input and call.name != "addmm":
            raise Conflict(
                "AT302",
                "split_input is set, but the input is already sharded",
                blame=(weight, value),
                notes=(f"{value}",),
            )
        counted_once(call, value)
        if not value.shard.same_cut(weight.shard):
            if placed.declared or placed.path in self.followed:
                raise Conflict(
                    "AT307",
                    "a row layer's weight is cut differently from its input",
                    blame=(weight, value),
                    notes=(f"{value}", f"{weight}"),
                )
            # The plan leaves the cut open: a row layer's weight follows its input.
            self._recut(weight, value.shard.at(weight.shard.dim))
        self.followed.add(placed.path)
        return [INVARIANT], [INVARIANT]

    def _recut(self, weight: Value, cut: Shard) -> None:
        name = weight.node.meta["name"]
        if not cut.fits(weight.shape[cut.dim]):
            raise Conflict("AT307", f"{weight.name} cannot be cut like its input", blame=(weight,))
        self.result.cuts[name] = cut
        self.result.layouts[weight.node] = self.result.computed[weight.node] = [cut]

    def _norm(self, call: Call, placed: Placed) -> tuple[list[Layout], list[Layout]]:
        """Its statistics are summed over the ranks, forward and backward."""
        value: Value = call["input"]
        weights = [v for v in (call["weight"], call["bias"]) if v is not None]
        if value.partial:
            raise Conflict(
                "AT310", "a norm is given a sum whose parts are still on the ranks", blame=(value,)
            )
        if value.shard is None or value.shard.dim != value.rank - 1:
            raise Conflict(
                "AT307",
                "a norm that is cut is given its own features on each rank; here they are whole",
                blame=(weights[0], value),
                notes=(f"{value}",),
            )
        counted_once(call, value)
        for weight in weights:
            if weight.shard is None or not weight.shard.same_cut(value.shard):
                raise Conflict(
                    "AT307",
                    "a norm's weight is cut differently from its input",
                    blame=(weight, value),
                    notes=(f"{value}", f"{weight}"),
                )
        return [value.shard], [value.shard]

    def _vocab(self, call: Call, placed: Placed) -> tuple[list[Layout], list[Layout]]:
        ids: Value = call["indices"]
        if not ids.whole:
            raise Conflict("AT314", "a vocab layer reads whole ids on every rank", blame=(ids,))
        return [INVARIANT], [INVARIANT]

    # -- what comes out

    def _outputs(self) -> None:
        for output in self.result.trace.outputs:
            layouts = self.result.layouts.get(output.node)
            if layouts is None or output.cached:
                continue
            seen = self._seen(output.node, None)
            if seen == REPLICATE and output.node.meta["val"].grad:
                value = self._value(output.node, None, grad=False)
                what = f"output {output.name}" if output.name else "the output"
                conflict = Conflict(
                    "AT305",
                    f"{what} is read as a copy for use on shards, and returned as well: its gradient would "
                    "count once for every rank",
                    blame=(value,),
                    notes=(f"{value}",),
                )
                self._find(output.node, conflict, self.origins[output.node])
            if is_whole(seen):
                continue
            value = self._value(output.node, None, grad=False)
            if isinstance(layouts[0], Partial):
                what = "a sum whose parts are still on the ranks"
            else:
                what = "a sharded value"
            name = f"output {output.name}" if output.name else "the output"
            conflict = Conflict(
                "AT311",
                f"{name} is {what}, and the caller would get each rank's part",
                blame=(value,),
                notes=(f"{value}",),
            )
            self._find(output.node, conflict, self.origins[output.node])
            end = next(n for n in self.result.trace.graph.nodes if n.op == "output")
            self.result.wanted += self._remedies(end, conflict)


_LAYERS: dict[str, Callable[[Engine, Call, Placed], tuple[list[Layout], list[Layout]]]] = {
    "linear": Engine._linear,
    "addmm": Engine._linear,
    "embedding": Engine._vocab,
    "layer_norm": Engine._norm,
    "rms_norm": Engine._norm,
}


_RENAMES = ("squeeze", "unsqueeze", "transpose", "t", "swapaxes", "swapdims")  # in their in-place forms


def _memory(node: fx.Node) -> fx.Node:
    """The op that made the memory that a value is a view of."""
    while node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        if schema is None or not any(r.alias_info is not None for r in schema.returns):
            return node
        node = node.all_input_nodes[0]
    return node


def _spoken(node: fx.Node) -> str:
    """A node as people say it: the parameter's name, or the op and the module that made it."""
    if node.op == "get_attr":
        return str(node.meta["name"])
    if node.op == "placeholder":
        return f"input {node.meta['name']}"
    source = node
    while source.target is operator.getitem:
        source = source.all_input_nodes[0]
    where = node.meta.get("module")
    return f"{op_name(source)} of {where}" if where else f"{op_name(source)}"
