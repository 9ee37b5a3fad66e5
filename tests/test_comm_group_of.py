"""Which group a mesh means for a rank; groups that are copied and pickled."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autotp.comm import Group, GroupOfOne, group_of
from autotp.comm.simulated import SimulatedGroup
from autotp.diagnostic import UsageError


def meshes(rank: int, size: int) -> list[tuple[int, int]]:
    world = dist.group.WORLD
    flat = init_device_mesh("cpu", (size,))
    named = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    outer = init_device_mesh("cpu", (size, 1), mesh_dim_names=("dp", "tp"))
    found = [group_of(mesh) for mesh in (None, world, flat, named, named["tp"], outer)]
    assert group_of(None) is group_of(None)
    assert group_of(found[0]) is found[0]
    return [(group.rank, group.size) for group in found]


def test_group_of_every_kind_of_mesh(ranks) -> None:
    assert ranks(2)(meshes) == [[(r, 2)] * 5 + [(0, 1)] for r in range(2)]
    group = group_of(None)
    assert (group.rank, group.size) == (0, 1)
    assert isinstance(group, Group)
    assert isinstance(SimulatedGroup(0, 2), Group)


def refused_meshes(rank: int, size: int) -> list[str]:
    found = []
    only_first = dist.new_group([0])
    for mesh in (
        init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "model")),
        init_device_mesh("cpu", (1, size)),
        only_first,
        DeviceMesh("cpu", [0]),
        "tp",
    ):
        try:
            group_of(mesh)
            found.append("fine")
        except UsageError as error:
            found.append(str(error))
    return found


def test_meshes_that_mean_no_group_are_refused_by_name(ranks) -> None:
    first, second = ranks(2)(refused_meshes)
    remedy = "name the axis in init_device_mesh(…, mesh_dim_names=…), or pass the 1-D mesh of the axis"
    shared = [
        f"a DeviceMesh with 2 axes ('dp', 'model') has none named 'tp': {remedy}",
        f"a DeviceMesh with 2 axes (no names) has none named 'tp': {remedy}",
    ]
    wrong = "a mesh is a DeviceMesh, a ProcessGroup, a Group or None, not str ('tp')"
    with pytest.raises(UsageError) as caught:
        group_of(2)
    assert str(caught.value) == wrong.replace("str ('tp')", "int (2); autotp.initialize(tp=…) makes a mesh")
    assert first == [*shared, "fine", "fine", wrong]
    assert second == [
        *shared,
        "rank 1 is not in the group that it was given",
        "rank 1 is not in the mesh, which has ranks [0]",
        wrong,
    ]


# ---- copies ----


def copies(group: Group) -> bool:
    return copy.deepcopy([group])[0] is group and same(pickle.loads(pickle.dumps(group)), group)


def same(a: Group, b: Group) -> bool:
    return (type(a), a.rank, a.size) == (type(b), b.rank, b.size)


def test_a_group_survives_deepcopy_and_pickle(run) -> None:
    assert run(copies) == [True] * run.size
    assert copies(GroupOfOne())


def pickled(rank: int, size: int, sent: bytes | None) -> bytes | str:
    if sent is None:
        buffer = io.BytesIO()
        torch.save(group_of(None), buffer)
        return buffer.getvalue()
    try:
        return str(torch.load(io.BytesIO(sent), weights_only=False) is group_of(None))
    except UsageError as error:
        return str(error)


def test_a_group_is_loaded_on_its_own_rank_only(ranks) -> None:
    of_rank_0, of_rank_1 = ranks(2)(pickled, None)
    assert ranks(2)(pickled, of_rank_0) == [
        "True",
        "this object was pickled on rank 0 and is loaded on rank 1",
    ]
    assert ranks(2)(pickled, of_rank_1)[1] == "True"
    with pytest.raises(UsageError) as caught:
        torch.load(io.BytesIO(of_rank_1), weights_only=False)
    assert str(caught.value) == (
        "this object was pickled on rank 1 of a group of 2 ranks: initialise torch.distributed before it is "
        "loaded"
    )
