"""From a conflict in the graph to a finding for people: the plan's line, the model's line, the remedy.

The same conflict in every layer of a stack is one finding that says in how many places it stands.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Iterable

from torch import fx

from autotp.diagnostic import Diagnostic, Span
from autotp.match import Matches, Placed
from autotp.placement import Partial, is_whole
from autotp.propagate.call import Value
from autotp.propagate.ops import op_name
from autotp.propagate.propagation import Finding, Propagation
from autotp.rule import Rule

__all__ = ["diagnose", "rule_line"]


def rule_line(pattern: str, rule: Rule, **changes: object) -> str:
    """A rule as the plan file has it, with some options changed.

    >>> rule_line("fc1", Rule(style="column"), gather_output=True)
    'fc1: {style: column, gather_output: true}'
    >>> rule_line("w", Rule(style="column", dim=0), heads=2)
    'w: {style: column, dim: 0, heads: 2}'
    """
    options = {k: v for k, v in rule.model_dump().items() if v is not None and v is not False} | changes
    options = {k: v for k, v in options.items() if v is not None}
    if set(options) == {"style"}:
        return f"{pattern}: {options['style']}"
    return f"{pattern}: {{{', '.join(f'{k}: {_word(v)}' for k, v in options.items())}}}"


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_word, value))}]"
    return str(value)


def diagnose(propagation: Propagation) -> list[Diagnostic]:
    """One diagnostic for each first cause; the same cause in other layers is counted in a note."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in propagation.findings:
        key = (
            finding.conflict.code,
            _collapsed(finding.node.meta.get("module") or ""),
            _collapsed(finding.conflict.message),
            str(_source(finding)),
        )
        groups.setdefault(key, []).append(finding)
    return [_diagnostic(found[0], propagation, len(found) - 1) for found in groups.values()]


def _source(finding: Finding) -> Span | None:
    span: Span | None = finding.source or finding.node.meta.get("source")
    return span


def _collapsed(text: str) -> str:
    return re.sub(r"\b\d+\b", "*", text)


def _diagnostic(finding: Finding, propagation: Propagation, others: int) -> Diagnostic:
    matches, conflict = propagation.matches, finding.conflict
    placed = [p for o in finding.origins if (p := matches.placed.get(o)) is not None]
    module = finding.node.meta.get("module") or None
    own = matches.placed.get(module or "")
    if own is not None and own not in placed:
        placed.append(own)
    blamed = (
        own if own is not None and conflict.code in ("AT302", "AT314") else (placed[0] if placed else None)
    )
    notes = list(conflict.notes)
    if blamed is not None and blamed.span is None:
        notes.append(f"the rule: {rule_line(blamed.pattern, blamed.rule)}")
    if others:
        notes.append(f"the same in {others} more place{'s' if others > 1 else ''} of the model")
    return Diagnostic(
        conflict.code,
        conflict.message,
        module=module,
        plan=blamed.span if blamed is not None else None,
        source=_source(finding),
        notes=tuple(notes),
        help=(*conflict.help, *_remedies(finding, placed, own, propagation)),
    )


def _remedies(
    finding: Finding, placed: list[Placed], own: Placed | None, propagation: Propagation
) -> list[str]:
    """The lines of the plan that would make it right, as the plan file has them."""
    code = finding.conflict.code
    columns = [p for p in placed if p.style == "column" and not (code == "AT314" and p is own)]
    layers = [p for p in _once(columns) if p.target == "module"]  # a tensor by itself gathers nothing
    gathers = [rule_line(p.pattern, p.rule, gather_output=True) for p in layers]
    gathered = f"let every rank have the whole value: `{'`, `'.join(gathers)}`" if gathers else ""
    help: list[str] = []
    if code == "AT301":
        raw = _raw_weight(finding)
        parent, _, leaf = raw.rpartition(".")
        name = _short(parent or finding.node.meta["module"], propagation.matches)
        name = f"{name}.{leaf}" if parent else raw or name
        row = "{style: row, dim: 1}" if raw else "row"
        help.append(f"let it read its own part on each rank: `{name}: {row}`")
    elif code == "AT302" and own is not None:
        if own.rule.split_input:
            return [f"the input is split already: `{rule_line(own.pattern, own.rule, split_input=False)}`"]
        made, gathered_by = _makers(finding, propagation)
        if gathered_by:
            lines = [rule_line(p.pattern, p.rule, gather_output=None) for p in gathered_by]
            help.append(f"let each rank keep its part of the input: `{'`, `'.join(lines)}`")
        elif made:
            lines = [f"{_short(m, propagation.matches)}: column" for m in made]
            help.append(f"shard what makes its input: `{'`, `'.join(lines)}`")
        else:
            help.append(f"a pair begins with a column layer, and row ends it: `{own.pattern}: column`")
        line = rule_line(own.pattern, own.rule, split_input=True)
        help.append(f"or let each rank take its part of the whole input: `{line}`")
        return help
    elif code in ("AT306", "AT307") and placed:
        missing = _whole_layers(finding, propagation)
        if missing and code == "AT306":
            lines = [
                rule_line(_short(m, propagation.matches), _like(m, columns or placed, finding).rule)
                for m in missing
            ]
            help.append(f"shard what it meets, too: `{'`, `'.join(dict.fromkeys(lines))}`")
        if code == "AT307" and len(columns) > 1:
            help.append("deal the same number of units to each of them: the same `heads` in their rules")
        if code == "AT307" and columns and columns[0].rule.heads is not None:
            rows = [p for p in _once(placed) if p.style == "row" and p.rule.heads is None]
            lines = [rule_line(p.pattern, p.rule, heads=columns[0].rule.heads) for p in rows]
            if lines:
                help.append(f"deal whole heads to what it meets, too: `{'`, `'.join(lines)}`")
    elif code == "AT308" and placed:
        heads, tp = _heads(finding), propagation.matches.tp
        if heads is not None and any(
            v.shard is not None and v.shard.groups > 1 for v in finding.conflict.blame
        ):
            line = rule_line(placed[0].pattern, placed[0].rule, sections=None, heads=heads)
            return [f"if its parts stand side by side in each head, heads alone are dealt: `{line}`"]
        if heads is not None:
            units = rule_line(placed[0].pattern, placed[0].rule, heads=heads)
            few = f" ({tp} ranks share {heads} kv heads; of other heads tp is {heads} at most)"
            help.append(f"say that whole heads are dealt: `{units}`{few if heads < tp else ''}")
        if heads is None or placed[0].rule.sections is None:
            parts = rule_line(placed[0].pattern, placed[0].rule, sections="N")
            help.append(f"if the layer is a fusion of N equal parts: `{parts}`")
        return help
    elif code == "AT309" and placed:
        given = placed[0].rule
        found = _sections(finding)
        if given.sections == found:
            line = rule_line(placed[0].pattern, given, sections=None)
            help.append(f"if its parts stand side by side in each head, heads alone are dealt: `{line}`")
        else:
            line = rule_line(placed[0].pattern, given, sections=found)
            help.append(f"a fused layer is cut part by part: `{line}`")
        return help
    elif code == "AT311":
        for read, dim in _factors(finding, propagation):
            line = f"{_short(read, propagation.matches)}: {{style: row, dim: {dim}}}"
            help.append(f"cut what it is multiplied by, too, and the sum is taken: `{line}`")
    elif code == "AT314" and own is not None and gathered:
        help.append(f"if it should follow {columns[0].path}, make it a row layer: `{own.pattern}: row`")
    if gathered and code in ("AT301", "AT303", "AT304", "AT306", "AT310", "AT311", "AT314"):
        help.append(("or " if help else "") + gathered)
    return help


def _raw_weight(finding: Finding) -> str:
    """The weight that a linear op takes by itself, and not in the forward of its layer; else ""."""
    node = finding.node
    weight = node.args[1] if op_name(node) == "linear" and len(node.args) > 1 else None
    name = str(weight.meta.get("name", "")) if isinstance(weight, fx.Node) else ""
    return "" if name.rpartition(".")[0] == node.meta["module"] else name


_MIXING = ("layer_norm", "rms_norm", "group_norm", "add", "sub")


def _makers(finding: Finding, propagation: Propagation) -> tuple[list[str], list[Placed]]:
    """The layers whose output a row layer is given: those without a rule, and those that gather theirs.

    A norm, and a sum with a residual, need their values whole: what is before them makes it not.
    """
    whole: dict[str, None] = {}
    gathering: dict[str, Placed] = {}
    frontier, seen = list(finding.node.all_input_nodes), set[fx.Node]()
    while frontier:
        node = frontier.pop(0)
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        name = node.meta["module"] if node.target is not operator.getitem else ""
        if node.target is not operator.getitem and op_name(node) in ("linear", "addmm"):
            placed = propagation.matches.placed.get(name)
            if placed is None:
                whole[name] = None
            elif placed.style == "column" and placed.rule.gather_output:
                gathering[placed.pattern] = placed
        elif node.target is operator.getitem or op_name(node) not in _MIXING:
            frontier += node.all_input_nodes
    return list(whole)[:4], list(gathering.values())


def _like(module: str, placed: list[Placed], finding: Finding) -> Placed:
    """The rule that a whole layer could have, too: of a layer of its sizes, if there is one."""
    read = [node for node in finding.node.graph.nodes if node.op == "get_attr" and "val" in node.meta]
    shapes = {node.meta.get("name"): tuple(node.meta["val"].shape) for node in read}
    own = shapes.get(f"{module}.weight")
    return next((p for p in placed if shapes.get(f"{p.path}.weight") == own), placed[0])


def _once(placed: list[Placed]) -> list[Placed]:
    return list({p.pattern: p for p in placed}.values())


def _short(path: str, matches: Matches) -> str:
    """The last names of a path, as a pattern: enough of them to be more than a number."""
    parts = path.split(".")
    keep = 1
    while keep < len(parts) and parts[-keep].isdigit():
        keep += 1
    return ".".join("*" if p.isdigit() and keep > 1 and i else p for i, p in enumerate(parts[-keep:]))


def _whole_layers(finding: Finding, propagation: Propagation) -> list[str]:
    """The nearest layers that make the whole values that the op meets."""
    found: list[str] = []
    frontier = [n for n in finding.node.all_input_nodes if _is_whole(n, propagation)]
    seen: set[fx.Node] = set()
    while frontier:
        node = frontier.pop(0)
        if node in seen or not _is_whole(node, propagation):
            continue
        seen.add(node)
        if (
            node.op == "call_function"
            and node.target is not operator.getitem
            and op_name(node) in ("linear", "addmm")
        ):
            if node.meta["module"] not in propagation.matches.placed:
                found.append(node.meta["module"])
            continue
        if node.op == "call_function":
            frontier += node.all_input_nodes
    return list(dict.fromkeys(found))[:4]


def _factors(finding: Finding, propagation: Propagation) -> list[tuple[str, int]]:
    """The parameters of which a rank reads a part for the sum that is still on the ranks, and the dims."""
    found: dict[tuple[str, int], None] = {}
    frontier, seen = [finding.node, *finding.node.all_input_nodes], set[fx.Node]()
    while frontier:
        node = frontier.pop(0)
        if node in seen:
            continue
        seen.add(node)
        for factor in node.all_input_nodes:
            read = propagation.reads.get(factor.meta.get("name", "")) if factor.op == "get_attr" else None
            if read is not None and read.shard is not None and len(factor.meta["val"].shape) > 1:
                found[read.name, read.shard.dim] = None
            elif isinstance(propagation.layouts.get(factor, [None])[0], Partial):
                frontier.append(factor)
    return list(found)[:4]


def _is_whole(node: fx.Node, propagation: Propagation) -> bool:
    return all(map(is_whole, propagation.layouts.get(node, [])))


def _heads(finding: Finding) -> int | None:
    """How many units the view makes of the sharded dim, when it splits that dim."""
    cut = next((v for v in finding.conflict.blame if v.shard is not None), None)
    val = finding.node.meta["val"]
    if cut is None or cut.shard is None or isinstance(val, list) or len(val.shape) <= cut.rank:
        return None
    before, dim = 1, cut.shard.dim
    for size in val.shape:
        if before == math.prod(cut.shape[:dim]) and size != 1:
            return int(size)
        before *= size
    return None


def _sections(finding: Finding) -> object:
    """The parts that a split or slice takes, as `sections` has them."""
    node = finding.node
    value: Iterable[Value] = finding.conflict.blame
    cut = next((v for v in value if v.shard is not None), None)
    if cut is None or cut.shard is None:
        return "N"
    size = cut.shape[cut.shard.dim]
    vals = node.meta["val"]
    if isinstance(vals, list) and all(v is not None for v in vals):
        sizes = [v.shape[cut.shard.dim] for v in vals]
        return len(sizes) if len(set(sizes)) == 1 else sizes
    edges = {0, size}
    for user in cut.node.users:
        if user.op == "call_function" and op_name(user) == "slice" and len(user.args) > 2:
            for edge in user.args[2:4]:
                if isinstance(edge, int):
                    edges.add(max(0, edge + size if edge < 0 else min(edge, size)))
    ordered = sorted(edges)
    sizes = [b - a for a, b in itertools.pairwise(ordered)]
    return len(sizes) if len(set(sizes)) == 1 else sizes
