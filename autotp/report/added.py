"""What the proof adds by itself, because it costs nothing in forward: whole tensors that are copied,
sliced or shared where they are read, and mappings at the border of modules."""

from __future__ import annotations

from autotp.analysis import Analysis
from autotp.cost import collapsed
from autotp.report.words import count, shard_words

__all__ = ["added_lines", "branch_lines"]


def added_lines(analysis: Analysis) -> list[tuple[str, str]]:
    """Lines (tensor or module, what is added), layers taken together."""
    tensors = analysis.inventory.tensors()
    lines: dict[tuple[str, str], None] = {}
    for read in analysis.reads:
        words = ["copied where it is read: its gradient is summed"] if read.copied else []
        if read.shared:
            words.append("shared where it is read: it belongs to the first rank's part of a sum")
        if read.held is not None:
            words.append("its gradient is summed over the ranks that hold the same part")
        if read.shard is not None:
            size = tensors[read.name].shape[read.shard.dim]
            words.append(f"each rank reads its part: {shard_words(read.shard, size, 'elements')}")
        lines[collapsed(read.name), ", ".join(words)] = None
    for region in analysis.regions:
        parts = [
            f"{count(len(region.copied), 'argument')} copied" if region.copied else "",
            f"{count(len(region.reduced), 'result')} reduced" if region.reduced else "",
        ]
        lines[collapsed(region.path), ", ".join(filter(None, parts))] = None
    return list(lines)


def branch_lines(analysis: Analysis) -> list[tuple[str, str]]:
    """Lines (function, its file and lines) of the branches that no mode took."""
    lines: dict[tuple[str, str], list[str]] = {}
    for branch in analysis.branches:
        lines.setdefault((branch.function, branch.span.file), []).append(str(branch.span.line))
    return [(function, f"{file}:{', '.join(places)}") for (function, file), places in lines.items()]
