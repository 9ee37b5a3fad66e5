"""One reduce after the sum of parallel branches, in the place of one behind each.

    mlp(x) + attention(x) + x        two row layers, each with a reduce of its own
    reduce(mlp(x) + attention(x)) + x

Row layers whose outputs meet in a sum, and nothing else reads them, leave their parts on the ranks. Every
call in every mode must be such, or the layer reduces as always. A whole value that is added before they have
met is shared: it is rank 0's part.

    x + attention(x) + mlp(x)
    reduce(share(x) + attention(x) + mlp(x))

A module of raw tensors (`x @ self.weight.T`) that reduces its output at its border is such a layer, too.
A dropout between them draws from the stream that is common to all ranks, so it zeroes the same elements of
each part: it is the dropout of the sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from autotp.placement import INVARIANT, PARTIAL
from autotp.propagate.ops import arguments_of, draws, op_name
from autotp.propagate.pointwise import LINEAR_IN_ONE
from autotp.propagate.propagation import Propagation
from autotp.propagate.regions import border
from autotp.trace.graph import REPEATED, Trace

__all__ = ["Sum", "between", "meeting", "merged", "sums", "within_layers"]

_SHAPES = frozenset(["view", "reshape", "_unsafe_view"])


@dataclass(frozen=True)
class Sum:
    """What is summed in an addition: the outputs of the layers `paths`, and `shared` whole values, as
    (reader, value). `nodes` are the ops between, `dropouts` those of them that draw."""

    paths: tuple[str, ...]
    shared: tuple[tuple[fx.Node, fx.Node], ...] = ()
    nodes: tuple[fx.Node, ...] = ()

    @property
    def dropouts(self) -> tuple[fx.Node, ...]:
        """The ops that draw."""
        return tuple(n for n in self.nodes if draws(n))


def merged(wholes: Iterable[Propagation]) -> frozenset[str]:
    """The row layers that may leave their output partial in every mode."""
    found = [(whole, sums(whole)) for whole in wholes]
    kept = frozenset(path for _, each in found for one in each.values() for path in one.paths)
    while True:
        before = kept
        for whole, each in found:
            inside = dict.fromkeys(kept, 0)
            for one in each.values():
                for path in one.paths if kept.issuperset(one.paths) else ():
                    inside[path] = inside.get(path, 0) + 1
            rows = [n for n in whole.trace.ops() if _row(whole, n)]
            calls = Counter(n.meta["module"] for n in rows)
            for repeat in whole.trace.repeats:  # the layer that is left out makes the same calls
                inside_of = (repeat.of, repeat.call)
                calls.update(repeat.renamed(n.meta["module"]) for n in rows if inside_of in n.meta["stack"])
            calls.update({p: len(whole.trace.left.get(p, ())) for p, r in whole.regions.items() if r.reduced})
            kept = frozenset(path for path in kept if inside[path] == calls[path])
        if kept == before:
            return kept


def sums(whole: Propagation) -> Mapping[fx.Node, Sum]:
    """The outermost additions in which row layers' outputs meet."""
    found: dict[fx.Node, Sum] = {}
    for node in whole.trace.ops():
        one = _branches(whole, node) if op_name(node) == "add" else None
        if one is None or any(reader is node for reader, _ in one.shared):
            continue
        for inside in one.nodes:
            found.pop(inside, None)
        found[node] = one
    return found


def _branches(whole: Propagation, node: fx.Node) -> Sum | None:
    """The row layers whose outputs are summed in a value, each once; None where there are none, or anything
    else happens to them."""
    region = _reduced(whole, node)
    if region is not None:
        return Sum((region,))
    if node.op != "call_function" or whole.layouts.get(node) != [INVARIANT]:
        return None
    if _row(whole, node):
        return Sum((node.meta["module"],))
    inputs, name = node.all_input_nodes, op_name(node)
    if name == "add":
        return _added(whole, node)
    if node.target is REPEATED:
        return _in_a_twin(whole, node)
    if node.meta.get("mutates") or (draws(node) and name != "dropout"):
        return None
    if name in (*LINEAR_IN_ONE, *_SHAPES) and len(inputs) == 1 and _read_once(inputs[0]):
        found = _branches(whole, inputs[0])
        return None if found is None else Sum(found.paths, found.shared, (*found.nodes, node))
    return None


def _read_once(value: fx.Node) -> bool:
    """Whether one op reads a value. That it stands for what layers like this one give is no reading."""
    return sum(reader.target is not REPEATED for reader in value.users) == 1


def _in_a_twin(whole: Propagation, node: fx.Node) -> Sum | None:
    """What a layer gives whose ops are left out, since they are those of another one."""
    value, number = node.args
    assert isinstance(value, fx.Node) and isinstance(number, int)
    found, repeat = _branches(whole, value), whole.trace.repeats[number]
    paths = [repeat.renamed(path) for path in found.paths] if found is not None else [None]
    if found is None or found.shared or found.dropouts or None in paths:
        return None
    return Sum(tuple(path for path in paths if path is not None), (), (node,))


def _added(whole: Propagation, node: fx.Node) -> Sum | None:
    """The sum of what two values are sums of; one of them may be whole."""
    inputs = node.all_input_nodes
    if len(inputs) != 2 or arguments_of(node).get("alpha", 1) != 1:
        return None
    if len({value.meta["val"].shape for value in inputs}) != 1:
        return None
    found = [_branches(whole, value) if _read_once(value) else None for value in inputs]
    every = [one for one in found if one is not None]
    shared = [(node, value) for value, one in zip(inputs, found, strict=True) if one is None]
    paths = tuple(path for one in every for path in one.paths)
    if not every or len(set(paths)) != len(paths) or not all(_shareable(whole, *pair) for pair in shared):
        return None
    pairs = (*(pair for one in every for pair in one.shared), *shared)
    return Sum(paths, pairs, (*(n for one in every for n in one.nodes), node))


def _shareable(whole: Propagation, reader: fx.Node, value: fx.Node) -> bool:
    """Whether a value is whole for its reader, its gradient, too."""
    if value.op == "get_attr" or value in reader.meta.get("mutates", ()):
        return False
    if whole.layouts.get(value) != [INVARIANT] or (reader, value) in whole.parts:
        return False
    return border(whole.trace, whole.regions, value, INVARIANT, reader) == INVARIANT


def _reduced(whole: Propagation, node: fx.Node) -> str | None:
    """The module of raw tensors that gives this value alone, reduced at its border."""
    for path, call in node.meta.get("stack", ()) if whole.layouts.get(node) == [PARTIAL] else ():
        region = whole.regions.get(path)
        gone = whole.trace.left.get(path, [])
        if region is not None and region.reduced and call < len(gone):
            places = {place for place, value in gone[call] if value is node}
            return path if places == region.reduced and len(gone[call]) == 1 else None
    return None


def _row(whole: Propagation, node: fx.Node) -> bool:
    """Whether a node is a row layer's product, which the layer reduces."""
    placed = whole.matches.placed.get(node.meta.get("module") or "")
    if placed is None or placed.style != "row" or placed.target != "module" or placed.rule.split_input:
        return False
    names = {whole.aliases.get(name, name) for name in placed.layouts}
    read = {n.meta["name"] for n in node.all_input_nodes if n.op == "get_attr"}
    return op_name(node) in ("linear", "addmm") and bool(read & names & whole.cuts.keys())


def meeting(wholes: Mapping[str, Propagation], rows: frozenset[str]) -> dict[str, dict[fx.Node, Sum]]:
    """The sums in which these row layers meet, of each mode."""
    return {
        mode: {node: one for node, one in sums(whole).items() if rows.issuperset(one.paths)}
        for mode, whole in wholes.items()
    }


def within_layers(trace: Trace, one: Sum) -> bool:
    """Whether a sum lies in one layer where others repeat that, and none of these reads a part of it."""
    top = one.nodes[-1] if one.nodes else None
    given = {here for repeat in trace.repeats for _, here in repeat.given}
    parts = {value for node in one.nodes for value in (node, *node.all_input_nodes)} - {
        v for _, v in one.shared
    }
    if not given.isdisjoint(parts - {top}) or any(node.target is REPEATED for node in one.nodes):
        return False
    layers = {r.of for r in trace.repeats if any(p == r.of or p.startswith(f"{r.of}.") for p in one.paths)}
    return all(layers <= {path for path, _ in node.meta["stack"]} for node in one.nodes)


def between(met: Mapping[str, Mapping[fx.Node, Sum]]) -> frozenset[str]:
    """The modules that give parts of a sum to the module that sums them: dropouts."""
    return frozenset(
        path
        for each in met.values()
        for top, one in each.items()
        for path in (node.meta["module"] for node in one.nodes)
        if path and path != top.meta["module"] and not top.meta["module"].startswith(f"{path}.")
    )
