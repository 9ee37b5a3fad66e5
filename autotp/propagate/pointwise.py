"""Layout rules of elementwise ops."""

from __future__ import annotations

from dataclasses import replace

from autotp.placement import INVARIANT, PARTIAL, REPLICATE, Layout, Shard
from autotp.propagate.call import Call, Conflict, Value, needs_copy, not_partial

__all__ = ["POINTWISE", "align", "elementwise", "expand_as"]

# fmt: off
_ONE = [
    "abs", "absolute", "acos", "acosh", "alias", "alpha_dropout", "angle", "arccos", "arccosh", "arcsin",
    "arcsinh", "arctan", "arctanh", "asin", "asinh", "atan", "atanh", "bernoulli", "bitwise_not", "ceil",
    "celu", "clamp", "clamp_max", "clamp_min", "clip", "clone", "_conj", "conj", "conj_physical",
    "contiguous", "cos", "cosh", "deg2rad", "detach", "dropout", "elu", "erf", "erfc", "erfinv", "exp",
    "exp2", "expm1", "fill", "floor", "frac", "gelu", "hardshrink", "hardsigmoid", "hardswish",
    "hardtanh", "imag", "isfinite", "isinf", "isnan", "isneginf", "isposinf", "isreal", "leaky_relu",
    "lift_fresh", "log", "log10", "log1p", "log2", "log_sigmoid", "logical_not", "logit", "mish",
    "nan_to_num", "neg", "negative", "positive", "rad2deg", "real", "reciprocal", "relu", "relu6",
    "resolve_conj", "resolve_neg", "round", "rrelu", "rsqrt", "selu", "sgn", "sigmoid", "sign", "signbit",
    "silu", "sin", "sinc", "sinh", "softplus", "softshrink", "sqrt", "square", "tan", "tanh", "threshold",
    "to", "_to_copy", "trunc", "type_as", "zero",
]
_MORE = [
    "add", "addcdiv", "addcmul", "__and__", "arctan2", "atan2", "bitwise_and", "bitwise_left_shift",
    "bitwise_or", "bitwise_right_shift", "bitwise_xor", "complex", "copy", "copysign", "div", "divide",
    "eq", "float_power", "floor_divide", "fmax", "fmin", "fmod", "ge", "greater", "greater_equal", "gt",
    "heaviside", "hypot", "le", "lerp", "less", "less_equal", "logaddexp", "logaddexp2", "logical_and",
    "logical_or", "logical_xor", "__lshift__", "lt", "masked_fill", "maximum", "minimum", "mul",
    "multiply", "ne", "not_equal", "__or__", "polar", "pow", "remainder", "__rshift__", "rsub", "sub",
    "subtract", "true_divide", "where", "xlogy", "__xor__",
]
_FROM_SHAPE = frozenset(
    ["empty_like", "full_like", "ones_like", "zeros_like", "rand_like", "randn_like", "randint_like"]
)
ELEMENTWISE = frozenset([*_ONE, *_MORE, *_FROM_SHAPE])

# y(a + b) = y(a) + y(b): a sum that is still to come passes through.
LINEAR_IN_ONE = frozenset(
    ["alias", "clone", "conj", "_conj", "conj_physical", "contiguous", "detach", "dropout", "imag",
     "lift_fresh", "neg", "negative", "positive", "real", "resolve_conj", "resolve_neg", "to", "_to_copy",
     "type_as"]
)
# fmt: on
_SUMS = frozenset(["add", "sub", "subtract", "rsub"])
_SCALINGS = frozenset(["mul", "multiply", "div", "divide", "true_divide"])
_OF_THE_FIRST = frozenset(["to", "type_as"])  # a second tensor gives only its dtype


def elementwise(call: Call) -> Layout:
    """All shards must be cut alike on the dim where they meet; what is whole there must be broadcast."""
    if call.name == "where" and call["self"] is None:
        message = "where: the number of places that it finds is another one on each rank"
        raise Conflict("AT304", message, blame=call.values)
    if call.name in _FROM_SHAPE:
        like: Value = call["self"]
        return like.layout if like.shard is not None else INVARIANT
    values = (call["self"],) if call.name in _OF_THE_FIRST else call.values
    if all(v.whole for v in values):
        return values[0].layout
    if any(v.partial for v in values):
        return _partial(call, values)
    return align(call, values, len(call.shape))


def _partial(call: Call, values: tuple[Value, ...]) -> Layout:
    partial = next(v for v in values if v.partial)
    others = [v for v in values if not v.partial]
    if (
        (call.name in LINEAR_IN_ONE and _stays_a_sum(call))
        or (call.name in _SUMS and not others and not any(_number(call[a]) for a in ("self", "other")))
        or (call.name == "copy" and not others and _stays_a_sum(call))
        or (call.name in _SCALINGS and _scaled(call, partial, others))
        or (call.name in ("where", "masked_fill") and _chosen(call))
    ):
        return PARTIAL
    raise Conflict(
        "AT310",
        f"{call.name} of a sum whose parts are still on the ranks",
        blame=(partial,),
        notes=(
            f"{partial}: each rank holds a part of the sum, and {call.name} of the parts is not the "
            f"part of the {call.name}",
        ),
    )


def _scaled(call: Call, partial: Value, others: list[Value]) -> bool:
    """A sum times, or divided by, one whole value: that value's gradient is then a part on each rank."""
    if call["rounding_mode"] is not None or len(call.values) - len(others) > 1:
        return False
    if call.name not in ("mul", "multiply") and call["self"] is not partial:
        return False
    if any(v.whole and v.grad and v.layout != REPLICATE for v in others):
        raise needs_copy(call, others[0], partial)
    return all(v.whole for v in others)


def _chosen(call: Call) -> bool:
    """Parts of a sum or zero, chosen by a whole mask."""
    mask = call["condition"] if call.name == "where" else call["mask"]
    first, second = call["self"], call["other"] if call.name == "where" else call["value"]
    return mask.whole and all(
        v.partial if isinstance(v, Value) else isinstance(v, (int, float)) and v == 0 for v in (first, second)
    )


def _stays_a_sum(call: Call) -> bool:
    if call.name == "dropout":
        return not (call["train"] and call["p"])
    dtype = call.node.meta["val"].dtype
    return bool(dtype.is_floating_point or dtype.is_complex)


def _number(value: object) -> bool:
    return isinstance(value, (int, float, complex)) and not isinstance(value, bool) and value != 0


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
        if value.grad and value.layout != REPLICATE and call.differentiable:
            raise needs_copy(call, value, owner)
    return found


def expand_as(call: Call) -> Layout:
    """The first value broadcast to the shape of the second, whose elements do not matter."""
    value: Value = call["self"]
    other: Value = call["other"]
    if other.shard is None:
        if value.shard is not None:
            return align(call, (value, replace(other, layout=INVARIANT, grad=False)), len(call.shape))
        return value.layout
    if value.partial:
        raise Conflict(
            "AT310",
            f"{call.name} of a sum whose parts are still on the ranks",
            blame=(value,),
            notes=(f"{value}",),
        )
    return align(call, (value, replace(other, grad=False)), len(call.shape))


def _prelu(call: Call) -> Layout:
    """A slope for all elements, or one for each channel: dim 1."""
    value, slope = call["self"], call["weight"]
    not_partial(call)
    if slope.shape != (1,) and value.rank > 1:
        slope = replace(slope, shape=(*slope.shape, *[1] * (value.rank - 2)))
    return align(call, (value, slope), value.rank)


POINTWISE = {**dict.fromkeys(ELEMENTWISE, elementwise), "prelu": _prelu}
