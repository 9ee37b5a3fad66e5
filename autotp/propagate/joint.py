"""Layout rules where two dims are cut together: kv heads that ranks share, and the query heads of each.

    k [b, kv, 1, s, d] --expand--> [b, kv, n, s, d] --reshape--> [b, kv * n, s, d]
        Shard(1)                    Joint((1, 2))                 Shard(1)

An op sees such a value twice, once with the first of the two dims cut and once with the second. Its own rule
must take both, so what sums over either dim, or moves elements along it, is refused as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from autotp.placement import REPLICATE, Deal, Joint, Layout, Shard, joined
from autotp.propagate.call import Call, Conflict, Value

__all__ = ["expanded", "joint", "split_jointly"]

Rule = Callable[[Call], Layout | list[Layout]]
# Ops whose rules go by dims alone; views and expansions of a joint value go by its elements.
_BY_DIM = frozenset(
    [
        *("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "unsqueeze"),
        *("slice", "narrow", "select", "unbind", "split", "split_with_sizes", "chunk", "cat", "stack"),
        *("softmax", "_softmax", "log_softmax", "sum", "mean", "amax", "logsumexp"),
        *("matmul", "bmm", "einsum", "scaled_dot_product_attention"),
    ]
)


def split_jointly(shard: Shard, shape: tuple[int, ...]) -> Joint | None:
    """How a dim of query heads is seen as (kv heads, queries of each) among the dims of `shape`.

    `shard` cuts the dim before `shape` splits it: its deal followed that of the kv heads.
    """
    deal = shard.deal
    if deal is None or shard.groups != 1 or not deal.over or shard.dim + 1 >= len(shape):
        return None
    units, each = shape[shard.dim], shape[shard.dim + 1]
    if (units, units * each) != (deal.over, deal.declared):
        return None
    found = Joint((shard.dim, shard.dim + 1), deal)
    return found if found.fits(units, each) else None


def expanded(shard: Shard, source: tuple[int, ...], shape: tuple[int, ...]) -> Joint | None:
    """The layout of shared units whose next dim, of one element, is expanded: their holders share that."""
    dim = shard.dim + len(shape) - len(source)
    if shard.dim + 1 >= len(source) or source[shard.dim + 1] != 1 or shape[dim + 1] == 1:
        return None
    deal = repeats(shard, source, shape[dim + 1])
    return None if deal is None else Joint((dim, dim + 1), deal)


def repeats(shard: Shard, source: tuple[int, ...], times: int) -> Deal | None:
    """The deal of shared units, an element each, that are repeated `times`; None where none are shared."""
    shared = shard.deal is not None and shard.groups == 1 and shard.deal.shared
    if not shared or shard.deal is None or shard.deal.units != source[shard.dim]:
        return None
    found = joined(shard.deal, times)
    return None if found.shared else found


def joint(call: Call, rule: Rule, pointwise: Mapping[str, Any]) -> Layout | list[Layout]:
    """The layout of an op of which at least one argument is a `Joint`."""
    first = next(v for v in call.values if isinstance(v.layout, Joint))
    assert isinstance(first.layout, Joint)
    if call.name not in _BY_DIM and call.name not in pointwise:
        raise Conflict(
            "AT304",
            f"{call.name} of heads and their repeats that are dealt together has no layout rule",
            blame=(first,),
            notes=(f"{first}",),
        )
    deal = first.layout.deal
    found = [_listed(rule(_seen(call, place)), call) for place in (0, 1)]
    layouts: list[Layout] = []
    for one, other in zip(*found, strict=True):
        if not isinstance(one, Shard) or not isinstance(other, Shard) or one.dim == other.dim:
            raise Conflict(
                "AT307",
                f"{call.name} of heads and their repeats, which are dealt together, keeps only one of them",
                blame=(first,),
                notes=(f"{first}",),
            )
        layouts.append(Joint((one.dim, other.dim), deal))
    return layouts


def _listed(found: Layout | list[Layout], call: Call) -> list[Layout]:
    return found if isinstance(found, list) else [found] * len(call.results)


def _seen(call: Call, place: int) -> Call:
    """The call with the first (0) or the second (1) dim of each `Joint` cut.

    Shards stand beside the first dim; where the second is cut they are taken for whole.
    """
    made = {id(value): _as_shard(value, place) for value in call.values}

    def mapped(argument: Any) -> Any:
        if isinstance(argument, Value):
            return made[id(argument)]
        return [mapped(a) for a in argument] if isinstance(argument, list) else argument

    arguments = {name: mapped(argument) for name, argument in call.arguments.items()}
    return replace(call, arguments=arguments, values=tuple(made[id(v)] for v in call.values))


def _as_shard(value: Value, place: int) -> Value:
    if isinstance(value.layout, Shard) and place == 1:
        return replace(value, layout=REPLICATE)
    if not isinstance(value.layout, Joint):
        return value
    units, each = (value.shape[dim] for dim in value.layout.dims)
    held = [value.layout.bounds(units, each, rank)[place] for rank in range(value.layout.tp)]
    return replace(value, layout=Shard(value.layout.dims[place], Deal((units, each)[place], tuple(held))))
