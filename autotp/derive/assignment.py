"""Which module or tensor is cut, and by which rule: what the search changes step by step.

An assignment is a dict from a module's path or a tensor's full name to its rule; what is not in it is whole.
Tied tensors are one tensor: a rule for one of the names brings the rules for the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from autotp.inventory import Inventory, ModuleInfo, TensorInfo
from autotp.match import Matches, Placed
from autotp.placement import Shard
from autotp.plan import Plan, Rule
from autotp.styles import cut_module, cut_tensor, is_norm
from autotp.units import Fault

__all__ = ["Assignment", "Board"]

Assignment = Mapping[str, Rule]
_PLAN = Plan(rules={"*.weight": "replicate"})  # stands where a `Matches` names its plan; nothing reads it


@dataclass
class Board:
    """A model's modules and tensors as the search sees them, and the number of ranks."""

    inventory: Inventory
    tp: int

    def __post_init__(self) -> None:
        self.tensors: dict[str, TensorInfo] = self.inventory.tensors()
        self.first: Mapping[str, str] = self.inventory.aliases
        self.names: dict[str, list[str]] = {}  # first name of a tied tensor -> all of them
        for further, first in self.first.items():
            self.names.setdefault(first, [first]).append(further)
        self._placed: dict[tuple[str, Rule, frozenset[int]], Placed | Fault] = {}

    def canonical(self, name: str) -> str:
        """The first name of a tensor."""
        return self.first.get(name, name)

    def owner(self, name: str) -> ModuleInfo:
        """The module that has a tensor of this name."""
        return self.inventory.modules[name.rpartition(".")[0]]

    def key(self, name: str) -> str:
        """What a rule names to cut this tensor: a layer by its path, any other tensor by its name."""
        owner = self.owner(name)
        layer = owner.kind in ("linear", "conv1d", "embedding") or is_norm(owner)
        return owner.path if layer and name.rpartition(".")[2] in ("weight", "bias") else name

    def unspeakable(self) -> dict[str, str]:
        """The layers that no pattern names without naming a container, too, each with the container: a head
        called `output` beside `layers.0.output`, since patterns are read from the end."""
        ends: dict[str, str] = {}
        for path in self.inventory.paths:
            if path and path not in self.inventory.modules:
                parts = path.split(".")
                for start in range(len(parts)):
                    ends.setdefault(".".join(parts[start:]), path)
        return {path: ends[path] for path in self.inventory.modules if path in ends}

    def placed(self, key: str, rule: Rule, assignment: Assignment) -> Placed | Fault:
        """What a rule cuts of a module or tensor, among the others, or why it cannot."""
        beside = _beside(key, rule, assignment)
        found = self._placed.get((key, rule, beside))
        if found is None:
            found = self._placed[key, rule, beside] = self._place(key, rule, beside)
        return found

    def _place(self, key: str, rule: Rule, beside: frozenset[int]) -> Placed | Fault:
        module = self.inventory.modules.get(key)
        if module is not None and key not in self.tensors:
            cuts = cut_module(rule, module, tp=self.tp, config={}, beside=beside)
        else:
            owner = self.owner(key)
            cuts = cut_tensor(rule, self.tensors[key], tp=self.tp, config={}, owner=owner, beside=beside)
        if isinstance(cuts, Fault):
            return cuts
        declared = rule.heads is not None or rule.sections is not None
        target = "tensor" if key in self.tensors else "module"
        return Placed(key, target, rule.style, rule, key, None, cuts, declared)  # type: ignore[arg-type]

    def matches(self, assignment: Assignment) -> Matches | Fault:
        """All decisions of an assignment, as matching its plan would give them."""
        placed: dict[str, Placed] = {}
        layouts: dict[str, Shard] = {}
        for key, rule in assignment.items():
            one = self.placed(key, rule, assignment)
            if isinstance(one, Fault):
                return one
            placed[key] = one
            layouts.update(one.layouts)
        for name in list(layouts):
            for other in self.names.get(self.canonical(name), ()):
                if layouts.setdefault(other, layouts[name]) != layouts[name]:
                    return Fault("AT210", f"{other}: tied to {name}, which is placed in another way")
        return Matches(self.tp, _PLAN, placed, layouts, ())

    def extended(self, assignment: Assignment, key: str, rule: Rule) -> dict[str, Rule] | None:
        """The assignment with a rule added or changed, and those of tied tensors; None if that cannot be."""
        grown = {**assignment, key: rule}
        one = self.placed(key, rule, grown)
        if isinstance(one, Fault):
            return grown  # the trial tells why
        for name, cut in one.layouts.items():
            for other in self.names.get(self.canonical(name), ()):
                if other == name or self.key(other) == key:
                    continue
                tied = self._tied(other, cut, rule)
                if tied is None:
                    return None
                twin = self.key(other)
                had = grown.get(twin)
                if had is None or self.placed(twin, had, grown) != self.placed(twin, tied, grown):
                    grown[twin] = tied
        return grown

    def _tied(self, name: str, cut: Shard, rule: Rule) -> Rule | None:
        """The rule that cuts a tensor under another of its names alike."""
        kind, sections, heads = self.owner(name).kind, rule.sections, rule.heads
        if name == self.key(name) or name.rpartition(".")[2] == "bias":
            raw = Rule(style="column", dim=cut.dim, sections=sections, heads=heads)
            return raw if name == self.key(name) else None
        if kind == "embedding":
            plain = cut.dim == 0 and rule.sections is None and rule.heads is None
            return Rule(style="vocab") if plain else None
        column = cut.dim == (1 if kind == "conv1d" else 0)
        return Rule(style="column" if column else "row", sections=sections, heads=heads)

    def nbytes(self, assignment: Assignment) -> Fraction:
        """The bytes of matrices that an assignment cuts, tied tensors once."""
        cut: dict[str, Fraction] = {}
        for key, rule in assignment.items():
            one = self.placed(key, rule, assignment)
            for name, shard in one.layouts.items() if isinstance(one, Placed) else ():
                tensor = self.tensors[name]
                if len(tensor.shape) > 1 and tensor.shape[shard.dim]:
                    size = tensor.shape[shard.dim]
                    dealt = sum(n for n, deal in shard.pieces(size) if deal is not None)
                    cut[self.canonical(name)] = Fraction(tensor.nbytes * dealt, size)
        return sum(cut.values(), Fraction())

    def keys_of(self, origins: tuple[str, ...], assignment: Assignment) -> Iterator[str]:
        """The rules that a finding's origins (layers, or raw tensors) come from."""
        for origin in origins:
            for key in assignment:
                if key == origin or (key in self.tensors and self.canonical(key) == origin):
                    yield key


def _beside(key: str, rule: Rule, assignment: Assignment) -> frozenset[int]:
    """The numbers of heads that column rules declare in the module of a key, as `match` counts them."""
    if rule.heads is None:
        return frozenset()
    home = key.rpartition(".")[0]
    found: set[int] = set()
    for other, theirs in {**assignment, key: rule}.items():
        if theirs.style == "column" and other.rpartition(".")[0] == home:
            given = theirs.heads if isinstance(theirs.heads, tuple) else (theirs.heads,)
            found |= {number for number in given if isinstance(number, int)}
    return frozenset(found)
