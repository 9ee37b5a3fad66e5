"""The layout rule of attention: each rank runs its own heads, of queries and of keys and values alike."""

from __future__ import annotations

from autotp.placement import Layout
from autotp.propagate.call import Call, Conflict, Value, not_partial, over
from autotp.propagate.contract import free

__all__ = ["ATTENTION"]


def _attention(call: Call) -> Layout:
    query, key, value = call["query"], call["key"], call["value"]
    mask = call["attn_mask"]
    not_partial(call)
    sharded = [v for v in (query, key, value) if v.shard is not None]
    whole = [v for v in (query, key, value) if v.shard is None]
    if not sharded:
        raise Conflict(
            "AT306", f"{call.name}: the mask is sharded, query, key and value are whole", blame=(mask,)
        )
    first = sharded[0]
    assert first.shard is not None
    if any(v.shard != first.shard for v in sharded):
        raise Conflict(
            "AT307",
            f"{call.name}: query, key and value are cut differently over the ranks",
            blame=tuple(sharded),
            notes=tuple(str(v) for v in (query, key, value)),
        )
    if first.shard.dim >= first.rank - 2:
        raise over(call, first)
    if whole and not (
        whole == [key, value] and all(v.shape[-3] == 1 and first.shard.dim == v.rank - 3 for v in whole)
    ):
        raise Conflict(
            "AT306",
            f"{call.name}: {first.name} holds its own part of dim {first.shard.dim} on each rank, "
            f"{' and '.join(v.name for v in whole)} every element of it: heads would be paired wrongly",
            blame=tuple(sharded),
            notes=tuple(str(v) for v in (query, key, value)),
        )
    for one in whole:  # one key and value head serves every query head
        free(call, one, first)
    return first.shard if mask is None else _masked(call, first, mask)


def _masked(call: Call, first: Value, mask: Value) -> Layout:
    assert first.shard is not None
    dim = first.shard.dim - (first.rank - mask.rank)
    if mask.shard is not None and (mask.shard.dim != dim or not mask.shard.same_cut(first.shard)):
        raise Conflict(
            "AT307", f"{call.name}: the mask is cut differently from the query", blame=(mask, first)
        )
    if mask.whole:
        if dim >= 0 and mask.shape[dim] != 1:
            raise Conflict(
                "AT306",
                f"{call.name}: the mask {mask.name} is whole, with {mask.shape[dim]} elements on the dim "
                f"that is sharded in {first.name}",
                blame=(first,),
                notes=(f"{first}", f"{mask}"),
            )
        free(call, mask, first)
    return first.shard


ATTENTION = {"scaled_dot_product_attention": _attention}
