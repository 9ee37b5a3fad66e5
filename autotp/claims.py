"""Which pattern of a plan decides about which module path or tensor name, and what decides nothing.

The strongest pattern that fits a name decides about it (`autotp.pattern`). A tie, a rule on a module
that holds only other modules, and a rule that matches nothing are slips, and are told here; so are
rules that are never the strongest. This file knows nothing of torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from autotp.diagnostic import Diagnostic
from autotp.inventory import Inventory, ModuleInfo
from autotp.pattern import ANY, general, nearest, segments, shortest, strongest
from autotp.plan import Plan
from autotp.planfault import with_line
from autotp.units import Fault

__all__ = ["Claims", "Found", "claim", "rule_at", "told", "undecided"]

LISTED = 8  # names in one line of help
_REGULAR = re.compile(r"[\\^$+()\[\]{}|]|\.\*$")  # what no name of a module has
MATRICES = ("linear", "conv1d", "embedding", "unknown")  # kinds whose weight a plan is about


@dataclass(frozen=True)
class Found:
    """A fault of a rule at one module or tensor."""

    pattern: str
    path: str
    fault: Fault
    severity: str = "error"


@dataclass(frozen=True)
class Claims:
    """`decided`: name → the pattern that decides about it; modules before tensors.

    `matched`: the patterns that fit at least one name. `disputed`: names whose patterns tie.
    """

    decided: Mapping[str, str]
    matched: frozenset[str]
    disputed: frozenset[str]
    found: tuple[Found, ...] = field(default=())


def claim(plan: Plan, inventory: Inventory) -> Claims:
    """Gives each module with tensors, and each tensor, to the pattern that decides about it."""
    decided: dict[str, str] = {}
    matched: set[str] = set()
    disputed: set[str] = set()
    found: list[Found] = []
    for name in [*filter(None, inventory.modules), *inventory.tensors()]:
        winners = strongest(plan.rules, name)
        matched.update(winners)
        rules = {plan.rules[pattern] for pattern in winners}
        if len(winners) > 1:
            found.append(_tie(plan, winners, name, same=len(rules) == 1))
        if len(rules) == 1:
            decided[name] = winners[0]
        elif rules:
            disputed.add(name)
    for path in inventory.paths:
        if path and path not in inventory.modules:
            for pattern in strongest(plan.rules, path):
                if segments(pattern)[-1] != ANY:
                    matched.add(pattern)
                    inside = [p[len(path) + 1 :] for p in inventory.modules if p.startswith(f"{path}.")]
                    if inside or plan.rules[pattern].style != "replicate":  # whole is what nothing is
                        found.append(_holds_nothing(pattern, path, inside))
    return Claims(decided, frozenset(matched), frozenset(disputed), tuple(found))


def rule_at(plan: Plan, pattern: str) -> str:
    """A rule with its place, for the note of a finding about another rule."""
    span = plan.span(pattern)
    return (
        f"`{pattern}`: {plan.rules[pattern].to_data()}"
        if span is None
        else f"`{pattern}` at {with_line(span)}"
    )


def _tie(plan: Plan, winners: tuple[str, ...], name: str, *, same: bool) -> Found:
    """Patterns with as many literal segments: an error, or a warning when they say the same."""
    first, *others = winners
    notes = tuple(rule_at(plan, other) for other in others)
    message = f"patterns `{first}` and `{others[0]}` are equally strong"
    if same:
        fault = Fault("AT208", f"{message}, and say the same", notes, ("one of them is enough",))
        return Found(first, name, fault, "warning")
    help = ("the pattern with more names wins: add a name to the one that is meant",)
    return Found(first, name, Fault("AT208", f"{message}, and say different things", notes, help))


def _holds_nothing(pattern: str, path: str, inside: list[str]) -> Found:
    """A rule on a module that has no tensors of its own, but those of the layers inside of it."""
    if not inside:
        help = ("leave the rule out",)
        return Found(
            pattern, path, Fault("AT213", "a module without parameters has nothing to cut", (), help)
        )
    last = segments(path)[-1]
    names = [f"`{last}.{name}`" for name in dict.fromkeys(inside)]
    help = (f"name its layers: {_some(names)}",)
    return Found(pattern, path, Fault("AT213", "a container has no tensors of its own", (), help))


def _some(words: list[str], most: int = LISTED) -> str:
    return ", ".join(words[:most]) + (", …" if len(words) > most else "")


def undecided(plan: Plan, inventory: Inventory, claims: Claims) -> Iterator[Diagnostic]:
    """Findings about the patterns that decide nothing, and about a plan of which none does."""
    lost = []
    for pattern in plan.rules:
        if pattern in claims.matched:
            continue
        stronger = {p for name, p in claims.decided.items() if strongest([pattern], name)}
        if stronger:
            note = f"stronger: {', '.join(f'`{other}`' for other in sorted(stronger))}"
            message = f"rule `{pattern}` decides nothing: wherever it matches, another pattern is stronger"
            yield Diagnostic("AT212", message, "warning", plan=plan.span(pattern), notes=(note,))
        else:
            lost.append(pattern)
    slips = [pattern for pattern in lost if pattern not in plan.optional]
    all_lost = len(lost) == len(plan.rules)
    modules = [path for path in dict.fromkeys((*inventory.modules, *inventory.paths)) if path]
    notes = () if all_lost else _for_another(plan, inventory)
    for pattern in slips:
        close = nearest(pattern, modules) or nearest(pattern, inventory.tensors())
        near = " or ".join(f"`{name}`" for name in close)
        help = (f"did you mean {near}?",) if near else () if all_lost else _layers(inventory)
        if not near and not all_lost:
            help = (
                *help,
                f"or let it match nothing where a model or a file has none: `optional: [{pattern}]`",
            )
        if _REGULAR.search(pattern):
            help = (
                *help,
                "patterns are no regular expressions: `*` is one name, and the end of a path will do",
            )
        message = f"rule `{pattern}` matches nothing in {inventory.name}"
        yield Diagnostic("AT201", message, plan=plan.span(pattern), notes=notes, help=help)
        notes = ()  # said once
    if all_lost:
        yield _matches_nothing(plan, inventory)
    elif len(lost) > len(slips):
        left = ", ".join(f"`{pattern}`" for pattern in lost if pattern in plan.optional)
        yield Diagnostic("AT215", f"optional rules that match nothing in {inventory.name}: {left}", "note")


def _matches_nothing(plan: Plan, inventory: Inventory) -> Diagnostic:
    message = f"the plan matches nothing in {inventory.name}"
    return Diagnostic("AT202", message, notes=_for_another(plan, inventory), help=_layers(inventory))


def _for_another(plan: Plan, inventory: Inventory) -> tuple[str, ...]:
    own = inventory.config.get("model_type")
    if not plan.model_type or plan.model_type == own:
        return ()
    told = f"the model's is {own}" if own else "this model says none"
    return (f"the plan is for model_type {plan.model_type}, and {told}",)


def _layers(inventory: Inventory) -> tuple[str, ...]:
    """A help line with the names of layers that a plan could be about."""
    layers = [m.path for m in inventory.modules.values() if m.path and m.kind in MATRICES and _is_matrix(m)]
    alike = {general(path): path for path in reversed(layers)}
    names = [shortest(path, inventory.modules) for path in [*reversed(alike.values())][: LISTED + 1]]
    return (f"its layers: {_some([f'`{name}`' for name in names])}",) if names else ()


def _is_matrix(module: ModuleInfo) -> bool:
    return "weight" in module.tensors and len(module.tensors["weight"].shape) == 2


def told(plan: Plan, found: Iterable[Found]) -> Iterator[Diagnostic]:
    """Findings for people: the same fault of a rule at many layers is told once."""
    alike: dict[tuple[str, Fault, str], list[str]] = {}
    for one in found:
        alike.setdefault((one.pattern, one.fault, one.severity), []).append(one.path)
    for (pattern, fault, severity), paths in alike.items():
        more = (f"and {len(paths) - 1} more: {_some(paths[1:], 3)}",) if len(paths) > 1 else ()
        yield Diagnostic(
            fault.code,
            fault.message,
            severity,
            module=paths[0],
            plan=plan.span(pattern),
            notes=(*fault.notes, *more),
            help=fault.help,
        )
