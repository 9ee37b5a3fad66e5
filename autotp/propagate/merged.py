"""One reduce after the sum of parallel branches, in the place of one behind each.

    mlp(x) + attention(x) + x        two row layers, each with a reduce of its own
    reduce(mlp(x) + attention(x)) + x

Row layers whose outputs meet in a sum, and nothing else reads them, leave their parts on the ranks. Every
call in every mode must be such, or the layer reduces as always. A random dropout between them is left alone:
it would zero other elements of each part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from autotp.placement import INVARIANT
from autotp.propagate.ops import arguments_of, draws, op_name
from autotp.propagate.pointwise import LINEAR_IN_ONE
from autotp.propagate.propagation import Propagation

__all__ = ["merged", "sums"]

_SHAPES = frozenset(["view", "reshape", "_unsafe_view"])
Sums = Mapping[fx.Node, frozenset[str]]


def merged(wholes: Iterable[Propagation]) -> frozenset[str]:
    """The row layers that may leave their output partial in every mode."""
    found = [(whole, sums(whole)) for whole in wholes]
    kept = frozenset[str]().union(*(paths for _, each in found for paths in each.values()))
    while True:
        before = kept
        for whole, each in found:
            inside = dict.fromkeys(kept, 0)
            for paths in each.values():
                for path in paths if paths <= kept else ():
                    inside[path] = inside.get(path, 0) + 1
            rows = [n.meta["module"] for n in whole.trace.ops() if _row(whole, n)]
            kept = frozenset(path for path in kept if inside[path] == rows.count(path))
        if kept == before:
            return kept


def sums(whole: Propagation) -> Sums:
    """The outermost additions of row layers' outputs alone, each with the layers."""
    found: dict[fx.Node, frozenset[str]] = {}
    for node in whole.trace.ops():
        paths = _branches(whole, node) if op_name(node) == "add" else None
        if paths is None or len(paths) < 2:
            continue
        for value in node.all_input_nodes:
            found.pop(value, None)
        found[node] = frozenset(paths)
    return found


def _branches(whole: Propagation, node: fx.Node) -> list[str] | None:
    """The row layers whose outputs, and nothing else, are summed in a value; each once."""
    if node.op != "call_function" or whole.layouts.get(node) != [INVARIANT]:
        return None
    if _row(whole, node):
        return [node.meta["module"]]
    inputs = node.all_input_nodes
    if any(len(value.users) != 1 for value in inputs) or draws(node) or node.meta.get("mutates"):
        return None
    if op_name(node) == "add":
        given = arguments_of(node)
        if len(inputs) != 2 or given.get("alpha", 1) != 1 or len({v.meta["val"].shape for v in inputs}) != 1:
            return None
        found = [_branches(whole, value) for value in inputs]
        paths = [path for each in found for path in each or ()]
        return paths if None not in found and len(set(paths)) == len(paths) else None
    if op_name(node) in (*LINEAR_IN_ONE, *_SHAPES) and len(inputs) == 1:
        return _branches(whole, inputs[0])
    return None


def _row(whole: Propagation, node: fx.Node) -> bool:
    """Whether a node is a row layer's product, which the layer reduces."""
    placed = whole.matches.placed.get(node.meta.get("module") or "")
    if placed is None or placed.style != "row" or placed.target != "module" or placed.rule.split_input:
        return False
    names = {whole.aliases.get(name, name) for name in placed.layouts}
    read = {n.meta["name"] for n in node.all_input_nodes if n.op == "get_attr"}
    return op_name(node) in ("linear", "addmm") and bool(read & names & whole.cuts.keys())
