"""docs/coverage.md: what `"auto"` makes of every architecture, in tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
import transformers

from tests.zoo.trial import Result

__all__ = ["report"]

MOST = 0.9  # of the matrix bytes
BUFFERS = "no weight: buffers, as a mask or a table of positions, which every rank has"
# Measured with transformers 5.18.0 on the same architectures at world size 2, float32, tolerance 1e-4.
TRANSFORMERS = (
    ("sharded beyond the head, and right", 77),
    ("no plan: the whole model on every rank, silently", 67),
    ("only the head sharded", 17),
    ("crash", 9),
    ("silently wrong", 1),
)


def report(results: Sequence[Result], total: int) -> str:
    """The page, as Markdown. `total` is how many architectures there are."""
    return (
        "\n".join(
            [
                *_head(results, total),
                *_states(results),
                *_refused(results),
                *_low(results),
                *_whole(results),
                *_table(results),
            ]
        )
        + "\n"
    )


def _head(results: Sequence[Result], total: int) -> Iterator[str]:
    yield "# Coverage"
    yield ""
    yield (
        'What the plan `"auto"` makes of a tiny random model of every causal-LM architecture of transformers '
        f"{transformers.__version__} with torch {torch.__version__.partition('+')[0]}: `make zoo` writes "
        "this page. Every rank is run in one process, and outputs and every gradient are compared with the "
        "unsharded model in float64, to 1e-9; to 1e-4 where a model does not run in float64, or computes in "
        "float32 by hand. At tp 3, a fixed sample: heads do not divide, 4 are dealt as 2, 1 and 1, and two "
        "ranks hold the same one of 2 kv heads."
    )
    yield ""
    sizes = sorted({r.tp for r in results})
    built = {tp: [r for r in results if r.tp == tp and r.end != "unbuilt"] for tp in sizes}
    yield f"| | {' | '.join(f'tp {tp}' for tp in sizes)} |"
    yield f"|---{'|---' * len(sizes)}|"
    tried = " | ".join(str(sum(r.tp == tp for r in results)) for tp in sizes)
    yield f"| tried, of {total} architectures | {tried} |"
    rows = {
        "of these build as a tiny model": lambda r: True,
        "exact": lambda r: r.end == "exact",
        "exact, with more than embedding and head sharded": lambda r: r.end == "exact" and r.beyond,
        "exact, with at least 90 % of the matrix bytes sharded": lambda r: (
            r.end == "exact" and r.fraction >= MOST
        ),
        "exact with call-site edits": lambda r: r.end == "exact" and r.edits > 0,
        "exact with `labels=` in train mode: the loss, and every gradient": lambda r: (
            r.end == "exact" and r.labels
        ),
        "the same tokens from `generate()` with a cache": lambda r: r.tokens == "same",
        "refused, with a message": lambda r: r.end == "refused",
        "wrong": lambda r: r.end == "wrong",
        "another exception than autotp's": lambda r: r.end == "foreign",
        "not done within its time": lambda r: r.end == "late",
    }
    for name, test in rows.items():
        yield f"| {name} | {' | '.join(str(sum(map(test, built[tp]))) for tp in sizes)} |"
    yield ""
    yield 'Beside them transformers\' own `tp_plan="auto"`, of 171 architectures at world size 2:'
    yield ""
    yield "| | architectures |"
    yield "|---|---|"
    for name, count in TRANSFORMERS:
        yield f"| {name} | {count} |"
    yield ""


def _states(results: Sequence[Result]) -> Iterator[str]:
    """Which rows come from which commit, where there are several."""
    counts = Counter(r.commit for r in results)
    if len(counts) < 2:
        return
    yield (
        "A row stays until it is tried anew, so rows come from several states of the sources: the last "
        "column of the table below (a plus: with changes that were committed later)."
    )
    yield ""
    sizes = sorted({r.tp for r in results})
    yield f"| commit | {' | '.join(f'rows at tp {tp}' for tp in sizes)} |"
    yield f"|---{'|---' * len(sizes)}|"
    for commit, _ in counts.most_common():
        numbers = " | ".join(str(sum(r.tp == tp and r.commit == commit for r in results)) for tp in sizes)
        yield f"| {commit or 'before commits were noted'} | {numbers} |"
    yield ""


def _refused(results: Sequence[Result]) -> Iterator[str]:
    bad = [r for r in results if r.end in ("refused", "wrong", "foreign", "late")]
    yield "## Not exact, and why"
    yield ""
    if not bad:
        yield "None."
    for result in bad:
        yield f"- {result.kind}, tp {result.tp}, {result.end}: {_plain(result.why)}"
    for result in results:
        if result.tokens.startswith("refused"):
            yield f"- {result.kind}, tp {result.tp}, `generate()` {_plain(result.tokens)}"
    yield ""
    unbuilt = sorted({(r.kind, _plain(r.why)) for r in results if r.end == "unbuilt"})
    if unbuilt:
        yield "No tiny model is built of these:"
        yield ""
        yield from (f"- {kind}: {why}" for kind, why in unbuilt)
        yield ""


def _low(results: Sequence[Result]) -> Iterator[str]:
    """The exact models of which little is sharded, and why: the reasons by what they leave whole."""
    smallest = min((r.tp for r in results), default=0)
    low = [r for r in results if r.tp == smallest and r.end == "exact" and r.fraction < MOST]
    if not low:
        return
    yield f"## Less than {MOST:.0%} sharded, and why"
    yield ""
    yield "At the smallest tp. Behind each reason its part of the bytes of weights that stay whole."
    yield ""
    yield "| architecture | share | what stays whole |"
    yield "|---|---|---|"
    for result in sorted(low, key=lambda r: r.fraction):
        left: Counter[str] = Counter()
        for _, nbytes, why in result.whole:
            left[why] += nbytes
        total = sum(left.values())
        told = [f"{_plain(why)}: {n / total:.0%}" for why, n in left.most_common() if n >= 0.05 * total]
        # Every weight that is left has a reason.
        yield f"| {result.kind} | {result.fraction:.1%} | {'; '.join(told) or BUFFERS} |"
    yield ""


def _whole(results: Sequence[Result]) -> Iterator[str]:
    """The reasons for which matrices of exact models stay whole, by how many models have them."""
    yield "## What stays whole, by reason"
    yield ""
    yield "At the smallest tp; how many architectures have at least one such matrix of 1 % of their bytes."
    yield ""
    smallest = min((r.tp for r in results), default=0)
    reasons: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for result in results:
        total = sum(nbytes for _, nbytes, _ in result.whole) / max(1e-9, 1 - result.fraction)
        told = {why for _, nbytes, why in result.whole if nbytes >= 0.01 * total}
        for why in told if result.tp == smallest else ():
            message, _, place = why.partition(" (")
            short = _general(message)
            reasons[short] += 1
            examples.setdefault(short, f"{result.kind}, {place.rstrip(')')}" if place else result.kind)
    yield "| architectures | reason | such as |"
    yield "|---|---|---|"
    for reason, count in reasons.most_common(40):
        yield f"| {count} | {_plain(reason)} | {examples[reason]} |"
    yield ""


def _table(results: Sequence[Result]) -> Iterator[str]:
    yield "## Every architecture"
    yield ""
    yield (
        "Share: of the matrix bytes. Collectives of one rank: forward / backward of the traced forward. "
        "Edits: changed lines of the model's code. Difference: of outputs / of gradients (relative). "
        "Labels: whether the loss of a forward with `labels=` in train mode was compared, too (it is not "
        "where that forward draws random numbers, or the model takes no labels). Tokens: what greedy "
        "generation with a cache gave; empty where the unsharded model does not generate, and where it was "
        "not tried: at any but the smallest tp."
    )
    yield ""
    columns = ("share", "collectives", "edits", "difference", "tolerance", "labels", "tokens", "commit")
    yield f"| architecture | tp | | {' | '.join(columns)} |"
    yield f"|{'---|' * (3 + len(columns))}"
    for r in sorted(results, key=lambda r: (r.kind, r.tp)):
        if r.end == "unbuilt":
            continue
        forward, backward = (sum(r.collectives.get(p, {}).values()) for p in ("forward", "backward"))
        numbers = f"{r.output:.0e} / {r.gradient:.0e} | {r.tolerance:.0e}" if r.tolerance else " | "
        moves = f"{forward} / {backward}"
        line = f"| {r.kind} | {r.tp} | {r.end} | {r.fraction:.1%} | {moves} | {r.edits or ''} | {numbers} "
        yield line + f"| {'same' if r.labels and r.end == 'exact' else ''} | {_told(r.tokens)} | {r.commit} |"


def _told(tokens: str) -> str:
    """How generation ended, in a word."""
    word = tokens.partition(":")[0]
    return "" if word == "none" else word


def _general(message: str) -> str:
    """A message without the numbers and names of one model."""
    names = ("." in word.strip(":,.") or any(c.isdigit() for c in word) for word in message.split())
    return " ".join("…" if name else word for name, word in zip(names, message.split(), strict=True))


def _plain(text: str) -> str:
    first = text.strip().splitlines()[0] if text.strip() else ""
    return first.replace("|", "\\|")
