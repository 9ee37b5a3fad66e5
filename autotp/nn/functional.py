"""The layers' computations as functions."""

from __future__ import annotations

from torch import Tensor

from autotp.nn.lookup import lookup
from autotp.nn.loss import vocab_parallel_cross_entropy, vocab_parallel_multi_label_cross_entropy

__all__ = ["lookup_table", "vocab_parallel_cross_entropy", "vocab_parallel_multi_label_cross_entropy"]


def lookup_table(table: Tensor, index: Tensor, start_index: int = 0, vocab_size: int | None = None) -> Tensor:
    """Rows (..., width) of a local `table` (rows, width) whose first row is id `start_index`.

    Ids that are not in the table give zeros. With `vocab_size`, ids outside of the vocabulary raise
    IndexError as in nn.Embedding. PaddlePaddle's `_c_lookup_table`.

    >>> import torch
    >>> lookup_table(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 4]), start_index=4).tolist()
    [[0.0], [1.0]]
    """
    return lookup(table, index, start_index, vocab_size=vocab_size)
