"""A derived plan as the text of a plan file, with what stays whole, and why, as comments."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from autotp.analysis import LAYOUTS, Analysis
from autotp.cost import collapsed
from autotp.derive.derived import Derived, Reason

__all__ = ["derived_text"]

WIDTH = 100
GATHERED = "What is cut, though its layer's output is read whole and so gathered:"


def derived_text(analysis: Analysis, derived: Derived) -> str:
    """The plan as YAML; it loads again."""
    return (
        "".join(f"{line}\n" for line in _head(analysis))
        + analysis.plan.dumps()
        + _reasons(GATHERED, derived.gathered.values())
        + _reasons("What stays whole on every rank, and why:", derived.whole)
    )


def _head(analysis: Analysis) -> Iterator[str]:
    proven = "proven" if analysis.certainty == LAYOUTS else "not proven"
    yield f"# Derived from the graph of {analysis.inventory.name}, {proven} for tp={analysis.tp}:"
    counts = {"forward": 0, "backward": 0}
    for collective in analysis.collectives:
        counts[collective.direction] += collective.calls
    moves = " and ".join(f"{n} in {direction}" for direction, n in counts.items())
    yield f"# {analysis.sharded_fraction:.1%} of the bytes of matrices are sharded; collectives: {moves}."


def _reasons(title: str, told: Iterable[Reason]) -> str:
    groups: dict[tuple[str, str], list[Reason]] = {}
    for reason in sorted(told, key=lambda r: -r.nbytes):
        groups.setdefault((collapsed(reason.name), reason.message), []).append(reason)
    lines = [f"# {title}"] if groups else []
    for (name, message), reasons in groups.items():
        first = reasons[0]
        where = f" ({first.source})" if first.source is not None else ""
        size = sum(reason.nbytes for reason in reasons)
        text = f"{name if len(reasons) > 1 else first.name} [{size:,} bytes]: {message}{where}"
        lines += textwrap.wrap(
            text, WIDTH, initial_indent="#   ", subsequent_indent="#     ", break_long_words=False,
            break_on_hyphens=False,
        )  # fmt: skip
    return "".join(f"{line}\n" for line in lines)
