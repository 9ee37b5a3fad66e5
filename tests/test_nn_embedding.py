"""Parallel embeddings, by rows and by columns, against nn.Embedding: options keep their global meaning."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotp import mappings
from autotp.comm import Group, simulate
from autotp.diagnostic import UsageError
from autotp.nn import ParallelEmbedding, VocabParallelEmbedding
from autotp.nn.lookup import lookup
from autotp.placement import Shard, deal
from tests.conftest import as_rank
from tests.test_mappings import quietly, randn
from tests.test_nn_linear import close, load
from tests.test_nn_linear_survives import saved_bytes

VOCABULARY, WIDTH = 13, 5
IDS = [[0, 1, 7, 12], [12, 5, 7, 7], [3, 4, 6, 11]]


def serial(**options: Any) -> nn.Embedding:
    layer = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64, **options)
    with torch.no_grad():
        layer.weight.copy_(randn(1, VOCABULARY, WIDTH))
    return layer


def parallel(
    group: Group, cls: type[nn.Embedding] = VocabParallelEmbedding, **options: Any
) -> VocabParallelEmbedding:
    return load(cls(VOCABULARY, WIDTH, group=group, dtype=torch.float64, **options), serial())


def results(call: Any, ids: Tensor, layer: Any = None) -> list[Tensor]:
    """Output, gradient after two uses, and the weight, which max_norm may have changed."""
    layer = call if layer is None else layer
    y = call(ids)
    y.backward(randn(2, *y.shape))
    call(ids[:1]).square().sum().backward()
    gradient = layer.weight.grad
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    found = [y.detach(), gradient, layer.weight.detach()]
    if isinstance(layer, VocabParallelEmbedding | ParallelEmbedding):
        found[1:] = [mappings.gather(x, layer.group, shard=layer.shard) for x in found[1:]]
    return found


def scenario(group: Group, cls: type[nn.Embedding], options: dict[str, Any]) -> list[Tensor]:
    return results(parallel(group, cls, **options), torch.tensor(IDS))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"padding_idx": 0},
    {"padding_idx": 7},
    {"padding_idx": -1},
    {"padding_idx": -VOCABULARY},
    {"max_norm": 1.0},
    {"max_norm": 1.5, "norm_type": 1.0},
    {"max_norm": 0.5, "norm_type": float("inf"), "padding_idx": 7},
    {"max_norm": 2.5, "norm_type": 0.0},
    {"max_norm": 0.2, "norm_type": -1.0},
    {"scale_grad_by_freq": True},
    {"scale_grad_by_freq": True, "padding_idx": 7},
    {"sparse": True},
    {"sparse": True, "padding_idx": 12},
    {"sparse": True, "scale_grad_by_freq": False, "max_norm": 2.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("cls", [VocabParallelEmbedding, ParallelEmbedding])
def test_every_option_has_its_global_meaning(run, cls: type[nn.Embedding], options: dict[str, Any]) -> None:
    want = results(serial(**options), torch.tensor(IDS))
    for found in run(scenario, cls, options):
        close(found, want)


def tables_of_every_size(group: Group) -> list[Tensor]:
    found = []
    for vocabulary in (group.size, 5, 8, 50):
        source = nn.Embedding(vocabulary, 3, dtype=torch.float64)
        with torch.no_grad():
            source.weight.copy_(randn(vocabulary, vocabulary, 3))
        layer = load(VocabParallelEmbedding(vocabulary, 3, group=group, dtype=torch.float64), source)
        for ids in (
            torch.arange(vocabulary),
            torch.tensor(vocabulary - 1),
            torch.empty(0, 2, dtype=torch.int64),
        ):
            found.append(layer(ids).detach() - source(ids).detach())
        found.append(layer(torch.arange(vocabulary, dtype=torch.int32)).detach() - source.weight.detach())
    return found


def test_uneven_tables_and_shapes_of_ids(run) -> None:
    for found in run(tables_of_every_size):
        assert all(torch.count_nonzero(x) == 0 for x in found)


def out_of_range(group: Group, bad: int, check_ids: bool) -> tuple[str, Any]:
    layer = parallel(group, check_ids=check_ids)
    try:
        y = layer(torch.tensor([1, bad]))
    except IndexError as error:
        return "IndexError", str(error)
    y.sum().backward()
    return "rows", [y[1].tolist(), mappings.gather(layer.weight.grad, group, shard=layer.shard).sum().item()]


@pytest.mark.parametrize("bad", [VOCABULARY, 99, -1, -VOCABULARY])
def test_ids_out_of_range_raise_on_every_rank_as_in_nn_embedding(ranks, bad: int) -> None:
    with pytest.raises(IndexError) as caught:
        serial()(torch.tensor([1, bad]))
    assert ranks(2)(as_rank, out_of_range, bad, True) == [("IndexError", str(caught.value))] * 2
    with pytest.raises(IndexError):
        simulate(3, lambda group: parallel(group)(torch.tensor([1, bad])))
    zeros = [[0.0] * WIDTH, float(WIDTH)]
    assert ranks(2)(as_rank, out_of_range, bad, False) == [("rows", zeros)] * 2
    assert simulate(3, lambda group: out_of_range(group, bad, False)) == [("rows", zeros)] * 3


def masters(group: Group) -> list[Tensor]:
    layer = VocabParallelEmbedding(11, 4, padding_idx=-3, keep_master_weight_for_test=True, group=group)
    other = ParallelEmbedding(11, 4, init_method=nn.init.normal_, group=group)
    assert torch.equal(layer.master_weight, layer.get_master_weight())
    assert other.master_weight is None
    assert layer.padding_idx == 8
    return [layer.master_weight, other.get_master_weight()]


def unchecked(group: Group, options: dict[str, Any]) -> list[Tensor]:
    layer = parallel(group, check_ids=False, **options)
    y = layer(torch.tensor([3, -1, VOCABULARY, 12, 2**40]))
    y.square().sum().backward()
    gradient = layer.weight.grad
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    return [y.detach(), mappings.gather(gradient, group, shard=layer.shard)]


@pytest.mark.parametrize("options", [{}, {"padding_idx": -1}, {"max_norm": 1.0, "sparse": True}], ids=str)
def test_ids_that_are_not_checked_give_zeros_and_no_gradient(run, options: dict[str, Any]) -> None:
    """For CUDA graphs, where no id can be looked at: those of the vocabulary are as ever."""
    plain = serial(**options)
    rows = plain(torch.tensor([3, 12]))
    rows.square().sum().backward()
    gradient = plain.weight.grad
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    want = torch.zeros(5, WIDTH, dtype=torch.float64)
    want[[0, 3]] = rows.detach()
    for found in run(unchecked, options):
        close(found, [want, gradient])


def test_the_master_is_that_of_one_process_with_its_padding_row_zero(run) -> None:
    torch.manual_seed(0)
    first = nn.init.xavier_normal_(torch.empty(11, 4))
    first[8] = 0
    second = nn.init.normal_(torch.empty(11, 4))
    for found in run(masters):
        assert torch.equal(found[0], first)
        assert torch.equal(found[1], second)


def adopted(group: Group) -> list[Tensor]:
    layer = serial(padding_idx=7)
    weight, seen = layer.weight, []
    layer.register_forward_hook(lambda *_: seen.append(1))
    shard = Shard(0, deal(VOCABULARY, group.size))
    VocabParallelEmbedding.adopt(layer, shard=shard, group=group)
    weight.data = mappings.slice(weight.data, group, shard=shard)
    assert type(layer) is VocabParallelEmbedding
    assert layer.weight is weight
    found = results(layer, torch.tensor(IDS))
    assert len(seen) == 2
    assert layer.num_embeddings == VOCABULARY
    return found


def test_adopting_an_embedding_in_place(run) -> None:
    want = results(serial(padding_idx=7), torch.tensor(IDS))
    for found in run(adopted):
        close(found, want)


def double_backward(group: Group | None) -> list[Tensor]:
    layer = serial() if group is None else parallel(group)
    y = layer(torch.tensor(IDS))
    cotangent = randn(4, *y.shape).requires_grad_()
    (gradient,) = torch.autograd.grad((y * cotangent).sum(), layer.weight, create_graph=True)
    loss = gradient.square().sum()
    return [torch.autograd.grad(loss, cotangent)[0]]  # summed over the ranks by reduce's own backward


def test_double_backward(run) -> None:
    want = double_backward(None)
    for found in run(double_backward):
        close(found, want)


def survivors(group: Group) -> str:
    layer = parallel(group, padding_idx=3, max_norm=2.0)
    ids = torch.tensor(IDS)
    want = layer(ids)
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(again(ids), want)
        assert again.layouts == layer.layouts
    assert list(layer.state_dict()) == ["weight"]
    plain = parallel(group)
    assert saved_bytes(plain, ids) <= saved_bytes(serial(), ids)
    plain.requires_grad_(False)
    assert saved_bytes(nn.Sequential(plain, nn.Linear(WIDTH, 2, dtype=torch.float64)), ids) > 0
    return repr(layer)


def test_deepcopy_pickle_repr_and_saved_activations(run) -> None:
    text = f"VocabParallelEmbedding(13, 5, padding_idx=3, max_norm=2.0, tp={run.size})"
    assert run(survivors) == [text] * run.size


def test_mistakes_are_named() -> None:
    def message(call) -> str:
        with pytest.raises(UsageError) as caught:
            simulate(2, call)
        return str(caught.value)

    assert message(lambda g: VocabParallelEmbedding(8, 4.0, group=g)) == (
        "VocabParallelEmbedding: embedding_dim must be a whole number, not 4.0"
    )
    assert message(lambda g: ParallelEmbedding(8, 4, padding_idx=1.0, group=g)) == (
        "ParallelEmbedding: padding_idx must be a whole number, not 1.0"
    )
    assert message(lambda g: VocabParallelEmbedding(1, 4, group=g)) == (
        "VocabParallelEmbedding: num_embeddings=1 cannot be dealt to 2 ranks"
    )
    assert message(lambda g: ParallelEmbedding(8, 1, group=g)) == (
        "ParallelEmbedding: embedding_dim=1 cannot be dealt to 2 ranks"
    )
    assert message(lambda g: VocabParallelEmbedding(8, 4, padding_idx=8, group=g)) == (
        "VocabParallelEmbedding: padding_idx=8 is outside num_embeddings=8"
    )
    assert message(lambda g: ParallelEmbedding(8, 4, max_norm="1", group=g)) == (
        "ParallelEmbedding: max_norm must be a number, not '1'"
    )
    assert message(lambda g: ParallelEmbedding(8, 4, sparse="yes", group=g)) == (
        "ParallelEmbedding: sparse must be True or False, not 'yes'"
    )
    assert message(lambda g: VocabParallelEmbedding(8, 4, check_ids=0, group=g)) == (
        "VocabParallelEmbedding: check_ids must be True or False, not 0"
    )
    assert message(lambda g: VocabParallelEmbedding(8, 4, norm_type=None, group=g)) == (
        "VocabParallelEmbedding: norm_type must be a number, not None"
    )
    for layer in (VocabParallelEmbedding, ParallelEmbedding):
        for options in ({}, {"max_norm": 1.0}, {"sparse": True}):
            for dtype in (torch.float32, torch.bool, torch.int16, torch.uint8, torch.complex64):
                ids = torch.zeros(2, dtype=dtype)
                assert message(lambda g, made=layer, o=options, x=ids: made(8, 4, group=g, **o)(x)) == (
                    f"{layer.__name__}: ids are of dtype torch.int64 or torch.int32, not {dtype}"
                )
            assert message(lambda g, made=layer, o=options: made(8, 4, group=g, **o)([1, 2])) == (
                f"{layer.__name__}: ids are a tensor, not list"
            )
    with pytest.raises(UsageError, match="lookup: ids are a tensor, not int"):
        lookup(torch.ones(4, 2), 3)

    class Scaled(nn.Embedding):
        def forward(self, ids):
            return self.weight[ids] * 3

    halves = Shard(0, deal(4, 2), groups=2)
    for layer, shard, text in (
        (Scaled(8, 4), Shard(0, deal(8, 2)), "takes the place of an nn.Embedding, not of Scaled"),
        (nn.Embedding(8, 4), halves, f"{halves} does not give each rank one range of rows of its own"),
        (
            nn.Embedding(8, 4),
            halves.at(1),
            f"{halves.at(1)} is no cut of dim 0 of the weight, 8 elements over 2 ranks",
        ),
    ):
        found = message(lambda g, m=layer, s=shard: VocabParallelEmbedding.adopt(m, shard=s, group=g))
        assert found.removeprefix("VocabParallelEmbedding").removeprefix(":").strip() == text
        assert type(layer) in (Scaled, nn.Embedding)


def test_lookup_of_a_local_table() -> None:
    table = torch.arange(8.0).view(4, 2).requires_grad_()
    y = lookup(table, torch.tensor([[2, 9], [5, 3]]), start=3)
    assert y.tolist() == [[[0, 0], [0, 0]], [[4, 5], [0, 1]]]
    y.sum().backward()
    assert table.grad.tolist() == [[1, 1], [0, 0], [1, 1], [0, 0]]
    with pytest.raises(IndexError):
        lookup(table, torch.tensor([9]), start=3, vocab_size=9)
    (one,) = torch.autograd.grad(lookup(table, torch.tensor(5), start=3, sparse=True).sum(), table)
    assert one.to_dense().tolist() == [[0, 0], [0, 0], [1, 1], [0, 0]]


def compiled(group: Group) -> None:
    for cls, options in (
        (VocabParallelEmbedding, {"padding_idx": 7, "max_norm": 1.0}),
        (ParallelEmbedding, {"max_norm": 1.0, "sparse": True}),
    ):
        torch._dynamo.reset()
        layer = parallel(group, cls, **options)
        want = results(layer, torch.tensor(IDS))
        layer = parallel(group, cls, **options)
        close(
            results(torch.compile(layer, fullgraph=True, backend="aot_eager"), torch.tensor(IDS), layer), want
        )
    torch._dynamo.reset()
    sparse, ids = parallel(group, sparse=True), torch.tensor(IDS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it tells the same besides
        with pytest.raises(torch._dynamo.exc.Unsupported, match="sparse_coo_tensor"):  # the one limit
            torch.compile(sparse, fullgraph=True, backend="aot_eager")(ids)
        torch.compile(sparse, backend="aot_eager")(ids).sum().backward()
    found = sparse.weight.grad.to_dense()
    sparse.weight.grad = None
    sparse(ids).sum().backward()
    close(found, sparse.weight.grad.to_dense())
    torch._dynamo.reset()
    layer = parallel(group)
    try:
        torch.compile(layer, fullgraph=True, backend="aot_eager")(torch.tensor([1, VOCABULARY]))
    except IndexError:
        return
    raise AssertionError("an id out of range passed in compiled code")


@pytest.mark.slow
def test_compiled_in_one_graph(ranks) -> None:
    ranks(2)(as_rank, quietly, compiled)
