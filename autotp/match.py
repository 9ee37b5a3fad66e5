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

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from autotp.claims import Found, claim, rule_at, told, undecided
from autotp.diagnostic import Diagnostic, Span, UsageError
from autotp.inventory import Inventory, ModuleInfo
from autotp.placement import Shard
from autotp.plan import Plan, Rule
from autotp.styles import cut_module, cut_tensor
from autotp.tied import Ruled, settle
from autotp.units import Fault, heads_of

__all__ = ["Matches", "Placed", "match"]

LARGEST_TP = 1_000_000


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
    if tp > LARGEST_TP:
        raise UsageError(f"tp is a number of ranks: at most {LARGEST_TP:,}, not {tp:,}")
    claims = claim(plan, inventory)
    placed, faults = _place(plan, inventory, tp, claims.decided)
    faults += _placed_twice(plan, placed)

    spoken_for = {*claims.decided, *claims.disputed}
    settled = settle(_ruled(plan, inventory, placed), inventory, spoken_for)
    extended, more_faults = _place(plan, inventory, tp, settled.same_rule)
    faults += [Found(pattern, name, fault) for pattern, name, fault in settled.faults] + more_faults
    placed |= extended

    layouts = {name: cut for one in placed.values() for name, cut in one.layouts.items()}
    layouts.update(settled.cuts)
    diagnostics = (*undecided(plan, inventory, claims), *told(plan, [*claims.found, *faults]))
    return Matches(tp, plan, placed, layouts, diagnostics)


def _place(
    plan: Plan, inventory: Inventory, tp: int, decided: Mapping[str, str]
) -> tuple[dict[str, Placed], list[Found]]:
    """Lets the style of each decided name cut its module or tensor."""
    placed: dict[str, Placed] = {}
    faults: list[Found] = []
    beside = _heads_beside(plan, inventory, decided)
    for path, pattern in decided.items():
        rule, span = plan.rules[pattern], plan.span(pattern)
        module = inventory.modules.get(path)
        cuts = _cuts(rule, path, inventory, tp, decided, beside.get(path.rpartition(".")[0], set()))
        if isinstance(cuts, Fault):
            faults.append(Found(pattern, path, cuts))
            continue
        target: Literal["module", "tensor"] = "tensor" if module is None else "module"
        declared = rule.heads is not None or rule.sections is not None
        placed[path] = Placed(path, target, rule.style, rule, pattern, span, cuts, declared)
    return placed, faults


def _heads_beside(plan: Plan, inventory: Inventory, decided: Mapping[str, str]) -> dict[str, set[int]]:
    """The numbers of heads that the column rules declare for what one module holds: q, k and v."""
    found: dict[str, set[int]] = {}
    for path, pattern in decided.items():
        rule = plan.rules[pattern]
        heads = heads_of(rule, inventory.config) if rule.style == "column" else ()
        if not isinstance(heads, Fault):
            found.setdefault(path.rpartition(".")[0], set()).update(heads)
    return found


def _cuts(
    rule: Rule, path: str, inventory: Inventory, tp: int, decided: Mapping[str, str], beside: Collection[int]
) -> dict[str, Shard] | Fault:
    module = inventory.modules.get(path)
    config = inventory.config
    if module is not None:
        return cut_module(rule, module, tp=tp, config=config, ruled=decided, beside=beside)
    holder, _, local = path.rpartition(".")
    owner: ModuleInfo = inventory.modules[holder]
    return cut_tensor(rule, owner.tensors[local], tp=tp, config=config, owner=owner, beside=beside)


def _placed_twice(plan: Plan, placed: Mapping[str, Placed]) -> list[Found]:
    """A tensor with a rule of its own that the style of its module places in another way.

    `replicate` on a module says nothing against a rule for one of its tensors.
    """
    faults = []
    for own in placed.values():
        path, _, local = own.path.rpartition(".")
        module = placed.get(path) if own.target == "tensor" else None
        if module is None or module.style == "replicate" or local not in ("weight", "bias"):
            continue
        if module.layouts.get(own.path) != own.layouts.get(own.path):
            notes = (rule_at(plan, module.pattern),)
            fault = Fault("AT209", f"style {module.style} of its module places it in another way", notes)
            faults.append(Found(own.pattern, own.path, fault))
    return faults


def _ruled(plan: Plan, inventory: Inventory, placed: Mapping[str, Placed]) -> dict[str, Ruled]:
    """Every tensor name that a rule decides about, cut or whole; a tensor's own rule comes last."""
    ruled: dict[str, Ruled] = {}
    for one in placed.values():
        names = [one.path]
        if one.target == "module":
            names = [tensor.name for tensor in inventory.modules[one.path].tensors.values()]
        for name in names:
            ruled[name] = Ruled(
                name, one.layouts.get(name), one.rule, one.pattern, rule_at(plan, one.pattern)
            )
    return ruled
