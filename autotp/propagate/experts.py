"""Layout rules of grouped matmuls: rows sorted by expert, each times its expert's own matrix.

The same op goes by several names: transformers' fallback is what a trace in float32 shows, torch's own
kernel is what runs.
"""

from __future__ import annotations

from autotp.placement import Layout
from autotp.propagate.call import Call, Conflict, Value, over
from autotp.propagate.contract import product

__all__ = ["EXPERTS"]

BLOCK = 16  # bytes


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
    for value in (rows, weight):
        _whole_blocks(call, value)
    return product(call, [(rows, "sk"), (weight, "ekn")], "sn")


def _whole_blocks(call: Call, value: Value) -> None:
    """Raise where a rank's width is no multiple of 16 bytes: the kernel refuses such strides."""
    if value.shard is None:
        return
    shard, size = value.shard, value.shape[value.shard.dim]
    block = max(1, BLOCK // value.node.meta["val"].dtype.itemsize)
    held = [shard.local_size(size, rank) for rank in range(shard.tp)]
    if any(width % block for width in held):
        section = min(length for length, _ in shard.pieces(size))
        help = (f"deal blocks of {block}: `heads: {section // block}`",) if section % block == 0 else ()
        raise Conflict(
            "AT318",
            f"{call.name} takes widths of whole {BLOCK}-byte blocks ({block} elements); the ranks would hold "
            f"{', '.join(map(str, dict.fromkeys(held)))}",
            blame=(value,),
            notes=(f"{value}",),
            help=help,
        )


EXPERTS = dict.fromkeys(["_grouped_mm", "transformers::grouped_mm_fallback"], _grouped)
