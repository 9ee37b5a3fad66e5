"""Linear layers that become column and row layers in place: shared heads, branches, subclasses."""

from __future__ import annotations

import copy
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
from tests.test_mappings import randn
from tests.test_nn_linear import F64, close, column, row, serial, whole


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


# ---- subclasses ----


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
