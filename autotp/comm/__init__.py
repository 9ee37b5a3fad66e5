"""Communication between the ranks of one tensor-parallel group: one seam, three ways to be a rank.

- `group_of(mesh)` wraps a torch process group (or is a group of one without torch.distributed)
- `simulate(tp, function)` runs every rank in this process, a thread each

Everything above this package (mappings, layers, shard, verify) sees only the `Group` protocol.
"""

from autotp.comm.group import Group, GroupOfOne
from autotp.comm.process_group import (
    ProcessGroupGroup,
    group_of,
    reduced_in,
    sum_into,
    sum_into_later,
    within,
)
from autotp.comm.reduced_in import ReducedIn
from autotp.comm.simulated import SimulatedGroup, simulate
from autotp.versions import check_torch

__all__ = [
    "Group",
    "GroupOfOne",
    "ProcessGroupGroup",
    "ReducedIn",
    "SimulatedGroup",
    "group_of",
    "reduced_in",
    "simulate",
    "sum_into",
    "sum_into_later",
    "within",
]

check_torch()  # whatever uses ranks comes by here, however it was imported
