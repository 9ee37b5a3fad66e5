"""What a plan costs: the bytes that each rank holds, and what stays whole on every rank.

Everything here is counted from names, shapes and layouts, without torch and without reading weights.
Bytes are exact, for uneven layouts too, and a tied tensor counts once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from autotp.diagnostic import Diagnostic
from autotp.inventory import Inventory, TensorInfo
from autotp.pattern import strongest
from autotp.placement import Shard

if TYPE_CHECKING:
    from autotp.match import Matches

__all__ = [
    "LOW",
    "Reason",
    "collapsed",
    "cost_findings",
    "held_bytes",
    "left_whole",
    "rank_bytes",
    "sharded_fraction",
]

LEFT_WHOLE = "AT390"  # a large tensor that stays whole on every rank
NOTHING = "AT391"  # a plan that shards nothing
LOW = "AT392"  # a plan that shards next to nothing

# A group of matrices is large when it holds this share of the model's bytes.
LARGE = Fraction(1, 100)
# A plan shards next to nothing below this share of the matrix bytes.
LITTLE = Fraction(1, 10)


@dataclass(frozen=True)
class Reason:
    """Tensors of one collapsed name that stay whole on every rank, and why."""

    name: str
    why: str
    tensors: int
    nbytes: int
    matrices: bool
    told: bool  # the plan says `replicate`, or a finding says why its rule is refused
    first: str  # the first of the tensors, by its full name


def _own(inventory: Inventory) -> Iterator[TensorInfo]:
    """Every tensor once: the further names of tied tensors are left out."""
    for name, tensor in inventory.tensors().items():
        if name not in inventory.aliases:
            yield tensor


def rank_bytes(inventory: Inventory, layouts: Mapping[str, Shard], tp: int) -> tuple[int, ...]:
    """The bytes of parameters and buffers that each rank holds, exactly."""
    return held_bytes(_own(inventory), layouts, tp)


def held_bytes(tensors: Iterable[TensorInfo], layouts: Mapping[str, Shard], tp: int) -> tuple[int, ...]:
    """The bytes that each rank holds of some tensors; equal tensors are worked out once."""
    number = Counter((tensor.shape, tensor.nbytes, layouts.get(tensor.name)) for tensor in tensors)
    held = [0] * tp
    for (shape, nbytes, shard), times in number.items():
        size = 0 if shard is None else shape[shard.dim]
        for rank in range(tp):
            local = nbytes * shard.local_size(size, rank) // size if shard is not None and size else nbytes
            held[rank] += times * local
    return tuple(held)


def sharded_fraction(inventory: Inventory, layouts: Mapping[str, Shard]) -> float:
    """The share of the bytes of matrices (two dims or more) that is cut, from 0.0 to 1.0.

    Sections that are whole on every rank do not count as cut.
    """
    total = cut = Fraction(0)
    for tensor in _own(inventory):
        if len(tensor.shape) < 2:
            continue
        total += tensor.nbytes
        shard = layouts.get(tensor.name)
        size = 0 if shard is None else tensor.shape[shard.dim]
        if shard is not None and size:
            dealt = sum(length for length, dealt in shard.pieces(size) if dealt is not None)
            cut += Fraction(tensor.nbytes * dealt, size)
    return float(cut / total) if total else 0.0


def collapsed(path: str) -> str:
    """A path with its layer numbers taken out.

    >>> collapsed("model.layers.11.mlp.fc1")
    'model.layers.*.mlp.fc1'
    """
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


def left_whole(inventory: Inventory, matches: Matches, layouts: Mapping[str, Shard]) -> tuple[Reason, ...]:
    """What every rank holds whole, largest first, layers taken together, each with its reason."""
    groups: dict[tuple[str, str], list[TensorInfo]] = {}
    told: set[str] = set()
    for tensor in _own(inventory):
        if tensor.name in layouts:
            continue
        owner = tensor.name.rpartition(".")[0]
        placed = matches.placed.get(tensor.name) or matches.placed.get(owner)
        patterns = strongest(matches.plan.rules, tensor.name) or strongest(matches.plan.rules, owner)
        if placed is not None and placed.style == "replicate":
            why = f"`{placed.pattern}: replicate` says so"
            told.add(collapsed(tensor.name))
        elif placed is not None:
            why = f"`{placed.pattern}: {placed.style}` leaves it whole"
        elif patterns:
            why = f"its rule `{patterns[0]}` is refused"
            told.add(collapsed(tensor.name))
        else:
            why = "no rule matches it"
        groups.setdefault((collapsed(tensor.name), why), []).append(tensor)
    reasons = [
        Reason(
            name=name,
            why=why,
            tensors=len(tensors),
            nbytes=sum(t.nbytes for t in tensors),
            matrices=any(len(t.shape) > 1 for t in tensors),
            told=name in told,
            first=tensors[0].name,
        )
        for (name, why), tensors in groups.items()
    ]
    return tuple(sorted(reasons, key=lambda reason: -reason.nbytes))


def cost_findings(
    inventory: Inventory, matches: Matches, layouts: Mapping[str, Shard]
) -> tuple[Diagnostic, ...]:
    """Findings on what a plan saves.

    AT391 (error): nothing is sharded. AT392 (warning): next to nothing is. AT390 (warning): a large
    matrix stays whole, though no rule says `replicate`.
    """
    total = sum(tensor.nbytes for tensor in _own(inventory))
    fraction = sharded_fraction(inventory, layouts)
    if not fraction:
        return (
            Diagnostic(
                NOTHING,
                "the plan shards no matrix: every rank would hold the whole model",
                notes=(f"modules and tensors that its rules match: {len(matches.placed)}",),
                help=("give the large matrices a column, row or vocab rule",),
            ),
        )
    found = []
    if fraction < LITTLE:
        found.append(
            Diagnostic(
                LOW,
                f"the plan shards {fraction:.1%} of the bytes of all matrices",
                severity="warning",
                help=("give the large matrices a column, row or vocab rule",),
            )
        )
    found += [
        _large(reason, total)
        for reason in left_whole(inventory, matches, layouts)
        if _is_large(reason, total)
    ]
    return tuple(found)


def _is_large(reason: Reason, total: int) -> bool:
    return reason.matrices and not reason.told and reason.nbytes >= LARGE * total


def _large(reason: Reason, total: int) -> Diagnostic:
    owner, _, leaf = reason.name.rpartition(".")
    module = owner if owner and leaf == "weight" else reason.name  # a layer, or a tensor by itself
    if not module.replace("*", "").strip("."):  # layers that only have numbers are named one by one
        module = reason.first.rpartition(".")[0]
    many = "" if reason.tensors == 1 else f", {reason.tensors} tensors"
    return Diagnostic(
        LEFT_WHOLE,
        f"stays whole on every rank: {reason.why}",
        severity="warning",
        module=reason.name,
        notes=(f"{reason.nbytes:,} bytes{many}, {reason.nbytes / total:.1%} of the model",),
        help=(f"shard it by a rule, or accept it by `{_suffix(module)}: replicate`",),
    )


def _suffix(path: str) -> str:
    """The end of a collapsed path that makes a short pattern: the last segments that are names."""
    parts: Iterable[str] = path.split(".*.")[-1].split(".")[-2:]
    return ".".join(parts)
