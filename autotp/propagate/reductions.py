"""Layout rules of ops that look along a dim: sums, means, softmax, norms, sorts, indexing."""

from __future__ import annotations

from collections.abc import Callable

from autotp.placement import PARTIAL, Layout
from autotp.propagate.call import Call, Conflict, Value, normal_dim
from autotp.propagate.pointwise import align

__all__ = ["REDUCTIONS"]


def _over(call: Call, value: Value) -> Conflict:
    assert value.shard is not None
    return Conflict(
        "AT303",
        f"{call.name} over dim {value.shard.dim}, which is sharded: each rank has only its part",
        blame=(value,),
        notes=(f"{value}",),
    )


def _not_partial(call: Call) -> None:
    for value in call.values:
        if value.partial:
            raise Conflict(
                "AT310",
                f"{call.name} of a sum whose parts are still on the ranks",
                blame=(value,),
                notes=(f"{value}",),
            )


def _dims(call: Call, value: Value) -> set[int]:
    dims = call["dim"]
    if dims is None or dims == []:
        return set(range(value.rank))
    return {normal_dim(d, value.rank) for d in ([dims] if isinstance(dims, int) else dims)}


def _reduce(call: Call) -> Layout | list[Layout]:
    value: Value = call["self"]
    if value.partial:
        if call.name in ("sum", "mean") and call.node.meta["val"].dtype.is_floating_point:
            return PARTIAL
        _not_partial(call)
    if value.shard is None:
        return value.layout
    dims = _dims(call, value)
    if value.shard.dim in dims:
        if call.name == "sum":
            return PARTIAL
        raise _over(call, value)
    kept = value.shard
    if not call["keepdim"]:
        kept = kept.at(kept.dim - sum(d < kept.dim for d in dims))
    return kept if len(call.results) == 1 else [kept] * len(call.results)


def _extremum(call: Call) -> Layout | list[Layout]:
    if isinstance(call["other"], Value):
        _not_partial(call)
        return align(call, call.values, len(call.shape))
    return _reduce(call)


def _along(call: Call) -> Layout | list[Layout]:
    """Ops that keep the shape and mix the elements of one dim (softmax, cumsum, sort)."""
    _not_partial(call)
    value: Value = call["self"]
    if value.shard is None:
        raise Conflict("AT304", f"{call.name} with a sharded argument", blame=tuple(call.sharded()))
    if value.shard.dim in (_dims(call, value) if call["dim"] is not None else {value.rank - 1}):
        raise _over(call, value)
    return value.shard if len(call.results) == 1 else [value.shard] * len(call.results)


def _norm(call: Call) -> Layout:
    _not_partial(call)
    value: Value = call["input"]
    others = [v for v in call.values if v is not value]
    if value.shard is None:
        raise Conflict("AT303", f"{call.name}: its weight is sharded, its input is whole", blame=tuple(call.sharded()))
    if value.shard.dim >= value.rank - len(call["normalized_shape"]):
        raise _over(call, value)
    return align(call, (value, *others), len(call.shape))


def _index(call: Call) -> Layout:
    value: Value = call["self"]
    indices = call["indices"]
    if any(isinstance(i, Value) and not i.whole for i in indices):
        raise Conflict("AT304", f"{call.name} with sharded indices", blame=tuple(call.sharded()))
    if value.shard is None:
        return value.layout
    if value.shard.dim < len(indices) and indices[value.shard.dim] is not None:
        raise _over(call, value)
    indexed = [d for d, i in enumerate(indices) if i is not None]
    if indexed != list(range(indexed[0], indexed[-1] + 1)):
        raise Conflict("AT304", f"{call.name} on dims that are not neighbours, of a sharded value", blame=(value,))
    if any(isinstance(i, Value) and i.mask for i in indices):
        raise Conflict("AT304", f"{call.name} by a mask, of a sharded value", blame=(value,))
    if value.shard.dim < indexed[0]:
        return value.shard
    wide = max(i.rank for i in indices if isinstance(i, Value))
    return value.shard.at(value.shard.dim - len(indexed) + wide)


def _gather(call: Call) -> Layout:
    _not_partial(call)
    value: Value = call["self"]
    if value.shard is not None and normal_dim(call["dim"], value.rank) == value.shard.dim:
        raise _over(call, value)
    return align(call, call.values, len(call.shape))


Rule = Callable[[Call], Layout | list[Layout]]
REDUCTIONS: dict[str, Rule] = {
    **dict.fromkeys(
        "sum mean prod var std amax amin logsumexp norm linalg_vector_norm all any argmax argmin".split(),
        _reduce,
    ),
    **dict.fromkeys(["max", "min"], _extremum),
    **dict.fromkeys(
        """softmax _softmax log_softmax _log_softmax cumsum cumprod logcumsumexp cummax cummin sort argsort
        topk""".split(),
        _along,
    ),
    **dict.fromkeys(["layer_norm", "rms_norm"], _norm),
    "index": _index,
    "gather": _gather,
    "take_along_dim": _gather,
}
