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
    named = patterns_of({key: _stated(key, rule, board) for key, rule in rules.items()}, board)
    kind = board.inventory.config.get("model_type")
    return Plan(
        rules=named,
        model_type=kind if isinstance(kind, str) and kind.isprintable() else None,
        optional=_optional(named, rules, board),
    )


def _optional(named: Mapping[str, Rule], rules: Mapping[str, Rule], board: Board) -> list[str]:
    """The patterns of layers that are tied to others: a checkpoint has the tensor under one name."""
    keys = {pattern: [key for key in rules if matches(pattern, key)] for pattern in named}
    names = {key: [n for n in board.tensors if n == key or n.rpartition(".")[0] == key] for key in rules}
    tied = {key for key, own in names.items() if own and all(board.canonical(name) != name for name in own)}
    return [pattern for pattern, found in keys.items() if found and tied.issuperset(found)]


def _stated(key: str, rule: Rule, board: Board) -> Rule:
    """A rule that means the same to who has names and shapes alone: Conv1D holds its weight as [in, out]."""
    module = board.inventory.modules.get(key)
    if module is None or module.kind != "conv1d" or rule.dim is not None or rule.style == "replicate":
        return rule
    return rule.model_copy(update={"dim": 1 if rule.style == "column" else 0})


def patterns_of(rules: Mapping[str, Rule], board: Board) -> dict[str, Rule]:
    """The rules by pattern, in the order of the names."""
    paths = filter(None, (*board.inventory.paths, *board.inventory.modules))
    names = list(dict.fromkeys([*paths, *board.tensors]))
    found: dict[str, Rule] = {}
    for key, rule in rules.items():
        if any(matches(p, key) and r == rule for p, r in found.items() if _decides(p, key, found)):
            continue
        found[_pattern(key, rule, rules, names)] = rule
    own = [name for name in names if name in board.inventory.modules or name in board.tensors]
    return _guarded(found, rules, own)


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
            if all(rules.get(other) == rule for other in names if matches(pattern, other)):
                return pattern
    return key


def _guarded(found: dict[str, Rule], rules: Mapping[str, Rule], names: list[str]) -> dict[str, Rule]:
    """With `replicate` for each module and tensor that a pattern matches though it has no rule."""
    guarded = dict(found)
    for name in names:
        decided = strongest(guarded, name)
        if not decided:
            continue
        if name not in rules:
            if any(guarded[pattern].style != "replicate" for pattern in decided):
                guarded[_unruled(name, rules, names)] = Rule(style="replicate")
        elif len(decided) > 1 or guarded[decided[0]] != rules[name]:
            guarded[name] = rules[name]
    return guarded


def _unruled(name: str, rules: Mapping[str, Rule], names: list[str]) -> str:
    """A name with `*` for its numbers, where nothing alike has a rule."""
    pattern = general(name)
    if not pattern.strip("*."):  # `*` alone matches everything
        return name
    return name if any(other in rules for other in names if matches(pattern, other)) else pattern
