"""What a layout rule sees of one recorded op call, and how it says no."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from autotp.placement import INVARIANT, REPLICATE, Layout, Partial, Shard, describe, is_whole
from autotp.trace.graph import REPEATED

__all__ = [
    "Call",
    "Conflict",
    "Value",
    "counted_once",
    "needs_copy",
    "normal_dim",
    "not_partial",
    "over",
    "with_gradient",
]


@dataclass(frozen=True)
class Value:
    """A tensor argument of a call: its global shape, its layout, whether a gradient flows to it here."""

    node: fx.Node
    shape: tuple[int, ...]
    layout: Layout
    grad: bool
    name: str
    origins: frozenset[str] = frozenset()
    mask: bool = False

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def shard(self) -> Shard | None:
        """The layout, if it is a shard."""
        return self.layout if isinstance(self.layout, Shard) else None

    @property
    def partial(self) -> bool:
        """Whether the value waits to be summed."""
        return isinstance(self.layout, Partial)

    @property
    def whole(self) -> bool:
        """Whether the value is the same on all ranks."""
        return is_whole(self.layout)

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {describe(self.layout)}"


class Conflict(Exception):
    """A layout that an op cannot take. `blame` are the values that made it so; `help` the remedies."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        blame: tuple[Value, ...] = (),
        notes: tuple[str, ...] = (),
        help: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.blame = blame
        self.notes = notes
        self.help = help


@dataclass(frozen=True)
class Call:
    """One op call: its name, its arguments by the schema's names, and the global shapes of its results."""

    node: fx.Node
    name: str
    arguments: dict[str, Any]
    results: tuple[tuple[int, ...], ...]
    values: tuple[Value, ...]

    def __getitem__(self, argument: str) -> Any:
        return self.arguments.get(argument)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first result."""
        return self.results[0]

    @property
    def differentiable(self) -> bool:
        """Whether a gradient flows through a result: a comparison, a sort's places have none."""
        vals = self.node.meta["val"]
        return any(v is not None and v.grad for v in (vals if isinstance(vals, list) else [vals]))

    def sharded(self) -> Iterator[Value]:
        """The arguments that are shards."""
        return (v for v in self.values if v.shard is not None)

    def same_everywhere(self) -> Layout | None:
        """The result's layout when no argument is a shard or partial: all the same in, the same out."""
        if any(not v.whole for v in self.values):
            return None
        partial_gradients = [v for v in self.values if v.grad and v.layout == REPLICATE]
        if not partial_gradients or not self.differentiable:
            return INVARIANT
        for value in self.values:
            if value.grad and value.layout == INVARIANT:
                raise needs_copy(self, value, partial_gradients[0])
        return REPLICATE


def with_gradient(node: fx.Node) -> list[fx.Node]:
    """The inputs of an op call that its gradient flows on to."""
    if node.target in (operator.getitem, REPEATED):
        return list(node.all_input_nodes)
    return [n for n in node.all_input_nodes if n in node.meta["grads"]]


def counted_once(call: Call, value: Value) -> None:
    """Raise if a sum over the sharded dim would count elements once for each rank that holds them."""
    assert value.shard is not None
    if value.shard.shared:
        raise Conflict(
            "AT307",
            f"{call.name} sums over a dim of which several ranks hold the same elements: "
            "they would be counted more than once",
            blame=(value,),
            notes=(f"{value}",),
        )


def over(call: Call, value: Value, what: str = "") -> Conflict:
    """An op that looks or moves along the dim that is sharded."""
    assert value.shard is not None
    return Conflict(
        "AT303",
        f"{call.name} {what + ' ' if what else ''}over dim {value.shard.dim}, which is sharded: "
        "each rank has only its part",
        blame=(value,),
        notes=(f"{value}",),
    )


def not_partial(call: Call) -> None:
    """Raise unless no argument waits to be summed."""
    for value in call.values:
        if value.partial:
            raise Conflict(
                "AT310",
                f"{call.name} of a sum whose parts are still on the ranks",
                blame=(value,),
                notes=(f"{value}",),
            )


def needs_copy(call: Call, value: Value, shard: Value) -> Conflict:
    """A value whose gradient is whole meets one whose gradient is not: the gradient would be a part."""
    what = "the parameter" if value.node.op == "get_attr" else "the value"
    help: tuple[str, ...] = ()
    if shard.whole:
        met = f"{shard.name}, which is read as a copy for use on shards"
        help = (
            f"use {shard.name} on sharded values in an expression of its own, so that it can be copied there",
        )
    else:
        met = "a shard" if shard.shard is not None else "a part of a sum"
    return Conflict(
        "AT305",
        f"{call.name}: {what} {value.name} is the same on every rank and meets {met}: "
        "its gradient on each rank would be a part of the whole",
        blame=(shard,),
        notes=(f"{value.name}: {list(value.shape)} replicate", f"{shard}"),
        help=help,
    )


def normal_dim(dim: int, rank: int) -> int:
    """The dim counted from the front."""
    return dim % max(rank, 1)
