"""Layout rules of ops that multiply and sum: matmul and its kin, einsum, embedding.

Every product is told in letters, as einsum has it: a letter for each dim of each operand, the letters that
the result keeps, the others summed. One rule (`product`) then serves all: matmul is `...mk,...kn->...mn`.

A linear layer that a plan shards has its mappings around the op, so its rule is the engine's
(`engine._layer`); these rules serve every other use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autotp.placement import PARTIAL, REPLICATE, Layout
from autotp.propagate.call import Call, Conflict, Value, counted_once, needs_copy, over
from autotp.propagate.pointwise import align

__all__ = ["CONTRACTIONS", "added", "free", "product"]

Letters = Sequence[str | int]  # one for each dim; batch dims are numbers, counted from the back
Operand = tuple[Value, Letters]


def product(call: Call, operands: Sequence[Operand], result: Letters) -> Layout:
    """The layout of a product of `operands` summed over every letter that `result` does not keep."""
    partial = next((value for value, _ in operands if value.partial), None)
    if partial is not None:
        return _of_a_sum(call, partial, [value for value, _ in operands if value is not partial])
    cut = [(value, letters) for value, letters in operands if value.shard is not None]
    if not cut:
        raise Conflict("AT304", f"{call.name} with a sharded argument", blame=tuple(call.sharded()))
    first, letter = cut[0][0], _letter(*cut[0])
    assert first.shard is not None
    for value, letters in cut[1:]:
        assert value.shard is not None
        if _letter(value, letters) != letter or not value.shard.same_cut(first.shard):
            raise Conflict(
                "AT307",
                f"{call.name} of two values that are cut differently over the ranks",
                blame=(first, value),
                notes=(f"{first}", f"{value}"),
            )
    for value, letters in operands:
        if value.shard is None:
            _meets(call, value, letters, first, letter, kept=letter in result)
    if any(list(letters).count(letter) > 1 for _, letters in (*operands, (first, result))):
        raise over(call, first, "takes the diagonal")
    if letter in result:
        return first.shard.at(list(result).index(letter))
    counted_once(call, first)
    return PARTIAL


def _letter(value: Value, letters: Letters) -> str | int:
    assert value.shard is not None
    return letters[value.shard.dim]


def _of_a_sum(call: Call, partial: Value, others: Sequence[Value]) -> Layout:
    """The product of a sum that is still on the ranks with whole values is the sum of the products."""
    for other in others:
        if not other.whole:
            raise Conflict(
                "AT310",
                f"{call.name} of a sum whose parts are still on the ranks",
                blame=(partial,),
                notes=(f"{partial}", f"{other}"),
            )
        free(call, other, partial)
    return PARTIAL


def _meets(
    call: Call, value: Value, letters: Letters, first: Value, letter: str | int, *, kept: bool
) -> None:
    """A whole operand beside a sharded one: it must not have the dim, and its gradient must be a part."""
    assert first.shard is not None
    for dim, name in enumerate(letters):
        if name != letter or value.shape[dim] == 1:
            continue
        if kept:
            message = (
                f"{call.name}: {value.name} is whole, with {value.shape[dim]} elements on the dim that is "
                f"sharded in {first.name}"
            )
        else:
            message = f"{call.name} sums over a dim that is sharded in {first.name} and whole in {value.name}"
        raise Conflict("AT306", message, blame=(first,), notes=(f"{first}", f"{value}"))
    free(call, value, first)


def free(call: Call, value: Value, other: Value) -> None:
    """Raise if a whole value beside one that is not would get a part of its gradient on each rank."""
    if value.grad and value.layout != REPLICATE and call.differentiable:
        raise needs_copy(call, value, other)


def added(call: Call, layout: Layout, bias: Value | None, last: Value) -> Layout:
    """The layout of a product plus `bias`, which broadcasts to it."""
    if bias is None:
        return layout
    if layout == PARTIAL or bias.partial:
        if layout == PARTIAL and bias.partial:
            return PARTIAL
        raise Conflict(
            "AT310",
            f"{call.name} adds a bias to a sum whose parts are still on the ranks: every rank adds it",
            blame=tuple(v for v in call.values if not v.whole),
        )
    made = replace(last, shape=call.shape, layout=layout, grad=False, name=f"the product in {call.name}")
    return align(call, (made, bias), len(call.shape))


# -- matmul and its kin


def _sides(
    first: Value, second: Value, rank: int
) -> tuple[list[str | int], list[str | int], list[str | int]]:
    """The letters of a matmul's operands and result; a vector has only the summed dim."""
    left: list[str | int] = ["k"] if first.rank == 1 else [*_numbers(first), "m", "k"]
    right: list[str | int] = ["k"] if second.rank == 1 else [*_numbers(second), "k", "n"]
    kept = ["m"] * (first.rank > 1) + ["n"] * (second.rank > 1)
    return left, right, [*range(len(kept) - rank, 0), *kept]


def _numbers(value: Value) -> list[str | int]:
    return list(range(2 - value.rank, 0))


def _matmul(call: Call) -> Layout:
    names = [
        n for n in ("self", "input", "other", "mat2", "tensor", "vec", "vec2") if isinstance(call[n], Value)
    ]
    first, second = (call[n] for n in names[:2])
    left, right, result = _sides(first, second, len(call.shape))
    return product(call, [(first, left), (second, right)], result)


def _linear(call: Call) -> Layout:
    value, weight, bias = call["input"], call["weight"], call["bias"]
    inner: list[str | int] = list(range(1 - value.rank, 0))
    wide: list[str | int] = ["n"] * (weight.rank > 1)
    if bias is not None and bias.whole and weight.shard is not None and wide and weight.shard.dim == 0:
        raise Conflict(
            "AT306", f"{call.name}: the bias {bias.name} is not cut like the weight", blame=(weight, bias)
        )
    if bias is not None and value.whole and weight.whole:
        raise Conflict("AT307", f"{call.name}: the bias {bias.name} is cut, the result is not", blame=(bias,))
    found = product(call, [(value, [*inner, "k"]), (weight, [*wide, "k"])], [*inner, *wide])
    return added(call, found, bias, value)


_ADDED_PRODUCTS: dict[str, tuple[str, str, str, str, str]] = {  # operands, then letters
    "addmm": ("mat1", "mat2", "mk", "kn", "mn"),
    "addmv": ("mat", "vec", "mk", "k", "m"),
    "baddbmm": ("batch1", "batch2", "bmk", "bkn", "bmn"),
    "addbmm": ("batch1", "batch2", "bmk", "bkn", "mn"),
    "addr": ("vec1", "vec2", "m", "n", "mn"),
}


def _added_product(call: Call) -> Layout:
    first, second, left, right, result = _ADDED_PRODUCTS[call.name]
    value, other, bias = call[first], call[second], call["self"]
    if value.whole and other.whole:
        raise Conflict("AT307", f"{call.name}: {bias.name} is not whole, the product is", blame=(bias,))
    return added(call, product(call, [(value, left), (other, right)], result), bias, value)


def _outer(call: Call) -> Layout:
    second = call["vec2"] if call["vec2"] is not None else call["other"]
    return product(call, [(call["self"], "m"), (second, "n")], "mn")


def _einsum(call: Call) -> Layout:
    """The equation's own letters; `...` stands for numbers counted from the back."""
    equation = call["equation"].replace(" ", "")
    sides, _, result = equation.partition("->")
    if "->" not in equation:
        used = sides.replace(",", "").replace(".", "")
        result = ("..." if "..." in sides else "") + "".join(
            c for c in sorted(set(used)) if used.count(c) == 1
        )
    operands = list(zip(call["tensors"], sides.split(","), strict=True))
    return product(
        call, [(v, _spelled(text, v.rank)) for v, text in operands], _spelled(result, len(call.shape))
    )


def _spelled(text: str, rank: int) -> list[str | int]:
    before, dots, after = text.partition("...")
    if not dots:
        return list(before)
    return [*before, *range(len(before) + len(after) - rank, 0), *after]


def _tensordot(call: Call) -> Layout:
    first, second = call["self"], call["other"]
    pairs = list(
        zip(
            (d % first.rank for d in call["dims_self"]),
            (d % second.rank for d in call["dims_other"]),
            strict=True,
        )
    )
    left = [f"a{d}" for d in range(first.rank)]
    matched = {other: f"a{mine}" for mine, other in pairs}
    right = [matched.get(d, f"b{d}") for d in range(second.rank)]
    summed = set(matched.values())
    return product(call, [(first, left), (second, right)], [x for x in (*left, *right) if x not in summed])


def _embedding(call: Call) -> Layout:
    weight: Value = call["weight"]
    indices: Value = call["indices"]
    if weight.whole and indices.shard is not None:
        # Each rank looks up its own ids; a whole table then needs its gradient summed.
        free(call, weight, indices)
        return indices.shard
    if indices.whole and weight.partial:
        return PARTIAL
    if indices.whole and weight.shard is not None and weight.shard.dim == 1:
        return weight.shard.at(len(call.shape) - 1)
    raise Conflict("AT303", f"{call.name} looks up rows of a table that is sharded by rows", blame=(weight,))


CONTRACTIONS = {
    "linear": _linear,
    **dict.fromkeys(["matmul", "mm", "bmm", "mv", "dot", "vdot"], _matmul),
    **dict.fromkeys(_ADDED_PRODUCTS, _added_product),
    **dict.fromkeys(["outer", "ger"], _outer),
    "einsum": _einsum,
    "tensordot": _tensordot,
    "embedding": _embedding,
}
