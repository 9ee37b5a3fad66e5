"""What a recorded op call is: its name, its arguments by the names of its schema, whether it draws."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autotp.trace.graph import OPAQUE
from autotp.trace.seeds import DRAWS, may_draw

__all__ = [
    "SILENT",
    "arguments_of",
    "draws",
    "name_of",
    "named_arguments",
    "op_name",
    "rests",
    "silent",
    "spoken",
]

SILENT = frozenset(["contiguous", "alias"])  # ops that may or may not be there, by the strides


def op_name(node: fx.Node) -> str:
    """The op's name without namespace (for aten), overload, and the underscore of an in-place form."""
    return name_of(node.target)


@functools.lru_cache(maxsize=4096)
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
    if node.target is OPAQUE:
        calls = node.meta.get(DRAWS)
        return calls is None or any(_draws(*call) for call in calls)
    return _draws(node.target, node.args, node.kwargs)


def _draws(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if not may_draw(target):
        return False
    named, name = named_arguments(target, args, kwargs), name_of(target)
    if name == "scaled_dot_product_attention":
        return bool(named["dropout_p"])
    if "p" in named and "train" in named:
        return bool(named["train"] and named["p"])
    if name == "rrelu":
        return bool(named["training"])
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def rests(node: fx.Node) -> bool:
    """Whether it is a dropout that draws nothing because its rate is 0."""
    named = arguments_of(node)
    if op_name(node) == "scaled_dot_product_attention":
        return not named["dropout_p"]
    return bool("p" in named and named.get("train") and not named["p"])


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """A call's arguments by the names of the op's schema, with the schema's defaults."""
    return named_arguments(node.target, node.args, node.kwargs)


def named_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a call that is no node."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return {str(position): value for position, value in enumerate(args)} | dict(kwargs)
    named, count = {}, len(args)
    for position, (name, has_default, default) in enumerate(_parameters(target)):
        if position < count:
            named[name] = args[position]
        elif name in kwargs:
            named[name] = kwargs[name]
        elif has_default:
            named[name] = default
    return named


@functools.lru_cache(maxsize=4096)
def _parameters(target: Any) -> tuple[tuple[str, bool, Any], ...]:
    """The parameters of an op: name, whether it has a default, and that."""
    found = target._schema.arguments
    return tuple((p.name, p.has_default_value(), p.default_value) for p in found)


def silent(node: fx.Node) -> bool:
    """Whether an op may be left out. TorchScript detaches what has no gradient, in some runs."""
    return op_name(node) in SILENT or (op_name(node) == "detach" and not node.meta["grads"])


def spoken(node: fx.Node) -> str:
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
