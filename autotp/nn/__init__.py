"""Parallel layers: subclasses of torch's own whose weights hold one rank's part.

Complete on their own, for models that are written with them from the start, and the layers that
`autotp.shard` puts in place of a model's own.
"""

from autotp.nn import functional
from autotp.nn.embedding import ParallelEmbedding, VocabParallelEmbedding
from autotp.nn.linear import ColumnParallelLinear, RowParallelLinear
from autotp.nn.norm import ParallelLayerNorm, ParallelRMSNorm
from autotp.nn.splitting import split

__all__ = [
    "ColumnParallelLinear",
    "ParallelEmbedding",
    "ParallelLayerNorm",
    "ParallelRMSNorm",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "functional",
    "split",
]
