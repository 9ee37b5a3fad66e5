"""From rules by full names to a plan with patterns.

Names that are alike but for numbers, with one rule, become one pattern, as short as it can be without
meaning anything else. Where a pattern would also match a name that stays whole, that name gets `replicate`.
"""

from __future__ import annotations

from collections.abc import Mapping

from autotp.derive.assignment import Board
from autotp.pattern import general, matches, strongest
from autotp.plan import Plan, Rule

__all__ = ["patterns_of", "plan_of"]

LEAST = 2  # segments of a pattern, where a name has them: one says little to a reader


def plan_of(rules: Mapping[str, Rule], board: Board) -> Plan:
    """The plan that says these rules of this model, and nothing else."""
    named = patterns_of(rules, board)
    kind = board.inventory.config.get("model_type")
    return Plan(rules=named, model_type=kind if isinstance(kind, str) and kind.isprintable() else None)


def patterns_of(rules: Mapping[str, Rule], board: Board) -> dict[str, Rule]:
    """The rules by pattern, in the order of the names."""
    names = list(dict.fromkeys([*filter(None, board.inventory.modules), *board.tensors]))
    found: dict[str, Rule] = {}
    for key, rule in rules.items():
        if any(matches(p, key) and r == rule for p, r in found.items() if _decides(p, key, found)):
            continue
        found[_pattern(key, rule, rules, names)] = rule
    return _guarded(found, rules, names)


def _decides(pattern: str, key: str, found: Mapping[str, Rule]) -> bool:
    return strongest(found, key) == (pattern,)


def _pattern(key: str, rule: Rule, rules: Mapping[str, Rule], names: list[str]) -> str:
    """The shortest pattern for a name that matches only names with the same rule."""
    parts = key.split(".")
    numbered = general(key).split(".")
    forms = [numbered] if numbered != parts else []
    # Numbers that differ in meaning (the places of a Sequential) stay: the last ones first.
    places = [i for i, part in enumerate(parts) if part.isdigit()]
    forms += [[p if i >= keep else n for i, (p, n) in enumerate(zip(parts, numbered, strict=True))]
              for keep in reversed(places)]  # fmt: skip
    for form in (*forms, parts):
        for length in (*range(LEAST, len(form) + 1), 1):
            tail = form[-length:]
            if tail[0] == "*" or all(part == "*" or part.isdigit() for part in tail):
                continue
            pattern = ".".join(tail)
            if all(rules.get(name) == rule for name in names if matches(pattern, name)):
                return pattern
    return key


def _guarded(found: dict[str, Rule], rules: Mapping[str, Rule], names: list[str]) -> dict[str, Rule]:
    """With `replicate` for each name that a pattern matches though it has no rule."""
    guarded = dict(found)
    for name in names:
        decided = strongest(found, name)
        if decided and name not in rules:
            guarded[name] = Rule(style="replicate")
        elif len(decided) > 1 or (decided and found[decided[0]] != rules[name]):
            guarded[name] = rules[name]
    return guarded
