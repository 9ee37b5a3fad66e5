"""An embedding whose table is cut by rows: each rank looks up the ids it holds, and the rows are summed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autotp import mappings
from autotp.comm import Group, group_of
from autotp.diagnostic import UsageError
from autotp.mappings import Mesh
from autotp.nn.lookup import lookup, renormalise
from autotp.nn.master import InitMethod, drawn_alike, own_part, shard_of
from autotp.placement import Shard

__all__ = ["VocabParallelEmbedding"]


class VocabParallelEmbedding(nn.Embedding):
    """nn.Embedding with the rows of the table dealt to the ranks: `weight` is [vocabulary/tp, width].

    All arguments have their global meaning: ids, `num_embeddings` and `padding_idx` are those of the
    whole table, whatever rank holds the row. An id outside the vocabulary raises as nn.Embedding does;
    with `check_ids=False` it gives a row of zeros. The output is the same on all ranks.

    >>> layer = VocabParallelEmbedding(10, 4)
    >>> layer(torch.tensor([[0, 9]])).shape
    torch.Size([1, 2, 4])
    """

    group: Group
    shard: Shard
    layouts: dict[str, Shard]
    start: int
    check_ids: bool
    init_method: InitMethod | None = None
    master_weight: Tensor | None = None

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
        nn.Module.__init__(self)
        group = group_of(group)
        self._place(
            shard_of("VocabParallelEmbedding", "num_embeddings", 0, num_embeddings, group.size),
            group,
            num_embeddings,
            check_ids,
        )
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise UsageError(
                f"VocabParallelEmbedding: padding_idx={padding_idx} is outside "
                f"num_embeddings={num_embeddings}"
            )
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.init_method = init_method
        self.keep_master_weight_for_test = keep_master_weight_for_test
        shape = self.shard.local_shape((num_embeddings, embedding_dim), group.rank)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def _place(self, shard: Shard, group: Group, num_embeddings: int, check_ids: bool) -> None:
        ranges = shard.ranges(num_embeddings, group.rank)
        if len(ranges) != 1 or shard.dim != 0:
            raise UsageError(
                f"VocabParallelEmbedding: {shard} does not give each rank one range of whole rows"
            )
        self.group, self.shard, self.layouts = group, shard, {"weight": shard}
        self.start, self.check_ids = ranges[0][0], check_ids

    def reset_parameters(self) -> None:
        """Fill the full table by `init_method`, its padding row by zeros, and keep this rank's rows."""
        if self.init_method is None:
            raise UsageError(f"{type(self).__name__}: a layer that was sharded has no init_method")
        if self.weight.is_meta:
            return
        master = torch.empty(
            (self.num_embeddings, self.embedding_dim), device=self.weight.device, dtype=self.weight.dtype
        )
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

    @classmethod
    def adopt(cls, module: nn.Embedding, *, shard: Shard, group: Mesh, check_ids: bool = True) -> None:
        """Turn an nn.Embedding into this class in place; hooks, identity and parameters stay.

        `shard` cuts dim 0 of the weight; the caller slices it. Raises UsageError for a subclass of
        nn.Embedding, whose forward might differ, and for a shard that is not one range of rows a rank.
        """
        if type(module) is not nn.Embedding:
            raise UsageError(
                f"{cls.__name__} takes the place of an nn.Embedding, not of {type(module).__name__}"
            )
        group = group_of(group)
        if len(shard.ranges(module.num_embeddings, group.rank)) != 1 or shard.dim != 0:
            raise UsageError(f"{cls.__name__}: {shard} does not give each rank one range of whole rows")
        module.__class__ = cls
        assert isinstance(module, VocabParallelEmbedding)
        module._place(shard, group, module.num_embeddings, check_ids)

    def forward(self, input: Tensor) -> Tensor:
        """Ids (...) -> (..., width)."""
        if self.max_norm is not None:
            renormalise(self.weight, input, self.start, max_norm=self.max_norm, norm_type=self.norm_type)
        rows = lookup(
            self.weight,
            input,
            self.start,
            vocab_size=self.num_embeddings if self.check_ids else None,
            padding_idx=self.padding_idx,
            scale_grad_by_freq=self.scale_grad_by_freq,
            sparse=self.sparse,
        )  # (..., width), zeros for other ranks' ids
        return mappings.reduce(rows, self.group)

    def extra_repr(self) -> str:
        """num_embeddings and padding_idx are those of the whole table."""
        return f"{super().extra_repr()}, tp={self.group.size}"
