"""Layout rules of ops that read or write elements by position: index, gather, scatter, and their kin.

Positions must be the same on every rank, or go element by element with what they point into; the dim that
they count is never the sharded one.
"""

from __future__ import annotations

from autotp.placement import PARTIAL, REPLICATE, Layout
from autotp.propagate.call import Call, Conflict, Value, needs_copy, normal_dim, not_partial, over
from autotp.propagate.pointwise import align

__all__ = ["INDEXING"]


def _whole_places(call: Call, places: list[Value]) -> None:
    if any(not place.whole for place in places):
        raise Conflict("AT304", f"{call.name} with sharded indices", blame=tuple(call.sharded()))


def _places(call: Call) -> list[Value]:
    """The index tensors of an index op, whole and no masks."""
    indices = [i for i in call["indices"] if i is not None]
    _whole_places(call, indices)
    if any(i.mask for i in indices):
        raise Conflict(
            "AT304",
            f"{call.name} by a mask, of a sharded value",
            blame=tuple(v for v in call.values if not v.whole),
        )
    return indices


def _neighbours(call: Call, value: Value) -> tuple[int, int]:
    """The first indexed dim and how many there are; they stand next to each other and are whole."""
    indexed = [d for d, i in enumerate(call["indices"]) if i is not None]
    if value.shard is not None and value.shard.dim in indexed:
        raise over(call, value)
    if indexed != list(range(indexed[0], indexed[-1] + 1)):
        raise Conflict(
            "AT304", f"{call.name} on dims that are not neighbours, of a sharded value", blame=(value,)
        )
    return indexed[0], len(indexed)


def _index(call: Call) -> Layout:
    value: Value = call["self"]
    if value.whole or (value.partial and all(i is None or i.whole for i in call["indices"])):
        _whole_places(call, [i for i in call["indices"] if i is not None])
        return value.layout
    places = _places(call)
    if _in_whole_sections(call, value):
        return REPLICATE
    first, count = _neighbours(call, value)
    assert value.shard is not None
    if value.shard.dim < first:
        return value.shard
    return value.shard.at(value.shard.dim - count + max(i.rank for i in places))


def _in_whole_sections(call: Call, value: Value) -> bool:
    """Whether positions that the forward writes as numbers point into whole sections of the sharded dim, and
    are the same on a rank: counted from the end, with nothing but whole sections behind."""
    given: list[Value | None] = call["indices"]
    if value.shard is None or value.shard.dim >= len(given) or sum(i is not None for i in given) != 1:
        return False
    place = given[value.shard.dim]
    node = place.node if place is not None else None
    if node is not None and str(node.target).startswith("aten.lift_fresh"):
        node = node.all_input_nodes[0]
    numbers = node.meta.get("constant") if node is not None else None
    if numbers is None or numbers.dim() != 1 or not numbers.numel():
        return False
    whole = 0
    for size, dealt in reversed(value.shard.pieces(value.shape[value.shard.dim])):
        if dealt is not None:
            break
        whole += size
    return all(-whole <= number < 0 for number in numbers.tolist())


def _index_put(call: Call) -> Layout:
    """Rows written at whole positions: the rows are cut like what they are written into."""
    value: Value = call["self"]
    rows: Value = call["values"]
    places = _places(call)
    if value.partial and rows.partial:
        return value.layout
    not_partial(call)
    if value.shard is None:
        raise _other_cut(call, rows, value)
    first, count = _neighbours(call, value)
    wide = max(i.rank for i in places)
    dim = value.shard.dim if value.shard.dim < first else value.shard.dim - count + wide
    return _written(call, value, rows, dim - (value.rank - count + wide - rows.rank))


def _written(call: Call, value: Value, rows: Value, dim: int) -> Layout:
    """`rows`, whose dim `dim` meets the sharded dim of `value`, is cut like it or broadcast along it."""
    assert value.shard is not None
    if rows.whole and (dim < 0 or rows.shape[dim] == 1):
        if rows.grad and rows.layout != REPLICATE:
            raise needs_copy(call, rows, value)
    elif rows.shard is None or rows.shard.dim != dim or not rows.shard.same_cut(value.shard):
        raise _other_cut(call, rows, value)
    return value.shard


def _other_cut(call: Call, rows: Value, value: Value) -> Conflict:
    whole = rows if rows.whole else value if value.whole else None
    other = value if whole is rows else rows
    return Conflict(
        "AT307" if whole is None else "AT306",
        f"{call.name} writes {rows.name} into {value.name}, and they are cut differently over the ranks"
        if whole is None
        else f"{call.name} writes {rows.name} into {value.name}: {whole.name} is whole, {other.name} is not",
        blame=tuple(v for v in (rows, value) if not v.whole),
        notes=(f"{value}", f"{rows}"),
    )


def _index_select(call: Call) -> Layout:
    value: Value = call["self"]
    _whole_places(call, [call["index"]])
    if value.shard is not None and normal_dim(call["dim"], value.rank) == value.shard.dim:
        raise over(call, value)
    return value.layout


def _index_add(call: Call) -> Layout:
    """Rows added, or put, at whole positions."""
    value, rows = call["self"], call["source"]
    _whole_places(call, [call["index"]])
    if rows.partial and value.partial:
        return PARTIAL
    not_partial(call)
    if value.shard is None:
        raise _other_cut(call, rows, value)
    if normal_dim(call["dim"], value.rank) == value.shard.dim:
        raise over(call, value)
    return _written(call, value, rows, value.shard.dim)


def _elementwise_places(call: Call) -> Layout:
    """gather, scatter: positions along one dim, the other dims side by side and equally long."""
    not_partial(call)
    value: Value = call["self"]
    first = next(call.sharded())
    assert first.shard is not None
    dim = first.shard.dim
    if normal_dim(call["dim"], value.rank) == dim:
        raise over(call, first)
    for other in call.values:
        if other.rank != value.rank or other.shape[dim] != value.shape[dim]:
            raise Conflict(
                "AT304",
                f"{call.name} of values whose sharded dim is not equally long: "
                f"{list(value.shape)} and {list(other.shape)}",
                blame=(first,),
                notes=(f"{value}", f"{other}"),
            )
    return align(call, call.values, value.rank)


def _one_hot(call: Call) -> Layout:
    value: Value = call["self"]
    if value.shard is None or call["num_classes"] < 0:
        raise Conflict(
            "AT304", f"{call.name} of a value that is not whole, without num_classes", blame=(value,)
        )
    return value.shard


def _bucketize(call: Call) -> Layout:
    """Each element looked up in whole boundaries, or in a whole set."""
    value = call["self"] if call["self"] is not None else call["elements"]
    table = call["boundaries"] if call["boundaries"] is not None else call["test_elements"]
    not_partial(call)
    if not isinstance(value, Value) or value.shard is None or (isinstance(table, Value) and not table.whole):
        raise Conflict("AT304", f"{call.name} in a sharded table", blame=tuple(call.sharded()))
    return value.shard


INDEXING = {
    "index": _index,
    "index_put": _index_put,
    "index_select": _index_select,
    **dict.fromkeys(["index_add", "index_copy"], _index_add),
    **dict.fromkeys(["gather", "take_along_dim", "scatter", "scatter_add"], _elementwise_places),
    "one_hot": _one_hot,
    "bucketize": _bucketize,
    "isin": _bucketize,
}
