"""Layout rules of elementwise ops."""

from __future__ import annotations

from autotp.placement import INVARIANT, PARTIAL, REPLICATE, Layout, Shard
from autotp.propagate.call import Call, Conflict, Value, needs_copy

__all__ = ["ELEMENTWISE", "LINEAR_IN_ONE", "align", "elementwise"]

ELEMENTWISE = frozenset(
    """abs acos add asin atan bitwise_and bitwise_not bitwise_or bitwise_xor ceil celu clamp clamp_max
    clamp_min clone contiguous copy cos cosh detach div dropout elu empty_like eq erf exp exp2 expm1 fill
    floor floor_divide fmod full_like ge gelu greater gt hardshrink hardsigmoid hardswish hardtanh isfinite
    isinf isnan le leaky_relu lerp less lift_fresh log log10 log1p log2 log_sigmoid logaddexp logical_and
    logical_not logical_or logical_xor lt masked_fill maximum minimum mish mul multiply nan_to_num ne neg
    negative ones_like positive pow reciprocal relu relu6 remainder rsqrt rsub round selu sigmoid sign silu
    sin sinh softplus softshrink softsign sqrt square sub subtract tan tanh threshold to _to_copy trunc
    true_divide type_as where zero zeros_like alias addcmul addcdiv divide __and__ __or__ __xor__ requires_grad
    """.split()
)

# y(a + b) = y(a) + y(b): a sum that is still to come passes through.
LINEAR_IN_ONE = frozenset(
    "clone contiguous alias detach neg negative positive to _to_copy type_as dropout lift_fresh".split()
)
_SUMS = frozenset("add sub subtract".split())
_SCALINGS = frozenset("mul multiply div divide true_divide".split())
_FROM_SHAPE = frozenset("empty_like full_like ones_like zeros_like".split())


def elementwise(call: Call) -> Layout:
    """All shards must be cut alike on the dim where they meet; what is whole there must be broadcast."""
    if call.name in _FROM_SHAPE:
        return call.values[0].layout if call.values[0].shard is not None else INVARIANT
    if any(v.partial for v in call.values):
        return _partial(call)
    return align(call, call.values, len(call.shape))


def _partial(call: Call) -> Layout:
    partial = next(v for v in call.values if v.partial)
    others = [v for v in call.values if not v.partial]
    alone = len(call.values) == 1
    if call.name in LINEAR_IN_ONE and alone and _stays_a_sum(call):
        return PARTIAL
    if call.name in _SUMS and not others and not any(_number(call[a]) for a in ("self", "other")):
        return PARTIAL
    if call.name in _SCALINGS and call["rounding_mode"] is None:
        multiplied = call.name in ("mul", "multiply") or call["self"] is partial
        if multiplied and (alone or (len(others) == 1 and others[0].whole and not others[0].grad)):
            return PARTIAL
    raise Conflict(
        "AT310",
        f"{call.name} of a sum whose parts are still on the ranks",
        blame=(partial,),
        notes=(f"{partial}: each rank holds a part of the sum, and {call.name} of the parts is not the "
               f"part of the {call.name}",),
    )


def _stays_a_sum(call: Call) -> bool:
    if call.name == "dropout":
        return not (call["train"] and call["p"])
    dtype = call.node.meta["val"].dtype
    return bool(dtype.is_floating_point or dtype.is_complex)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value != 0


def align(call: Call, values: tuple[Value, ...], rank: int) -> Layout:
    """The layout of a broadcast over `values`, with `rank` dims in the result."""
    found: Shard | None = None
    owner: Value | None = None
    for value in values:
        if value.shard is None:
            continue
        placed = value.shard.at(value.shard.dim + rank - value.rank)
        if found is None:
            found, owner = placed, value
        elif placed != found:
            assert owner is not None
            raise Conflict(
                "AT307",
                f"{call.name} of two values that are cut differently over the ranks",
                blame=(value, owner),
                notes=(f"{owner}", f"{value}"),
            )
    assert found is not None and owner is not None
    for value in values:
        if not value.whole:
            continue
        dim = found.dim - (rank - value.rank)
        if dim >= 0 and value.shape[dim] != 1:
            raise Conflict(
                "AT306",
                f"{call.name}: {value.name} is whole, with {value.shape[dim]} elements on the dim that is "
                f"sharded in {owner.name}",
                blame=(owner,),
                notes=(f"{owner}", f"{value.name}: {list(value.shape)} replicate, its dim {dim} is not cut"),
            )
        if value.grad and value.layout != REPLICATE:
            raise needs_copy(call, value, owner)
    return found


