"""split: each operation against the serial one, and an error for each wrong argument."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autotp import mappings
from autotp.comm import Group, simulate
from autotp.diagnostic import UsageError
from autotp.nn import ColumnParallelLinear, split
from autotp.placement import Shard, deal
from tests.test_mappings import randn
from tests.test_nn_linear import close


def fill(x: Tensor) -> None:
    x.copy_(torch.arange(x.numel(), dtype=x.dtype).view(x.shape) / 10)


def filled(*shape: int) -> Tensor:
    x = torch.empty(*shape, dtype=torch.float64)
    fill(x)
    return x


def linear(group: Group, axis: int, gather_out: bool, parallel_input: bool) -> list[Tensor]:
    x = randn(1, 3, 5).requires_grad_()
    fed = mappings.scatter(x, group, shard=Shard(1, deal(5, group.size))) if parallel_input else x
    y = split(fed, (5, 9), "linear", axis, group.size, gather_out, fill, fill, group=group)
    if not gather_out:
        cut = Shard(1, deal(9, group.size))
        y = mappings.gather(y, group, shard=cut) if axis else mappings.reduce(y, group)
    y.backward(randn(2, *y.shape))
    return [y.detach(), x.grad]


@pytest.mark.parametrize("axis, parallel_input", [(0, False), (0, True), (1, False)])
@pytest.mark.parametrize("gather_out", [True, False])
def test_linear(run, axis: int, gather_out: bool, parallel_input: bool) -> None:
    x = randn(1, 3, 5).requires_grad_()
    y = F.linear(x, filled(9, 5), filled(9))
    y.backward(randn(2, *y.shape))
    for found in run(linear, axis, gather_out, parallel_input):
        close(found, [y.detach(), x.grad])


def embedding(group: Group, gather_out: bool) -> Tensor:
    y = split(torch.tensor([[0, 7, 3]]), (8, 5), "embedding", 0, group.size, gather_out, fill, group=group)
    return (y if gather_out else mappings.reduce(y, group)).detach()


@pytest.mark.parametrize("gather_out", [True, False])
def test_embedding(run, gather_out: bool) -> None:
    want = filled(8, 5).float()[torch.tensor([[0, 7, 3]])]
    assert all(torch.equal(found, want) for found in run(embedding, gather_out))


def kept(group: Group) -> list[Any]:
    """A model that makes its layers in its first forward and trains them."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            p = group.size
            h = split(x, (5, 9), "linear", 1, p, False, fill, owner=self, name="up", group=group)
            return split(h.tanh(), (9, 4), "linear", 0, p, owner=self, name="down", group=group)

    model = Model()
    x = randn(1, 3, 5)
    model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [list(model.state_dict()), losses]


def test_layers_are_kept_by_their_owner_and_train() -> None:
    names, losses = simulate(1, kept)[0]
    assert names == ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert losses[2] < losses[0]
    for found_names, found in simulate(2, kept) + simulate(3, kept):
        assert found_names == names
        torch.testing.assert_close(found, losses, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "arguments, text",
    [
        (((4, 8), "matmul", 0, 2), "operation='matmul' is not 'linear' or 'embedding'"),
        (((4, 8, 2), "linear", 0, 2), "size=(4, 8, 2) has 3 numbers, two are needed"),
        (((4, 8), "linear", 2, 2), "axis=2 of operation 'linear' is not 0 or 1"),
        (((4, 8), "embedding", 1, 2), "axis=1 of operation 'embedding' is not 0"),
        (((4, 8), "linear", 0, 4), "num_partitions=4, but the group has 2 ranks"),
        (((4, 8), "linear", 0), "num_partitions=1, but the group has 2 ranks"),
        (((4, 8), "linear", 0, "2"), "num_partitions='2', but the group has 2 ranks"),
        (((4, 8), "linear", 0, 2, None), "gather_out=None is not True or False"),
        (((4, 8), "linear", 0, 2, True, 3), "weight_attr=3 is no function that fills a tensor"),
        (
            ((4, 8), "linear", 0, 2, True, None, "zeros"),
            "bias_attr='zeros' is no function that fills a tensor, no True or False",
        ),
        (
            ((4, 8), "embedding", 0, 2, True, None, True),
            "bias_attr=True of operation 'embedding', which has no bias",
        ),
        (((6, 8), "linear", 1, 2), "the input of a column layer has 4 features, not 6"),
        (
            ((6, 8), "linear", 0, 2),
            "the input of a row layer has 4 features: neither 6, the whole, nor 3, the part of rank 1",
        ),
    ],
)
def test_each_wrong_argument_has_its_own_error(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        simulate(2, lambda group: split(torch.ones(2, 4), *arguments, group=group))
    assert str(caught.value) == f"split: {text}"


def test_an_owner_needs_a_name() -> None:
    for options in ({"owner": nn.Module()}, {"name": "up"}):
        with pytest.raises(UsageError, match="split: owner and name go together"):
            split(torch.ones(2, 4), (4, 8), "linear", **options)
    assert split(torch.ones(2, 4), (4, 8), "linear", bias_attr=False).shape == (2, 8)


@pytest.mark.parametrize(
    "again, text",
    [
        (
            ((4, 9), "linear", 1),
            "('linear', 1, 4, 8, True), and this call describes ('linear', 1, 4, 9, True)",
        ),
        (
            ((4, 8), "linear", 0),
            "('linear', 1, 4, 8, True), and this call describes ('linear', 0, 4, 8, True)",
        ),
        (((4, 8), "linear", 1, 1, False), "('linear', 1, 4, 8, True), and this call describes"),
    ],
)
def test_a_name_stands_for_one_layer(again: tuple[Any, ...], text: str) -> None:
    """Used again for another layer it would give the first one's numbers, and shapes that may fit."""
    owner = nn.Module()
    split(torch.ones(2, 4), (4, 8), "linear", 1, owner=owner, name="up")
    with pytest.raises(UsageError, match=re.escape(f"split: the owner's 'up' is {text}")):
        split(torch.ones(2, 4), *again, owner=owner, name="up")
    with pytest.raises(UsageError) as caught:
        split(torch.ones(2, 4), (4, 8), "linear", 1, bias_attr=False, owner=owner, name="up")
    assert str(caught.value) == (
        "split: the owner's 'up' has a bias, and this call's bias_attr=False describes another layer; give "
        "each layer its own name"
    )
    owner.norm = nn.LayerNorm(4)
    with pytest.raises(UsageError, match=re.escape("split: the owner's 'norm' is ('LayerNorm',)")):
        split(torch.ones(2, 4), (4, 8), "linear", 1, owner=owner, name="norm")


def test_what_is_no_size_no_name_and_no_number() -> None:
    x, owner = torch.ones(2, 4), nn.Module()
    for told, call in {
        "split: x must be a tensor, not list": lambda: split([1.0], (4, 8), "linear"),  # type: ignore[arg-type]
        "split: owner is a module and name a str, not None and 3": lambda: split(
            x,
            (4, 8),
            "linear",
            name=3,  # type: ignore[arg-type]
        ),
        "split: size=4 is no pair of numbers": lambda: split(x, 4, "linear"),  # type: ignore[arg-type]
        "split: name='forward' is no name for a new submodule of the owner": lambda: split(
            x, (4, 6), "linear", owner=owner, name="forward"
        ),
        "split: name='a.b' is no name for a new submodule of the owner": lambda: split(
            x, (4, 6), "linear", owner=owner, name="a.b"
        ),
        "split: a linear layer takes floating-point numbers, not torch.int64": lambda: split(
            x.long(), (4, 6), "linear"
        ),
        "ColumnParallelLinear: sections=8 is no sequence of sizes": lambda: ColumnParallelLinear(
            4,
            8,
            sections=8,  # type: ignore[arg-type]
        ),
    }.items():
        with pytest.raises(UsageError) as caught:
            call()
        assert str(caught.value) == told
