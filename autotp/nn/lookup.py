"""Rows of a part of an embedding table, zeros for the ids that other ranks hold; and their norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autotp.comm import Group
from autotp.derivatives import quick
from autotp.diagnostic import UsageError
from autotp.marks import capturing, marked

__all__ = ["checked_ids", "lookup", "renormalise_columns", "renormalise_rows"]


def checked_ids(name: str, ids: object) -> None:
    """Raise UsageError for ids that are no tensor, or of a dtype that torch's embeddings do not take."""
    if not isinstance(ids, Tensor):
        raise UsageError(f"{name}: ids are a tensor, not {type(ids).__name__}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise UsageError(f"{name}: ids are of dtype torch.int64 or torch.int32, not {ids.dtype}")


def _positions(
    ids: Tensor, start: int, rows: int, *, foreign_to: int, vocab_size: int | None
) -> tuple[Tensor, Tensor]:
    """The row of each id in a table that starts at `start`, and which ids are foreign to it.

    Foreign ids get row `foreign_to`; but with a `vocab_size`, ids outside of it keep their impossible
    row, so that the lookup itself raises as it does in nn.Embedding, without a check of its own.
    """
    local = ids - start
    foreign = (local < 0) | (local >= rows)
    moved = foreign
    if vocab_size is not None:
        moved = foreign & (ids >= 0) & (ids < vocab_size)
    return torch.where(moved, foreign_to, local), foreign


class _Lookup(torch.autograd.Function):
    """rows = table[ids - start]; saves nothing but the ids, as nn.Embedding does."""

    @staticmethod
    def forward(
        table: Tensor,
        ids: Tensor,
        start: int,
        vocab_size: int | None,
        padding_idx: int | None,
        scale_grad_by_freq: bool,
        sparse: bool,
    ) -> Tensor:
        position, foreign = _positions(ids, start, table.shape[0], foreign_to=0, vocab_size=vocab_size)
        return F.embedding(position, table).masked_fill_(foreign.unsqueeze(-1), 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        table, ids, ctx.start, _, ctx.padding_idx, ctx.scale_grad_by_freq, ctx.sparse = inputs
        ctx.rows = table.shape[0]
        ctx.save_for_backward(ids)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        rows = ctx.rows
        position, _ = _positions(ids, ctx.start, rows, foreign_to=rows, vocab_size=None)
        if ctx.padding_idx is not None:
            position = position.masked_fill(ids == ctx.padding_idx, rows)
        if ctx.sparse:
            position, dy = position.flatten(), dy.reshape(-1, dy.shape[-1])
            own = position < rows
            shape = (rows, dy.shape[-1])
            values = dy[own]
            if ctx.scale_grad_by_freq:
                counts = torch.bincount(position, minlength=rows + 1)
                values = values / counts[position[own]].unsqueeze(-1).to(values.dtype)
            dtable = torch.sparse_coo_tensor(
                position[own].unsqueeze(0), values, shape, check_invariants=False
            )
        else:
            # one row more, for the ids that have no gradient here
            dtable = torch.ops.aten.embedding_dense_backward(
                dy, position, rows + 1, -1, ctx.scale_grad_by_freq
            )
            dtable = dtable[:rows]
        return dtable, None, None, None, None, None, None


_looked_up = quick(_Lookup)


def lookup(
    table: Tensor,
    ids: Tensor,
    start: int = 0,
    *,
    vocab_size: int | None = None,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Rows (..., width) of `table` (rows, width), whose first row is id `start`, for `ids` (...).

    Ids of other ranks give zeros, and so do ids that are in no table, unless `vocab_size` is given:
    then those raise IndexError as in nn.Embedding (on CUDA a device-side assertion). The other options
    are those of torch.nn.functional.embedding, with the global `padding_idx`, 0 … vocabulary - 1.

    Raises UsageError for ids that are no tensor of int64 or int32.

    >>> lookup(torch.tensor([[1.0], [2.0]]), torch.tensor([3, 4, 5]), start=4).tolist()
    [[0.0], [1.0], [2.0]]
    """
    checked_ids("lookup", ids)
    if capturing():
        return marked(
            lookup,
            table,
            ids,
            like=lambda table, ids: table.new_empty((*ids.shape, table.shape[-1])),
            start=start,
            vocab_size=vocab_size,
            padding_idx=padding_idx,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
        )
    rows: Tensor = _looked_up(table, ids, start, vocab_size, padding_idx, scale_grad_by_freq, sparse)
    return rows


def renormalise_rows(table: Tensor, ids: Tensor, start: int, *, max_norm: float, norm_type: float) -> None:
    """Scale, in place, the rows that `ids` name to a norm of at most `max_norm`, as nn.Embedding does."""
    local = ids.flatten() - start
    own = local[(local >= 0) & (local < table.shape[0])]
    with torch.no_grad():
        torch.embedding_renorm_(table.detach(), own, max_norm, norm_type)


def renormalise_columns(
    table: Tensor, ids: Tensor, group: Group, *, max_norm: float, norm_type: float
) -> None:
    """The same for a table of which each rank holds some columns: the norm is that of the whole row."""
    with torch.no_grad():
        # each row once; compiled code knows no number that depends on ids, and scales a row twice alike
        named = ids.flatten() if torch.compiler.is_compiling() else ids.unique()  # type: ignore[no-untyped-call]
        rows = F.embedding(named, table)  # an id that is none raises, and does not count from the end
        parts = torch.linalg.vector_norm(rows, norm_type, dim=-1).unsqueeze(0)
        every = group.all_gather(parts, 0, [1] * group.size)
        # a norm of the parts' norms, but for the number of elements that are not 0, which adds up
        norms = torch.linalg.vector_norm(every, norm_type, dim=0) if norm_type else every.sum(0)
        scale = torch.where(norms > max_norm, max_norm / (norms + 1e-7), 1.0)
        table[named] = rows * scale.unsqueeze(-1)
