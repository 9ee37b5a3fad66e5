"""Where a graph ends: what the caller is given, and what code of its own is given in the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import fx

from autotp.placement import INVARIANT, PARTIAL, REPLICATE, Layout, Partial, describe, is_whole
from autotp.propagate.call import Conflict, Value
from autotp.propagate.propagation import Propagation

__all__ = ["gradients", "outputs"]


def outputs(
    result: Propagation, seen: Callable[[fx.Node, None], Layout], value_of: Callable[[fx.Node], Value]
) -> Iterator[tuple[fx.Node, Conflict]]:
    """What is returned that is not whole on every rank, or of which each rank would have a part of the
    gradient."""
    for output in result.trace.outputs:
        layouts = result.layouts.get(output.node)
        if layouts is None or output.cached:
            continue
        layout, value = seen(output.node, None), value_of(output.node)
        name = f"output {output.name}" if output.name else "the output"
        if layout == REPLICATE and output.node.meta["val"].grad:
            conflict = Conflict(
                "AT305",
                f"{name} is read as a copy for use on shards, and returned as well: its gradient would "
                "count once for every rank",
                blame=(value,),
                notes=(f"{value}",),
            )
            yield output.node, conflict
        if is_whole(layout):
            continue
        partial = isinstance(layouts[0], Partial)
        what = "a sum whose parts are still on the ranks" if partial else "a sharded value"
        conflict = Conflict(
            "AT311",
            f"{name} is {what}, and the caller would get each rank's part",
            blame=(value,),
            notes=(f"{value}",),
        )
        yield output.node, conflict


def gradients(
    result: Propagation, value_of: Callable[[fx.Node], Value]
) -> Iterator[tuple[fx.Node, Conflict, fx.Node]]:
    """Gradient hooks and functions with a backward of their own that see a part of a gradient, each with the
    value that it is about."""
    for node in result.trace.graph.nodes:
        layouts = result.layouts.get(node)
        if not node.meta.get("backward") or layouts is None or layouts[0] == INVARIANT:
            continue
        value = value_of(node)
        conflict = Conflict(
            "AT323",
            f"{node.meta['backward'][0]} handles the gradient of {value.name}, of which each rank has a "
            "part: what it does is not traced, so the gradients cannot be proven",
            blame=(value,),
            notes=(f"{value}",),
        )
        yield node, conflict, node
    for name, into, found in result.trace.gradients:
        # A gradient is laid out as its value is: of a whole value whole, of a shard a shard.
        held, got = (result.layouts.get(n, [])[:1] for n in (into, found))
        if not held or not got or (held == got and held[0] not in (REPLICATE, PARTIAL)):
            continue
        given = value_of(into)
        conflict = Conflict(
            "AT323",
            f"the backward of {name} gives a gradient of {given.name} that is not laid out as the value "
            "itself",
            blame=(given,),
            notes=(f"{given}", f"its gradient: {describe(got[0])}"),
        )
        yield found, conflict, into
