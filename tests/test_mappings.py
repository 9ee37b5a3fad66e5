"""The eight mappings: values, gradients, gradients of gradients, on any dim, cut and dtype."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autotp import mappings
from autotp.comm import Group, GroupOfOne, simulate
from autotp.diagnostic import UsageError
from autotp.placement import Deal, Shard, deal
from tests.conftest import as_rank

SIZE = 24
EIGHT = [name for name in mappings.MAPPINGS if name != "copy_shared"]


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def shared(tp: int) -> Deal:
    """Two units over tp ranks: the first ranks hold one together, the last rank the other."""
    return Deal(2, (*[(0, 1)] * (tp - 1), (1, 2)))


def shards(tp: int) -> dict[str, Shard | None]:
    """Every kind of cut of 24 elements."""
    return {
        "even or nearly": None,
        "uneven": Shard(0, Deal(SIZE, tuple(itertools.pairwise([0, *range(1, tp), SIZE])))),
        "groups": Shard(0, deal(8, tp), groups=3),
        "sections": Shard(0, sections=((14, deal(7, tp)), (6, deal(6, tp)), (4, deal(4, tp)))),
        "a whole section": Shard(0, sections=((20, deal(20, tp)), (4, None))),
        "shared": Shard(0, shared(tp)),
        "shared sections": Shard(0, sections=((16, deal(16, tp)), (8, shared(tp)))),
    }


def weight(rank: int) -> float:
    return 0.5 + rank


# Each takes x, the same on all ranks, to y, the same on all ranks; one process would do the second.
JOURNEYS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor, int], Tensor]]] = {
    "copy, reduce": (
        lambda x, group, cut: mappings.reduce(mappings.copy(x, group) ** 3 * weight(group.rank), group),
        lambda x, tp: x**3 * sum(map(weight, range(tp))),
    ),
    "share, reduce": (
        lambda x, group, cut: mappings.reduce(
            mappings.share(x**3, group) + mappings.copy(x, group) * weight(group.rank), group
        ),
        lambda x, tp: x**3 + x * sum(map(weight, range(tp))),
    ),
    "scatter, gather": (
        lambda x, group, cut: mappings.gather(mappings.scatter(x, group, **cut) ** 3, group, **cut),
        lambda x, tp: x**3,
    ),
    "slice, gather": (
        lambda x, group, cut: mappings.gather(
            mappings.slice(mappings.copy(x, group), group, **cut) ** 3, group, **cut
        ),
        lambda x, tp: x**3,
    ),
    "scatter, all_gather, reduce": (
        lambda x, group, cut: mappings.reduce(
            mappings.all_gather(mappings.scatter(x, group, **cut) ** 3, group, **cut) * weight(group.rank),
            group,
        ),
        lambda x, tp: x**3 * sum(map(weight, range(tp))),
    ),
    "copy, reduce_scatter, gather": (
        lambda x, group, cut: mappings.gather(
            mappings.reduce_scatter(mappings.copy(x, group) ** 3 * weight(group.rank), group, **cut) ** 2,
            group,
            **cut,
        ),
        lambda x, tp: (x**3 * sum(map(weight, range(tp)))) ** 2,
    ),
}


def orders(y: Tensor, x: Tensor, cotangent: Tensor) -> list[Tensor]:
    """y, its gradient, the gradient of the gradient's square, and once more."""
    found = [y]
    (first,) = torch.autograd.grad(y, x, cotangent, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(second.square().sum(), x)
    return [z.detach() for z in (*found, first, second, third)]


def travel(group: Group, journey: str, kind: str, dim: int) -> list[Tensor]:
    x = randn(1, 2, SIZE, 3).movedim(1, dim).requires_grad_()
    cotangent = randn(2, 2, SIZE, 3).movedim(1, dim)
    shard = shards(group.size)[kind]
    if shard is None and SIZE % group.size:
        shard = Shard(0, deal(SIZE, group.size))
    y = JOURNEYS[journey][0](x, group, {"dim": dim, "shard": shard})
    return orders(y, x, cotangent)


@pytest.mark.parametrize(
    "journey, kind",
    [
        (journey, kind)
        for journey in JOURNEYS
        for kind in shards(2)
        if kind == "uneven" or journey not in ("copy, reduce", "share, reduce")  # these two cut nothing
    ],
)
def test_values_and_gradients_of_every_order(run, journey: str, kind: str) -> None:
    for dim in (0, 1, -1):
        x = randn(1, 2, SIZE, 3).movedim(1, dim).requires_grad_()
        want = orders(JOURNEYS[journey][1](x, run.size), x, randn(2, 2, SIZE, 3).movedim(1, dim))
        for found in run(travel, journey, kind, dim):
            for a, b in zip(found, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def held(group: Group, kind: str) -> list[Tensor]:
    """Parameters that several ranks hold, each used differently by each of them."""
    shard = shards(group.size)[kind] or Shard(0, deal(SIZE, group.size))
    part = mappings.scatter(randn(1, SIZE, 3), group, shard=shard).requires_grad_()
    y = mappings.copy_shared(part, group, shard=shard) ** 3 * weight(group.rank)
    (first,) = torch.autograd.grad(y.sum(), part, create_graph=True)
    used = mappings.copy_shared(first, group, shard=shard)
    (second,) = torch.autograd.grad((used**2 * weight(group.rank)).sum(), part)
    return [mappings.gather(x.detach(), group, shard=shard) for x in (first, second)] + [
        first.detach()
        - mappings.scatter(mappings.gather(first.detach(), group, shard=shard), group, shard=shard)
    ]


@pytest.mark.parametrize("kind", shards(2))
def test_parameters_of_several_holders_have_the_sum_of_their_gradients(run, kind: str) -> None:
    shard = shards(run.size)[kind] or Shard(0, deal(SIZE, run.size))
    x = randn(1, SIZE, 3).requires_grad_()
    weights = torch.zeros(SIZE, 1, dtype=torch.float64)
    for rank in range(run.size):
        for start, stop in shard.ranges(SIZE, rank):
            weights[start:stop] += weight(rank)
    (first,) = torch.autograd.grad((x**3 * weights).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first**2 * weights).sum(), x)
    for a, b, difference in run(held, kind):
        torch.testing.assert_close(a, first.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(b, second, rtol=1e-10, atol=1e-10)
        assert torch.count_nonzero(difference) == 0  # the holders have the same bits


def each_alone(group: Group) -> dict[str, tuple[Tensor, Tensor]]:
    """Every mapping's own forward and backward on values that differ by rank."""
    rank, size = group.rank, group.size
    found = {}
    for name in EIGHT:
        local = name in ("gather", "all_gather")
        x = randn(rank, 2, 5 if local else 5 * size).requires_grad_()
        y = getattr(mappings, name)(x, group)
        y.backward(randn(10 + rank, *y.shape))
        found[name] = (y.detach(), x.grad)
    return found


def test_forward_and_backward_of_each_mapping(run) -> None:
    p = run.size
    wide = [randn(r, 2, 5 * p) for r in range(p)]
    narrow = [randn(r, 2, 5) for r in range(p)]
    d_wide = [randn(10 + r, 2, 5 * p) for r in range(p)]
    d_narrow = [randn(10 + r, 2, 5) for r in range(p)]

    def part(x: Tensor, r: int) -> Tensor:
        return x[:, 5 * r : 5 * r + 5]

    def embedded(x: Tensor, r: int) -> Tensor:
        return torch.cat([x if s == r else torch.zeros_like(x) for s in range(p)], 1)

    for r, found in enumerate(run(each_alone)):
        want = {
            "copy": (wide[r], sum(d_wide)),
            "reduce": (sum(wide), d_wide[r]),
            "gather": (torch.cat(narrow, 1), part(d_wide[r], r)),
            "scatter": (part(wide[r], r), torch.cat(d_narrow, 1)),
            "reduce_scatter": (part(sum(wide), r), torch.cat(d_narrow, 1)),
            "all_gather": (torch.cat(narrow, 1), part(sum(d_wide), r)),
            "share": (wide[r] if r == 0 else torch.zeros_like(wide[r]), d_wide[r]),
            "slice": (part(wide[r], r), embedded(d_narrow[r], r)),
        }
        assert list(found) == list(want)
        for name, pair in want.items():
            for a, b in zip(found[name], pair, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def shared_gradient(group: Group) -> list[Tensor]:
    """One gradient tensor goes to three places: writing into it would change the others."""
    a, b, c = (torch.ones(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    (mappings.copy(a, group) + mappings.copy(b, group) + c).backward(torch.ones(2, 3, dtype=torch.float64))
    return [a.grad, b.grad, c.grad]


def test_a_gradient_that_others_use_is_not_written_to(run) -> None:
    for grads in run(shared_gradient):
        assert [grad.unique().tolist() for grad in grads] == [[run.size], [run.size], [1]]


def awkward_gradients(group: Group) -> list[Tensor]:
    grads = []
    for loss in (
        lambda y: y.sum(),  # an expanded gradient
        lambda y: (y.t() @ torch.arange(8.0, dtype=torch.float64).view(4, 2)).sum(),  # a transposed one
        lambda y: y[:, ::2].sum(),
    ):
        x = randn(3, 4, 6).requires_grad_()
        loss(mappings.copy(x, group)).backward()
        grads.append(x.grad)
        x = randn(3, 4, 6).requires_grad_()
        loss(mappings.gather(mappings.scatter(x, group), group, shard=even(group, 6))).backward()
        grads.append(x.grad * group.size)
    return grads


def even(group: Group, size: int) -> Shard:
    return Shard(1, deal(size, group.size))


def test_expanded_and_non_contiguous_gradients(run) -> None:
    want = []
    for loss in (
        lambda y: y.sum(),
        lambda y: (y.t() @ torch.arange(8.0, dtype=torch.float64).view(4, 2)).sum(),
        lambda y: y[:, ::2].sum(),
    ):
        x = randn(3, 4, 6).requires_grad_()
        loss(x).backward()
        want += [x.grad * run.size] * 2
    for found in run(awkward_gradients):
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def values(group: Group) -> list[Any]:
    """A leaf that requires grad, non-contiguous and expanded inputs, other dtypes."""
    leaf = randn(group.rank, 3, 4).requires_grad_()
    kept = leaf.detach().clone()
    found: list[Any] = [mappings.reduce(leaf, group).detach(), torch.equal(leaf, kept)]
    found += [
        mappings.reduce(leaf.t(), group).detach(),
        mappings.reduce(leaf[0].expand(5, 4), group).detach(),
    ]
    for x in (
        torch.arange(60).view(12, 5).t(),
        torch.arange(60).view(5, 12) % 3 == 0,
        torch.arange(60.0).view(12, 5).t(),
        torch.arange(12).expand(5, 12),
    ):
        shard = Shard(1, Deal(12, tuple(itertools.pairwise([0, *range(2, group.size + 1), 12]))))
        part = mappings.scatter(x, group, shard=shard)
        back = mappings.gather(part, group, shard=shard)
        found.append(part.is_contiguous() and torch.equal(back, x) and back.dtype == x.dtype)
    return found


def test_leaves_strides_and_dtypes(run) -> None:
    total = sum(randn(r, 3, 4) for r in range(run.size))
    for first, kept, second, third, *rest in run(values):
        torch.testing.assert_close(first, total, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(second, total.t(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(third, total[0].expand(5, 4), rtol=1e-12, atol=1e-12)
        assert kept
        assert rest == [True] * 4


def in_place(group: Group) -> list[Any]:
    x = randn(group.rank, 3, 4).requires_grad_()
    fresh = x * 2
    y = mappings.reduce_(fresh, group)
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    plain = mappings.reduce(x * 2, group)
    (want,) = torch.autograd.grad((plain**3).sum(), x, create_graph=True)
    (want_second,) = torch.autograd.grad(want.square().sum(), x)
    alike = [torch.equal(y, plain), torch.equal(first, want), torch.equal(second, want_second)]
    with torch.no_grad():
        fresh = x * 2
        alike.append(mappings.reduce_(fresh, group) is fresh and torch.equal(fresh, plain))
        turned = (x * 2).t()
        alike.append(torch.equal(mappings.reduce_(turned, group), plain.t()))
    return alike


def test_reduce_in_place(run) -> None:
    assert run(in_place) == [[True] * 5] * run.size


def test_a_group_of_one_returns_the_input_itself() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    assert mappings.copy_shared(x, shard=Shard(0, deal(2, 1))) is x
    for name in EIGHT:
        assert getattr(mappings, name)(x, GroupOfOne()) is x
        assert getattr(mappings, name)(x) is x
        assert simulate(1, lambda group, name=name: getattr(mappings, name)(x, group) is x) == [True]


def test_gather_is_scatter_back_at_every_rank() -> None:
    """[XX, XX, X] from XXXXX and back, in the original order."""

    def parts(group: Group) -> list[int]:
        return mappings.scatter(torch.arange(12), group, shard=Shard(0, deal(4, 3), groups=3)).tolist()

    assert simulate(3, parts) == [[0, 1, 4, 5, 8, 9], [2, 6, 10], [3, 7, 11]]
    assert simulate(3, lambda g: mappings.scatter(torch.arange(5), g).tolist()) == [[0, 1], [2, 3], [4]]


def wrong(call: Callable[[Group], object], tp: int = 2) -> str:
    with pytest.raises(UsageError) as caught:
        simulate(tp, call)
    return str(caught.value)


def test_errors_name_the_dim_the_size_and_the_ranks() -> None:
    x = torch.zeros(3, 2, 5)
    assert wrong(lambda g: mappings.scatter(x, g, dim=1), 3) == (
        "scatter on dim 1: its size 2 is less than the 3 ranks"
    )
    assert wrong(lambda g: mappings.reduce_scatter(x, g, dim=-2), 3) == (
        "reduce_scatter on dim 1: its size 2 is less than the 3 ranks"
    )
    assert wrong(lambda g: mappings.scatter(x, g, dim=3)) == "scatter on dim 3: the value has 3 dims"
    for name in ("gather", "all_gather", "scatter", "slice", "reduce_scatter"):
        call = getattr(mappings, name)
        assert wrong(lambda g, f=call: f(x, g, dim=1.0)) == f"{name}: dim=1.0 is no dim of a tensor"
        assert wrong(lambda g, f=call: f(x, g, shard=3)) == f"{name}: shard=3 is no Shard"
    for name in EIGHT:
        call = getattr(mappings, name)
        assert wrong(lambda g, f=call: f([1.0], g)) == f"{name}: a tensor is mapped, not list"
    assert wrong(lambda g: mappings.gather(x, g, dim=-4)) == "gather on dim -4: the value has 3 dims"
    assert wrong(lambda g: mappings.slice(x, g, shard=Shard(2, deal(4, 2)))) == (
        "slice on dim 2: its size 5 does not fit shard(dim 2: 2 equal parts) over 2 ranks"
    )
    assert wrong(lambda g: mappings.slice(x, g, shard=Shard(2, deal(5, 3)))) == (
        "slice: shard(dim 2: 2+2+1 of 5) is for 3 ranks, the group has 2"
    )
    assert wrong(lambda g: mappings.gather(x, g, shard=Shard(2, deal(3, 2)))) == (
        "gather on dim 2: its local size 5 is not a part of shard(dim 2: 2+1 of 3) on rank 0 of 2"
    )
    assert (
        wrong(lambda g: mappings.gather(x[..., :0], g)) == "gather on dim 2: its size is 0 on each of 2 ranks"
    )
    sections = Shard(2, sections=((4, deal(4, 2)), (2, deal(2, 2))))
    assert wrong(lambda g: mappings.all_gather(x, g, shard=sections)) == (
        "all_gather on dim 2: its local size 5 is not a part of shard(dim 2: sections 4 in 2 equal parts, "
        "2 in 2 equal parts) on rank 0 of 2"
    )
    assert wrong(lambda g: mappings.gather(x, g, dim=2) if g.rank else mappings.gather(x, g, dim=0)) == (
        "the ranks do not make the same collective call: rank 0: all_gather(float32[3, 2, 5], dim=0, "
        "sizes=[3, 5]); rank 1: all_gather(float32[3, 2, 5], dim=2, sizes=[3, 5])"
    )


def compiled(group: Group, backend: str) -> list[tuple[Tensor, Tensor]]:
    torch._dynamo.reset()
    shard = Shard(1, deal(13, group.size))
    results = []
    x = randn(1, 4, 13)

    def function(x: Tensor) -> Tensor:
        part = mappings.scatter(mappings.reduce(mappings.copy(x, group) * 2, group), group, shard=shard)
        whole = mappings.all_gather(part.sin(), group, shard=shard)
        return mappings.gather(mappings.reduce_scatter(whole, group, shard=shard), group, shard=shard)

    for call in (function, torch.compile(function, fullgraph=True, backend=backend)):
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        y.sin().sum().backward()
        results += [y.detach(), leaf.grad]
    return results


@pytest.mark.slow
def test_compiled_in_one_graph(ranks) -> None:
    for y, dx, y_compiled, dx_compiled in ranks(2)(as_rank, quietly, compiled, "aot_eager"):
        assert torch.equal(y, y_compiled)
        assert torch.equal(dx, dx_compiled)


def quietly(group: Group, scenario: Callable[..., Any], *args: Any) -> Any:
    """torch 2.13 warns of its own way to trace an autograd.Function."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*should not be instantiated", category=DeprecationWarning)
        return scenario(group, *args)
