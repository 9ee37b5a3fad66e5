"""Layout rules of grouped matmuls: rows sorted by expert, each times its expert's own matrix.

The same op goes by several names: transformers' fallback is what a trace in float32 shows, torch's own
kernel is what runs.
"""

from __future__ import annotations

from autotp.placement import Layout
from autotp.propagate.call import Call, Conflict, over
from autotp.propagate.contract import product

__all__ = ["EXPERTS"]


def _grouped(call: Call) -> Layout:
    """(rows, in) x (experts, in, out) -> (rows, out), row i with the matrix that `offs` gives it."""
    rows = call["self"] if call["self"] is not None else call["input"]
    weight = call["mat2"] if call["mat2"] is not None else call["weight"]
    ends = call["offs"]
    if rows.rank != 2 or weight.rank != 3 or not ends.whole or call["bias"] is not None:
        raise Conflict(
            "AT304",
            f"{call.name} of {list(rows.shape)} and {list(weight.shape)} has no rule here",
            blame=tuple(v for v in call.values if not v.whole),
        )
    for value, dims in ((rows, {0}), (weight, {0})):
        if value.shard is not None and value.shard.dim in dims:
            raise over(call, value)
    return product(call, [(rows, "sk"), (weight, "ekn")], "sn")


EXPERTS = dict.fromkeys(["_grouped_mm", "transformers::grouped_mm_fallback"], _grouped)
