"""Layout rules of ops that look along a dim: sums, means, softmax, sorts, norms."""

from __future__ import annotations

from collections.abc import Callable

from autotp.placement import PARTIAL, REPLICATE, Layout
from autotp.propagate.call import (
    Call,
    Conflict,
    Value,
    counted_once,
    needs_copy,
    normal_dim,
    not_partial,
    over,
)
from autotp.propagate.pointwise import align

__all__ = ["REDUCTIONS"]

_LINEAR = frozenset(["sum", "mean", "cumsum"])  # of a sum that is still to come: the sum of theirs


def _dims(call: Call, value: Value) -> set[int]:
    dims = call["dim"]
    if dims is None or dims == []:
        return set(range(value.rank))
    return {normal_dim(d, value.rank) for d in ([dims] if isinstance(dims, int) else dims)}


def _still_a_sum(call: Call) -> bool:
    dtype = call.node.meta["val"].dtype if call.name in _LINEAR else None
    if dtype is None or not (dtype.is_floating_point or dtype.is_complex):
        not_partial(call)
    return True


def _reduce(call: Call) -> Layout | list[Layout]:
    value: Value = call["self"]
    if value.partial and _still_a_sum(call):
        return PARTIAL
    if value.shard is None:
        raise Conflict("AT304", f"{call.name} with a sharded argument", blame=tuple(call.sharded()))
    dims = _dims(call, value)
    if value.shard.dim in dims:
        if call.name != "sum":
            raise over(call, value)
        counted_once(call, value)
        return PARTIAL
    kept = value.shard
    if not call["keepdim"]:
        kept = kept.at(kept.dim - sum(d < kept.dim for d in dims))
    return [kept] * len(call.results)


def _extremum(call: Call) -> Layout | list[Layout]:
    if isinstance(call["other"], Value):
        not_partial(call)
        return align(call, call.values, len(call.shape))
    return _reduce(call)


def _along(call: Call) -> Layout | list[Layout]:
    """Ops that keep the shape and mix the elements of one dim (softmax, cumsum, sort)."""
    value: Value = call["self"]
    if value.partial and _still_a_sum(call):
        return PARTIAL
    if value.shard is None:
        raise Conflict("AT304", f"{call.name} with a sharded argument", blame=tuple(call.sharded()))
    if value.shard.dim in (_dims(call, value) if call["dim"] is not None else {value.rank - 1}):
        raise over(call, value)
    return [value.shard] * len(call.results)


def _norm(call: Call) -> Layout:
    """Norms over the last dims, with a weight and a bias of those dims."""
    not_partial(call)
    value: Value = call["input"]
    others = [v for v in call.values if v is not value]
    if value.shard is None:
        raise Conflict(
            "AT303", f"{call.name}: its weight is sharded, its input is whole", blame=tuple(call.sharded())
        )
    if value.shard.dim >= value.rank - len(call["normalized_shape"]):
        raise over(call, value)
    return align(call, (value, *others), len(call.shape))


def _channel_norm(call: Call) -> Layout:
    """Norms of dim 1, channel by channel or group by group: whole groups may be dealt, the weights alike."""
    not_partial(call)
    value: Value = call["input"]
    weights = [v for v in call.values if v is not value]
    if value.shard is None or value.shard.dim > 1 or (value.shard.dim == 0 and call.name == "batch_norm"):
        raise over(call, next(call.sharded()))
    if value.shard.dim == 0:
        return _of_samples(call, value, weights)
    groups = call["num_groups"] or value.shape[1]
    if value.shard.sections is not None or not value.shard.fits(groups):
        raise over(call, value, "takes the statistics of whole groups")
    for weight in weights:
        if weight.shard is None or not weight.shard.same_cut(value.shard):
            raise Conflict(
                "AT306",
                f"{call.name}: {weight.name} is not cut like the channels of {value.name}",
                blame=(value,),
                notes=(f"{value}", f"{weight}"),
            )
    return value.shard


def _of_samples(call: Call, value: Value, weights: list[Value]) -> Layout:
    assert value.shard is not None
    for weight in weights:
        if not weight.whole:
            raise Conflict(
                "AT307",
                f"{call.name}: {weight.name} is cut, the channels of {value.name} are not",
                blame=(weight,),
            )
        if weight.grad and weight.layout != REPLICATE and call.differentiable:
            raise needs_copy(call, weight, value)
    return value.shard


Rule = Callable[[Call], Layout | list[Layout]]
# fmt: off
REDUCTIONS: dict[str, Rule] = {
    **dict.fromkeys(
        ["sum", "mean", "prod", "var", "std", "var_mean", "std_mean", "amax", "amin", "aminmax", "nansum",
         "nanmean", "logsumexp", "norm", "linalg_vector_norm", "all", "any", "argmax", "argmin", "median",
         "nanmedian", "mode", "kthvalue", "count_nonzero"],
        _reduce,
    ),
    **dict.fromkeys(["max", "min"], _extremum),
    **dict.fromkeys(
        ["softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod",
         "logcumsumexp", "cummax", "cummin", "sort", "argsort", "topk"],
        _along,
    ),
    **dict.fromkeys(["layer_norm", "rms_norm"], _norm),
    **dict.fromkeys(["group_norm", "batch_norm"], _channel_norm),
}
# fmt: on
