"""Meshes with pp, dp and tp axes on real ranks."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from autotp.comm import group_of, within
from autotp.diagnostic import UsageError
from autotp.groups import Place, initialize, place


def places(rank: int, size: int) -> list[object]:
    found: list[object] = []
    for tp, pp in ((2, 1), (1, 2), (1, 1)):
        mesh = initialize(tp=tp, pp=pp)
        group = group_of(mesh)
        found.append((mesh.mesh_dim_names, tuple(mesh.shape), place(mesh), group.rank, group.size))
    return found


def test_sizes_ranks_and_sources(ranks) -> None:
    axes = ("pp", "dp", "tp")
    for rank, found in enumerate(ranks(2)(places)):
        assert found == [
            (axes, (1, 1, 2), Place(rank, 2, 0, 1, 0, 1, source=0), rank, 2),
            (axes, (2, 1, 1), Place(0, 1, 0, 1, rank, 2, source=rank), 0, 1),
            (axes, (1, 2, 1), Place(0, 1, rank, 2, 0, 1, source=rank), 0, 1),
        ]


def refused(rank: int, size: int) -> list[str]:
    found = []
    for tp, pp in ((3, 1), (2, 2), (0, 1), (1, -1)):
        try:
            initialize(tp=tp, pp=pp)
        except UsageError as error:
            found.append(str(error))
    try:
        place(torch.distributed.device_mesh.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)))
    except UsageError as error:
        found.append(str(error))
    return found


def test_sizes_that_do_not_fit_are_errors_with_the_numbers(ranks) -> None:
    assert (
        ranks(2)(refused)
        == [
            [
                "a world of 2 ranks cannot be tp=3 × pp=1 × dp: 2 is not a multiple of 3",
                "a world of 2 ranks cannot be tp=2 × pp=2 × dp: 2 is not a multiple of 4",
                "tp must be at least 1, not 0",
                "pp must be at least 1, not -1",
                "the mesh has the axes ['dp'], and none named 'tp'",
            ]
        ]
        * 2
    )


def test_a_process_that_nothing_started_as_a_rank(monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for tp, text in (
        (2, "one process was started, and tp=2 × pp=1 takes 2: start it by `torchrun --nproc-per-node 2 …`"),
        ("2", "tp must be a whole number, not '2'"),
    ):
        with pytest.raises(UsageError) as caught:
            initialize(tp=tp)
        assert str(caught.value) == text
    try:
        group = group_of(initialize(tp=1))
        assert (group.size, group.exchange("plan")) == (1, ["plan"])
    finally:
        dist.destroy_process_group()


def of_four(rank: int, size: int, tp: int, pp: int) -> tuple[Place, list[int], float]:
    mesh = initialize(tp=tp, pp=pp)
    group = group_of(mesh)
    total = group.all_reduce(torch.tensor([float(rank)])).item()
    return place(mesh), dist.get_process_group_ranks(mesh.get_group("tp")), total


@pytest.mark.slow
def test_tensor_ranks_are_adjacent_on_four_ranks(ranks) -> None:
    for rank, (found, members, total) in enumerate(ranks(4)(of_four, 2, 1)):
        assert found == Place(rank % 2, 2, rank // 2, 2, 0, 1, source=rank // 2 * 2)
        assert members == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert total == sum(members)
    for rank, (found, members, _) in enumerate(ranks(4)(of_four, 2, 2)):
        assert found == Place(rank % 2, 2, 0, 1, rank // 2, 2, source=rank // 2 * 2)
        assert members == [rank // 2 * 2, rank // 2 * 2 + 1]


def unequal_stages(rank: int, size: int) -> float:
    """Two pipeline stages of one tensor rank each that build different numbers of layers."""
    from autotp.nn import ColumnParallelLinear
    from autotp.random import synchronize

    mesh = initialize(tp=1, pp=2)
    started = time.monotonic()
    for _ in range(1 + 3 * rank):
        ColumnParallelLinear(4, 4, group=mesh)
        synchronize(mesh)
        within(group_of(mesh)).exchange(rank)
    return time.monotonic() - started


def test_stages_of_a_pipeline_do_not_wait_for_each_others_layers(ranks) -> None:
    assert all(seconds < 4 for seconds in ranks(2)(unequal_stages))
