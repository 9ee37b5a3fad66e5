"""The ranks of a torch process group, one process each."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autotp.comm.exchange import Store, exchange_through
from autotp.comm.group import EXCHANGE_TIMEOUT, Group, GroupOfOne, KnownGroup, check_summed, contiguous_copy
from autotp.comm.reduced_in import ReducedIn
from autotp.diagnostic import UsageError

__all__ = ["ProcessGroupGroup", "group_of", "reduced_in", "sum_into", "sum_into_later", "within"]

T = TypeVar("T")
_known: dict[tuple[str, tuple[int, ...]], ProcessGroupGroup] = {}
_world: list[dist.ProcessGroup | None] = [None]  # whose groups are known
PAUSE = 0.1
"""Seconds at the end of a process, in which its groups' threads finish."""
_float8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
# gloo knows no 16-bit integers, no unsigned ones but uint8, and no 8-bit floats
_reduced_as = {torch.int16: torch.int32, **dict.fromkeys(_float8, torch.float32)}
_moved_as_bytes = {torch.int16, *_float8, torch.float8_e8m0fnu, torch.uint16, torch.uint32, torch.uint64}


class ProcessGroupGroup(KnownGroup):
    """A `Group` over a torch process group. Made by `group_of`."""

    def __init__(self, process_group: dist.ProcessGroup, *, everyone: Sequence[int]) -> None:
        self.process_group = process_group
        self.members = tuple(dist.get_process_group_ranks(process_group))
        self.everyone = tuple(everyone)
        self.rank = dist.get_rank(process_group)
        self.size = len(self.members)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks: a new tensor."""
        check_summed(x)
        if x.dtype in _reduced_as:
            return self.all_reduce(x.to(_reduced_as[x.dtype])).to(x.dtype)
        total = contiguous_copy(x)
        if x.numel() > 0:
            dist.all_reduce(total, group=self.process_group)
        return total

    def all_reduce_later(self, x: Tensor) -> Callable[[], Tensor]:
        """Start the sum over the ranks; the function waits for it."""
        if x.dtype in _reduced_as or x.numel() == 0:
            now = self.all_reduce(x)
            return lambda: now
        return _waiting(contiguous_copy(x), self)

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """The ranks' tensors concatenated on `dim`.

        Uneven parts are padded to the largest and narrowed: gloo's own uneven all_gather raises, and
        the functional one ends the process.
        """
        if x.dtype in _moved_as_bytes:
            return self._gather_bytes(x, dim, sizes)
        dim, largest = dim % x.ndim, max(sizes)
        padded = _padded(x, dim, largest).contiguous()
        every = padded.new_empty((self.size, *padded.shape))  # the ranks' tensors one after another
        if every.numel() > 0:
            dist.all_gather_single(every.flatten(0, 1), padded, group=self.process_group)
        if dim == 0 and all(size == largest for size in sizes):
            return every.flatten(0, 1)
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(every, sizes, strict=True)], dim)

    def _gather_bytes(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """The same for a dtype that the backend cannot move: as bytes, with a last dim for them."""
        width = x.element_size()
        octets = x.contiguous().unsqueeze(-1).view(torch.uint8)  # (..., width)
        assert octets.shape[-1] == width
        every = self.all_gather(octets, dim if dim >= 0 else dim - 1, sizes)
        return every.view(x.dtype).squeeze(-1)

    def reduce_scatter(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """This rank's block of the sum; uneven blocks are padded to the largest and narrowed."""
        check_summed(x)
        if x.dtype in _reduced_as:
            return self.reduce_scatter(x.to(_reduced_as[x.dtype]), dim, sizes).to(x.dtype)
        dim, largest = dim % x.ndim, max(sizes)
        blocks = torch.stack([_padded(block, dim, largest) for block in torch.split(x, list(sizes), dim)])
        mine = blocks.new_empty(blocks.shape[1:])
        if mine.numel() > 0:
            dist.reduce_scatter_single(mine, blocks.flatten(0, 1), group=self.process_group)
        return mine.narrow(dim, 0, sizes[self.rank]).contiguous()

    def exchange(self, obj: T, *, timeout: float = EXCHANGE_TIMEOUT) -> list[T]:
        """Every rank's `obj`, through the job's store, so that a rank that disagrees hangs nobody."""
        world = dist.group.WORLD
        assert world is not None
        return exchange_through(
            cast(Store, world.get_group_store()),
            obj,
            rank=dist.get_rank(),
            members=self.members,
            everyone=self.everyone,
            timeout=timeout,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessGroupGroup:
        return self

    def __reduce__(self) -> tuple[Callable[..., Group], tuple[str, tuple[int, ...], int]]:
        return _found_again, (self.process_group.group_name, self.members, self.rank)

    def __repr__(self) -> str:
        return f"ProcessGroupGroup(rank={self.rank}, size={self.size}, ranks={list(self.members)})"


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    """`x` with zeros behind it, so that `dim` has `size`."""
    missing = size - x.shape[dim]
    if missing == 0:
        return x
    return torch.cat([x, x.new_zeros((*x.shape[:dim], missing, *x.shape[dim + 1 :]))], dim)


def _found_again(name: str, members: tuple[int, ...], rank: int) -> Group:
    """The group of a pickled `ProcessGroupGroup`, in the same or a restarted process of its rank."""
    if not dist.is_initialized():
        raise UsageError(
            f"this object was pickled on rank {rank} of a group of {len(members)} ranks: initialise "
            "torch.distributed before it is loaded"
        )
    same = [known for known in _known.values() if known.members == members]
    named = [known for known in same if known.process_group.group_name == name]
    group = next(iter(named + same), None)
    if group is None and members == tuple(range(dist.get_world_size())):
        group = _wrapped(dist.group.WORLD, members)
    if group is None:
        raise UsageError(
            f"this object was pickled in a group of the ranks {list(members)}, which this process has not "
            "made: call autotp.comm.group_of(mesh) before it is loaded"
        )
    if group.rank != rank:
        raise UsageError(f"this object was pickled on rank {rank} and is loaded on rank {group.rank}")
    return group


@atexit.register
def _let_threads_finish() -> None:
    """A group's thread drops what autograd noted of Python for a collective of a backward pass
    (torch/autograd/graph.py), for which it asks for Python's lock. If Python ends meanwhile, the thread ends
    the process by an abort, after all work is done. So whoever asks now is let in first."""
    if _known:
        time.sleep(PAUSE)


def _wrapped(
    process_group: dist.ProcessGroup | int | None, everyone: tuple[int, ...] | None
) -> ProcessGroupGroup:
    """The one `ProcessGroupGroup` of a process group; `everyone` are the ranks that make the same calls."""
    if not isinstance(process_group, dist.ProcessGroup) or dist.get_rank(process_group) < 0:
        raise UsageError(f"rank {dist.get_rank()} is not in the group that it was given")
    if everyone is None:
        everyone = tuple(dist.get_process_group_ranks(process_group))
    if dist.group.WORLD is not _world[0]:  # a new job in this process: all its groups are new
        _world[0] = dist.group.WORLD
        _known.clear()
    name = process_group.group_name
    known = _known.get((name, everyone))
    if known is None or known.process_group is not process_group:
        known = _known[name, everyone] = ProcessGroupGroup(process_group, everyone=everyone)
    return known


def group_of(mesh: DeviceMesh | dist.ProcessGroup | Group | int | None = None) -> Group:
    """The tensor-parallel group that `mesh` means for this rank.

    A 1-D DeviceMesh, or the axis named "tp" of a larger one; a process group; a `Group` as it is;
    None: the default process group, or a group of one when torch.distributed is not initialised.
    With a mesh or None, all ranks of the job are taken to make the same calls, so that ranks with
    different meshes find out; a part of the job that works on its own passes its process group.

    Raises UsageError for a larger mesh without an axis "tp", for a rank outside the group, and for None where
    several ranks were started (WORLD_SIZE) and torch.distributed is not initialised.

    >>> group_of(None).size
    1
    """
    given: object = mesh
    if isinstance(given, KnownGroup):
        return cast(Group, given)
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or ()
        if mesh.ndim > 1 and "tp" not in names:
            axes = ", ".join(map(repr, names)) if names else "no names"
            raise UsageError(
                f"a DeviceMesh with {mesh.ndim} axes ({axes}) has none named 'tp': name the axis in "
                "init_device_mesh(…, mesh_dim_names=…), or pass the 1-D mesh of the axis"
            )
        if mesh.get_coordinate() is None:
            raise UsageError(
                f"rank {dist.get_rank()} is not in the mesh, which has ranks {mesh.mesh.flatten().tolist()}"
            )
        process_group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
        return _wrapped(process_group, tuple(range(dist.get_world_size())))
    if mesh is None:
        if not (dist.is_available() and dist.is_initialized()):
            started = os.environ.get("WORLD_SIZE", "1")
            if started.isdigit() and int(started) > 1:
                raise UsageError(
                    f"{started} ranks were started, and torch.distributed is not initialised on this one, so "
                    "it would work alone; call autotp.initialize(tp=…) or "
                    "torch.distributed.init_process_group first"
                )
            return GroupOfOne()
        return _wrapped(dist.group.WORLD, tuple(range(dist.get_world_size())))
    if isinstance(mesh, Group):
        return mesh
    if isinstance(mesh, dist.ProcessGroup) or given == dist.GroupMember.NON_GROUP_MEMBER:  # torch's, outside
        return _wrapped(mesh, None)
    raise UsageError(
        f"a mesh is a DeviceMesh, a ProcessGroup, a Group or None, not {type(mesh).__name__} ({mesh!r})"
        + ("; autotp.initialize(tp=…) makes a mesh" if isinstance(mesh, int) else "")
    )


def within(group: Group) -> Group:
    """The same group, whose `exchange` waits for its own ranks only, and not for the rest of the job.

    For what one tensor group does on its own while others do something else, as the stages of a pipeline
    that build different layers. Ranks with another group are then found by the timeout alone.
    """
    if isinstance(group, ReducedIn):
        return within(group.group)
    return _wrapped(group.process_group, group.members) if isinstance(group, ProcessGroupGroup) else group


def reduced_in(mesh: DeviceMesh | dist.ProcessGroup | Group | None, dtype: torch.dtype) -> ReducedIn:
    """The group of `mesh`, whose sums over ranks run in `dtype` where values are less precise: bfloat16 in
    float32, say, at twice the bytes moved. Give it wherever a mesh is taken, alike on every rank.

    The ranks' sum is then rounded once, and not at each of its steps; the products in each rank's layers are
    rounded as before. Raises UsageError for a dtype that is not floating-point.

    >>> half = torch.tensor([1.0], dtype=torch.bfloat16)
    >>> from autotp.comm import simulate
    >>> simulate(3, lambda group: reduced_in(group, torch.float32).all_reduce(half).item())
    [3.0, 3.0, 3.0]
    """
    return ReducedIn(group_of(mesh), dtype, getattr(mesh, "device_type", "cpu"))


def sum_into(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, in `x` itself where the group can; `x` is contiguous, and nothing else's."""
    if isinstance(group, ProcessGroupGroup) and x.dtype not in _reduced_as and x.numel() > 0:
        dist.all_reduce(x, group=group.process_group)
        return x
    total = group.all_reduce(x)
    return x.copy_(total)


def sum_into_later(x: Tensor, group: Group) -> Callable[[], Tensor]:
    """Start `sum_into(x, group)`; the function that is returned waits for the sum. Call it once."""
    if isinstance(group, ProcessGroupGroup) and x.dtype not in _reduced_as and x.numel() > 0:
        return _waiting(x, group)
    return group.all_reduce_later(x)


def _waiting(x: Tensor, group: ProcessGroupGroup) -> Callable[[], Tensor]:
    """Start the sum in `x`."""
    work = dist.all_reduce(x, group=group.process_group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return x

    return wait
