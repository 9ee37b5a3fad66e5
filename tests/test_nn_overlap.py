"""The column layer's overlapped backward: same bits as the plain pair, and the sum starts before dW."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autotp import mappings
from autotp.comm import Group, simulate
from autotp.nn.overlap import copied_linear
from tests.test_mappings import randn


def all_three(group: Group, shape: tuple[int, ...], bias: bool) -> list[list[Tensor]]:
    found = []
    for kind in ("overlapped", "in turn", "plain"):
        x = randn(1, *shape, 5).requires_grad_()
        weight = randn(10 + group.rank, 3, 5).requires_grad_()
        added = randn(20 + group.rank, 3).requires_grad_() if bias else None
        if kind == "plain":
            y = F.linear(mappings.copy(x, group), weight, added)
        else:
            y = copied_linear(x, weight, added, group, overlap=kind == "overlapped")
        y.backward(randn(30 + group.rank, *y.shape))
        leaves = [leaf for leaf in (x, weight, added) if leaf is not None]
        found.append([y.detach(), *(leaf.grad for leaf in leaves)])
    return found


@pytest.mark.parametrize("shape", [(4,), (2, 3), ()], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_same_numbers_as_copy_and_linear(run, shape: tuple[int, ...], bias: bool) -> None:
    for overlapped, in_turn, plain in run(all_three, shape, bias):
        for a, b, c in zip(overlapped, in_turn, plain, strict=True):
            assert a.shape == b.shape == c.shape
            assert torch.equal(a, b)
            torch.testing.assert_close(a, c, rtol=1e-14, atol=1e-14)


def test_the_sum_starts_before_the_weight_gradient_and_ends_after_it() -> None:
    logs: list[list[str]] = [[], []]

    def function(group: Group) -> None:
        events, started = logs[group.rank], group.all_reduce_later

        def later(x: Tensor):
            wait = started(x)
            events.append("start")
            return lambda: (events.append("wait"), wait())[1]

        group.all_reduce_later = later
        x, weight = randn(1, 4, 5).requires_grad_(), randn(2, 3, 5).requires_grad_()
        y = copied_linear(x, weight, None, group, overlap=True)

        class Log(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func is torch.ops.aten.mm.default:
                    events.append("mm")
                return func(*args, **(kwargs or {}))

        with Log():
            y.sum().backward()

    simulate(2, function)
    assert logs == [["mm", "start", "mm", "wait"]] * 2
