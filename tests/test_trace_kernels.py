"""What an op gives by its kernel alone is what a run on fake tensors gives, for every op and form."""

import logging
import random

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher

from autotp.trace import hooks
from autotp.trace.kernels import KERNELS, by_kernel
from autotp.trace.remembered import Remembered

aten = torch.ops.aten
CPU = torch.device("cpu")
SHAPES = [(2, 3, 4), (1, 3, 4), (4,), (3, 4), (2, 0, 4), (2, 3, 1, 4), (1, 1, 1), ()]
LAYOUTS = ["dense", "turned", "expanded", "sliced", "strided"]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]
ONE = ("neg", "rsqrt", "sqrt", "cos", "sin", "silu", "gelu", "relu", "tanh", "sigmoid", "alias")
TWO = ("add", "sub", "mul", "div", "le", "lt", "ge", "gt", "eq", "ne", "__and__", "__or__")


def fake(fakes, shape, layout="dense", dtype=torch.float32, grad=False):
    """A fake tensor that lies in its memory in one of the layouts."""
    *outer, last = shape or (0,)
    with fakes.mode:
        if layout == "turned" and outer:
            new = fakes.made((*outer[:-1], last, outer[-1]), dtype, CPU).transpose(-1, -2)
        elif layout == "expanded" and outer:
            new = fakes.made((1, *shape[1:]), dtype, CPU).expand(shape)
        elif layout == "sliced" and shape:
            new = fakes.made((*outer, last + 3), dtype, CPU)[..., 2 : 2 + last]
        elif layout == "strided" and shape:
            new = fakes.made((*outer, 2 * last), dtype, CPU)[..., ::2]
        else:
            new = fakes.made(shape, dtype, CPU)
        return new.detach().requires_grad_() if grad and dtype.is_floating_point else new


def calls(x, made):
    """Op calls on a tensor; `made` makes others."""
    shape, n = tuple(x.shape), x.dim()
    yield from ((getattr(aten, name).default, (x,)) for name in ONE)
    others = [made(shape, d, t) for d in ("dense", "turned") for t in DTYPES]
    others += [made((), "dense", t) for t in DTYPES] + [made(shape[-1:], "dense", t) for t in DTYPES]
    for name in TWO:
        yield from ((getattr(aten, name).Tensor, pair) for o in others for pair in ((x, o), (o, x)))
        yield from ((getattr(aten, name).Tensor, (x, number)) for number in (2, 2.5))
        yield from ((getattr(aten, name).Scalar, (x, number)) for number in (2, 2.5))
    yield from ((aten.where.self, (made(shape, "dense", torch.bool), x, o)) for o in others)
    yield from ((op, (x, number)) for op in (aten.pow.Tensor_Scalar, aten.rsub.Scalar) for number in (2, 0.5))
    yield from [(aten.pow.Scalar, (2.0, x)), (aten.mean.default, (x,)), (aten.sum.default, (x,))]
    yield from [(aten.squeeze.default, (x,)), (aten.unsqueeze.default, (x, n)), (aten.t.default, (x,))]
    for sizes in ([-1], [*shape], [1, *shape], [*shape, 1], [*shape[:-1], -1, 2], [*shape[:1], -1]):
        yield from ((op.default, (x, sizes)) for op in (aten.view, aten.reshape))
    for sizes in ([*shape], [5, *shape], [-1] * n, [4 if s == 1 else -1 for s in shape]):
        yield aten.expand.default, (x, sizes)
    yield from ((aten.permute.default, (x, order)) for order in ([*range(n)], [*reversed(range(n))]))
    for d in range(-n, n):
        for kept in (True, False):
            yield from ((op, (x, [d], kept)) for op in (aten.mean.dim, aten.sum.dim_IntList))
        yield from ((op, (x, d)) for op in (aten.unsqueeze.default, aten.squeeze.dim, aten.softmax.int))
        yield from ((aten.select.int, (x, d, i)) for i in (0, -1))
        yield from ((aten.transpose.int, (x, d, other)) for other in range(n))
        for bounds in ((0, 2, 1), (1, None, 1), (0, 9, 2), (-1, None, 1), (None, None, 1)):
            yield aten.slice.Tensor, (x, d, *bounds)
        yield from ((aten.cat.default, (parts, d)) for parts in ([x], [x, x], [x, *others[:4]]))
    for layout in ("dense", "turned", "strided"):
        last, weight = shape[-1:] or (1,), made((6, *shape[-1:]), layout)
        bias, right = made((6,)), made((*last, 6), layout)
        yield from [(aten.linear.default, (x, weight)), (aten.linear.default, (x, weight, bias))]
        yield from [(aten.matmul.default, (x, right)), (aten.matmul.default, (x, made(last)))]
        yield aten.matmul.default, (x, made((*shape[:-2], *last, 5), layout))
        yield aten.bmm.default, (x, made((*shape[:1], *last, 5), layout))
        yield aten.layer_norm.default, (x, last, made(last), made(last))
        for ids in (torch.int64, torch.int32):
            yield aten.embedding.default, (made((10, 6), layout), made(shape, "dense", ids))


class OtherwiseError(Exception):
    """A kernel gives what a run does not give."""


class Compares(hooks.OpMode):
    """Runs each op by its kernel and on fake tensors."""

    def __init__(self, fakes, told):
        super().__init__()
        self.remembered, self.told, self.nested = Remembered(fakes, on=True), told, False

    def op(self, func, args, kwargs):
        if self.nested:
            return func(*args, **kwargs)
        tensors, self.nested = [], True
        try:
            self.remembered._key(func, args, kwargs, tensors)
            found = by_kernel(func, args, kwargs, tensors)
            try:
                wanted = func(*args, **kwargs)
            except Exception as error:
                if found is None:
                    raise
                raise OtherwiseError(func, args) from error
            if found is not None:
                self.told.append(func.__name__.partition(".")[0])
                if not alike(self.remembered._again(found, tensors, None), wanted, tensors):
                    raise OtherwiseError(func, args)
            return wanted
        finally:
            self.nested = False


def alike(one, two, tensors):
    def told(out):
        same = [(hooks.storage(out) == hooks.storage(t), out is t) for t in tensors]
        return type(out), hooks.like(out), vars(out), same

    return told(one) == told(two)


@pytest.mark.slow
@pytest.mark.parametrize("grad", [True, False], ids=["gradients", "no gradients"])
def test_a_kernel_gives_what_a_run_gives(grad):
    """The forms are drawn, so that each op meets many of them. What a run refuses, no kernel may give."""
    draw, told = random.Random(0), []
    logging.disable(logging.CRITICAL)  # torch logs what it refuses
    try:
        for shape in SHAPES:
            for layout in draw.sample(LAYOUTS, 3):
                dtype, needs = draw.choice(DTYPES[:4]), draw.random() < 0.5
                fakes = hooks.Fakes()
                x = fake(fakes, shape, layout, dtype, needs)
                every = list(calls(x, lambda *form, f=fakes: fake(f, *form, grad=draw.random() < 0.3)))
                with fakes.mode, torch.set_grad_enabled(grad), enable_python_dispatcher():
                    for func, given in draw.sample(every, 25):
                        with Compares(fakes, told):
                            try:
                                func(*given)
                            except OtherwiseError:
                                raise
                            except Exception:  # a run refuses it
                                continue
    finally:
        logging.disable(logging.NOTSET)
    assert len(told) > 250 and len(KERNELS - set(told)) < 12, KERNELS - set(told)
