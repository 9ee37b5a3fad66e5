"""Layout rules of ops that multiply and sum: matmul and its kin, attention, embedding.

A linear layer that a plan shards has its mappings around the op, so its rule is the engine's
(`engine._layer`); these rules serve every other use.
"""

from __future__ import annotations

from autotp.placement import PARTIAL, REPLICATE, Layout, Shard
from autotp.propagate.call import Call, Conflict, Value, needs_copy

__all__ = ["CONTRACTIONS"]


def _free(call: Call, value: Value, other: Value) -> None:
    if value.grad and value.layout != REPLICATE:
        raise needs_copy(call, value, other)


def _linear(call: Call) -> Layout:
    value, weight, bias = call["input"], call["weight"], call["bias"]
    return _product(call, value, weight, len(call.shape), weight_rows=True, bias=bias)


def _matmul(call: Call) -> Layout:
    first = call["self"]
    second = call["other"] if call["other"] is not None else call["mat2"]
    return _product(call, first, second, len(call.shape))


def _role(value: Value, *, left: bool, rows: bool = False) -> str | int | None:
    """Where a shard sits in a product: "m", "n", "k" (summed), or a batch dim counted from the back."""
    if value.shard is None:
        return None
    dim = value.shard.dim - value.rank
    if value.rank == 1:
        return "k"
    names = {-1: "k", -2: "m"} if left else ({-1: "k", -2: "n"} if rows else {-1: "n", -2: "k"})
    return names.get(dim, dim)


def _product(
    call: Call, first: Value, second: Value, rank: int, *, weight_rows: bool = False, bias: Value | None = None
) -> Layout:
    """Rows of `first` times columns of `second` (or its rows, as F.linear has it)."""
    if first.partial or second.partial:
        partial, other = (first, second) if first.partial else (second, first)
        if other.whole and not (other.grad and other.layout != REPLICATE) and bias is None:
            return PARTIAL
        raise Conflict(
            "AT310",
            f"{call.name} of a sum whose parts are still on the ranks",
            blame=(partial,),
            notes=(f"{partial}", f"{other}"),
        )
    left, right = _role(first, left=True), _role(second, left=False, rows=weight_rows)
    sharded, whole = (first, second) if left is not None else (second, first)
    if left is not None and right is not None:
        assert first.shard is not None and second.shard is not None
        if left == right and first.shard.same_cut(second.shard):
            if left == "k":
                if bias is not None:
                    raise Conflict(
                        "AT310",
                        f"{call.name} adds a bias to a sum whose parts are still on the ranks: every rank adds it",
                        blame=(first, second),
                    )
                return PARTIAL
            if isinstance(left, int):
                return first.shard.at(left + rank)
        raise Conflict(
            "AT307",
            f"{call.name} of two values that are cut differently over the ranks",
            blame=(first, second),
            notes=(f"{first}", f"{second}"),
        )
    assert sharded.shard is not None
    where = left if left is not None else right
    if where == "k":
        raise Conflict(
            "AT306",
            f"{call.name} sums over a dim that is sharded in {sharded.name} and whole in {whole.name}",
            blame=(sharded,),
            notes=(f"{sharded}", f"{whole}"),
        )
    if isinstance(where, int) and whole.rank >= -where and whole.shape[where] != 1:
        raise Conflict(
            "AT306",
            f"{call.name}: {whole.name} is whole, with {whole.shape[where]} elements on the dim that is "
            f"sharded in {sharded.name}",
            blame=(sharded,),
            notes=(f"{sharded}", f"{whole}"),
        )
    _free(call, whole, sharded)
    if where == "n":
        placed = sharded.shard.at(rank - 1)
        if bias is not None and not (bias.shard is not None and bias.shard.same_cut(placed)):
            raise Conflict(
                "AT306", f"{call.name}: the bias {bias.name} is not cut like the weight", blame=(second, bias)
            )
        return placed
    if bias is not None:
        if not bias.whole:
            raise Conflict("AT307", f"{call.name}: the bias {bias.name} is cut, the result is not", blame=(bias,))
        _free(call, bias, sharded)
    return sharded.shard.at(sharded.shard.dim + rank - sharded.rank + (whole.rank == 1))


def _attention(call: Call) -> Layout:
    query, key, value = call["query"], call["key"], call["value"]
    mask = call["attn_mask"]
    for part in (query, key, value, *([mask] if mask is not None else [])):
        if part.partial:
            raise Conflict(
                "AT310", f"{call.name} of a sum whose parts are still on the ranks", blame=(part,), notes=(f"{part}",)
            )
    sharded = [v for v in (query, key, value) if v.shard is not None]
    whole = [v for v in (query, key, value) if v.shard is None]
    if not sharded:
        raise Conflict("AT306", f"{call.name}: the mask is sharded, query, key and value are whole", blame=(mask,))
    first = sharded[0]
    assert first.shard is not None
    if whole:
        raise Conflict(
            "AT306",
            f"{call.name}: {first.name} holds its own part of dim {first.shard.dim} on each rank, "
            f"{' and '.join(v.name for v in whole)} every element of it: heads would be paired wrongly",
            blame=tuple(sharded),
            notes=tuple(str(v) for v in (query, key, value)),
        )
    if any(v.shard != first.shard for v in sharded):
        raise Conflict(
            "AT307",
            f"{call.name}: query, key and value are cut differently over the ranks",
            blame=tuple(sharded),
            notes=tuple(str(v) for v in (query, key, value)),
        )
    if first.shard.dim >= first.rank - 2:
        raise Conflict(
            "AT303",
            f"{call.name} over dim {first.shard.dim}, which is sharded: each rank has only its part",
            blame=(first,),
            notes=(f"{first}",),
        )
    if mask is not None:
        dim = first.shard.dim - (first.rank - mask.rank)
        if mask.shard is not None and (mask.shard.dim != dim or not mask.shard.same_cut(first.shard)):
            raise Conflict("AT307", f"{call.name}: the mask is cut differently from the query", blame=(mask, first))
        if mask.whole:
            if dim >= 0 and mask.shape[dim] != 1:
                raise Conflict(
                    "AT306",
                    f"{call.name}: the mask {mask.name} is whole, with {mask.shape[dim]} elements on the dim that "
                    f"is sharded in {first.name}",
                    blame=(first,),
                    notes=(f"{first}", f"{mask}"),
                )
            _free(call, mask, first)
    return first.shard


def _embedding(call: Call) -> Layout:
    weight, indices = call["weight"], call["indices"]
    if not indices.whole:
        # Each rank looks up its own ids; a whole table then needs its gradient summed.
        _free(call, weight, indices)
        if weight.whole and indices.shard is not None:
            return indices.shard
    if weight.shard is not None and weight.shard.dim == 1 and indices.whole:
        return weight.shard.at(len(call.shape) - 1)
    raise Conflict("AT303", f"{call.name} looks up rows of a table that is sharded by rows", blame=(weight,))


CONTRACTIONS = {
    "linear": _linear,
    "matmul": _matmul,
    "mm": _matmul,
    "bmm": _matmul,
    "scaled_dot_product_attention": _attention,
    "embedding": _embedding,
}
