"""What column and row layers must survive: copies, autocast, checkpointing, optimizers, compilation."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotp.comm import Group
from autotp.nn import ColumnParallelLinear, RowParallelLinear
from tests.conftest import as_rank
from tests.test_mappings import quietly, randn
from tests.test_nn_linear import close, column, row, serial, whole


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
