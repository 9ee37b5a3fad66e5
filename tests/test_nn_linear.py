"""Column and row layers against nn.Linear: slices, outputs, gradients, and what a module must survive."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp import mappings
from autotp.comm import Group, simulate
from autotp.diagnostic import UsageError
from autotp.nn import ColumnParallelLinear, RowParallelLinear
from autotp.placement import Deal, Shard, deal
from tests.conftest import as_rank
from tests.test_mappings import quietly, randn

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
    shard = layer.layouts.get(name)
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
    return [dx.detach(), x.grad, *steps(model, 6)]


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


def penalty(group: Group) -> list[Tensor]:
    model = nn.Sequential(
        column(group, 6, 9, gather_output=False), nn.Tanh(), row(group, 9, 4, input_is_parallel=True)
    )
    x = randn(5, 3, 6).requires_grad_()
    (dx,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    dx.square().sum().backward()
    return [
        dx.detach(),
        x.grad,
        whole(model[0], "weight"),
        whole(model[0], "bias"),
        whole(model[2], "weight"),
    ]


def test_double_backward(run) -> None:
    model = nn.Sequential(serial(6, 9), nn.Tanh(), serial(9, 4))
    x = randn(5, 3, 6).requires_grad_()
    (dx,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    dx.square().sum().backward()
    want = [dx.detach(), x.grad, model[0].weight.grad, model[0].bias.grad, model[2].weight.grad]
    for found in run(penalty):
        close(found, want)


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
        ((4, 8), {"init_method": None}, "init_method must be a function that fills a tensor, not None"),
    ],
)
def test_what_is_no_size_is_an_error_by_name(sizes: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        ColumnParallelLinear(*sizes, **options)
    assert str(caught.value) == f"ColumnParallelLinear: {text}"


# ---- adopted layers ----


def adopted(group: Group) -> list[Any]:
    first, second = serial(5, 9), serial(9, 4)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    names = [name for layer in (first, second) for name in layer.state_dict()]
    objects = [first, first.weight, first.bias, second.weight]
    seen: list[str] = []
    first.register_forward_hook(lambda *_: seen.append("forward"))
    second.register_full_backward_hook(lambda *_: seen.append("backward"))
    first.eval()
    shard = Shard(0, deal(9, group.size))
    ColumnParallelLinear.adopt(first, shard=shard, group=group)
    RowParallelLinear.adopt(second, shard=shard.at(1), group=group)
    for parameter, dim in ((first.weight, 0), (first.bias, 0), (second.weight, 1)):
        parameter.data = mappings.slice(parameter.data, group, shard=shard.at(dim))
    assert all(a is b for a, b in zip([first, first.weight, first.bias, second.weight], objects, strict=True))
    assert [name for layer in (first, second) for name in layer.state_dict()] == names
    assert (type(first), type(second)) == (ColumnParallelLinear, RowParallelLinear)
    assert (first.in_features, first.out_features, first.training, second.training) == (5, 9, False, True)
    x = randn(1, 3, 5).requires_grad_()
    y = second(first(x).tanh())
    y.square().sum().backward()
    optimizer.step()
    assert seen == ["forward", "backward"]
    return [y.detach(), x.grad, first.get_master_weight(), second.get_master_weight(), second.bias.detach()]


def test_adopting_a_layer_in_place(run) -> None:
    first, second = serial(5, 9), serial(9, 4)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    x = randn(1, 3, 5).requires_grad_()
    y = second(first(x).tanh())
    y.square().sum().backward()
    optimizer.step()
    want = [y.detach(), x.grad, first.weight.detach(), second.weight.detach(), second.bias.detach()]
    for found in run(adopted):
        close(found, want)


def test_only_the_exact_class_is_adopted() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    layer, shard = Scaled(4, 4), Shard(0, deal(4, 1))
    for cls in (ColumnParallelLinear, RowParallelLinear):
        with pytest.raises(UsageError) as caught:
            cls.adopt(layer, shard=shard, group=None)
        assert str(caught.value) == f"{cls.__name__} takes the place of an nn.Linear, not of Scaled"
    assert type(layer) is Scaled


def test_a_shard_that_does_not_fit_leaves_the_module_as_it_was() -> None:
    layer = nn.Linear(6, 4)
    fits = "is no cut of dim"
    for cls, shard, text in (
        (
            ColumnParallelLinear,
            Shard(1, deal(4, 2)),
            f"shard(dim 1: 2 equal parts) {fits} 0 of the weight, 4",
        ),
        (ColumnParallelLinear, Shard(0, deal(3, 2)), f"shard(dim 0: 2+1 of 3) {fits} 0 of the weight, 4"),
        (
            ColumnParallelLinear,
            Shard(0, deal(4, 4)),
            f"shard(dim 0: 4 equal parts) {fits} 0 of the weight, 4",
        ),
        (RowParallelLinear, Shard(0, deal(6, 2)), f"shard(dim 0: 2 equal parts) {fits} 1 of the weight, 6"),
    ):
        with pytest.raises(UsageError) as caught:
            simulate(2, lambda group, c=cls, s=shard: c.adopt(layer, shard=s, group=group))
        assert str(caught.value) == f"{cls.__name__}: {text} elements over 2 ranks"
        with pytest.raises(UsageError, match="a mesh is a DeviceMesh"):
            cls.adopt(layer, shard=shard, group="tp")
        assert type(layer) is nn.Linear


def kv_heads(tp: int) -> Deal:
    """Two kv heads on more ranks, as they are dealt: the ranks of one head hold all of it."""
    return {2: deal(2, 2), 3: Deal(2, ((0, 1), (0, 1), (1, 2)))}.get(
        tp, Deal(2, ((0, 1),) * 2 + ((1, 2),) * 2)
    )


def query_heads(tp: int) -> Deal:
    """Four query heads, two of each kv head, dealt to the ranks of that head."""
    return {3: Deal(4, ((0, 1), (1, 2), (2, 4)))}.get(tp, deal(4, tp))


def grouped(q: Tensor, k: Tensor, repeats: int) -> Tensor:
    """Scores of (tokens, heads, 3) queries against the key head of each."""
    return torch.einsum(
        "ahd,bhd->hab", q.unflatten(-1, (-1, 3)), k.unflatten(-1, (-1, 3)).repeat_interleave(repeats, 1)
    )


def fewer_key_heads_than_ranks(group: Group) -> list[Tensor]:
    q, k = nn.Linear(5, 12, **F64), nn.Linear(5, 6, **F64)
    for layer, dealt, seed in ((q, query_heads(group.size), 0), (k, kv_heads(group.size), 1)):
        source, shard = serial(5, layer.out_features, seed), Shard(0, dealt)
        ColumnParallelLinear.adopt(layer, shard=shard, group=group)
        for name in ("weight", "bias"):
            getattr(layer, name).data = mappings.scatter(getattr(source, name).detach(), group, shard=shard)
    x = randn(1, 7, 5).requires_grad_()
    queries, keys = q(x), k(x)
    scores = grouped(queries, keys, queries.shape[-1] // keys.shape[-1]).softmax(-1)
    heads = Shard(0, query_heads(group.size))
    mappings.gather(scores, group, shard=heads).backward(randn(2, 4, 7, 7))
    return [x.grad, *(whole(layer, name) for layer in (q, k) for name in ("weight", "bias"))]


def test_gradients_of_key_heads_that_several_ranks_hold(run) -> None:
    q, k = serial(5, 12), serial(5, 6, seed=1)
    x = randn(1, 7, 5).requires_grad_()
    grouped(q(x), k(x), 2).softmax(-1).backward(randn(2, 4, 7, 7))
    want = [x.grad, q.weight.grad, q.bias.grad, k.weight.grad, k.bias.grad]
    for found in run(fewer_key_heads_than_ranks):
        close(found, want)


def test_a_row_layer_refuses_columns_that_several_ranks_hold() -> None:
    shard = Shard(1, kv_heads(4))
    with pytest.raises(UsageError) as caught:
        simulate(4, lambda group: RowParallelLinear.adopt(nn.Linear(6, 4), shard=shard, group=group))
    assert str(caught.value) == (
        f"RowParallelLinear: {shard} gives some columns to several ranks, each of which would add them to "
        "the sum"
    )


def shared_copy_and_partial_sum(group: Group) -> list[Tensor]:
    """Two column layers behind one copy, two row branches with biases behind one reduce."""
    columns = [column(group, 5, 9, gather_output=False) for _ in range(2)]
    rows = [row(group, 9, 4, input_is_parallel=True) for _ in range(2)]
    for layer in columns:
        layer.copy_input = False
    for layer in rows:
        layer.reduce_output = False
    x = randn(1, 3, 5).requires_grad_()
    shared = mappings.copy(x, group)
    branches = [second(first(shared).tanh()) for first, second in zip(columns, rows, strict=True)]
    y = mappings.reduce(branches[0] + branches[1], group)
    y.square().sum().backward()
    return [y.detach(), x.grad, whole(columns[0], "weight"), whole(rows[0], "weight"), rows[1].bias.grad]


def test_one_copy_and_one_reduce_for_parallel_branches(run) -> None:
    columns, rows = [serial(5, 9), serial(5, 9)], [serial(9, 4), serial(9, 4)]
    x = randn(1, 3, 5).requires_grad_()
    y = rows[0](columns[0](x).tanh()) + rows[1](columns[1](x).tanh())
    y.square().sum().backward()
    want = [y.detach(), x.grad, columns[0].weight.grad, rows[0].weight.grad, rows[1].bias.grad]
    for found in run(shared_copy_and_partial_sum):
        close(found, want)


# ---- what a module must survive ----


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes of the activations that a forward keeps for backward: parameters do not count."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[id(tensor)] = tensor.numel() * tensor.element_size()
            held.append(tensor)
        return tensor

    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x).sum()
    return sum(kept.values())


def saved(group: Group) -> list[tuple[int, int]]:
    found = []
    for frozen in (False, True):
        for layer, plain, width in (
            (column(group, 6, 12, gather_output=False), serial(6, 12), 6),
            (column(group, 6, 12, gather_output=True), serial(6, 12), 6),
            (row(group, 12, 6, input_is_parallel=False), serial(12, 6), 12),
        ):
            for module in (layer, plain):
                module.weight.requires_grad_(not frozen)
            x = randn(1, 10, width).requires_grad_()
            found.append((saved_bytes(layer, x), saved_bytes(plain, x)))
    return found


def test_saved_activations_are_no_more_than_those_of_nn_linear(run) -> None:
    for found in run(saved):
        trained, frozen = found[:3], found[3:]
        assert all(0 < ours <= theirs for ours, theirs in trained)
        assert frozen == [(0, 0)] * 3


def survivors(group: Group) -> list[str]:
    layers = [
        column(group, 6, 18, stride=3, gather_output=False),
        row(group, 18, 4, sections=[6, 6, 6], input_is_parallel=True),
    ]
    x = randn(1, 2, 6)
    want = layers[1](layers[0](x))
    state = [list(layer.state_dict()) for layer in layers]
    for again in (copy.deepcopy(layers), pickle.loads(pickle.dumps(layers))):
        close(again[1](again[0](x)), want)
        assert [list(layer.state_dict()) for layer in again] == state == [["weight", "bias"]] * 2
        assert again[0].layouts == layers[0].layouts
        assert again[0].weight is not layers[0].weight
    close(nn.Sequential(*layers)(x), want)
    layers[0].double().requires_grad_(False)
    return [repr(layer) for layer in layers]


def test_deepcopy_pickle_sequential_and_repr(run) -> None:
    p = run.size
    assert (
        run(survivors)
        == [
            [
                f"ColumnParallelLinear(in_features=6, out_features=18, bias=True, tp={p})",
                f"RowParallelLinear(in_features=18, out_features=4, bias=True, tp={p})",
            ]
        ]
        * p
    )


def autocast(group: Group) -> list[Tensor]:
    first = column(group, 6, 9, gather_output=False).float()
    second = row(group, 9, 4, input_is_parallel=True).float()
    x = randn(1, 3, 6).float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = first(x)
        y = second(hidden.tanh())
    assert hidden.dtype == y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    return [y.detach(), x.grad, whole(first, "weight"), second.bias.grad]


def test_autocast_has_the_dtypes_and_values_of_the_serial_run(run) -> None:
    first, second = serial(6, 9).float(), serial(9, 4).float()
    x = randn(1, 3, 6).float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = second(first(x).tanh())
    y.float().square().sum().backward()
    want = [y.detach(), x.grad, first.weight.grad, second.bias.grad]
    for found in run(autocast):
        for a, b in zip(found, want, strict=True):
            assert a.dtype == b.dtype
            scale = b.abs().max().item()
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.05 * scale)


def checkpointed(group: Group, reentrant: bool | None) -> list[Tensor]:
    model = nn.Sequential(
        column(group, 6, 9, gather_output=False), nn.Tanh(), row(group, 9, 6, input_is_parallel=True)
    )
    x = randn(1, 3, 6).requires_grad_()
    if reentrant is None:
        y = model(model(x))
    else:
        from torch.utils.checkpoint import checkpoint

        y = checkpoint(model, checkpoint(model, x, use_reentrant=reentrant), use_reentrant=reentrant)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(run, reentrant: bool) -> None:
    for found, want in zip(run(checkpointed, reentrant), run(checkpointed, None), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=str)
def test_optimizers(run, options: dict[str, bool]) -> None:
    want = optimised(None, options)
    for found in run(optimised, options):
        close(found, want)


def optimised(group: Group | None, options: dict[str, bool]) -> list[Tensor]:
    if group is None:
        layers: list[Any] = [serial(6, 9), serial(9, 4)]
    else:
        layers = [column(group, 6, 9, gather_output=False), row(group, 9, 4, input_is_parallel=True)]
    optimizer = torch.optim.AdamW([p for layer in layers for p in layer.parameters()], lr=0.1, **options)
    for step in range(3):
        layers[1](layers[0](randn(step, 5, 6)).tanh()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    full = [layer.weight if group is None else layer.get_master_weight() for layer in layers]
    return [x.detach() for x in (*full, layers[1].bias)]


def compiled(group: Group) -> list[Tensor]:
    torch._dynamo.reset()
    model = nn.Sequential(
        column(group, 6, 9, gather_output=False),
        nn.Tanh(),
        row(group, 9, 5, input_is_parallel=True),
        column(group, 5, 8, sections=[3, 5]),
        row(group, 8, 3, stride=2),
    )
    x = randn(1, 3, 6).requires_grad_()
    model(x).square().sum().backward()
    want = [x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    x = randn(1, 3, 6).requires_grad_()
    torch.compile(model, fullgraph=True, backend="aot_eager")(x).square().sum().backward()
    close([x.grad, *(p.grad for p in model.parameters())], want)
    return want


@pytest.mark.slow
def test_compiled_in_one_graph(ranks) -> None:
    ranks(2)(as_rank, quietly, compiled)


def test_meta_device_and_dtype() -> None:
    layer = ColumnParallelLinear(4, 6, device="meta", dtype=torch.bfloat16)
    assert layer.weight.is_meta
    assert layer.weight.dtype == torch.bfloat16
    made = layer.to_empty(device="cpu")
    torch.manual_seed(0)
    made.reset_parameters()
    torch.manual_seed(0)
    want = nn.init.xavier_normal_(torch.empty(6, 4, dtype=torch.bfloat16))
    assert torch.equal(made.weight, want)
    assert RowParallelLinear(4, 6, bias=False).bias is None


class Named(nn.Linear):
    """A class of its own for how it is made, as models have it."""

    def __init__(self, features: int, wide: int) -> None:
        super().__init__(features, wide)
        self.note = "mine"

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)

    def twice(self) -> int:
        return 2 * self.out_features


class Sparse(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class Counting(nn.Linear):
    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args) * 2


class Mixed(nn.Module):
    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


class WithMixed(nn.Linear, Mixed):
    pass


class Wide(nn.Linear):
    in_features = 3


def test_a_subclass_that_adds_nothing_keeps_its_class() -> None:
    whole = nn.Sequential(Named(6, 9), nn.Tanh(), Named(9, 6))
    assert autotp.verify(whole, {"0": "column", "2": "row"}, tp=2).ok

    def rank(group: Group) -> bool:
        layer = autotp.shard(copy.deepcopy(whole), {"0": "column", "2": "row"}, group)[0]
        again = copy.deepcopy(layer)
        assert isinstance(layer, Named) and isinstance(layer, ColumnParallelLinear)
        assert (type(layer).__name__, layer.note, layer.twice()) == ("Named", "mine", 18)
        return torch.equal(again(torch.ones(2, 6)), layer(torch.ones(2, 6)))

    assert simulate(2, rank) == [True, True]


@pytest.mark.parametrize("kind", [Sparse, Counting, WithMixed, Wide])
def test_a_subclass_that_may_compute_otherwise_is_none(kind: type[nn.Linear]) -> None:
    analysis = autotp.analyze(nn.Sequential(kind(6, 9)), {"0": "column"}, tp=2)
    assert "AT206" in {d.code for d in analysis.diagnostics}
