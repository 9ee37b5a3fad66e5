"""From one matrix to a set of rules that propagates without conflict.

A matrix is cut; the first conflict in the graph says what else must be cut, or how (repairs.py). The steps
make a small tree, walked depth first. Of the clean ends the one that cuts the most bytes beyond what is cut
already is taken, and of those the one that moves the fewest elements.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from autotp.derive.assignment import Assignment, Board
from autotp.derive.repairs import further, repairs, units_declared
from autotp.derive.seeds import Seed
from autotp.derive.trial import Outcome, Trials
from autotp.plan import Rule

__all__ = ["Found", "search"]

MOST_TRIES = 160  # for one matrix
AFTER_CLEAN = 12  # further tries once there is a clean end


@dataclass
class Found:
    """The rules of the best clean end, or none and the conflict at the end of the likeliest way.

    `blocked` is a forbidden key that the likeliest way needs.
    """

    rules: dict[str, Rule] = field(default_factory=dict)
    dead_end: Outcome | None = None
    blocked: str | None = None


def search(
    seed: Seed,
    board: Board,
    trials: Trials,
    *,
    accepted: Mapping[str, frozenset[str]],
    rules: Assignment,
    forbidden: Collection[str],
    statistics: bool = True,
) -> Found:
    """The rules that cut `seed` and all that must be cut with it.

    `rules` are those accepted so far, `accepted` says which of them go together: a step that needs one takes
    its group. `forbidden` keys stay whole. Without `statistics` no end counts in which the ranks sum the
    statistics of a norm.
    """
    found = Found()
    best: tuple[object, ...] = ()
    todo: list[dict[str, Rule]] = []
    for rule in reversed(seed.rules):
        start = board.extended({}, seed.key, rule)
        if start is not None:
            todo.append(start)
    seen: set[frozenset[tuple[str, Rule]]] = set()
    tries, limit = 0, MOST_TRIES
    while todo and tries < limit:
        assignment = _with_groups(todo.pop(), accepted, rules)
        known = frozenset(assignment.items())
        if known in seen:
            continue
        blocked = next((key for key in assignment if key in forbidden), None)
        if blocked is not None:
            found.blocked = found.blocked or blocked
            continue
        seen.add(known)
        tries += 1
        outcome = trials.run(assignment)
        if outcome.clean and outcome.statistics and not statistics:
            continue
        if outcome.clean:
            new = {key: rule for key, rule in assignment.items() if key not in rules}
            worth = (board.nbytes(new), -outcome.moved, -len(assignment))
            if not best or worth > best:
                best, found.rules = worth, assignment
            limit = min(limit, tries + AFTER_CLEAN)
            todo += further(outcome, assignment, board)
            continue
        steps = list(repairs(outcome, assignment, board, rules))
        if outcome.fault is not None or (outcome.finding and outcome.finding.conflict.code == "AT307"):
            declared = units_declared(assignment, board, trials.heads)
            steps = [declared, *steps] if declared not in (None, assignment) else steps
        if not steps and found.dead_end is None:
            found.dead_end = outcome
        todo += reversed(steps)
    return found


def _with_groups(
    assignment: dict[str, Rule], accepted: Mapping[str, frozenset[str]], rules: Assignment
) -> dict[str, Rule]:
    """The assignment with the rules that go with those of it that were accepted before."""
    grown = dict(assignment)
    for key in assignment:
        for other in accepted.get(key, ()):
            grown.setdefault(other, rules[other])
    return grown
