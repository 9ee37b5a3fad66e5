"""The layout rule of attention: each rank runs its own heads, of queries and of keys and values alike."""

from __future__ import annotations

from autotp.placement import Layout, Shard
from autotp.propagate.call import Call, Conflict, Value, not_partial, over
from autotp.propagate.contract import free

__all__ = ["ATTENTION"]


def _attention(call: Call) -> Layout:
    query, key, value, mask = call["query"], call["key"], call["value"], call["attn_mask"]
    not_partial(call)
    heads: list[Value] = [query, key, value]
    first = next((v for v in heads if v.shard is not None), None)
    if first is None:
        raise Conflict(
            "AT306", f"{call.name}: the mask is sharded, query, key and value are whole", blame=(mask,)
        )
    assert first.shard is not None
    if first.shard.dim >= first.rank - 2:
        raise over(call, first)
    whole = [v for v in heads if v.shard is None]
    if whole:
        _one_head_for_all(call, first, whole)
    elif key.shard != value.shard or not _paired(query, key, grouped=call["enable_gqa"]):
        raise Conflict(
            "AT307",
            f"{call.name}: query, key and value are cut differently over the ranks",
            blame=tuple(heads),
            notes=tuple(str(v) for v in heads),
        )
    return first.shard if mask is None else _masked(call, first, mask)


def _one_head_for_all(call: Call, first: Value, whole: list[Value]) -> None:
    """Keys and values may be whole where they have one head, which serves every query head."""
    assert first.shard is not None
    alone = all(v.shape[-3] == 1 and first.shard.dim == v.rank - 3 for v in whole)
    if not alone or whole != [call["key"], call["value"]]:
        raise Conflict(
            "AT306",
            f"{call.name}: {first.name} holds its own part of dim {first.shard.dim} on each rank, "
            f"{' and '.join(v.name for v in whole)} every element of it: heads would be paired wrongly",
            blame=tuple(call.sharded()),
            notes=tuple(str(call[n]) for n in ("query", "key", "value")),
        )
    for one in whole:
        free(call, one, first)


def _paired(query: Value, other: Value, *, grouped: bool) -> bool:
    """Whether each rank's query heads read the key heads that it holds, as in the whole run.

    With grouped heads query head h of H reads key head h // (H / K) of K; on a rank both count its own
    heads only. So 6 query heads may be dealt 2+1+2+1 over 4 ranks of which each two share a key head.
    """
    mine, theirs = query.shard, other.shard
    assert mine is not None and theirs is not None
    if mine == theirs:
        return True
    if not grouped or mine.dim != theirs.dim or mine.dim != query.rank - 3:
        return False
    many, few = query.shape[-3], other.shape[-3]
    return all(
        len(q) % len(k) == 0
        and [h // (many // few) for h in q] == [h for h in k for _ in range(len(q) // len(k))]
        for q, k in ((_held(mine, many, rank), _held(theirs, few, rank)) for rank in range(mine.tp))
    )


def _held(shard: Shard, size: int, rank: int) -> list[int]:
    return [element for start, stop in shard.ranges(size, rank) for element in range(start, stop)]


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
