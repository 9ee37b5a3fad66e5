"""The values along one module, from the layouts of a trace: placement, mapping and reason of each op."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Iterable
from dataclasses import replace

from torch import fx, nn

from autotp.diagnostic import UsageError
from autotp.explanation import Explanation, Mapped, Step
from autotp.placement import INVARIANT, PARTIAL, REPLICATE, Joint, Layout, Partial, Shard
from autotp.proof import Proof
from autotp.propagate.mapped import STATISTICS
from autotp.propagate.ops import op_name
from autotp.propagate.propagation import Propagation
from autotp.propagate.regions import border
from autotp.report.words import cut_words

__all__ = ["along"]

LAYERS = ("linear", "addmm", "embedding")
BORDER = "added by the proof at the module's border"
EDIT = "added by the proof in the model's code"


def along(found: Explanation, module: nn.Module, proof: Proof, mode: str | None) -> Explanation:
    """The explanation with its values, in `mode` or the first that runs the module.

    Raises UsageError for a mode that was not traced, or that does not run the module.
    """
    traced, modes = found.module, tuple(proof.propagations)
    found = replace(found, modes=modes)
    if not modes:
        return found
    mode = proof.covered.get(mode, mode) if mode is not None else None
    if mode is not None and mode not in modes:
        known = [*modes, *(name for name, by in proof.covered.items() if by in modes)]
        raise UsageError(f"mode {mode!r} was not traced\n  = help: these were: {'; '.join(known)}")
    runs = [m for m in modes if proof.propagations[m].trace.calls.get(traced)]
    runs.sort(key=lambda m: not proof.propagations[m].findings)  # a refusal is what people ask about
    if not runs or (mode is not None and mode not in runs):
        where = f"in {mode} mode" if mode is not None else "in any mode that was traced"
        help = f"it runs in {'; '.join(runs)}" if runs else _inside(found.module, module)
        raise UsageError(f"{found.module} does not run {where}" + (f"\n  = help: {help}" if help else ""))
    walk = _Walk(proof.propagations[mode or runs[0]], traced, proof.shared)
    return replace(
        found,
        mode=mode or runs[0],
        covers=tuple(name for name, by in proof.covered.items() if by == (mode or runs[0])),
        calls=walk.whole.trace.calls[traced],
        entered=walk.entered(module),
        steps=walk.steps(),
        left=walk.left(),
        unknown=walk.unknown,
    )


class _Walk:
    """The first call of a module in one propagated trace."""

    def __init__(self, whole: Propagation, path: str, shared: Iterable[tuple[str, ...]]) -> None:
        self.whole, self.path, self.trace = whole, path, whole.trace
        self.firsts = {follower: group[0] for group in shared for follower in group[1:]}
        self.placed = {p.path: p for p in whole.matches.placed.values() if p.target == "module"}
        self.codes = {self._here(finding.node): finding.conflict.code for finding in whole.findings}
        self.arguments: dict[fx.Node, str] = {}
        self.unknown = 0

    def _here(self, node: fx.Node) -> fx.Node:
        """The op of this trace: a finding about one rank is at the op of that rank's own trace."""
        ours = self.trace.ops()
        theirs = [n for n in node.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
        if node.graph is self.trace.graph or node not in theirs:
            return node
        return ours[min(theirs.index(node), len(ours) - 1)]

    # -- what goes in, the ops, what comes out

    def entered(self, module: nn.Module) -> tuple[Step, ...]:
        calls = self.trace.entered.get(self.path) or [[]]
        named = [(_argument(place, module), node) for place, node in calls[0]]
        found = tuple(self._value(name, node, self._maker(node)) for name, node in named)
        self.arguments = {node: name for name, node in reversed(named)}
        return found

    def left(self) -> tuple[Step, ...]:
        calls = self.trace.left.get(self.path) or [[]]
        return tuple(self._value(f"result{place}", node, self._called(node)) for place, node in calls[0])

    def _value(self, name: str, node: fx.Node, why: str) -> Step:
        return Step(name, "", None, _shape(node), 1, self._placement(node), why=f"from {why}")

    def _maker(self, node: fx.Node) -> str:
        """Where a value that goes in comes from: the module that made it."""
        if not self.path:
            return "the caller"
        module = node.meta.get("module") if node.op == "call_function" else None
        return module or self._called(node)

    def steps(self) -> tuple[Step, ...]:
        found: list[Step] = []
        for node in self.trace.ops():
            if not self._inside(node):
                continue
            if node in self.whole.layouts or node in self.codes:
                found.append(self._step(node))
            else:
                self.unknown += 1
        return tuple(found)

    def _inside(self, node: fx.Node) -> bool:
        return not self.path or (self.path, 0) in node.meta.get("stack", ())

    def _step(self, node: fx.Node) -> Step:
        val = node.meta["val"]
        mappings, rule = self._layer(node)
        whys = {rule or self._follows(node): None}
        for value in node.all_input_nodes:
            more, reason = self._added(value, node)
            mappings = [*more, *mappings]
            whys |= {reason: None} if reason else {}
        if self._leaves(node):
            mappings.append(Mapped("reduce", "after"))
            whys[BORDER] = None
        how = self.whole.mapped.get(node, ())
        if how:
            mappings += [Mapped("reduce" if step in STATISTICS else step, "after") for step in how]
            whys[EDIT] = None
        return Step(
            op_name(node),
            self._relative(node.meta["module"]),
            node.meta.get("source"),
            _shape(node),
            len(val) if isinstance(val, list) else 1,
            self._placement(node),
            tuple(mappings),
            "; ".join(whys),
            self.codes.get(node, ""),
        )

    # -- placements

    def _placement(self, node: fx.Node) -> str:
        layouts = self.whole.layouts.get(node)
        if self._leaves(node):
            return "replicate"
        if layouts is None:
            return f"refused: {self.codes[node]}" if node in self.codes else "unknown"
        found = list(dict.fromkeys(map(self._words, layouts, _shapes(node))))
        return ", ".join([*found, f"refused: {self.codes[node]}"] if node in self.codes else found)

    def _words(self, layout: Layout, shape: tuple[int, ...]) -> str:
        if isinstance(layout, Joint):
            return str(layout)
        if isinstance(layout, Shard):
            return cut_words(layout, shape[layout.dim])
        return "partial" if isinstance(layout, Partial) else "replicate"

    # -- mappings and reasons

    def _layer(self, node: fx.Node) -> tuple[list[Mapped], str]:
        """The mappings that a layer of the plan has around its op, and its rule."""
        placed = self.placed.get(node.meta["module"])
        names = {n.meta["name"] for n in node.all_input_nodes if n.op == "get_attr"}
        if placed is None or op_name(node) not in LAYERS or not names & self.whole.cuts.keys():
            return [], ""
        why = f"rule `{placed.pattern}` ({placed.style})"
        found: list[Mapped] = []
        if node not in self.whole.layouts:
            return found, why
        if placed.style == "column":
            read = [
                n for v in node.all_input_nodes for n in (v, *v.all_input_nodes)
            ]  # a Conv1D has a view between
            value = next((n for n in read if n in self.whole.copied.get(placed.path, ())), None)
            if value is not None:
                first = self.firsts.get(placed.path)
                if first is None:
                    found.append(Mapped("copy", "before", self._called(value)))
                else:
                    found.append(Mapped("copy", "shared", self._relative(first)))
            if placed.rule.gather_output:
                found.append(Mapped("gather", "after"))
        else:
            if placed.rule.split_input:
                found.append(Mapped("scatter", "before", self._called(node.all_input_nodes[0])))
            if placed.path not in self.whole.unreduced:
                found.append(Mapped("reduce", "after"))
        return found, why

    def _added(self, value: fx.Node, reader: fx.Node) -> tuple[list[Mapped], str]:
        """Reads and borders that the proof adds to an input of an op."""
        name = value.meta.get("name", "")
        read = self.whole.reads.get(name) if value.op == "get_attr" else None
        if read is not None:
            kinds = ["share"] * read.shared + ["copy"] * read.copied + ["slice"] * (read.shard is not None)
            of = self._relative(name)
            return [
                Mapped(kind, "before", of) for kind in kinds
            ], "added by the proof: a whole tensor meets a shard"
        layout = self._layout(value)
        if (reader, value) in self.whole.shared:
            return [Mapped("share", "before", self._called(value))], "added to parts of a sum"
        if (reader, value) in self.whole.copied_in:
            return [Mapped("copy", "before", self._called(value))], "read by a head"
        if layout == INVARIANT and self._seen(value, reader) == REPLICATE:
            of = self._called(value)
            return [Mapped("copy", "before", of)], BORDER
        return [], ""

    def _leaves(self, node: fx.Node) -> bool:
        """Whether the value is reduced on its way out of a region."""
        return self._layout(node) == PARTIAL and self._outside(node) == INVARIANT

    def _outside(self, node: fx.Node) -> Layout:
        return border(self.trace, self.whole.regions, node, PARTIAL, None)

    def _seen(self, value: fx.Node, reader: fx.Node) -> Layout | None:
        layout = self._layout(value)
        return None if layout is None else border(self.trace, self.whole.regions, value, layout, reader)

    def _layout(self, node: fx.Node) -> Layout | None:
        return self.whole.layouts.get(node, [None])[0]

    def _follows(self, node: fx.Node) -> str:
        """Which values decide the placement of an op's result."""
        parts = [n for n in node.all_input_nodes if isinstance(self._seen(n, node), (Shard, Joint, Partial))]
        layout = self._layout(node)
        if layout is None:
            return f"reads {self._listed(node.all_input_nodes)}"
        if not parts:
            return "every input is whole"
        said = self._listed(parts)
        if isinstance(layout, Partial) and any(isinstance(self._layout(n), Shard) for n in parts):
            return f"each rank sums its part of {said}"
        if isinstance(layout, (Shard, Joint, Partial)):
            return f"follows {said}"
        return f"of {said}"

    # -- names

    def _listed(self, nodes: Iterable[fx.Node]) -> str:
        names = list(dict.fromkeys(map(self._called, nodes)))
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def _called(self, node: fx.Node) -> str:
        """A value as people say it, seen from the module that is explained."""
        if node in self.arguments:
            return self.arguments[node]
        while node.target is operator.getitem:
            node = node.all_input_nodes[0]
        if node.op == "placeholder":
            return f"the model's {_argument(node.meta['name'], None)}"
        if node.op == "get_attr":
            placed = self.whole.matches.placed.get(node.meta["name"])
            rule = f" (rule `{placed.pattern}`)" if placed is not None else ""
            return self._relative(node.meta["name"]) + rule
        module, source = self._relative(node.meta["module"]), node.meta.get("source")
        if node.meta["module"] in self.placed and op_name(node) in LAYERS:
            return module or op_name(node)
        return op_name(node) + (f":{source.line}" if source is not None else f" of {module or self.path}")

    def _relative(self, name: str) -> str:
        if name == self.path:
            return ""
        return name.removeprefix(f"{self.path}.") if self.path else name


def _inside(path: str, module: nn.Module) -> str:
    """What to name instead of a container: the modules in it."""
    names = [f"{path}.{name}" for name, _ in module.named_children()]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"name a module in it: {', '.join(names[:3])}{more}" if names else ""


def _shapes(node: fx.Node) -> list[tuple[int, ...]]:
    val = node.meta["val"]
    return [() if v is None else tuple(v.shape) for v in (val if isinstance(val, list) else [val])]


def _shape(node: fx.Node) -> tuple[int, ...]:
    return next(iter(_shapes(node)), ())


def _argument(place: str, module: nn.Module | None) -> str:
    """The name of an argument: `[0][1]` is the second positional one, `[1].mask` is named."""
    found = re.match(r"\[0\]\[(\d+)\](.*)|\[1\]\.?(\w+)(.*)", place)
    if found is None:
        return place
    if found[3] is not None:
        return f"{found[3]}{found[4]}"
    names = list(inspect.signature(module.forward).parameters) if module is not None else []
    number = int(found[1])
    return (names[number] if number < len(names) else f"argument {number}") + found[2]
