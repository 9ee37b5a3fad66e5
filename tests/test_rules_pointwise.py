"""Elementwise ops: rules against execution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autotp.placement import INVARIANT, PARTIAL, REPLICATE
from autotp.propagate.pointwise import POINTWISE
from tests.rules import Case, cut, hold, tensor

f64 = torch.float64
MASK = tensor(6, 4) > 0.7
COMPLEX = torch.complex(tensor(6, 9), tensor(6, 9, seed=1))
X, Y, ROW, COLUMN = tensor(6, 9), tensor(6, 9, seed=1), tensor(9, seed=2), tensor(6, 1, seed=3)


def x_of(function: Any, *inputs: torch.Tensor, **options: Any) -> Case:
    return Case(function, inputs or (X,), **options)


CASES = {
    "sum": x_of(
        lambda x, y: x + y, X, ROW, takes=((PARTIAL, PARTIAL), (cut(1, 9), cut(0, 9)), (cut(0), REPLICATE))
    ),
    "prelu": x_of(
        lambda x, w: F.prelu(x, w), X, tensor(1), takes=((cut(1, 9), REPLICATE), (cut(0), REPLICATE))
    ),
    "prelu of channels": x_of(
        lambda x, w: F.prelu(x - 0.7, w),
        tensor(4, 6, 3),
        tensor(6),
        few=5,
        takes=((cut(1), cut(0)), (cut(0), REPLICATE), (cut(2, 3), REPLICATE)),
    ),
    "rrelu, eval": x_of(lambda x: F.rrelu(x - 0.7), X, takes=((cut(1, 9),),)),
    "alpha dropout, eval": x_of(lambda x: F.alpha_dropout(x, 0.5, False), X, takes=((cut(1, 9),),)),
    "sum in three groups": x_of(lambda x, y: x - y, tensor(5, 12), tensor(12)),
    "sum alpha": x_of(lambda x, y: torch.add(x, y, alpha=2), X, Y, takes=((PARTIAL, PARTIAL),)),
    "product": x_of(lambda x, y: x * y, tensor(6, 1, 9), tensor(12, 1), takes=((PARTIAL, REPLICATE),)),
    "product of one value": x_of(lambda x: x * x),
    "quotient": x_of(lambda x, y: x / y, X, COLUMN, takes=((PARTIAL, INVARIANT),)),
    "quotient rounded": x_of(lambda x, y: torch.div(x, y, rounding_mode="floor"), X, ROW),
    "scaled": x_of(lambda x: x / 3 * 2, takes=((PARTIAL,),)),
    "shifted": x_of(lambda x: x + 3),
    "one minus": x_of(lambda x: 1 - x),
    "comparison": x_of(lambda x, y: x < y, X, ROW, takes=((cut(0), INVARIANT),)),
    "chosen": x_of(torch.where, MASK, tensor(6, 4, seed=1), tensor(6, 1, seed=2), few=5),
    "chosen of sums": x_of(
        torch.where, MASK, tensor(6, 4), tensor(6, 4), few=3, takes=((INVARIANT, PARTIAL, PARTIAL),)
    ),
    "chosen or zero": x_of(lambda m, x: torch.where(m, x, 0.0), X > 0.7, Y, takes=((INVARIANT, PARTIAL),)),
    "chosen or one": x_of(lambda m, x: torch.where(m, x, 1.0), X > 0.7, Y),
    "masked": x_of(lambda x, m: x.masked_fill(m, 0.0), Y, X > 0.7, takes=((PARTIAL, INVARIANT),)),
    "masked by a tensor": x_of(lambda x, m, v: x.masked_fill(m, v), Y, X > 0.7, tensor(), few=4),
    "in place": x_of(lambda x, y: x.clone().add_(y).mul_(2), X, ROW),
    "copied into": x_of(lambda x, y: x.clone().copy_(y), X, ROW),
    "copied into, same shapes": x_of(lambda x, y: x.clone().copy_(y), X, Y),
    "filled": x_of(lambda x: x.clone().fill_(2)),
    "zeroed": x_of(lambda x: x.clone().zero_()),
    "empty": x_of(lambda x: torch.empty_like(x).fill_(1)),
    "full": x_of(lambda x: torch.full_like(x, 3.0)),
    "zeros": x_of(lambda x: torch.zeros_like(x) + x),
    "cast": x_of(lambda x: x.to(torch.float32), tolerance=1e-5, takes=((PARTIAL,),)),
    "cast to whole numbers": x_of(lambda x: (x * 9).to(torch.int64)),
    "cast like another": x_of(
        lambda x, y: x.to(y),
        COLUMN,
        tensor(9, dtype=torch.float32),
        tolerance=1e-5,
        takes=((PARTIAL, cut(0, 9)),),
    ),
    "type of another": x_of(lambda x, y: x.type_as(y), X, tensor(4, dtype=torch.float32), tolerance=1e-5),
    "no dropout": x_of(lambda x: F.dropout(x, 0.5, False), takes=((PARTIAL,),)),
    "clamp by tensors": x_of(lambda x, y: x.clamp(min=y), X, ROW),
    "clamp_max": x_of(lambda x: x.clamp_max(0.7)),
    "clamp_min": x_of(lambda x: x.clamp_min(0.7)),
    "clip": x_of(lambda x: x.clip(0.4, 0.7)),
    "clamp": x_of(lambda x: x.clamp(0.4, 0.7)),
    "threshold": x_of(lambda x: F.threshold(x, 0.7, 0.1)),
    "addcmul": x_of(torch.addcmul, tensor(6, 4), tensor(4), tensor(6, 4, seed=1), few=4),
    "addcdiv": x_of(torch.addcdiv, tensor(6, 4), tensor(4), tensor(6, 4, seed=1), few=4),
    "lerp": x_of(torch.lerp, tensor(6, 4), tensor(4), tensor(6, 4, seed=1), few=4),
    "lerp by a number": x_of(lambda x, y: torch.lerp(x, y, 0.3), X, Y),
    "fill by a tensor": x_of(lambda x, v: torch.ops.aten.fill(x, v), X, tensor()),
    "complex product": x_of(lambda x, y: x * y, COMPLEX, torch.complex(ROW, ROW)),
    "conjugate": x_of(lambda x: x.conj().resolve_conj(), COMPLEX, takes=((PARTIAL,),)),
    "acosh": x_of(lambda x: (x + 1).acosh()),
    "arccosh": x_of(lambda x: (x + 1).arccosh()),
    "parts": x_of(lambda x: x.real * 2 + x.imag, COMPLEX, takes=((PARTIAL,),)),
}
_WHOLE_NUMBERS = (
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "__and__",
    "__or__",
    "__xor__",
    "bitwise_left_shift",
    "bitwise_right_shift",
    "__lshift__",
    "__rshift__",
    "bitwise_not",
)


def _plain(name: str) -> Case | None:
    """An op of one or two tensors and nothing else."""
    op = getattr(torch.ops.aten, name)
    kind = torch.int64 if name in _WHOLE_NUMBERS else f64
    x, y = (
        (tensor(*shape) * 0.8).to(kind) for shape in ((6, 9), (9,))
    )  # 0.16…0.96: where logit and asin are defined
    for inputs in ((x,), (x, y)):
        try:
            op(*inputs)
        except RuntimeError:
            continue
        if name in ("floor_divide", "heaviside"):  # without a derivative
            return Case(lambda *x: op(*(t.detach() for t in x)), inputs, few=3)
        return Case(lambda *x: op(*x), inputs, few=4 if len(inputs) == 1 else 3, tps=(3,))
    return None


_SPELLED = (
    "imag",
    "_conj",
    "dropout",
    "type_as",
    "acosh",
    "arccosh",
    "copy",
    "clip",
    "clamp",
    "clamp_min",
    "clamp_max",
    "threshold",
    "fill",
    "addcmul",
    "addcdiv",
    "lerp",
    "masked_fill",
    "where",
    "empty_like",
    "full_like",
    "prelu",
    "rrelu",
    "alpha_dropout",
    "bernoulli",
    "rand_like",
    "randn_like",
    "randint_like",
)
PLAIN = {name: _plain(name) for name in sorted(POINTWISE) if name not in _SPELLED}


@pytest.mark.parametrize("name", CASES)
def test_a_rank_s_part_is_its_part_of_the_whole(name: str) -> None:
    hold(CASES[name])


@pytest.mark.parametrize("name", PLAIN)
def test_every_elementwise_op(name: str) -> None:
    case = PLAIN[name]
    assert case is not None, f"{name} needs a case of its own"
    hold(case)
