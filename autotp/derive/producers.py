"""What makes a value: the tensors behind a whole value, and the place of a value in a fused tensor."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from autotp.derive.assignment import Board
from autotp.placement import Layout, Shard
from autotp.propagate.ops import arguments_of, op_name

__all__ = ["Part", "parts", "producers", "shard_at"]

VIEWS = ("view", "reshape", "unflatten", "_unsafe_view", "flatten")
FARTHEST = 64  # ops between a value and the layer that makes it

Layouts = Mapping[fx.Node, list[Layout]]


def shard_at(layouts: Layouts, node: fx.Node) -> Shard | None:
    """The cut of a node's (first) value, if it is one."""
    found = layouts.get(node, [None])
    return found[0] if found and isinstance(found[0], Shard) else None


def producers(value: fx.Node, board: Board) -> Iterator[str]:
    """The parameters that a value is made of, the nearest first: one for each layer, not past it."""
    frontier, seen = [value], {value}
    for node in frontier:
        if len(seen) > FARTHEST:
            return
        if node.op == "get_attr":
            if node.meta["origin"] == "parameter" and node.meta["name"] in board.tensors:
                yield node.meta["name"]
            continue
        if node.op != "call_function":
            continue
        matrices = [n for n in node.all_input_nodes if _layer_matrix(n, board)]
        for source in matrices or node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                frontier.append(source)


def _layer_matrix(node: fx.Node, board: Board) -> bool:
    """Whether a node is the weight of a layer: what the layer reads is then behind another layer."""
    if node.op != "get_attr" or node.meta["name"] not in board.tensors:
        return False
    return (
        len(board.tensors[node.meta["name"]].shape) > 1 and board.key(node.meta["name"]) != node.meta["name"]
    )


@dataclass(frozen=True)
class Part:
    """A sharded value is a part of a cut tensor's dim: its element i is the tensor's start + i·scale."""

    name: str
    start: int
    scale: int


def parts(value: fx.Node, layouts: Layouts, cuts: Mapping[str, Shard]) -> list[Part]:
    """The cut tensors behind a sharded value, with the place of its dim in theirs.

    Walks back over ops that keep the dim and its elements, or take a piece of it.
    """
    found: dict[str, Part] = {}
    frontier: list[tuple[fx.Node, int, int]] = [(value, 0, 1)]
    seen = {value}
    for node, start, scale in frontier:
        if node.op == "get_attr":
            if node.meta["name"] in cuts:
                found.setdefault(node.meta["name"], Part(node.meta["name"], start, scale))
            continue
        for source, offset, factor in _before(node, layouts):
            if source not in seen:
                seen.add(source)
                frontier.append((source, start * factor + offset, scale * factor))
    return list(found.values())


def _before(node: fx.Node, layouts: Layouts) -> Iterator[tuple[fx.Node, int, int]]:
    """The sharded inputs of an op, where in them its result begins, how many of their elements one is."""
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        inner = next((n for n in source.all_input_nodes if shard_at(layouts, n) is not None), None)
        cut = None if inner is None else shard_at(layouts, inner)
        if inner is None or cut is None:
            return
        sizes = [v.shape[cut.dim] if len(v.shape) > cut.dim else 0 for v in source.meta["val"]]
        yield inner, sum(sizes[:index]) if sum(sizes) == inner.meta["val"].shape[cut.dim] else 0, 1
        return
    val, own = node.meta["val"], shard_at(layouts, node)
    size = val.shape[own.dim] if own is not None and not isinstance(val, list) else None
    named, name = arguments_of(node), op_name(node)
    for source in node.all_input_nodes:
        cut = shard_at(layouts, source)
        if cut is None:
            continue
        before = source.meta["val"].shape[cut.dim]
        if size is None or before == size:
            yield source, 0, 1
        elif name == "slice" and (named.get("step") or 1) == 1:
            yield source, slice(named.get("start"), named.get("end")).indices(before)[0], 1
        elif name == "narrow":
            yield source, int(named["start"]) % before, 1
        elif name in VIEWS:  # what lies behind the dim within an element of it
            behind = math.prod(source.meta["val"].shape[cut.dim + 1 :])
            yield source, 0, max(1, math.prod(val.shape[own.dim + 1 :]) // behind) if own is not None else 1
        else:
            yield source, 0, max(1, before // size)
