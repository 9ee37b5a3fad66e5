"""How a fused dim is cut: its units and sections, read off the op that cannot take it as it is.

view [b, s, 48] -> [b, s, 3, 16]           3 heads are the units; or 3 sections, when they are taken apart
view [s, b, 48] -> [s, b*3, 16]            the same
split [b, s, 96] -> 64 | 16 | 16           sections of these sizes
[.., ::2], [.., 1::2]                      pairs are the units
grouped_mm of widths that must be 8k       blocks of 8 are the units
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate, pairwise

from torch import fx

from autotp.plan import Rule
from autotp.propagate.call import Value
from autotp.propagate.ops import arguments_of, op_name

__all__ = [
    "Form",
    "cuts_of",
    "dealt",
    "forms_of_view",
    "heads_seen",
    "refined",
    "sizes_of",
    "with_whole_sections",
]

Form = tuple[int | None, int | None]  # equal sections, units of each
MOST_SECTIONS = 8


def forms_of_view(node: fx.Node, value: Value) -> Iterator[Form]:
    """What a view makes of the sharded dim: units, or sections of units."""
    assert value.shard is not None
    shape, front, before = node.meta["val"].shape, math.prod(value.shape[: value.shard.dim]), 1
    landing: list[int] = []
    for dim, size in enumerate(shape):
        merged = front // before  # of the dims in front, as batch and heads in one
        if front % before == 0 and size % merged == 0 and size != merged:
            landing = [n for n in (size // merged, *shape[dim + 1 :]) if n != 1]
            break
        before *= size
    if not landing:
        return
    yield None, landing[0]
    if len(landing) > 1 and landing[0] <= MOST_SECTIONS:
        yield landing[0], landing[1]
        yield landing[0], None


def sizes_of(rule: Rule, size: int) -> list[int]:
    """The sizes of a rule's sections of a dim."""
    if isinstance(rule.sections, tuple):
        return [int(section) for section in rule.sections]
    number = rule.sections or 1
    return [size // number] * number


def dealt(rule: Rule, size: int, width: int) -> Rule | None:
    """A rule that deals units of `width` elements, in each of its sections; None where they do not fit.

    A section that is whole on every rank, or has smaller units, stays as it is.
    """
    sizes = sizes_of(rule, size)
    had = rule.heads if isinstance(rule.heads, tuple) else (None,) * len(sizes)
    heads: list[int] = []
    for length, number in zip(sizes, had, strict=True):
        if isinstance(number, int) and (number == 1 or length % max(width, 1)):
            heads.append(number)
        elif width < 1 or length % width:
            return None
        else:
            heads.append(length // width)
    given = heads[0] if len(set(heads)) == 1 else tuple(heads)
    return rule.model_copy(update={"heads": given})


def with_whole_sections(rule: Rule, size: int, whole: int) -> Rule | None:
    """A rule whose sections of `whole` elements are on every rank: one head for all. None without them."""
    sizes = sizes_of(rule, size)
    if rule.heads is not None or whole not in sizes or len(set(sizes)) == 1:
        return None
    heads = tuple(1 if length == whole else length for length in sizes)
    return rule.model_copy(update={"heads": heads})


def cuts_of(node: fx.Node, value: Value) -> list[int]:
    """The places where a split, or the slices of one value, take its sharded dim apart."""
    assert value.shard is not None
    size, vals = value.shape[value.shard.dim], node.meta["val"]
    if isinstance(vals, list):
        sizes = [v.shape[value.shard.dim] for v in vals]
        return list(accumulate(sizes))[:-1]
    edges: set[int] = set()
    for user in value.node.users:
        if user.op != "call_function":
            continue
        named = arguments_of(user)
        if op_name(user) == "slice":
            if (named.get("dim") or 0) % value.rank == value.shard.dim:
                edges |= set(slice(named.get("start"), named.get("end")).indices(size)[:2])
        elif op_name(user) == "narrow" and named["dim"] % value.rank == value.shard.dim:
            edges |= {named["start"] % size, named["start"] % size + named["length"]}
        elif op_name(user) == "glu":
            edges.add(size // 2)
    return sorted(edges - {0, size})


def refined(rule: Rule, size: int, edges: list[int]) -> Rule | None:
    """A rule whose sections also end at `edges`; None where it has them already."""
    if rule.sections is None:
        have: list[int] = []
    elif isinstance(rule.sections, int):
        have = [size // rule.sections * part for part in range(1, rule.sections)]
    else:
        have = list(accumulate(int(section) for section in rule.sections))[:-1]
    wanted = sorted({*have, *(edge for edge in edges if 0 < edge < size)})
    if wanted == sorted(have):
        return None
    sizes = [stop - start for start, stop in pairwise([0, *wanted, size])]
    sections = len(sizes) if len(set(sizes)) == 1 else tuple(sizes)
    return rule.model_copy(update={"sections": sections, "heads": None})  # units are found anew


FARTHEST = 24  # ops between a layer and the view that tells its heads


def heads_seen(output: fx.Node) -> int | None:
    """How many units the first view of a layer's output makes of its last dim."""
    frontier, seen = [output], {output}
    size = output.meta["val"].shape[-1]
    for node in frontier:
        for user in node.users if len(seen) <= FARTHEST else ():
            val = user.meta.get("val")
            if user in seen or user.op != "call_function" or val is None or isinstance(val, list):
                continue
            shape, before = val.shape, node.meta["val"].shape
            front = len(before) - 1
            split = len(shape) > len(before) and shape[:front] == before[:front]
            if split and math.prod(shape[front:]) == size and shape[front] > 1:
                return int(shape[front])
            if shape == before:
                seen.add(user)
                frontier.append(user)
    return None
