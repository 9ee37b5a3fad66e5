"""The eight mappings between layouts, each a pair of linear kernels that are each other's adjoint.

    mapping         from -> to               forward                        backward
    copy            Invariant -> Replicate   nothing                        all-reduce
    reduce          Partial -> Invariant     all-reduce                     nothing
    gather          Shard -> Invariant       all-gather                     own part
    scatter         Invariant -> Shard       own part                       all-gather
    reduce_scatter  Partial -> Shard         reduce-scatter                 all-gather
    all_gather      Shard -> Replicate       all-gather                     reduce-scatter
    share           Invariant -> Partial     the value on rank 0, 0 else    nothing
    slice           Replicate -> Shard       own part                       own part, 0 elsewhere

And one for the parameters of heads that several ranks hold:

    copy_shared     Shard -> Shard           nothing                        sum over an element's holders

After Megatron-LM's f and g (https://arxiv.org/abs/1909.08053) and its sequence-parallel pair
(https://arxiv.org/abs/2205.05198). Backward is the same function with the two kernels swapped, so it can
be differentiated again; forward derivatives and batches (torch.func) go the way of the values. Nothing is
written in place (but by `reduce_`, which says so), and a group of one returns its input untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from autotp import kernels
from autotp.comm import Group, SimulatedGroup, group_of, sum_into
from autotp.comm.group import contiguous_copy
from autotp.cut import Cut, local_cut, whole_cut
from autotp.derivatives import quick, tracked, transformed
from autotp.diagnostic import UsageError
from autotp.kernels import Kernel
from autotp.marks import capturing, marked
from autotp.placement import Shard

__all__ = [
    "MAPPINGS",
    "all_gather",
    "copy",
    "copy_shared",
    "gather",
    "owned",
    "reduce",
    "reduce_",
    "reduce_scatter",
    "scatter",
    "share",
    "slice",
]

Mesh = Group | DeviceMesh | ProcessGroup | None


@dataclass(frozen=True)
class Mapping:
    """One row of the table: from one layout to another, by `forward`; gradients go by `backward`."""

    source: str
    target: str
    forward: Kernel
    backward: Kernel


MAPPINGS: dict[str, Mapping] = {
    "copy": Mapping("Invariant", "Replicate", kernels.keep, kernels.total),
    "reduce": Mapping("Partial", "Invariant", kernels.total, kernels.keep),
    "gather": Mapping("Shard", "Invariant", kernels.join, kernels.owned),
    "scatter": Mapping("Invariant", "Shard", kernels.part, kernels.join_sum),
    "reduce_scatter": Mapping("Partial", "Shard", kernels.sum_part, kernels.join_sum),
    "all_gather": Mapping("Shard", "Replicate", kernels.join, kernels.sum_owned),
    "share": Mapping("Invariant", "Partial", kernels.first, kernels.keep),
    "slice": Mapping("Replicate", "Shard", kernels.part, kernels.embed),
    "copy_shared": Mapping("Shard", "Shard", kernels.keep, kernels.sum_shared),
}


class _Linear(torch.autograd.Function):
    """y = there(x), with dx = back(dy); `there` and `back` are adjoint, so dx is the same the other way."""

    @staticmethod
    def forward(x: Tensor, there: Kernel, back: Kernel, group: Group, cut: Cut | None) -> Tensor:
        return there(x, group, cut)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.there, ctx.back, ctx.group, ctx.cut = inputs

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _linear(dy, ctx.back, ctx.there, ctx.group, ctx.cut), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, *rest: None) -> Tensor:
        if isinstance(ctx.group, SimulatedGroup):  # one that ends its derivative would end those of all
            raise UsageError("a process has one forward derivative, and simulated ranks cannot have one each")
        return _linear(dx, ctx.there, ctx.back, ctx.group, ctx.cut)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int, ...],
        x: Tensor,
        there: Kernel,
        back: Kernel,
        group: Group,
        cut: Cut | None,
    ) -> tuple[Tensor, int]:
        behind = None if cut is None else replace(cut, dim=cut.dim + 1)
        return _linear(x.movedim(in_dims[0], 0), there, back, group, behind), 0


_linear_function = quick(_Linear)


def _linear(x: Tensor, there: Kernel, back: Kernel, group: Group, cut: Cut | None) -> Tensor:
    """there(x); a value without a gradient needs no node in the graph."""
    if not tracked(x):
        return there(x, group, cut)
    y: Tensor = _linear_function(x, there, back, group, cut)
    return y


def _tensor(name: str, x: object) -> Tensor:
    """`x`. Raises UsageError for what is no tensor."""
    if not isinstance(x, Tensor):
        raise UsageError(f"{name}: a tensor is mapped, not {type(x).__name__}")
    return x


def _apply(name: str, x: Tensor, group: Group, cut: Cut | None, shard: Shard | None = None) -> Tensor:
    """Map `x`, whose cut is that of `shard`."""
    row = MAPPINGS[name]
    _tensor(name, x)
    if capturing():
        where = {} if cut is None else {"dim": cut.dim} | ({} if shard is None else {"shard": shard})
        return marked(globals()[name], x, like=_like(name, group, cut), group=group, **where)
    return _linear(x, row.forward, row.backward, group, cut)


def _like(name: str, group: Group, cut: Cut | None) -> Callable[[Tensor], Tensor]:
    """What a mapping gives, without its values."""
    whole = MAPPINGS[name].target in ("Invariant", "Replicate")

    def like(x: Tensor) -> Tensor:
        shape = list(x.shape)
        if cut is not None:
            shape[cut.dim] = cut.size if whole else cut.sizes[group.rank]
        return x.new_empty(shape)

    return like


def owned(x: Tensor, group: Group, *, shard: Shard) -> Tensor:
    """This rank's part `x` of a sharded value, with zeros for the elements that an earlier rank holds too.

    For what counts every element of the whole once. No communication; without shared elements `x` itself.
    """
    cut = local_cut("owned", x, group, None, shard)
    return kernels.without_others(contiguous_copy(x), group, cut) if cut.shared else x


def copy(x: Tensor, group: Mesh = None) -> Tensor:
    """`x`, the same on every rank, for use by each rank's own part of a computation.

    Its gradient is summed over the ranks. No communication in forward.

    >>> copy(torch.ones(2)).tolist()
    [1.0, 1.0]
    """
    group = group_of(group)
    if group.size == 1 or not (capturing() or tracked(_tensor("copy", x))):
        return x
    return _apply("copy", x, group, None)


def reduce(x: Tensor, group: Mesh = None) -> Tensor:
    """The sum of the ranks' `x`, the same on every rank. The gradient is passed on unchanged."""
    group = group_of(group)
    return x if group.size == 1 else _apply("reduce", x, group, None)


class _ReduceInPlace(torch.autograd.Function):
    """`reduce`, written into its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        ctx.mark_dirty(x)
        return sum_into(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        if 0 in dy.stride():  # expanded, as of a sum: each of the products that read it would write it out
            dy = dy.contiguous()
        return copy(dy, ctx.group), None


def reduce_(x: Tensor, group: Mesh = None) -> Tensor:
    """As `reduce`, written into `x`, a tensor that nothing else reads: the fresh output of a linear.

    Saves the copy that `reduce` makes. Compiled code makes its own choice, and here, as under the transforms
    of torch.func, is `reduce` itself.
    """
    group = group_of(group)
    if group.size == 1:
        return x
    if not x.is_contiguous() or torch.compiler.is_compiling() or transformed():
        return reduce(x, group)
    if not tracked(x):
        return sum_into(x, group)
    y: Tensor = _ReduceInPlace.apply(x, group)  # type: ignore[no-untyped-call]
    return y


def share(x: Tensor, group: Mesh = None) -> Tensor:
    """`x`, the same on every rank, as a term of a sum over the ranks: whole on rank 0, zeros elsewhere.

    For a bias or residual that is added before a `reduce`. Its gradient is whole on every rank.
    """
    group = group_of(group)
    return x if group.size == 1 else _apply("share", x, group, None)


def gather(x: Tensor, group: Mesh = None, *, dim: int | None = None, shard: Shard | None = None) -> Tensor:
    """The whole value, of which each rank holds the part `x`: [XX, XX] -> XXXX on every rank.

    `shard` says how the whole was cut: uneven parts, sections that are brought back into their original
    order. Without it the parts are laid side by side, and the ranks ask each other for their sizes (compiled
    code takes them to be equal). `dim` is the cut dim of `x`; the default is
    the shard's dim, or the last without a shard. Any dtype.

    Raises UsageError when the local size is no part of `shard`, or for a dim that `x` has not.
    """
    group = group_of(group)
    if group.size == 1:
        return x
    return _apply("gather", x, group, local_cut("gather", x, group, dim, shard), shard)


def all_gather(
    x: Tensor, group: Mesh = None, *, dim: int | None = None, shard: Shard | None = None
) -> Tensor:
    """As `gather`, for use by each rank's own part of a computation: the gradient is reduce-scattered."""
    group = group_of(group)
    if group.size == 1:
        return x
    return _apply("all_gather", x, group, local_cut("all_gather", x, group, dim, shard), shard)


def scatter(x: Tensor, group: Mesh = None, *, dim: int | None = None, shard: Shard | None = None) -> Tensor:
    """This rank's part of `x`, which is the same on every rank: XXXX -> [XX, XX].

    `shard` says how to cut; without it `dim` (default: the last) is cut into one part a rank, the first
    ranks holding one more where it does not divide. The gradient is gathered on the same dim.

    Raises UsageError when the dim has fewer elements than there are ranks, or does not fit `shard`.
    """
    group = group_of(group)
    if group.size == 1:
        return x
    return _apply("scatter", x, group, whole_cut("scatter", x, group, dim, shard), shard)


def slice(x: Tensor, group: Mesh = None, *, dim: int | None = None, shard: Shard | None = None) -> Tensor:
    """As `scatter`, of a value whose gradient is summed elsewhere (a `copy` before it): no communication."""
    group = group_of(group)
    if group.size == 1:
        return x
    return _apply("slice", x, group, whole_cut("slice", x, group, dim, shard), shard)


def reduce_scatter(
    x: Tensor, group: Mesh = None, *, dim: int | None = None, shard: Shard | None = None
) -> Tensor:
    """This rank's part of the sum of the ranks' `x`. The gradient is gathered."""
    group = group_of(group)
    if group.size == 1:
        return x
    return _apply("reduce_scatter", x, group, whole_cut("reduce_scatter", x, group, dim, shard), shard)


def copy_shared(x: Tensor, group: Mesh = None, *, shard: Shard) -> Tensor:
    """`x`, this rank's part of a sharded parameter, where it is read: its gradient is summed over the ranks
    that hold the same elements (kv heads, when there are fewer than ranks).

    No communication in forward, and none at all when no element has two holders.
    """
    group = group_of(group)
    if group.size == 1:
        return x
    cut = local_cut("copy_shared", x, group, None, shard)
    return _apply("copy_shared", x, group, cut, shard) if cut.shared_pieces() else x
