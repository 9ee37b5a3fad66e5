"""Tied tensors: one tensor under several names has one placement.

An input embedding that is the output layer's weight too is the usual case. Both names ruled: the cuts
must be equal. One name ruled: the other module takes the same rule when it is of the same kind; a bare
parameter takes the same cut; a module of another kind needs a rule of its own, and the finding prints
the line to add. This file knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from autotp.inventory import Inventory, ModuleInfo
from autotp.pattern import shortest
from autotp.placement import Shard
from autotp.rule import Rule
from autotp.units import Fault

__all__ = ["Ruled", "Settled", "settle"]

SAME_RULE = ("linear", "conv1d", "embedding")


@dataclass(frozen=True)
class Ruled:
    """A tensor name that a rule decides about: its cut (None: whole) and the rule's pattern."""

    name: str
    cut: Shard | None
    rule: Rule
    pattern: str
    told: str  # the rule and its place, for notes


@dataclass(frozen=True)
class Settled:
    """What follows for the other names of tied tensors.

    `same_rule`: module path → the pattern whose rule it takes. `cuts`: tensor name → its cut.
    `faults`: (pattern, name, fault).
    """

    same_rule: Mapping[str, str]
    cuts: Mapping[str, Shard]
    faults: tuple[tuple[str, str, Fault], ...]


def _families(inventory: Inventory) -> list[list[str]]:
    """The names of each tied tensor, the first name first."""
    families: dict[str, list[str]] = {}
    for further, first in inventory.aliases.items():
        families.setdefault(first, [first]).append(further)
    return list(families.values())


def _word(cut: Shard | None) -> str:
    return "whole" if cut is None else str(cut)


def settle(ruled: Mapping[str, Ruled], inventory: Inventory, spoken_for: Collection[str]) -> Settled:
    """Compares the rules of tied tensors and extends them to the names without a rule.

    `spoken_for` are the modules and tensors that some pattern matches: where its rule did not fit,
    that was told already.
    """
    same_rule: dict[str, str] = {}
    cuts: dict[str, Shard] = {}
    faults: list[tuple[str, str, Fault]] = []
    for family in _families(inventory):
        known = [ruled[name] for name in family if name in ruled]
        if not known:
            continue
        first = known[0]
        other = next((r for r in known if r.cut != first.cut), None)
        if other is not None:
            notes = tuple(f"{r.name}: {_word(r.cut)}, by {r.told}" for r in (first, other))
            message = f"tied to {other.name}, which is placed in another way"
            fault = Fault("AT210", message, notes, ("one tensor has one placement: make the rules agree",))
            faults.append((first.pattern, first.name, fault))
            continue
        if first.cut is None:
            continue
        for name in family:
            path, _, local = name.rpartition(".")
            owner = inventory.modules.get(path)
            ruler = inventory.modules[first.name.rpartition(".")[0]]
            if not {name, path}.isdisjoint(spoken_for):
                continue
            if owner is not None and owner.kind in SAME_RULE and owner.kind == ruler.kind:
                same_rule[path] = first.pattern
            elif owner is None or _is_bare(owner, local):
                cuts[name] = first.cut
            else:
                faults.append((first.pattern, first.name, _unruled(first, owner, name, inventory)))
    return Settled(same_rule, cuts, tuple(faults))


def _is_bare(owner: ModuleInfo, local: str) -> bool:
    """Whether a tensor is a parameter that a module holds, and not the matrix of a layer."""
    matrix = local == "weight" and len(owner.tensors[local].shape) == 2
    return owner.kind in ("other", "unknown") and not matrix


def _unruled(first: Ruled, owner: ModuleInfo, name: str, inventory: Inventory) -> Fault:
    """A tied name of a module of another kind, without a rule: the line to add."""
    pattern = shortest(owner.path, inventory.modules)
    kind = owner.kind
    by_rows = first.cut is not None and first.cut.dim == 0
    notes = (f"{first.name}: {_word(first.cut)}, by {first.told}", f"{name}: no rule")
    head = f"`{pattern}: {{style: column, gather_output: true}}`"
    if by_rows and kind == "embedding":
        help = f"add the rule `{pattern}: vocab`"
    elif by_rows and (kind in ("linear", "other") or first.rule.style == "vocab"):
        help = f"add the rule {head}"
    elif by_rows:
        help = f"add the rule {head}, or `{pattern}: vocab` if it is an embedding"
    else:
        help = f"no style cuts both; write `{first.pattern}: replicate`"
    return Fault("AT211", f"tied to {name}, which has no rule", notes, (help,))
