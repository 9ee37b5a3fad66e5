"""One folder that a conversion writes: what of each tensor belongs there, and the headers of its files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotp.checkpoint.folder import PART
from autotp.diagnostic import UsageError
from autotp.header import Entry, Header, encode_header
from autotp.placement import Shard
from autotp.slicing import Rows, rows

__all__ = ["Output", "rank_folder", "rank_outputs"]


def rank_outputs(layouts: Mapping[str, Shard], tp: int, ranks: Sequence[int] | None) -> list[Output]:
    """The outputs of all ranks, of which only `ranks` are written; None is all of them.

    Raises UsageError for ranks that there are not, and for what is no list of them.
    """
    chosen = range(tp) if ranks is None else ranks
    listed = isinstance(chosen, Sequence) and not isinstance(chosen, str)
    if not listed or not chosen or not all(type(rank) is int and rank in range(tp) for rank in chosen):
        raise UsageError(
            f"ranks are from 0 to {tp - 1} for tp={tp}, not {list(chosen) if listed else repr(ranks)}"
        )
    return [Output(rank_folder(Path(), rank, tp), layouts, rank, tp, rank in chosen) for rank in range(tp)]


def rank_folder(folder: Path, rank: int, tp: int) -> Path:
    """Where a rank's files stand: `rank-0-of-2`."""
    return folder / f"rank-{rank}-of-{tp}"


@dataclass(frozen=True)
class Output:
    """One folder to write: one rank's parts, or (`rank` None) every tensor whole, as in the source.

    One that is not `written` is only computed, for the digests that belong in every manifest. The header
    of a part says whose it is, so that nobody takes it for the whole.
    """

    home: Path
    layouts: Mapping[str, Shard]
    rank: int | None
    tp: int = 1
    written: bool = True

    def rows(self, entry: Entry) -> Rows:
        """What of a tensor belongs here."""
        shard = None if self.rank is None else self.layouts.get(entry.name)
        return rows(entry.shape, entry.itemsize, shard, self.rank or 0)

    def header(self, file: Header) -> Header:
        """The header of the file in `home` that holds this output's part of a source file."""
        if self.rank is None:
            return replace(file, path=self.home / file.path.name)
        local = {}
        for entry in file.tensors.values():
            shard = self.layouts.get(entry.name)
            shape = entry.shape if shard is None else shard.local_shape(entry.shape, self.rank)
            local[entry.name] = (entry.dtype, shape, self.rows(entry).nbytes)
        mark = {PART: f"rank {self.rank} of {self.tp}"} if self.tp > 1 else {}
        metadata = {**file.metadata, **mark}
        raw, starts = encode_header(local, metadata)
        entries = {
            name: Entry(name, local[name][0], local[name][1], start, start + local[name][2])
            for name, start in starts.items()
        }
        size = len(raw) + sum(nbytes for _, _, nbytes in local.values())
        return Header(self.home / file.path.name, size, raw, entries, metadata)

    def index(self, headers: Sequence[Header], source: bytes) -> bytes:
        """The text of the index in `home` for the files with these headers, and the source's index."""
        if self.rank is None:
            return source
        total = sum(entry.nbytes for header in headers for entry in header.tensors.values())
        weight_map = {name: header.path.name for header in headers for name in header.tensors}
        table = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        return (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()
