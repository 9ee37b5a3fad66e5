"""The layers beside torch's own data and pipeline parallelism, on the axes of one mesh of four ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autotp import mappings
from autotp.clip import clip_grad_norm_
from autotp.comm import group_of
from autotp.groups import initialize, place
from autotp.nn import ColumnParallelLinear, RowParallelLinear
from tests.test_mappings import randn
from tests.test_nn_linear import close, load, serial

SIZES = (5, 9, 3)


def parallel(mesh) -> nn.Sequential:
    options = {"group": mesh, "dtype": torch.float64}
    return nn.Sequential(
        load(ColumnParallelLinear(5, 9, gather_output=False, **options), serial(5, 9)),
        nn.Tanh(),
        load(RowParallelLinear(9, 3, input_is_parallel=True, **options), serial(9, 3)),
    )


def steps_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return found


def with_fully_shard(rank: int, size: int) -> Tensor:
    from torch.distributed.fsdp import fully_shard

    mesh = initialize(tp=2)
    here = place(mesh)
    model = parallel(mesh)
    fully_shard(model, mesh=mesh["dp"])
    x = randn(1, 8, 5).chunk(here.dp_size)[here.dp_rank]
    steps_of(model, x)
    with torch.no_grad():
        return model(randn(2, 4, 5))


@pytest.mark.slow
def test_with_fully_shard_on_the_dp_axis(ranks) -> None:
    model = nn.Sequential(serial(5, 9), nn.Tanh(), serial(9, 3))
    steps_of(model, randn(1, 8, 5))
    for found in ranks(4)(with_fully_shard):
        close(found, model(randn(2, 4, 5)).detach())


def clipped(rank: int, size: int) -> list[Tensor]:
    """The norm before, and the gradient of a whole and of a cut parameter after clipping."""
    from torch.distributed.fsdp import fully_shard

    mesh = initialize(tp=2)
    here = place(mesh)
    model = parallel(mesh)
    fully_shard(model, mesh=mesh["dp"])
    model(randn(1, 8, 5).chunk(here.dp_size)[here.dp_rank]).square().mean().backward()
    norm = clip_grad_norm_(model, 0.5)
    cut = mappings.gather(
        model[0].weight.grad.full_tensor(), group_of(mesh), shard=model[0].layouts["weight"]
    )
    return [norm, model[2].bias.grad.full_tensor(), cut]


@pytest.mark.slow
def test_clipping_with_fully_shard_on_the_dp_axis(ranks) -> None:
    model = nn.Sequential(serial(5, 9), nn.Tanh(), serial(9, 3))
    model(randn(1, 8, 5)).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert norm > 1
    for found in ranks(4)(clipped):
        close(found, [norm, model[2].bias.grad, model[0].weight.grad])


def with_pipelining(rank: int, size: int) -> list[Tensor]:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    mesh = initialize(tp=2, pp=2)
    here = place(mesh)
    first = parallel(mesh)
    second = nn.Sequential(
        load(ColumnParallelLinear(3, 4, group=mesh, dtype=torch.float64), serial(3, 4)), nn.Tanh()
    )
    module = [first, second][here.pp_rank]
    stage = PipelineStage(module, here.pp_rank, here.pp_size, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda y, t: (y - t).square().sum())
    if here.pp_rank == 0:
        schedule.step(randn(1, 4, 5))
        return [whole(first[0], "weight"), first[2].bias.grad]
    losses: list[Tensor] = []
    schedule.step(target=randn(2, 4, 4), losses=losses)
    return [torch.stack(losses).sum().detach(), whole(second[0], "bias")]


def whole(layer: nn.Module, name: str) -> Tensor:
    return mappings.gather(getattr(layer, name).grad, group_of(layer.group), shard=layer.layouts[name])


@pytest.mark.slow
def test_with_pipelining_on_the_pp_axis(ranks) -> None:
    up, down, last = serial(5, 9), serial(9, 3), serial(3, 4)
    loss = (last(down(up(randn(1, 4, 5)).tanh())).tanh() - randn(2, 4, 4)).square().sum()
    loss.backward()
    scale = 2  # GPipe averages the gradients over its two micro-batches
    for rank, found in enumerate(ranks(4)(with_pipelining)):
        if rank < 2:
            close(found, [up.weight.grad / scale, down.bias.grad / scale])
        else:
            close(found, [loss.detach(), last.bias.grad / scale])
