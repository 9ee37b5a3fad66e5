"""Plans written as transformers keeps them: a dict from whole names of modules to styles.

Two ways. A plan that `autotp.hfplan` has read is written from its rules alone, by the same table the other
way round. Any other plan needs the proven analysis of a model: patterns here match the end of a name, one
style fits several kinds of module, and what a norm on a shard needs is found by the proof:

| in the analysis                                    | entry                                     |
|----------------------------------------------------|-------------------------------------------|
| column of one piece; with gather_output            | colwise; colwise_gather_output            |
| column of two equal pieces, without a bias         | packed_colwise                            |
| row; with split_input                              | rowwise; rowwise_split_input              |
| vocab                                              | embedding_rowwise                         |
| a parameter's last dim but one, or only dim        | colwise, of two pieces packed_colwise     |
| a parameter's last dim                             | rowwise, of two pieces packed_rowwise     |
| experts whose states and weights are copied        | moe_tp_experts                            |
| whole parameters that are copied where they are read | replicated_with_grad_allreduce          |

What transformers cannot carry is refused by name, AT115: uneven parts, other sections, layers of one name
that are cut in different ways. This file knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autotp.analysis import LAYOUTS, Analysis
from autotp.diagnostic import Diagnostic, PlanError, UsageError
from autotp.hfplan import LAYER, MLA, TENSOR, VECTORS, Why
from autotp.hfsource import layer_name
from autotp.match import Placed
from autotp.pattern import segments
from autotp.placement import Shard
from autotp.plan import Plan, Rule

__all__ = ["from_analysis", "from_rules"]

SAYS = {rule: style for style, rule in LAYER.items() if rule.style != "replicate"}
CUTS = {cut: style for style, cut in TENSOR.items()}
EXPERTS = frozenset({"[0][0]", "[0][2]"})  # what transformers copies: the first and the third argument
WHOLE = "whole"


def from_rules(plan: Plan) -> dict[str, str]:
    """The entries of a plan that `autotp.hfplan` has read.

    Heads are not written, transformers cuts equal parts. Raises PlanError with every rule that cannot be
    written, and for a plan of another source.
    """
    if not plan._whole_names:
        message = "a pattern here matches the end of a name, and transformers takes whole names"
        help = ("pass the analysis of a model: plan.to_transformers(autotp.analyze(model, plan, tp=2))",)
        first = next(iter(plan.rules))
        raise PlanError([Diagnostic("AT115", message, module=first, plan=plan.span(first), help=help)])
    styles: dict[str, str | Why] = {}
    for pattern, rule in plan.rules.items():
        styles[pattern] = _style(pattern, rule)
        if _is_part(pattern, rule):
            styles.setdefault(pattern.rpartition(".")[0], "moe_tp_experts")
    return _without_faults(styles, plan)


def _without_faults(styles: Mapping[str, str | Why], plan: Plan) -> dict[str, str]:
    faults = [
        Diagnostic("AT115", found.text, module=name, plan=plan.span(name))
        for name, found in styles.items()
        if isinstance(found, Why)
    ]
    if faults:
        raise PlanError(faults)
    return {name: style for name, style in styles.items() if isinstance(style, str) and style != WHOLE}


def _is_part(pattern: str, rule: Rule) -> bool:
    return rule.dim is not None and segments(pattern)[-1] not in VECTORS


def _style(pattern: str, rule: Rule) -> str | Why:
    """The style of transformers that says what a rule says, or why there is none."""
    last = segments(pattern)[-1]
    if rule.style == "replicate":
        return "mla_kv_a_proj" if last.startswith(MLA) else "replicated_with_grad_allreduce"
    if not _is_part(pattern, rule):
        if rule.dim is not None:
            return "colwise"
        bare = Rule.model_validate(rule.model_dump(exclude={"heads"}))
        return SAYS.get(bare) or Why(f"no style of transformers says {rule.to_data()}")
    if segments(pattern)[-2:-1] != ("experts",):
        return Why("transformers sums what a module's own parameters compute only where it is called experts")
    assert rule.dim is not None and (rule.sections is None or isinstance(rule.sections, int))
    return CUTS[rule.dim, rule.sections]


def from_analysis(analysis: Analysis) -> dict[str, str]:
    """The entries that let transformers do what a proven analysis says, by the names of its model.

    Raises PlanError with everything that transformers cannot carry, UsageError for an unproven analysis.
    """
    if not analysis.ok or analysis.certainty != LAYOUTS:
        raise UsageError(
            "transformers runs whatever a plan says, so only a proven analysis is written for it"
        )
    styles: dict[str, str | Why] = {}
    found = dict(_placed(analysis)) | dict(_proven(analysis))  # a whole norm's entry is what the proof says
    for path, style in found.items():
        name = layer_name(path)
        if styles.setdefault(name, style) != style and not isinstance(styles[name], Why):
            styles[name] = Why("its layers are cut in different ways, and one entry is for all")
    return _without_faults(styles, analysis.plan)


def _placed(analysis: Analysis) -> Iterator[tuple[str, str | Why]]:
    """Each module and tensor with its style; those that are whole too, so that layers can be compared."""
    modules = analysis.inventory.modules
    placed = analysis.matches.placed
    for path, module in modules.items():
        if path in placed and placed[path].layouts:
            yield path, _layer(placed[path], module.kind, "bias" in module.tensors, analysis.layouts)
        elif path:
            yield path, WHOLE
        for tensor in module.tensors.values():
            if tensor.name in placed and tensor.name in analysis.layouts:
                yield tensor.name, _tensor(len(tensor.shape), analysis.layouts[tensor.name])


def _layer(placed: Placed, kind: str, biased: bool, layouts: Mapping[str, Shard]) -> str | Why:
    cut = layouts[f"{placed.path}.weight"]
    if why := _uneven(cut):
        return why
    if kind == "conv1d":
        return Why("transformers cuts a weight as [out, in], and this one is [in, out]")
    if placed.style == "vocab":
        return "embedding_rowwise"
    if placed.style == "row" and cut.groups == 1:
        return "rowwise_split_input" if placed.rule.split_input else "rowwise"
    if placed.style == "column" and cut.groups == 1:
        return "colwise_gather_output" if placed.rule.gather_output else "colwise"
    if placed.style == "column" and cut.groups == 2 and not placed.rule.gather_output:
        return (
            Why("transformers cuts the bias of a packed layer in one piece") if biased else "packed_colwise"
        )
    return Why(f"no style of transformers says {placed.rule.to_data()}")


def _tensor(dims: int, cut: Shard) -> str | Why:
    if why := _uneven(cut):
        return why
    if dims == 1 and cut.groups == 1:
        return "colwise"
    found = CUTS.get((cut.dim - dims, None if cut.groups == 1 else cut.groups)) if dims > 1 else None
    return found or Why(f"no style of transformers cuts a parameter of {dims} dims as {cut}")


def _uneven(cut: Shard) -> Why | None:
    if cut.deal is not None and cut.deal.units == cut.tp:
        return None
    return Why(f"transformers cuts equal parts, and this is {cut}")


def _proven(analysis: Analysis) -> Iterator[tuple[str, str | Why]]:
    """What the proof found around whole parameters and around modules with parameters of their own."""
    borders = {region.path: region for region in analysis.regions}
    for path, region in borders.items():
        inside = any(other.startswith(f"{path}.") and borders[other].copied for other in borders)
        if region.copied == EXPERTS:
            yield path, "moe_tp_experts"
        elif region.copied or not inside:
            yield path, Why("transformers copies the states and weights of experts, and nothing else")
    copied = {read.name for read in analysis.reads if read.copied and read.shard is None}
    for read in analysis.reads:
        holder = read.name.rpartition(".")[0]
        own = analysis.inventory.modules[holder].tensors.values()
        parameters = {tensor.name for tensor in own if tensor.role == "parameter"}
        if parameters <= copied:
            yield holder, "replicated_with_grad_allreduce"
        else:
            yield read.name, Why("transformers has no style for a parameter that is cut where it is read")
