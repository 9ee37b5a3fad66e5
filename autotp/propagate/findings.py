"""A finding at the place of the graph that it is about."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from autotp.placement import Shard
from autotp.propagate.call import Conflict
from autotp.propagate.propagation import Finding, Propagation

__all__ = ["CONSTANT", "finding_at", "finding_in", "finding_of", "origins_of"]

CONSTANT = (
    "the model uses a size of the whole model here; read it off the tensor (x.shape, or -1), so that it "
    "follows the shard",
)


def finding_of(
    whole: Propagation,
    node: fx.Node,
    code: str,
    message: str,
    *notes: str,
    source: fx.Node | None = None,
    help: tuple[str, ...] = (),
) -> Finding:
    """A finding about an op of the whole run, whose shards are named; it stands at `source`, if given."""
    return Finding(source or node, Conflict(code, message, notes=notes, help=help), origins_of(whole, node))


def finding_in(
    whole: Propagation,
    path: str,
    code: str,
    message: str,
    help: tuple[str, ...] = (),
    only: Callable[[fx.Node], bool] | None = None,
) -> Finding:
    """A finding at the first op (of `only` those) of the module `path` that has to do with a shard."""
    inside = [n for n in whole.trace.ops() if _within(n.meta["module"], path)]
    inside = [n for n in inside if only is None or only(n)]
    node = next((n for n in inside if origins_of(whole, n)), (inside or whole.trace.ops())[0])
    return Finding(node, Conflict(code, message, help=help), origins_of(whole, node))


def finding_at(whole: Propagation, tensor: str, code: str, message: str) -> Finding:
    """A finding at the op that reads the tensor of that name."""
    node = next(n for n in whole.trace.graph.nodes if n.op == "get_attr" and n.meta["name"] == tensor)
    user = next(iter(node.users))
    return Finding(user, Conflict(code, message), origins_of(whole, user))


def _within(path: str, root: str) -> bool:
    return not root or path == root or path.startswith(f"{root}.")


def origins_of(whole: Propagation, node: fx.Node) -> tuple[str, ...]:
    """The nearest sharded layers above a node."""
    found: set[str] = set()
    frontier, seen = [node], set()
    while frontier and not found:
        current = frontier.pop(0)
        if current in seen:
            continue
        seen.add(current)
        if current.op == "get_attr" and any(isinstance(x, Shard) for x in whole.layouts.get(current, [])):
            found.add(current.meta["name"].rpartition(".")[0])
        frontier += current.all_input_nodes
    return tuple(sorted(found))
