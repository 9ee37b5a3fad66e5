"""Heads that are no layers: products with the table of a vocabulary, read past its embedding.

    F.linear(h, self.embed.weight)     h @ self.embed.weight.T

The table is cut by words, so each rank has the logits of its own words. The hidden states are copied where
the product reads them (their gradient is summed over the ranks), and the logits are gathered where it makes
them: what reads them, a softmax, a loss, `generate`, sees all words. Both stand around expressions of the
model's code (`rewrite/edits`). The table itself may be turned and cast on the way.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autotp.placement import INVARIANT, Shard
from autotp.propagate.call import Call, Conflict
from autotp.propagate.contract import CONTRACTIONS

__all__ = ["GATHER", "HELP", "CopiedIn", "copied_in", "gathers", "reads_table"]

GATHER = ("gather",)
HELP = (
    "a head that shares its weight may be a layer: in __init__ `self.head = nn.Linear(…, bias=False); "
    "self.head.weight = self.embed.weight`, with the rule `head: {style: column, gather_output: true}`",
)
_PRODUCTS = CONTRACTIONS.keys() - {"embedding"}
_ON_THE_WAY = frozenset(
    ["alias", "contiguous", "numpy_T", "permute", "t", "to", "_to_copy", "transpose", "type_as"]
)


@dataclass(frozen=True)
class CopiedIn:
    """The op at `reader` is given a copy of `value`."""

    reader: fx.Node
    value: fx.Node


def reads_table(call: Call) -> bool:
    """Whether an op may be given a table past its layer: a product with it, or what makes one of it."""
    return call.name in _PRODUCTS or call.name in _ON_THE_WAY


def _with_table(call: Call, tables: frozenset[str]) -> bool:
    """Whether a call is a product with the table of one of the vocab layers `tables`, and with nothing else
    that a layer has cut."""
    origins = frozenset().union(*(v.origins for v in call.sharded()))
    return call.name in _PRODUCTS and bool(origins) and origins <= tables


def copied_in(call: Call, conflict: Conflict, tables: frozenset[str]) -> list[CopiedIn]:
    """The copies that resolve a conflict of such a product: of each whole value with a gradient."""
    if conflict.code not in ("AT305", "AT306") or not _with_table(call, tables):
        return []
    whole = [v for v in call.values if v.layout == INVARIANT and v.grad and v.node.op != "get_attr"]
    return [CopiedIn(call.node, value.node) for value in whole]


def gathers(call: Call, layout: object, tables: frozenset[str]) -> bool:
    """Whether the product gives logits, of which each rank has those of its own words."""
    return isinstance(layout, Shard) and not layout.shared and _with_table(call, tables)
