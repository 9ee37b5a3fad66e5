"""Column and row layers against nn.Linear: slices, outputs, gradients, masters, mistakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotp import mappings
from autotp.comm import Group, simulate
from autotp.diagnostic import UsageError
from autotp.nn import ColumnParallelLinear, RowParallelLinear
from tests.test_mappings import randn

F64: dict[str, Any] = {"dtype": torch.float64}


def fill(module: nn.Module, seed: int = 0) -> nn.Module:
    """Random biases: zero ones hide a bias that is added once per rank."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    return module


def column(group: Group, *args: Any, **options: Any) -> ColumnParallelLinear:
    """A column layer with the weight and bias that `serial` has for these sizes."""
    layer = ColumnParallelLinear(*args, group=group, **F64, **options)
    return load(layer, serial(*args[:2]))


def row(group: Group, *args: Any, **options: Any) -> RowParallelLinear:
    return load(RowParallelLinear(*args, group=group, **F64, **options), serial(*args[:2]))


def serial(inputs: int, outputs: int, seed: int = 0) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, **F64)
    with torch.no_grad():
        layer.weight.copy_(randn(100 + seed, outputs, inputs))
        layer.bias.copy_(randn(200 + seed, outputs))
    return layer


def load(layer: Any, source: nn.Linear) -> Any:
    """Cut the serial layer's parameters by hand: ranges of rows or columns, not by our slicing."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            whole = getattr(source, name).detach()
            shard = layer.layouts.get(name)
            if shard is not None:
                index = torch.arange(whole.shape[shard.dim])
                kept = torch.cat([index[a:b] for a, b in shard.ranges(len(index), layer.group.rank)])
                whole = whole.index_select(shard.dim, kept)
            parameter.copy_(whole)
    return layer


def whole(layer: Any, name: str) -> Tensor:
    """The full gradient of a parameter."""
    gradient = getattr(layer, name).grad
    shard = getattr(layer, "layouts", {}).get(name)
    return gradient if shard is None else mappings.gather(gradient, layer.group, shard=shard)


def close(found: Any, want: Any) -> None:
    torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-10)


# ---- one layer ----

CUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stride 2": {"stride": 2},
    "stride 3": {"stride": 3},
    "sections": {"sections": [7, 4, 13]},
}


def one_column(group: Group, inputs: int, outputs: int, options: dict[str, Any]) -> list[Tensor]:
    layer = column(group, inputs, outputs, **options)
    x = randn(1, 3, 2, inputs).requires_grad_()
    y = layer(x)
    if not layer.gather_output:
        assert y.shape[-1] == layer.weight.shape[0] == layer.bias.shape[0]
        y = mappings.gather(y, group, dim=-1, shard=layer.shard)
    y.backward(randn(2, *y.shape))
    return [y.detach(), x.grad, whole(layer, "weight"), whole(layer, "bias"), layer.get_master_weight()]


def one_row(group: Group, inputs: int, outputs: int, options: dict[str, Any]) -> list[Tensor]:
    layer = row(group, inputs, outputs, **options)
    x = randn(1, 3, 2, inputs).requires_grad_()
    fed = mappings.scatter(x, group, dim=-1, shard=layer.shard) if layer.input_is_parallel else x
    y = layer(fed)
    y.backward(randn(2, *y.shape))
    return [y.detach(), x.grad, whole(layer, "weight"), layer.bias.grad, layer.get_master_weight()]


def one_serial(inputs: int, outputs: int) -> list[Tensor]:
    layer = serial(inputs, outputs)
    x = randn(1, 3, 2, inputs).requires_grad_()
    y = layer(x)
    y.backward(randn(2, *y.shape))
    return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad, layer.weight.detach()]


@pytest.mark.parametrize("overlap", [False, True])
def test_double_backward_and_training_with_and_without_overlap(run, overlap: bool) -> None:
    model = nn.Sequential(serial(6, 9), nn.Tanh(), serial(9, 4))
    want = overlapped_steps(model)
    for found in run(overlapped, overlap):
        close(found, want)


def overlapped(group: Group, overlap: bool) -> list[Tensor]:
    first = column(group, 6, 9, gather_output=False, overlap=overlap)
    return overlapped_steps(nn.Sequential(first, nn.Tanh(), row(group, 9, 4, input_is_parallel=True)))


def overlapped_steps(model: nn.Module) -> list[Tensor]:
    x = randn(5, 3, 6).requires_grad_()
    (dx,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    dx.square().sum().backward()
    of_weights = [whole(model[0], "weight"), whole(model[0], "bias"), whole(model[2], "weight")]
    return [dx.detach(), x.grad, *of_weights, *steps(model, 6)]


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_layer_equals_nn_linear(run, kind: str, cut: str, flag: bool) -> None:
    if kind == "column":
        every = run(one_column, 5, 24, CUTS[cut] | {"gather_output": flag})
        want = one_serial(5, 24)
    else:
        every = run(one_row, 24, 5, CUTS[cut] | {"input_is_parallel": flag})
        want = one_serial(24, 5)
    for found in every:
        close(found, want)


@pytest.mark.parametrize("sizes", [(13, 17, 7), (8, 129, 5)])
def test_odd_sizes_and_training(run, sizes: tuple[int, int, int]) -> None:
    """Five SGD steps of column, tanh, row, with gradients of the input, equal the serial net's."""
    want = train_serial(sizes)
    for found in run(train, sizes):
        close(found, want)


def train(group: Group, sizes: tuple[int, int, int]) -> list[Tensor]:
    first = column(group, *sizes[:2], gather_output=False)
    second = row(group, *sizes[1:], input_is_parallel=True)
    losses = steps(nn.Sequential(first, nn.Tanh(), second), sizes[0])
    return [*losses, first.get_master_weight(), second.get_master_weight(), second.bias.detach()]


def train_serial(sizes: tuple[int, int, int]) -> list[Tensor]:
    first, second = serial(*sizes[:2]), serial(*sizes[1:])
    losses = steps(nn.Sequential(first, nn.Tanh(), second), sizes[0])
    return [*losses, first.weight.detach(), second.weight.detach(), second.bias.detach()]


def steps(model: nn.Module, inputs: int) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    found = []
    for step in range(5):
        optimizer.zero_grad()
        x = randn(step, 6, inputs).requires_grad_()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        found += [loss.detach(), x.grad]
    return found


# ---- slices ----


def test_stride_deals_the_chunks_in_turn() -> None:
    def rows(layer: str, stride: int) -> list[list[float]]:
        def own(group: Group) -> list[float]:
            def count(master: Tensor) -> None:
                dim = 0 if layer == "column" else 1
                master.copy_(torch.arange(8.0).view(-1, 1) if dim == 0 else torch.arange(8.0))

            if layer == "column":
                made = ColumnParallelLinear(3, 8, stride=stride, init_method=count, group=group)
                return made.weight[:, 0].tolist()
            return RowParallelLinear(8, 3, stride=stride, init_method=count, group=group).weight[0].tolist()

        return simulate(2, own)

    for layer in ("column", "row"):
        assert rows(layer, 1) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert rows(layer, 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]
        assert rows(layer, 4) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def masters(group: Group, init: str, seed_by_rank: bool) -> list[Any]:
    torch.manual_seed(7 + (group.rank if seed_by_rank else 0))
    init_method = getattr(nn.init, init)
    layers = [
        ColumnParallelLinear(12, 18, init_method=init_method, keep_master_weight_for_test=True, group=group),
        RowParallelLinear(18, 12, init_method=init_method, keep_master_weight_for_test=True, group=group),
    ]
    for layer in layers:
        assert torch.equal(layer.master_weight, layer.get_master_weight())
        assert torch.count_nonzero(layer.bias) == 0
        assert torch.equal(mappings.scatter(layer.master_weight, group, shard=layer.shard), layer.weight)
    return [layer.master_weight for layer in layers] + [torch.rand(2)]


@pytest.mark.parametrize("init", ["xavier_normal_", "kaiming_uniform_", "orthogonal_"])
def test_the_master_is_that_of_the_serial_layer_at_every_tp(run, init: str) -> None:
    torch.manual_seed(7)
    want = [torch.empty(18, 12), torch.empty(12, 18)]
    for master in want:
        getattr(nn.init, init)(master)
    for found in run(masters, init, False):
        assert all(
            torch.equal(a, b) for a, b in zip(found, [*want, torch.rand(2)], strict=False) if a.ndim > 1
        )


def test_masters_are_alike_on_ranks_that_were_seeded_differently(run) -> None:
    every = run(masters, "xavier_normal_", True)
    for first, second, after in every[1:]:
        assert torch.equal(first, every[0][0])
        assert torch.equal(second, every[0][1])
        assert not torch.equal(after, every[0][2])


def test_a_master_is_kept_only_when_asked_for() -> None:
    assert ColumnParallelLinear(4, 4).master_weight is None
    assert RowParallelLinear(4, 4).master_weight is None


def test_wrong_sizes_are_errors_by_name_and_number() -> None:
    def message(make: Callable[[Group], object], tp: int = 2) -> str:
        with pytest.raises(UsageError) as caught:
            simulate(tp, make)
        return str(caught.value)

    assert message(lambda g: ColumnParallelLinear(4, 8, stride=3, group=g)) == (
        "ColumnParallelLinear: out_features=8 cannot be cut into stride=3 equal sections"
    )
    assert message(lambda g: RowParallelLinear(8, 4, stride=3, group=g)) == (
        "RowParallelLinear: in_features=8 cannot be cut into stride=3 equal sections"
    )
    assert message(lambda g: ColumnParallelLinear(4, 8, stride=8, group=g)) == (
        "ColumnParallelLinear: a section of 1 cannot be dealt to 2 ranks"
    )
    assert message(lambda g: RowParallelLinear(3, 8, group=g), 4) == (
        "RowParallelLinear: in_features=3 cannot be dealt to 4 ranks"
    )
    assert message(lambda g: ColumnParallelLinear(4, 8, sections=[4, 3], group=g)) == (
        "ColumnParallelLinear: sections=[4, 3] add up to 7, not out_features=8"
    )
    assert message(lambda g: ColumnParallelLinear(4, 8, sections=[4, 4], stride=2, group=g)) == (
        "ColumnParallelLinear: stride=2 and sections=[4, 4] exclude each other"
    )
    assert message(lambda g: ColumnParallelLinear(4, 8, stride=0, group=g)) == (
        "ColumnParallelLinear: stride must be at least 1, not 0"
    )
    assert message(lambda g: RowParallelLinear(8, 4, input_is_parallel=True, group=g)(torch.ones(2, 8))) == (
        "RowParallelLinear: the input has 8 features, in_features=8, rank 1 of 2 holds 4 "
        "(input_is_parallel=True)"
    )
    assert message(lambda g: RowParallelLinear(8, 4, group=g)(torch.ones(2, 6))) == (
        "RowParallelLinear: the input has 6 features, in_features=8 (input_is_parallel=False)"
    )
    assert message(lambda g: RowParallelLinear(8, 4, group=g)(torch.ones(()))) == (
        "RowParallelLinear: the input has no dims, in_features=8 (input_is_parallel=False)"
    )
    assert message(lambda g: ColumnParallelLinear(4, 8, group=g)(torch.ones(2, 6))) == (
        "ColumnParallelLinear: the input has 6 features, in_features=4"
    )


@pytest.mark.parametrize(
    "sizes, options, text",
    [
        (("4", 8), {}, "in_features must be a whole number, not '4'"),
        ((4, 8.0), {}, "out_features must be a whole number, not 8.0"),
        ((4, True), {}, "out_features must be a whole number, not True"),
        ((-4, 8), {}, "in_features must not be negative, and is -4"),
        ((4, 8), {"stride": 2.0}, "stride must be a whole number, not 2.0"),
        ((4, 8), {"sections": [4.0, 4.0]}, "sections=[4.0, 4.0] are not whole numbers"),
        ((4, 8), {"bias": "no"}, "bias must be True or False, not 'no'"),
        ((4, 8), {"gather_output": "False"}, "gather_output must be True or False, not 'False'"),
        (
            (4, 8),
            {"keep_master_weight_for_test": 1},
            "keep_master_weight_for_test must be True or False, not 1",
        ),
        ((4, 8), {"dtype": "float32"}, "dtype must be a floating-point torch.dtype, not 'float32'"),
        ((4, 8), {"dtype": torch.int64}, "dtype must be a floating-point torch.dtype, not torch.int64"),
        ((4, 8), {"init_method": None}, "init_method must be a function that fills a tensor, not None"),
    ],
)
def test_what_is_no_size_is_an_error_by_name(sizes: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        ColumnParallelLinear(*sizes, **options)
    assert str(caught.value) == f"ColumnParallelLinear: {text}"


def test_a_row_layers_flag_is_one() -> None:
    with pytest.raises(UsageError) as caught:
        RowParallelLinear(4, 8, input_is_parallel="False")
    assert str(caught.value) == "RowParallelLinear: input_is_parallel must be True or False, not 'False'"


def halves_and_heads(group: Group) -> list[Tensor]:
    """A GLU's halves, and q, k, v of unequal sizes that do not divide: the masters, in their own order."""

    def count(master: Tensor) -> None:
        master.copy_(torch.arange(master.numel()).view(master.shape))

    kinds = {"init_method": count, "keep_master_weight_for_test": True, "group": group}
    found = []
    for options in ({"stride": 2}, {"sections": [13, 4, 5]}):
        for layer in (
            ColumnParallelLinear(3, 22, **options, **kinds),
            RowParallelLinear(22, 3, **options, **kinds),
        ):
            gathered, cut = layer.get_master_weight(), layer.layouts["weight"]
            assert torch.equal(gathered, layer.master_weight)
            pieces = [22 // 2] * 2 if "stride" in options else options["sections"]
            local = [size // group.size + (group.rank < size % group.size) for size in pieces]
            assert layer.weight.shape[cut.dim] == sum(local)
            whole = layer.master_weight if cut.dim == 0 else layer.master_weight.T
            mine = layer.weight if cut.dim == 0 else layer.weight.T
            for size, own, part in zip(pieces, local, whole.split(pieces), strict=True):
                before = group.rank * (size // group.size) + min(group.rank, size % group.size)
                assert torch.equal(mine[:own], part[before : before + own])  # of each section, by hand
                mine = mine[own:]
            found.append(gathered)
    return found


def test_masters_of_halves_and_of_unequal_heads_keep_their_order(run) -> None:
    want = torch.arange(66.0)
    for found in run(halves_and_heads):
        assert all(torch.equal(a.flatten(), want) for a in found)
