"""Embeddings whose table is cut by rows (vocabulary) or by columns (width).

    VocabParallelEmbedding   table [vocabulary/tp, width]   own rows, zeros for other ids -> reduce
    ParallelEmbedding        table [vocabulary, width/tp]   own columns of every row      -> gather

The layers of Megatron-LM and FairScale's nn.model_parallel. All arguments keep their global meaning, and
neither the vocabulary nor the width need divide by tp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autotp import mappings
from autotp.comm import Group, group_of
from autotp.cut import cut_of
from autotp.diagnostic import UsageError
from autotp.mappings import Mesh
from autotp.nn.behind import behind
from autotp.nn.lookup import checked_ids, lookup, renormalise_columns, renormalise_rows
from autotp.nn.master import (
    InitMethod,
    checked_init,
    checked_kind,
    drawn_alike,
    own_part,
    shard_of,
    whole_number,
)
from autotp.part_guard import refuse_other, watch
from autotp.placement import Shard
from autotp.trace.delegates import delegates

__all__ = ["ParallelEmbedding", "VocabParallelEmbedding"]


class _CutEmbedding(nn.Embedding):
    """What both have: a group, a cut of the table, and the way to its first values."""

    group: Group
    shard: Shard
    held: int
    """How many rows or columns this rank holds."""
    layouts: dict[str, Shard]
    """How each parameter is cut, by its name."""
    init_method: InitMethod | None = None
    master_weight: Tensor | None = None

    cut_dim: int
    """The dim of the table that is dealt to the ranks."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        *,
        init_method: InitMethod = nn.init.xavier_normal_,
        keep_master_weight_for_test: bool = False,
        group: Mesh = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        layer, sizes, dim = type(self).__name__, (num_embeddings, embedding_dim), self.cut_dim
        group = group_of(group)
        for name, size in (("num_embeddings", num_embeddings), ("embedding_dim", embedding_dim)):
            whole_number(layer, name, size)
        if padding_idx is not None:
            whole_number(layer, "padding_idx", padding_idx)
        for name, number in (("max_norm", max_norm), ("norm_type", norm_type)):
            if type(number) not in (int, float) and not (name == "max_norm" and number is None):
                raise UsageError(f"{layer}: {name} must be a number, not {number!r}")
        checked_init(layer, init_method)
        checked_kind(
            layer,
            dtype,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            keep_master_weight_for_test=keep_master_weight_for_test,
        )
        shard = shard_of(layer, ("num_embeddings", "embedding_dim")[dim], dim, sizes[dim], group.size)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise UsageError(f"{layer}: padding_idx={padding_idx} is outside num_embeddings={num_embeddings}")
        self.num_embeddings, self.embedding_dim = sizes
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self._place(shard, group)
        self.init_method = init_method
        self.keep_master_weight_for_test = keep_master_weight_for_test
        shape = shard.local_shape(sizes, group.rank)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()
        watch(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        watch(self)  # a copy, too

    def _place(self, shard: Shard, group: Group) -> None:
        self.group, self.shard, self.layouts = group, shard, {"weight": shard}
        size = (self.num_embeddings, self.embedding_dim)[shard.dim]
        self.held = shard.local_size(size, group.rank)

    def reset_parameters(self) -> None:
        """Fill the full table by `init_method`, its padding row by zeros, and keep this rank's part."""
        if self.init_method is None:
            raise UsageError(f"{type(self).__name__}: a layer that was sharded has no init_method")
        if self.weight.is_meta:
            return
        shape = (self.num_embeddings, self.embedding_dim)
        master = torch.empty(shape, device=self.weight.device, dtype=self.weight.dtype)
        with torch.no_grad():
            with drawn_alike(self.group, master.device):
                self.init_method(master)
            if self.padding_idx is not None:
                master[self.padding_idx].zero_()
            self.weight.copy_(own_part(master, self.shard, self.group.rank))
        self.master_weight = master if self.keep_master_weight_for_test else None

    def get_master_weight(self) -> Tensor:
        """The full table, the same on all ranks; call it on all."""
        return mappings.gather(self.weight.detach(), self.group, shard=self.shard)

    def extra_repr(self) -> str:
        """num_embeddings, embedding_dim and padding_idx are those of the whole table."""
        return f"{super().extra_repr()}, tp={self.group.size}"


class VocabParallelEmbedding(_CutEmbedding):
    """nn.Embedding with the rows of the table dealt to the ranks: `weight` is [vocabulary/tp, width].

    All arguments have their global meaning: ids, `num_embeddings` and `padding_idx` are those of the
    whole table, whatever rank holds the row. An id outside the vocabulary raises as nn.Embedding does;
    with `check_ids=False` it gives a row of zeros. The output is the same on all ranks.

    `init_method` fills the full table alike on all ranks. `group` is a DeviceMesh (its axis "tp"), a
    process group, a `Group`, or None for the default.

    >>> layer = VocabParallelEmbedding(10, 4)
    >>> layer(torch.tensor([[0, 9]])).shape
    torch.Size([1, 2, 4])
    """

    cut_dim = 0
    start: int
    check_ids: bool
    reduce_output: bool = True
    """False: the output stays partial, for a reduce that stands elsewhere."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        *,
        check_ids: bool = True,
        init_method: InitMethod = nn.init.xavier_normal_,
        keep_master_weight_for_test: bool = False,
        group: Mesh = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        checked_kind("VocabParallelEmbedding", None, check_ids=check_ids)
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            init_method=init_method,
            keep_master_weight_for_test=keep_master_weight_for_test,
            group=group,
            device=device,
            dtype=dtype,
        )
        self.check_ids = check_ids

    def _place(self, shard: Shard, group: Group) -> None:
        super()._place(shard, group)
        self.start = shard.ranges(self.num_embeddings, group.rank)[0][0]

    @classmethod
    def adopt(cls, module: nn.Embedding, *, shard: Shard, group: Mesh, check_ids: bool = True) -> None:
        """Turn an nn.Embedding into this class in place; hooks, identity and parameters stay.

        A subclass that computes through `super().forward` keeps its own forward: this class is put behind
        it. `shard` cuts dim 0 of the weight; the caller slices it. Raises UsageError for any other subclass,
        whose forward might differ, and for a shard that is not one range of rows a rank.
        """
        kind = type(module)
        if kind is not nn.Embedding and not delegates(kind, nn.Embedding):
            raise UsageError(
                f"{cls.__name__} takes the place of an nn.Embedding, not of {type(module).__name__}"
            )
        group = group_of(group)
        rows = module.num_embeddings
        if shard.dim != 0 or shard.tp != group.size or not shard.fits(rows):
            raise UsageError(
                f"{cls.__name__}: {shard} is no cut of dim 0 of the weight, {rows} elements over "
                f"{group.size} ranks"
            )
        if len(shard.ranges(rows, group.rank)) != 1 or cut_of(shard, rows, 0).shared:
            raise UsageError(f"{cls.__name__}: {shard} does not give each rank one range of rows of its own")
        module.__class__ = cls if kind is nn.Embedding else behind(kind, VocabParallelEmbedding)
        assert isinstance(module, VocabParallelEmbedding)
        module._place(shard, group)
        module.check_ids = check_ids

    def forward(self, input: Tensor) -> Tensor:
        """Ids (...) -> (..., width)."""
        checked_ids("VocabParallelEmbedding", input)
        weight: Tensor = self.weight
        refuse_other(self, weight)
        if self.max_norm is not None:
            renormalise_rows(weight, input, self.start, max_norm=self.max_norm, norm_type=self.norm_type)
        rows = lookup(
            weight,
            input,
            self.start,
            vocab_size=self.num_embeddings if self.check_ids else None,
            padding_idx=self.padding_idx,
            scale_grad_by_freq=self.scale_grad_by_freq,
            sparse=self.sparse,
        )  # (..., width), zeros for other ranks' ids
        return mappings.reduce_(rows, self.group) if self.reduce_output else rows


class ParallelEmbedding(_CutEmbedding):
    """nn.Embedding with the columns of the table dealt to the ranks: `weight` is [vocabulary, width/tp].

    Each rank looks up its columns, and the widths are gathered: the output is (..., width) on all ranks.
    `max_norm` bounds the norm of the whole row. The arguments are those of VocabParallelEmbedding.

    >>> layer = ParallelEmbedding(10, 4)
    >>> layer(torch.tensor([[0, 9]])).shape
    torch.Size([1, 2, 4])
    """

    cut_dim = 1

    def forward(self, input: Tensor) -> Tensor:
        """Ids (...) -> (..., width)."""
        checked_ids("ParallelEmbedding", input)
        weight: Tensor = self.weight
        refuse_other(self, weight)
        if self.max_norm is not None:
            renormalise_columns(weight, input, self.group, max_norm=self.max_norm, norm_type=self.norm_type)
        columns = F.embedding(
            input,
            weight,
            self.padding_idx,
            scale_grad_by_freq=self.scale_grad_by_freq,
            sparse=self.sparse,
        )  # (..., width/tp)
        return mappings.gather(columns, self.group, dim=-1, shard=self.shard)
