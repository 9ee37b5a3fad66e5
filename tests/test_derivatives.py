"""Layers, lookups and the loss under torch.func: gradients, Jacobians, forward derivatives, batches."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap
from torch.nn import functional as F

from autotp import mappings
from autotp.comm import Group, simulate
from autotp.diagnostic import UsageError
from autotp.nn import VocabParallelEmbedding
from autotp.nn.functional import vocab_parallel_cross_entropy
from autotp.nn.shared import SharedCopy
from tests.conftest import as_rank
from tests.test_mappings import quietly, randn
from tests.test_nn_linear import F64, close, column, row, serial

IDS = torch.tensor([[0, 9, 3], [5, 1, 9]])
TARGETS = torch.tensor([0, 11, -100, 5])


def two_layers(group: Group | None) -> nn.Module:
    if group is None:
        return nn.Sequential(serial(6, 9), nn.Tanh(), serial(9, 4))
    up, down = column(group, 6, 9, gather_output=False), row(group, 9, 4, input_is_parallel=True)
    return nn.Sequential(up, nn.Tanh(), down)


def transformed(group: Group | None) -> list[Tensor]:
    """What the transforms give of two layers, of their weights, and of a map that is batched inside."""
    model, x = two_layers(group), randn(1, 5, 6)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    of_weights = grad(lambda given: functional_call(model, given, (x,)).square().sum())(parameters)
    y, back = vjp(model, x)
    one_by_one = vmap(grad(lambda row: model(row).square().sum()))(x)
    batched_inside = grad(lambda rows: vmap(model, in_dims=1)(rows.t()).square().sum())(x)
    shared = SharedCopy(group, 1) if group is not None else lambda value: value
    behind_a_copy = grad(lambda rows: summed(group, vmap(lambda r: shared(r).exp())(rows).sum()))(x)
    return [
        grad(lambda rows: model(rows).square().sum())(x),
        of_weights["2.bias"],
        whole(group, of_weights["0.weight"]),
        *back(torch.ones_like(y)),
        jacrev(model)(x[0]),
        jacrev(jacrev(lambda row: model(row).square().sum()))(x[0]),
        vmap(model)(x),
        one_by_one,
        batched_inside,
        behind_a_copy / (group.size if group is not None else 1),
    ]


def whole(group: Group | None, part: Tensor) -> Tensor:
    return part if group is None else mappings.gather(part, group, dim=0)


def summed(group: Group | None, x: Tensor) -> Tensor:
    return x if group is None else mappings.reduce(x, group)


def test_the_transforms_of_layers(run) -> None:
    want = transformed(None)
    for found in run(transformed):
        close(found, want)


def looked_up(group: Group | None) -> list[Tensor]:
    table, z = randn(3, 10, 4), randn(4, 4, 12)
    if group is None:
        embedding: nn.Module = nn.Embedding(10, 4, **F64)
        of_logits = grad(lambda given: F.cross_entropy(given, TARGETS, label_smoothing=0.1))(z)
    else:
        embedding = VocabParallelEmbedding(10, 4, group=group, **F64)
        table, z = mappings.scatter(table, group, dim=0), mappings.scatter(z, group)
        of_logits = grad(
            lambda given: vocab_parallel_cross_entropy(given, TARGETS, group=group, label_smoothing=0.1)
        )(z)
        of_logits = mappings.gather(of_logits, group)
    given = {"weight": table}
    of_table = grad(lambda given: functional_call(embedding, given, (IDS,)).square().sum())(given)
    return [whole(group, of_table["weight"]), of_logits]


def test_the_gradients_of_lookups_and_of_the_loss(run) -> None:
    want = looked_up(None)
    for found in run(looked_up):
        close(found, want)


def forward(group: Group | None) -> list[Tensor]:
    """By torch.func, and by dual numbers, with weights that require a gradient and with frozen ones."""
    warnings.filterwarnings(
        "ignore", "`torch.jit.script` is deprecated"
    )  # which torch's own rules are made by
    model, x = two_layers(group), randn(1, 5, 6)
    found = [*jvp(model, (x,), (randn(2, 5, 6),))]
    for trained in (True, False):
        model.requires_grad_(trained)
        with forward_ad.dual_level():
            y = forward_ad.unpack_dual(model(forward_ad.make_dual(x, randn(2, 5, 6))))
            found += [y.primal.detach(), y.tangent.detach()]
    return found


def test_forward_derivatives_on_real_ranks(ranks) -> None:
    want = forward(None)
    for found in ranks(2)(as_rank, forward):
        close(found, want)


def test_forward_derivatives_are_refused_for_simulated_ranks() -> None:
    with pytest.raises(UsageError) as caught:
        simulate(2, forward)
    assert str(caught.value) == (
        "a process has one forward derivative, and simulated ranks cannot have one each"
    )


def compiled(group: Group) -> list[Tensor]:
    """Where code that calls transforms is compiled, the part under them is left to run as it is written."""
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
    warnings.filterwarnings(
        "ignore", "The .grad attribute of a Tensor that is not a leaf"
    )  # the compiler asks
    torch._dynamo.reset()
    model, x = two_layers(group), randn(1, 5, 6)
    of_inputs = grad(lambda rows: model(rows).square().sum())
    calls = (of_inputs, lambda rows: jvp(vmap(model), (rows,), (rows,))[1])
    found = [torch.compile(call, backend="aot_eager")(x) for call in calls]
    close(found, [call(x) for call in calls])
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="takes autotp's functions apart"):
        torch.compile(of_inputs, fullgraph=True, backend="aot_eager")(x)
    return found


@pytest.mark.slow
def test_transforms_in_compiled_code(ranks) -> None:
    model, x = two_layers(None), randn(1, 5, 6)
    want = grad(lambda rows: model(rows).square().sum())(x)
    for found in ranks(2)(as_rank, quietly, compiled):
        close(found[0], want)
