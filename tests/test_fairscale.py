"""Where FairScale 0.4.13 is right, our layers hold the same slices and give the same outputs and gradients.

FairScale is the extra `fairscale`, which `make test` installs where it can; this file is collected where it
is installed.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotp.comm import group_of
from autotp.nn import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, VocabParallelEmbedding
from autotp.nn.functional import vocab_parallel_cross_entropy


def theirs() -> Any:
    """FairScale's module, with its groups made for the whole world."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import fairscale.nn.model_parallel as module
        from fairscale.nn.model_parallel import initialize

        if not initialize.model_parallel_is_initialized():
            initialize.initialize_model_parallel(torch.distributed.get_world_size())
    return module


def run_layer(layer: nn.Module, fed: Tensor) -> list[Tensor]:
    """Parameters, output and gradients of a layer whose gradients nobody else uses."""
    x = fed.clone()
    if x.is_floating_point():
        x.requires_grad_()
    y = layer(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
    gradients = [p.grad for p in layer.parameters()]
    return [*(p.detach() for p in layer.parameters()), y.detach(), x.grad, *gradients]


CASES: dict[str, tuple[Any, str, tuple[int, int], dict[str, Any]]] = {
    "column": (ColumnParallelLinear, "ColumnParallelLinear", (6, 8), {}),
    "column, local": (ColumnParallelLinear, "ColumnParallelLinear", (6, 8), {"gather_output": False}),
    "column, stride 2": (
        ColumnParallelLinear,
        "ColumnParallelLinear",
        (6, 8),
        {"stride": 2, "gather_output": False},
    ),
    "column, uniform": (
        ColumnParallelLinear,
        "ColumnParallelLinear",
        (6, 8),
        {"init_method": nn.init.kaiming_uniform_},
    ),
    "row": (RowParallelLinear, "RowParallelLinear", (8, 6), {}),
    "row, parallel input": (RowParallelLinear, "RowParallelLinear", (8, 6), {"input_is_parallel": True}),
    "vocabulary": (VocabParallelEmbedding, "VocabParallelEmbedding", (10, 4), {}),
    "embedding": (ParallelEmbedding, "ParallelEmbedding", (10, 4), {}),
}


def compare(rank: int, size: int, case: str) -> None:
    module = theirs()
    ours, name, sizes, options = CASES[case]
    if "mbedding" in name:
        fed = torch.tensor([[0, 9, 4], [5, 5, 1]])
    else:
        width = sizes[0] // (size if options.get("input_is_parallel") else 1)
        fed = torch.linspace(-1, 1, 3 * width).view(3, width)
    found = []
    for cls in (ours, getattr(module, name, None) or getattr(module.layers, name)):
        torch.manual_seed(5)
        found.append(run_layer(cls(*sizes, **options), fed))
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize("case", CASES)
def test_same_slices_outputs_and_gradients(ranks, case: str) -> None:
    ranks(2)(compare, case)


def compare_loss(rank: int, size: int) -> None:
    module = theirs()
    from fairscale.nn.model_parallel.cross_entropy import vocab_parallel_cross_entropy as their_loss

    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(rank))
    target = torch.tensor([0, 5, 2, 3, 1])
    found = []
    for loss in (
        lambda x: vocab_parallel_cross_entropy(x, target, reduction="none", group=group_of(None)),
        lambda x: their_loss(x.clone(), target),
    ):
        x = logits.clone().requires_grad_()
        y = loss(x)
        y.sum().backward()
        found.append([y.detach(), x.grad])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert module.get_model_parallel_rank() == rank


def test_same_cross_entropy(ranks) -> None:
    ranks(2)(compare_loss)
