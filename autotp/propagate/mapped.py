"""Statistics over a dim that is cut, mapped where the model's code makes them.

A norm that a model writes by hand takes the mean of squares of all features, of which a rank has its part:

    mean(x)    the ranks' means, each weighed by its number of elements, are summed: the mean of all
    sum(x)     is a part of a sum; where that is used as a value it is reduced
    var, std   of the mean of all, and the summed squares of what is left

Each rank's own features then depend on the statistic, so its gradient is summed as well (`copy`). The
mappings stand around the expression in the model's code (`rewrite/edits`). Found from the conflict, like
reads; nothing but statistics is ever summed this way, since a plan says itself what it gathers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from autotp.placement import INVARIANT, PARTIAL, REPLICATE, Layout, Partial, Shard
from autotp.propagate.call import Call, Conflict, Value, counted_once, normal_dim, with_gradient
from autotp.propagate.losses import LOSSES, MEAN, SUM, aligned
from autotp.propagate.ops import arguments_of, op_name
from autotp.propagate.reads import Read

__all__ = [
    "MARK",
    "STATISTICS",
    "STEPS",
    "Mapped",
    "after",
    "copies_of",
    "counted",
    "divisor",
    "mapped_statistic",
    "stripped",
    "sums_of",
]

STATISTICS = ("mean", "var", "std")  # of which the ranks' own say nothing about all
STEPS = (*STATISTICS, "reduce", "copy", "gather")
MARK = "autotp::mapped"  # a step in the trace of an edited model
_SUMS = ("sum", "mean")
_RUNS = {"mean": ("reduce",), **dict.fromkeys(("var", "std"), ("reduce", "copy", "reduce"))}


@dataclass(frozen=True)
class Mapped:
    """The result of the op at `node` goes through mappings, the first one first."""

    node: fx.Node
    how: tuple[str, ...]


def statistic_over(call: Call) -> Value | None:
    """The shard over whose elements a statistic is taken; None for another call."""
    value = call["self"]
    if _statistic(call) is None or not isinstance(value, Value) or value.shard is None:
        return None
    if call.name in LOSSES:
        return value
    dims = call["dim"]
    every = list(range(value.rank)) if dims is None or dims == [] else dims
    cut = {normal_dim(d, value.rank) for d in ([every] if isinstance(every, int) else every)}
    if value.shard.dim not in cut or (call.name != "mean" and len(cut) > 1):
        return None  # the divisor of a variance is a number of the model only along the dim that is cut
    return value


def _statistic(call: Call) -> str | None:
    """Which statistic an op takes; a loss may take the mean of all."""
    if call.name in LOSSES:
        return "mean" if call["reduction"] == MEAN else None
    return call.name if call.name in STATISTICS else None


def mapped_statistic(call: Call, how: tuple[str, ...]) -> list[Layout] | None:
    """What a mapped statistic gives by itself; None for any other op."""
    value = statistic_over(call)
    if value is None or how[0] != _statistic(call):
        return None
    counted_once(call, value)
    if call.name in LOSSES:
        aligned(call)
    return [INVARIANT]


def after(layouts: list[Layout], how: tuple[str, ...]) -> list[Layout]:
    """The layout behind the mappings."""
    for mapping in how:
        if mapping == "reduce":
            assert layouts == [PARTIAL]
            layouts = [INVARIANT]
        elif mapping == "copy":
            layouts = [REPLICATE]
        elif mapping == "gather":
            layouts = [INVARIANT]
    return layouts


def sums_of(
    node: fx.Node,
    call: Callable[[fx.Node], Call],
    layouts: Mapping[fx.Node, list[Layout]],
    conflict: Conflict,
) -> list[Mapped]:
    """The statistics that resolve a conflict of the op at `node`: itself, or the sums of which it is given
    parts. An empty list where a part comes from anything else."""
    if conflict.code == "AT303":
        try:
            made = call(node)
            value = statistic_over(made)
            if value is not None:
                counted_once(made, value)
                return [Mapped(node, (_statistic(made) or "",))]
        except Conflict:
            return []
        return []
    found: list[Mapped] = []
    parts = [n for n in node.all_input_nodes if isinstance(layouts.get(n, [INVARIANT])[0], Partial)]
    seen: set[fx.Node] = set()
    while parts:
        part = parts.pop()
        if part in seen:
            continue
        seen.add(part)
        before = [n for n in part.all_input_nodes if isinstance(layouts.get(n, [INVARIANT])[0], Partial)]
        if before:
            parts += before
        elif part.op == "call_function" and _is_sum(part) and _of_a_shard(part, layouts):
            found.append(Mapped(part, ("reduce",)))
        else:
            return []
    return found


def _is_sum(node: fx.Node) -> bool:
    if op_name(node) in LOSSES:
        return bool(arguments_of(node).get("reduction") == SUM)
    return op_name(node) in _SUMS


def _of_a_shard(node: fx.Node, layouts: Mapping[fx.Node, list[Layout]]) -> bool:
    return any(isinstance(layouts.get(n, [INVARIANT])[0], Shard) for n in node.all_input_nodes)


def copies_of(
    node: fx.Node,
    seen: Callable[[fx.Node, fx.Node], Layout],
    layouts: Mapping[fx.Node, list[Layout]],
    mapped: Mapping[fx.Node, tuple[str, ...]],
    readable: Callable[[fx.Node], bool],
) -> list[Mapped | Read]:
    """Copies of the statistics that the whole inputs of an op depend on, and of the parameters beside them;
    an empty list where they depend on anything else."""
    found: dict[Mapped | Read, None] = {}
    values = [n for n in with_gradient(node) if seen(n, node) == INVARIANT]
    met: set[fx.Node] = set()
    while values:
        value = values.pop()
        if value in met:
            continue
        met.add(value)
        if value in mapped:
            found[Mapped(value, (*mapped[value], "copy"))] = None
        elif value.op == "get_attr" and readable(value):
            found[Read(value.meta["name"], copied=True)] = None
        elif value.op == "call_function" and with_gradient(value):
            values += [n for n in with_gradient(value) if layouts.get(n, [REPLICATE])[0] != REPLICATE]
        else:
            return []
    return list(found) if any(isinstance(one, Mapped) for one in found) else []


def counted(mapped: Iterable[tuple[fx.Node, tuple[str, ...]]]) -> Counter[tuple[str, str]]:
    """How often each mapping runs in a call of each module: (module, mapping) -> runs."""
    found: Counter[tuple[str, str]] = Counter()
    calls: dict[str, set[object]] = {}
    for node, how in mapped:
        module = node.meta["module"]
        calls.setdefault(module, set()).add(
            next((c for c in reversed(node.meta["stack"]) if c[0] == module), None)
        )
        found.update((module, one) for step in how for one in _RUNS.get(step, (step,)))
    return Counter({key: -(-runs // len(calls[key[0]])) for key, runs in found.items()})


def divisor(node: fx.Node) -> tuple[int, bool, float]:
    """(dim, keepdim, what is taken off the number of elements) of a variance."""
    given = arguments_of(node)
    rank = len(node.all_input_nodes[0].meta["val"].shape)
    dims = given.get("dim")
    dim = 0 if dims is None or dims == [] else dims if isinstance(dims, int) else dims[0]
    correction = given.get("correction", 1)
    if "unbiased" in given:
        correction = 1 if given["unbiased"] else 0
    return normal_dim(dim, rank), bool(given.get("keepdim")), 1 if correction is None else float(correction)


def stripped(source: Any) -> Any:
    """The op's own id, without the mappings around it."""
    while isinstance(source, tuple) and len(source) == 2 and source[0] in STEPS:
        source = source[1]
    return source
