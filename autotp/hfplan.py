"""transformers' own tensor-parallel plans, read as plans of autotp and written back.

transformers keeps a plan as a dict from module names to styles: `base_model_tp_plan` of a config names the
modules of the base model, `_tp_plan` of a model class those of its head
(https://huggingface.co/docs/transformers/perf_infer_gpu_multi). What each style is here:

| transformers                    | on            | here                                                  |
|---------------------------------|---------------|-------------------------------------------------------|
| colwise                         | layer         | column, in attention with the heads of the config     |
| colwise_gather_output           | layer         | column, gather_output                                 |
| packed_colwise                  | layer         | column, sections: 2                                   |
| rowwise                         | layer         | row, in attention with the heads of the config        |
| rowwise_split_input             | layer         | row, split_input                                      |
| embedding_rowwise               | embedding     | vocab                                                 |
| colwise, packed_colwise         | experts' part | column or row, dim: -2; packed: sections: 2           |
| rowwise, packed_rowwise         | experts' part | row or column, dim: -1; packed: sections: 2           |
| colwise                         | `sinks`       | column, dim: 0, with the heads                        |
| moe_tp_experts, all_reduce      | experts       | nothing: the proof finds their copies and their sum   |
| replicated_with_grad_allreduce  | norm          | replicate: the proof finds the sum of its gradient    |
| mla_kv_a_proj                   | layer         | replicate: likewise                                   |

All other styles are refused by name. There a name that matches nothing is a warning, so here every pattern
is optional; what stands in no rule is proven as it is, so a plan that transformers would run to wrong
numbers is refused when it is analysed.

    AT114  an entry of transformers' plan that no rule can say
    AT115  a rule that transformers' plan cannot carry

This file knows nothing of torch; transformers is asked for only where its configs have to be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autotp.diagnostic import Diagnostic, PlanError, UsageError
from autotp.inventory import Inventory
from autotp.pattern import general, segments
from autotp.plan import Plan, Rule

__all__ = ["Entries", "plan_of", "read", "written"]

LAYER = {  # style of a layer -> the rule
    "colwise": Rule(style="column"),
    "colwise_gather_output": Rule(style="column", gather_output=True),
    "packed_colwise": Rule(style="column", sections=2),
    "rowwise": Rule(style="row"),
    "rowwise_split_input": Rule(style="row", split_input=True),
    "embedding_rowwise": Rule(style="vocab"),
    "replicated_with_grad_allreduce": Rule(style="replicate"),
    "mla_kv_a_proj": Rule(style="replicate"),
}
EMBEDDING = ("rowwise", "rowwise_split_input", "embedding_rowwise")  # each cuts the rows of an embedding
TENSOR = {  # style of a parameter by itself -> (dim counted from the end, sections)
    "colwise": (-2, None),
    "packed_colwise": (-2, 2),
    "rowwise": (-1, None),
    "packed_rowwise": (-1, 2),
}
OLD = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}  # names of one style
HOLDERS = ("moe_tp_experts", "all_reduce")  # on a module whose own parameters are cut
VECTORS = ("sinks",)  # parameters with one element a head
MLA = "kv_a_proj"  # how the layers of mla_kv_a_proj are called

ATTENTION = ("self_attn", "attention", "attn")
WITH_KV = ("k_proj", "v_proj")  # where these are layers of their own, attention is dealt by kv heads
FUSED = ("kv_b_proj", "query_key_value", "qkv")  # here it has one kv head for each head
KV_KEYS = ("num_key_value_heads", "num_attention_heads", "num_heads")
HEAD_KEYS = ("num_attention_heads", "num_heads")

REFUSED = {
    "grouped_gemm": "it gives each rank whole experts, and autotp cuts every expert",
    "ep_router": "it gives each rank whole experts, and autotp cuts every expert",
    "megamoe_router": "it belongs to a kernel that computes the experts in its own way",
    "megamoe_experts": "it belongs to a kernel that computes the experts in its own way",
    "moe_identity_expert": "it divides a value by the number of ranks so that their sum is right again",
    "sequence_parallel": "it cuts the sequence, and a plan cuts weights",
    "packed_rowwise": "it cuts a parameter by itself, and this is a layer",
}


@dataclass(frozen=True)
class Entries:
    """transformers' plan for one model, and what is known of the model.

    `styles`: name → style. `config`: the config as a dict, for its numbers of heads. `names`: the model's
    modules and tensors, None where only a config is known.
    """

    styles: Mapping[str, str]
    config: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    names: Inventory | None = None


# --- reading


def read(source: object) -> Entries:
    """transformers' plan of a config, a model, a model class, a config as a dict, a folder or a config.json;
    or the plan itself, a dict from names to styles.

    Raises UsageError for what has no plan and where transformers is not installed.
    """
    if isinstance(source, Mapping) and "model_type" not in source:
        return Entries(_checked(source, "the dict"))
    if isinstance(source, (str, Path, Mapping)):
        source = _config(source)
    name = source.__name__ if isinstance(source, type) else type(source).__name__
    if isinstance(source, type):
        config = source() if hasattr(source, "base_model_tp_plan") else _default_config(source)
        own = getattr(source, "_tp_plan", None)
        return Entries(_checked(_merged(config, own), name), _as_dict(config))
    if hasattr(source, "named_modules") and hasattr(source, "config"):
        from autotp.trace.inventory import inventory

        own = getattr(source, "_tp_plan", None) or {}
        return Entries(_checked(own, name), _as_dict(source.config), inventory(source))  # type: ignore[arg-type]
    if hasattr(source, "base_model_tp_plan"):
        return Entries(_checked(_merged(source, _head(source)), name), _as_dict(source))
    raise UsageError(f"a config or a model of transformers has a plan, and this is of type {name}")


def _checked(styles: object, name: str) -> dict[str, str]:
    if not isinstance(styles, Mapping) or not styles:
        raise UsageError(f"{name} has no tensor-parallel plan of transformers")
    wrong = next(((k, v) for k, v in styles.items() if not (isinstance(k, str) and isinstance(v, str))), None)
    if wrong is not None:
        raise UsageError(f"transformers' plan maps names to styles, and has {wrong[0]!r}: {wrong[1]!r:.60}")
    return dict(styles)


def _merged(config: Any, head: Mapping[str, str] | None) -> dict[str, str]:
    return {**(getattr(config, "base_model_tp_plan", None) or {}), **(head or {})}


def _as_dict(config: Any) -> dict[str, Any]:
    found = config.to_dict()
    assert isinstance(found, dict)
    return found


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "reading transformers' plans needs transformers\n  = help: pip install 'autotp[hf]'"
        ) from error
    return transformers


def _config(source: str | Path | Mapping[str, Any]) -> Any:
    """The config that a folder, a config.json or a dict describes; nothing is downloaded, no code is run."""
    transformers = _transformers()
    try:
        if isinstance(source, Mapping):
            kind = str(source["model_type"])
            return transformers.AutoConfig.for_model(**source) if kind else None
        folder = Path(source) if Path(source).is_dir() else Path(source).parent
        if not (folder / "config.json").is_file():
            raise UsageError(f"{folder}: there is no config.json, so transformers' plan is not known")
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = "the dict" if isinstance(source, Mapping) else str(source)
        raise UsageError(
            f"{what}: transformers {transformers.__version__} reads no config: {reason}"
        ) from error


def _default_config(model: type) -> Any:
    config = getattr(model, "config_class", None)
    if config is None:
        raise UsageError(f"a model class of transformers has a config_class, and {model.__name__} has none")
    return config()


def _head(config: Any) -> dict[str, str]:
    """What the class of the architecture says of its head; the causal language model's by default."""
    transformers = _transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    named = getattr(config, "architectures", None) or [CAUSAL.get(config.model_type)]
    classes = [getattr(transformers, name, None) for name in named if isinstance(name, str)]
    own = getattr(next(filter(None, classes), None), "_tp_plan", None)
    return dict(own or {})


# --- transformers' entries as rules


@dataclass(frozen=True)
class Why:
    """Why one side cannot say what the other says."""

    text: str


def plan_of(entries: Entries) -> Plan:
    """The plan that says what transformers' entries say. Raises PlanError with every entry it cannot say."""
    rules: dict[str, Rule] = {}
    faults: list[Diagnostic] = []
    for name, given in entries.styles.items():
        style = OLD.get(given, given)
        found = _rule(name, style, entries)
        if isinstance(found, Why):
            message = f"style {given} of transformers: {found.text}"
            faults.append(Diagnostic("AT114", message, module=name))
        elif found is not None:
            rules[name] = found
    if faults:
        raise PlanError(faults)
    plan = Plan(rules=rules, model_type=entries.config.get("model_type") or None, optional=tuple(rules))
    plan._whole_names = True
    return plan


def _rule(name: str, style: str, entries: Entries) -> Rule | Why | None:
    """The rule of an entry, why there is none, or None where the proof finds what the entry says."""
    if style in HOLDERS:
        if any(_holder(other) == name for other in entries.styles):
            return None
        return Why("no parameter of this module has an entry, so there is nothing to sum")
    if _is_tensor(name, entries):
        return _tensor_rule(name, style, entries)
    if style not in LAYER:
        return Why(REFUSED.get(style, "autotp does not know it"))
    if style == "mla_kv_a_proj" and not segments(name)[-1].startswith(MLA):
        return Why(f"it splits the output of a layer named {MLA}…, and this one is named otherwise")
    if _is_embedding(name, entries):
        if style in EMBEDDING:
            return LAYER["embedding_rowwise"]
        return Why("it cuts the width of an embedding, and autotp cuts its rows")
    rule = LAYER[style]
    heads = _heads(name, entries) if style in ("colwise", "rowwise") else None
    return rule if heads is None else Rule(style=rule.style, heads=heads)


def _tensor_rule(name: str, style: str, entries: Entries) -> Rule | Why:
    if style not in TENSOR:
        return Why("it is for a layer, and this is a parameter by itself")
    if segments(name)[-1] in VECTORS:
        if style != "colwise":
            return Why("one number a head is cut by colwise")
        return Rule(style="column", dim=0, heads=_heads(name, entries))
    dim, sections = TENSOR[style]
    siblings = [s for other, s in entries.styles.items() if _holder(other) == _holder(name)]
    turned = "packed_rowwise" in siblings  # weights [in, out]: the fused gate|up is cut along its last dim
    column = (dim == -1) if turned else (dim == -2)
    return Rule(style="column" if column else "row", dim=dim, sections=sections)


def _holder(name: str) -> str:
    return name.rpartition(".")[0]


def _is_tensor(name: str, entries: Entries) -> bool:
    if entries.names is not None:
        return any(general(n) == name for n in entries.names.tensors())
    held = entries.styles.get(_holder(name)) in HOLDERS and entries.styles[name] in TENSOR
    return held or segments(name)[-1] in VECTORS


def _is_embedding(name: str, entries: Entries) -> bool:
    modules = entries.names.modules.values() if entries.names is not None else ()
    return any(m.kind == "embedding" and general(m.path) == name for m in modules)


def _block(name: str) -> str | None:
    """The path of the attention that a name is inside of."""
    parts = segments(name)
    last = max((i for i, part in enumerate(parts) if part in ATTENTION), default=None)
    return None if last is None else ".".join(parts[: last + 1])


def _heads(name: str, entries: Entries) -> str | None:
    """The config key that counts the units of an attention, so that no number of ranks cuts a head."""
    block = _block(name)
    if block is None:
        return None
    plain = [
        segments(other)[-1]
        for other, style in entries.styles.items()
        if _block(other) == block and style in ("colwise", "rowwise")
    ]
    if any(part in plain for part in WITH_KV):
        keys: Iterable[str] = KV_KEYS
    elif any(part in plain for part in FUSED):
        keys = HEAD_KEYS
    else:
        return None
    return next((key for key in keys if isinstance(entries.config.get(key), int)), None)


# --- rules as transformers' entries

SAYS = {rule: style for style, rule in LAYER.items() if rule.style != "replicate"}
CUTS = {cut: style for style, cut in TENSOR.items()}


def written(plan: Plan) -> dict[str, str]:
    """The dict that transformers takes: an entry for each rule, and those of the modules that hold experts.

    Heads are not written, transformers cuts equal parts. Raises PlanError with every rule that cannot be
    written, and for a plan that was not read from transformers: its patterns match from the end of a name,
    and transformers' are whole names.
    """
    if not plan._whole_names:
        message = "a pattern here matches the end of a name, and transformers takes whole names"
        help = ("write a plan that `Plan.from_transformers` has read",)
        first = next(iter(plan.rules))
        raise PlanError([Diagnostic("AT115", message, module=first, plan=plan.span(first), help=help)])
    styles: dict[str, str] = {}
    faults: list[Diagnostic] = []
    for pattern, rule in plan.rules.items():
        found = _style(pattern, rule)
        if isinstance(found, Why):
            faults.append(Diagnostic("AT115", found.text, module=pattern, plan=plan.span(pattern)))
        else:
            styles[pattern] = found
            if _is_part(pattern, rule):
                styles[_holder(pattern)] = "moe_tp_experts"
    if faults:
        raise PlanError(faults)
    return styles


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
