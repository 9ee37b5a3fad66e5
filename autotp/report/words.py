"""Numbers and layouts as people read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from autotp.diagnostic import Diagnostic
from autotp.placement import Deal, Shard
from autotp.units import counted

__all__ = [
    "bytes_words",
    "count",
    "cut_words",
    "deal_words",
    "findings_words",
    "parts_words",
    "shard_words",
    "shortened",
]


def count(number: int, noun: str) -> str:
    """A number and its noun.

    >>> count(1, "rule"), count(3, "rule")
    ('1 rule', '3 rules')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def findings_words(diagnostics: Iterable[Diagnostic]) -> str:
    """How many findings there are of each severity: "refused: 2 errors, 1 warning", or "ok".

    >>> findings_words([])
    'ok'
    """
    number = Counter(finding.severity for finding in diagnostics)
    words = ", ".join(count(number[kind], kind) for kind in ("error", "warning", "note") if number[kind])
    return f"refused: {words}" if number["error"] else f"ok: {words}" if words else "ok"


def bytes_words(nbytes: int) -> str:
    """A size with three digits or so.

    >>> bytes_words(131072), bytes_words(900), bytes_words(45_409_152)
    ('128.0 KiB', '900 B', '43.3 MiB')
    """
    if nbytes < 1024:
        return f"{nbytes} B"
    size, units = nbytes / 1024, iter(("KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while size >= 999.95 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{size:,.1f} {unit}"


def parts_words(parts: Sequence[int]) -> str:
    """What each rank gets, in rank order, runs of equal parts taken together.

    >>> parts_words([4, 4, 4, 4]), parts_words([2, 1]), parts_words([3, 2, 2, 2, 2])
    ('4 each', '2 + 1', '3 + 4 x 2')
    """
    if len(parts) > 2 and len(set(parts)) == 1:
        return f"{parts[0]} each"
    runs = [(value, len(list(run))) for value, run in groupby(parts)]
    if len(parts) < 4:
        runs = [(value, 1) for value in parts]
    return " + ".join(str(value) if times == 1 else f"{times} x {value}" for value, times in runs)


def deal_words(dealt: Deal, size: int, noun: str) -> str:
    """How one piece of `size` elements is dealt, in declared units; `noun` names them in the plural.

    >>> from autotp.placement import deal
    >>> deal_words(deal(12, 2), 384, "heads")
    '12 heads -> 6 + 6'
    """
    units = dealt.declared or dealt.units
    parts = [(stop - start) * units // dealt.units for start, stop in dealt.ranges]
    alike = _sharers(dealt.ranges)
    text = f"{counted(units, noun)} -> {parts_words(parts)}"
    return text if alike == 1 else f"{text}, each shared by {alike} ranks"


def _sharers(ranges: Iterable[tuple[int, int]]) -> int:
    """The largest number of ranks that hold the same units."""
    held = list(ranges)
    return max(held.count(one) for one in held)


def shard_words(shard: Shard, size: int, noun: str) -> str:
    """How a dim of `size` elements is cut.

    >>> from autotp.placement import deal
    >>> shard_words(Shard(0, deal(3, 2)), 48, "heads")
    '3 heads -> 2 + 1'
    >>> shard_words(Shard(0, deal(64, 2), groups=2), 128, "features")
    '2 sections of 64 features -> 32 + 32'
    """
    if shard.sections is None:
        assert shard.deal is not None, "a Shard has a deal or sections"
        words = deal_words(shard.deal, size // shard.groups, noun)
        return words if shard.groups == 1 else f"{shard.groups} sections of {words}"
    lengths = "+".join(f"{length}" + ("" if dealt else " whole") for length, dealt in shard.sections)
    parts = [shard.local_size(size, rank) for rank in range(shard.tp)]
    return f"sections {lengths} -> {parts_words(parts)}"


def cut_words(shard: Shard, size: int) -> str:
    """How a value's dim of `size` elements lies on the ranks, in elements.

    >>> from autotp.placement import deal
    >>> cut_words(Shard(2, deal(3, 2)), 48)
    'shard dim 2: 48 -> 32 + 16'
    >>> cut_words(Shard(1, deal(64, 2), groups=2), 128)
    'shard dim 1: 128 in 2 sections -> 64 + 64'
    """
    parts = parts_words([shard.local_size(size, rank) for rank in range(shard.tp)])
    pieces = len(shard.pieces(size))
    return f"shard dim {shard.dim}: {size}{f' in {pieces} sections' if pieces > 1 else ''} -> {parts}"


def shortened(name: str, width: int) -> str:
    """A dotted name in at most `width` columns (but no less than 12): whole segments go, from the front.

    >>> shortened("bert.encoder.layer.*.attention", 20)
    '….layer.*.attention'
    """
    while len(name) > max(width, 12) and "." in name.removeprefix("…."):
        name = "…." + name.removeprefix("….").partition(".")[2]
    return name
