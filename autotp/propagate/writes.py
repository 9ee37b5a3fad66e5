"""What an op that writes in place does to the layouts: other names see what it writes, too."""

from __future__ import annotations

import operator
from collections.abc import Callable

from torch import fx

from autotp.placement import INVARIANT, REPLICATE, Layout
from autotp.propagate.call import Call, Conflict
from autotp.propagate.propagation import Propagation

__all__ = ["written"]

_RENAMES = ("squeeze", "unsqueeze", "transpose", "t", "swapaxes", "swapdims")  # in their in-place forms


def written(
    result: Propagation, call: Call, layout: Layout, seen: Callable[[fx.Node, fx.Node], Layout]
) -> list[fx.Node]:
    """The values that have the layout of what `call` writes from now on, without a gradient until then.

    Raises Conflict where what is written into is laid out differently.
    """
    if call.name in _RENAMES:  # the elements stay, and other names see them as before
        return []
    found: list[fx.Node] = []
    for node in call.node.meta["mutates"]:
        had = seen(node, call.node)
        if had == layout:
            continue
        aliases = _fresh(result, node) if (had, layout) == (INVARIANT, REPLICATE) else []
        if not aliases or node in call.node.meta["grads"]:
            raise Conflict(
                "AT317",
                f"{call.name} writes in place, into a tensor that is laid out differently",
                blame=call.values,
                notes=tuple(str(v) for v in call.values),
            )
        found += aliases
    return found


def _fresh(result: Propagation, node: fx.Node) -> list[fx.Node]:
    """The names of one memory, where an op of the forward made it; none where it came from outside."""
    root = _memory(node)
    if root.op != "call_function" or root.target is operator.getitem:
        return []
    names = [n for n in result.layouts if n.op == "call_function" and _memory(n) is root]
    return names if all(result.layouts[n] == [INVARIANT] for n in names) else []


def _memory(node: fx.Node) -> fx.Node:
    """The op that made the memory that a value is a view of."""
    while node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        if schema is None or not any(r.alias_info is not None for r in schema.returns):
            return node
        node = node.all_input_nodes[0]
    return node
