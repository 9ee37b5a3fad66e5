"""Match: the rules of a plan meet the modules and tensors of a model.

Each module or tensor takes the rule of the strongest pattern that fits its name; the style says which
of its tensors are cut and along which dim, the rule's heads and sections say how:

| style  | module                        | weight                          | bias  |
|--------|-------------------------------|---------------------------------|-------|
| column | linear [out, in]              | dim 0 (Conv1D [in, out]: dim 1) | dim 0 |
| row    | linear [out, in]              | dim 1 (Conv1D [in, out]: dim 0) | whole |
| vocab  | embedding [vocabulary, width] | dim 0                           |       |

A rule for a parameter or buffer states its `dim`. All else is whole. Nothing is proven here: that the
cuts fit together is what the layouts prove. A bad plan is never raised, it is told:

    AT201  a rule matches nothing             AT208  two patterns are equally strong
    AT202  the whole plan matches nothing     AT209  two rules cut one tensor
    AT203  fewer units than ranks             AT210  a tied tensor is placed in two ways
    AT204  heads or sections do not fit       AT211  a tied tensor is cut under one name only
    AT205  the config lacks a key             AT212  a rule decides nothing (warning)
    AT206  the style does not fit the module  AT213  a module without tensors of its own
    AT207  a tensor's dim is missing or wrong AT214  a tensor that the style does not know
                                              AT215  an optional rule matches nothing (note)

This file knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from autotp.diagnostic import Diagnostic, Span, UsageError
from autotp.inventory import Inventory, ModuleInfo
from autotp.pattern import ANY, nearest, segments, shortest, strongest
from autotp.placement import Shard
from autotp.plan import Plan, Rule
from autotp.styles import cut_module, cut_tensor
from autotp.tied import Ruled, settle
from autotp.units import Fault

__all__ = ["Matches", "Placed", "match"]


@dataclass(frozen=True)
class Placed:
    """What a rule decides about one module or tensor.

    `path` is the module's path or the tensor's full name. `layouts` maps full tensor names to cuts;
    tensors of the module that are not in it are whole. `declared` says that heads or sections were
    given: a row rule without them may take the deal of its input once the layouts are proven.
    """

    path: str
    target: Literal["module", "tensor"]
    style: str
    rule: Rule
    pattern: str
    span: Span | None
    layouts: Mapping[str, Shard]
    declared: bool


@dataclass(frozen=True)
class Matches:
    """All decisions of a plan about a model, over `tp` ranks.

    `placed` is keyed by module path or tensor name. `layouts` has every cut tensor under each of its
    names, shared ones too. `diagnostics` are the findings; with an error among them the rest is
    what could be decided.
    """

    tp: int
    plan: Plan
    placed: Mapping[str, Placed]
    layouts: Mapping[str, Shard]
    diagnostics: tuple[Diagnostic, ...]


@dataclass(frozen=True)
class _Found:
    """A fault of a rule at one module or tensor."""

    pattern: str
    path: str
    fault: Fault
    severity: str = "error"


def match(plan: Plan, inventory: Inventory, tp: int) -> Matches:
    """Decides which tensors a plan cuts over `tp` ranks, and how.

    Never raises for a bad plan: see `Matches.diagnostics`. Raises UsageError for a tp that is no
    whole number of at least 1.

    >>> from autotp.inventory import TensorInfo
    >>> weight = TensorInfo("fc1.weight", (32, 16), "F32", 4)
    >>> model = Inventory({"fc1": ModuleInfo("fc1", "linear", {"weight": weight})})
    >>> str(match(Plan(rules={"fc1": "column"}), model, tp=2).layouts["fc1.weight"])
    'shard(dim 0: 2 equal parts)'
    """
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise UsageError(f"tp is a whole number of at least 1, not {tp!r}")
    claims, found = _claims(plan, inventory)
    placed, faults = _place(plan, inventory, tp, claims)
    found += faults
    ruled = _ruled(plan, inventory, placed)
    settled = settle(ruled, inventory)
    found += [_Found(pattern, name, fault) for pattern, name, fault in settled.faults]
    extended = {path: pattern for path, pattern in settled.same_rule.items() if path not in claims}
    more, faults = _place(plan, inventory, tp, extended)
    placed.update(more)
    found += faults
    layouts = {name: cut for p in placed.values() for name, cut in p.layouts.items()}
    layouts.update(settled.cuts)
    diagnostics = [*_unmatched(plan, inventory, claims, found), *_told(plan, found)]
    return Matches(tp, plan, placed, layouts, tuple(diagnostics))


def _claims(plan: Plan, inventory: Inventory) -> tuple[dict[str, str], list[_Found]]:
    """Which pattern decides about which module path or tensor name."""
    claims: dict[str, str] = {}
    found: list[_Found] = []
    for name in [*filter(None, inventory.modules), *inventory.tensors()]:
        winners = strongest(plan.rules, name)
        rules = {plan.rules[pattern] for pattern in winners}
        if len(winners) > 1:
            found += _tie(plan, winners, name, same=len(rules) == 1)
        if len(rules) == 1:
            claims[name] = winners[0]
    for path in inventory.paths:
        if path and path not in inventory.modules:
            winners = strongest(plan.rules, path)
            found += [_container(p, path, inventory) for p in winners if segments(p)[-1] != ANY]
    return claims, found


def _tie(plan: Plan, winners: tuple[str, ...], name: str, *, same: bool) -> list[_Found]:
    """Two patterns with as many literal segments: an error, or a warning when they say the same."""
    first, *others = winners
    notes = tuple(f"`{other}`{_at(plan, other)}" for other in others)
    message = f"`{first}` and `{others[0]}` are equally strong"
    if same:
        fault = Fault("AT208", f"{message}, and say the same", notes, ("one of them is enough",))
        return [_Found(first, name, fault, "warning")]
    help = ("the pattern with more names wins: add one to the pattern that you mean",)
    return [_Found(first, name, Fault("AT208", f"{message}, and say different things", notes, help))]


def _at(plan: Plan, pattern: str) -> str:
    """Where a rule stands and what it says, for a note."""
    span = plan.span(pattern)
    return f": {plan.rules[pattern].to_data()}" if span is None else f" at {span}: `{span.text.strip()}`"


def _container(pattern: str, path: str, inventory: Inventory) -> _Found:
    """A rule on a module that has no tensors of its own."""
    inside = [p for p in inventory.modules if p.startswith(f"{path}.")]
    if not inside:
        fault = Fault(
            "AT213", "a module without parameters: there is nothing to cut", (), ("leave the rule out",)
        )
        return _Found(pattern, path, fault)
    names = list(dict.fromkeys(p[len(path) + 1 :] for p in inside))[:6]
    last = segments(path)[-1]
    help = (f"name its layers: {', '.join(f'`{last}.{name}`' for name in names)}",)
    return _Found(pattern, path, Fault("AT213", "a container, with no tensors of its own", (), help))


def _place(
    plan: Plan, inventory: Inventory, tp: int, claims: Mapping[str, str]
) -> tuple[dict[str, Placed], list[_Found]]:
    """Lets each claim's style cut its module or tensor."""
    placed: dict[str, Placed] = {}
    found: list[_Found] = []
    for path, pattern in claims.items():
        rule = plan.rules[pattern]
        module = inventory.modules.get(path)
        if module is not None:
            cuts = cut_module(rule, module, tp=tp, config=inventory.config, ruled=claims)
        else:
            owner = inventory.modules[path.rpartition(".")[0]]
            tensor = owner.tensors[path.rpartition(".")[2]]
            cuts = cut_tensor(rule, tensor, tp=tp, config=inventory.config, owner=owner)
        if isinstance(cuts, Fault):
            found.append(_Found(pattern, path, cuts))
            continue
        declared = rule.heads is not None or rule.sections is not None
        target: Literal["module", "tensor"] = "module" if module is not None else "tensor"
        placed[path] = Placed(path, target, rule.style, rule, pattern, plan.span(pattern), cuts, declared)
    return placed, found + _ruled_twice(plan, inventory, placed)


def _names(placed: Placed, inventory: Inventory) -> list[str]:
    """The tensors that a placement decides about, cut or whole."""
    if placed.target == "tensor":
        return [placed.path]
    return [tensor.name for tensor in inventory.modules[placed.path].tensors.values()]


def _ruled_twice(plan: Plan, inventory: Inventory, placed: Mapping[str, Placed]) -> list[_Found]:
    """A tensor with a rule of its own that its module's rule places in another way."""
    found = []
    for own in placed.values():
        module = placed.get(own.path.rpartition(".")[0]) if own.target == "tensor" else None
        local = own.path.rpartition(".")[2]
        if module is None or local not in ("weight", "bias"):
            continue
        if module.layouts.get(own.path) != own.layouts.get(own.path):
            note = f"`{module.pattern}`{_at(plan, module.pattern)}"
            fault = Fault("AT209", "the rule of its module places it in another way", (note,))
            found.append(_Found(own.pattern, own.path, fault))
    return found


def _ruled(plan: Plan, inventory: Inventory, placed: Mapping[str, Placed]) -> dict[str, Ruled]:
    """Every tensor name that a rule decides about."""
    ruled: dict[str, Ruled] = {}
    for one in placed.values():
        place = f" at {one.span}" if one.span else ""
        for name in _names(one, inventory):
            ruled[name] = Ruled(name, one.layouts.get(name), one.rule, one.pattern, place)
    return ruled


def _unmatched(
    plan: Plan, inventory: Inventory, claims: Mapping[str, str], found: Iterable[_Found]
) -> list[Diagnostic]:
    """Findings about patterns that decide nothing."""
    used = {*claims.values(), *(one.pattern for one in found)}
    names = [*filter(None, inventory.modules), *inventory.tensors(), *filter(None, inventory.paths)]
    diagnostics = []
    for pattern in plan.rules:
        if pattern in used:
            continue
        stronger = sorted({claims[name] for name in claims if strongest([pattern], name)})
        if stronger:
            note = f"stronger: {', '.join(f'`{other}`' for other in stronger)}"
            message = f"rule `{pattern}` decides nothing: other patterns are stronger wherever it matches"
            diagnostics.append(
                Diagnostic("AT212", message, "warning", plan=plan.span(pattern), notes=(note,))
            )
            continue
        near = nearest(pattern, names)
        question = f"did you mean {' or '.join(f'`{name}`' for name in near)}?"
        help = (question,) if near else _layers(inventory)
        if pattern in plan.optional:
            message = f"optional rule `{pattern}` matches nothing here"
            diagnostics.append(Diagnostic("AT215", message, "note", plan=plan.span(pattern)))
            continue
        message = f"rule `{pattern}` matches nothing in {inventory.name}"
        diagnostics.append(Diagnostic("AT201", message, plan=plan.span(pattern), help=help))
    if not used:
        model_type = inventory.config.get("model_type")
        differs = plan.model_type and model_type and plan.model_type != model_type
        notes = (
            (f"the plan is for model_type {plan.model_type}, the model is {model_type}",) if differs else ()
        )
        message = f"the plan matches nothing in {inventory.name}"
        diagnostics.append(Diagnostic("AT202", message, notes=notes, help=_layers(inventory)))
    return diagnostics


def _layers(inventory: Inventory) -> tuple[str, ...]:
    """A help line with the names of layers that a plan could be about."""
    kinds = ("linear", "conv1d", "embedding", "unknown")
    likely = [m for m in inventory.modules.values() if m.path and m.kind in kinds and _is_matrix(m)]
    last = list(dict.fromkeys(shortest(m.path, inventory.modules) for m in likely))
    return (f"its layers: {', '.join(last[:8])}{', …' if len(last) > 8 else ''}",) if last else ()


def _is_matrix(module: ModuleInfo) -> bool:
    return "weight" in module.tensors and len(module.tensors["weight"].shape) == 2


def _told(plan: Plan, found: Iterable[_Found]) -> list[Diagnostic]:
    """Findings for people: the same fault of a rule at many layers is told once."""
    alike: dict[tuple[str, Fault, str], list[str]] = {}
    for one in found:
        alike.setdefault((one.pattern, one.fault, one.severity), []).append(one.path)
    diagnostics = []
    for (pattern, fault, severity), paths in alike.items():
        notes: tuple[str, ...] = fault.notes
        if len(paths) > 1:
            more = ", ".join(paths[1:4]) + (", …" if len(paths) > 4 else "")
            notes = (*notes, f"and {len(paths) - 1} more: {more}")
        diagnostics.append(
            Diagnostic(
                fault.code, fault.message, severity, paths[0], plan.span(pattern), None, notes, fault.help
            )
        )
    return diagnostics
