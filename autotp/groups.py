"""The mesh of a job: pipeline, data and tensor ranks, and each rank's place in it.

    initialize(tp=2, pp=2) on 8 ranks: axes pp, dp, tp of sizes 2, 2, 2; tensor ranks are adjacent

           tp 0  tp 1
    pp 0    0     1     dp 0
            2     3     dp 1
    pp 1    4     5     dp 0
            6     7     dp 1

The order of Megatron-LM and FairScale. `fully_shard` of torch takes mesh["dp"], and
`torch.distributed.pipelining` mesh.get_group("pp").
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autotp.diagnostic import UsageError

__all__ = ["Place", "initialize", "place"]

AXES = ("pp", "dp", "tp")


def initialize(tp: int, pp: int = 1, *, device_type: str = "cpu", backend: str | None = None) -> DeviceMesh:
    """A DeviceMesh with the axes pp, dp, tp over all ranks of the job; dp takes what tp and pp leave.

    Initialises torch.distributed from the environment (torchrun's variables) when it is not initialised;
    `backend` is then its backend (default: torch's own for the device). Every rank calls it alike. A process
    that nothing started as a rank is a world of one.

    Raises UsageError when the world does not divide by tp · pp, with the numbers.

    >>> mesh = initialize(tp=1)
    >>> mesh.mesh_dim_names, tuple(mesh.shape), place(mesh).dp_size
    (('pp', 'dp', 'tp'), (1, 1, 1), 1)
    >>> dist.destroy_process_group()
    """
    for axis, size in (("tp", tp), ("pp", pp)):
        if type(size) is not int:
            raise UsageError(f"{axis} must be a whole number, not {size!r}")
        if size < 1:
            raise UsageError(f"{axis} must be at least 1, not {size}")
    if not dist.is_initialized():
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        elif tp * pp > 1:
            raise UsageError(
                f"one process was started, and tp={tp} × pp={pp} takes {tp * pp}: start it by "
                f"`torchrun --nproc-per-node {tp * pp} …`"
            )
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
    world = dist.get_world_size()
    dp, rest = divmod(world, tp * pp)
    if rest or dp < 1:
        raise UsageError(
            f"a world of {world} ranks cannot be tp={tp} × pp={pp} × dp: "
            f"{world} is not a multiple of {tp * pp}"
        )
    return init_device_mesh(device_type, (pp, dp, tp), mesh_dim_names=AXES)


@dataclass(frozen=True)
class Place:
    """One rank's coordinates and the sizes of the axes; `source` is the global rank of its group's tp 0."""

    tp_rank: int
    tp_size: int
    dp_rank: int
    dp_size: int
    pp_rank: int
    pp_size: int
    source: int


def place(mesh: DeviceMesh) -> Place:
    """Where this rank stands in `mesh`: a mesh of `initialize`, or any with an axis "tp".

    An axis that the mesh does not have has size 1. Data loaders split by `dp_rank` and `dp_size`: the
    ranks of one tensor group read the same batches. `source` is the rank to broadcast from in the group.

    Raises UsageError for a mesh without an axis "tp", or without this rank.
    """
    names = mesh.mesh_dim_names or ()
    if "tp" not in names:
        raise UsageError(f"the mesh has the axes {list(names)}, and none named 'tp'")
    here = mesh.get_coordinate()
    if here is None:
        raise UsageError(f"rank {dist.get_rank()} is not in the mesh")

    def of(axis: str) -> tuple[int, int]:
        if axis not in names:
            return 0, 1
        dim = names.index(axis)
        return here[dim], mesh.size(dim)

    ranks = dist.get_process_group_ranks(mesh.get_group("tp"))
    return Place(*of("tp"), *of("dp"), *of("pp"), source=ranks[0])
