"""transformers' own tensor-parallel plans, read as plans of autotp. (Written back: `autotp.hfwrite`.)

A plan there is a dict from names of modules to styles (where it stands: `autotp.hfsource`). What each style
is here:

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
| colwise                         | sinks, …bias  | column, dim: 0, with the heads                        |
| moe_tp_experts, all_reduce      | experts       | nothing: the proof finds their copies and their sum   |
| local_params (as of 5.24)       | attention     | nothing: its vectors have entries of their own        |
| replicated_with_grad_allreduce  | norm          | replicate: the proof finds the sum of its gradient    |
| mla_kv_a_proj                   | layer         | replicate: likewise                                   |
| replicate (as of 5.24)          | layer         | replicate                                             |

All other styles are refused by name. There a name that matches nothing is a warning, so here every pattern
is optional; what stands in no rule is proven as it is, so a plan that transformers would run to wrong
numbers is refused when it is analysed.

    AT114  an entry of transformers' plan that no rule can say

This file knows nothing of torch, and nothing of transformers but the names of its styles.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autotp.diagnostic import Diagnostic, PlanError
from autotp.hfsource import Entries, layer_name
from autotp.pattern import segments
from autotp.plan import Plan, Rule

__all__ = ["Why", "plan_of"]

LAYER = {  # style of a layer -> the rule
    "colwise": Rule(style="column"),
    "colwise_gather_output": Rule(style="column", gather_output=True),
    "packed_colwise": Rule(style="column", sections=2),
    "rowwise": Rule(style="row"),
    "rowwise_split_input": Rule(style="row", split_input=True),
    "embedding_rowwise": Rule(style="vocab"),
    "replicated_with_grad_allreduce": Rule(style="replicate"),
    "mla_kv_a_proj": Rule(style="replicate"),
    "replicate": Rule(style="replicate"),
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
LOCAL = "local_params"  # on the module of such vectors
VECTORS = ("sinks", "bias")  # how parameters with one element a head end
MLA = "kv_a_proj"  # how the layers of mla_kv_a_proj are called

ATTENTION = ("self_attn", "attention", "attn")
WITH_KV = ("k_proj", "v_proj")  # these have kv heads, and the layers beside them query heads
FUSED = ("kv_b_proj", "query_key_value", "qkv")  # here it has one kv head for each head
KV_KEYS = ("num_key_value_heads", "num_attention_heads", "num_heads")
HEAD_KEYS = ("num_attention_heads", "num_heads")

REFUSED = {
    "local_params": "no parameter of this module has an entry of its own",
    "embedding_colwise": "it cuts the width of an embedding, and autotp cuts its rows",
    "grouped_gemm": "it gives each rank whole experts, and autotp cuts every expert",
    "ep_router": "it gives each rank whole experts, and autotp cuts every expert",
    "megamoe_router": "it belongs to a kernel that computes the experts in its own way",
    "megamoe_experts": "it belongs to a kernel that computes the experts in its own way",
    "moe_identity_expert": "it divides a value by the number of ranks so that their sum is right again",
    "sequence_parallel": "it cuts the sequence, and a plan cuts weights",
    "packed_rowwise": "it cuts a parameter by itself, and this is a layer",
}


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
    if style == LOCAL and any(_is_vector(n) and _holder(n) == name for n in entries.styles):
        return None
    if _is_tensor(name, entries):
        return _tensor_rule(name, style, entries)
    if style not in LAYER:
        if _names_nothing(name, entries):
            return None  # a warning there: some plans of transformers have every name with two prefixes
        return Why(REFUSED.get(style, "autotp does not know it"))
    if style == "mla_kv_a_proj" and not segments(name)[-1].startswith(MLA):
        return Why(f"it splits the output of a layer named {MLA}…, and this one is named otherwise")
    if _is_embedding(name, entries):
        if style in EMBEDDING:
            return LAYER["embedding_rowwise"]
        if style == "replicate":
            return LAYER[style]
        return Why("it cuts the width of an embedding, and autotp cuts its rows")
    rule = LAYER[style]
    heads = _heads(name, entries) if style in ("colwise", "rowwise") else None
    return rule if heads is None else Rule(style=rule.style, heads=heads)


def _tensor_rule(name: str, style: str, entries: Entries) -> Rule | Why:
    if style not in TENSOR:
        return Why("it is for a layer, and this is a parameter by itself")
    if _is_vector(name):
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
        return any(layer_name(n) == name for n in entries.names.tensors())
    held = entries.styles.get(_holder(name)) in HOLDERS and entries.styles[name] in TENSOR
    return held or _is_vector(name)


def _is_vector(name: str) -> bool:
    return segments(name)[-1].endswith(VECTORS)


def _names_nothing(name: str, entries: Entries) -> bool:
    """Whether the model is known, and has neither a module nor a tensor of that name."""
    known = entries.names
    return known is not None and name not in {layer_name(n) for n in (*known.paths, *known.tensors())}


def _is_embedding(name: str, entries: Entries) -> bool:
    modules = entries.names.modules.values() if entries.names is not None else ()
    return any(m.kind == "embedding" and layer_name(m.path) == name for m in modules)


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
    if segments(name)[-1] in WITH_KV:
        keys: Iterable[str] = KV_KEYS
    elif any(part in plain for part in WITH_KV):
        keys = (*HEAD_KEYS, *KV_KEYS)
    elif any(part in plain for part in FUSED):
        keys = HEAD_KEYS
    else:
        return None
    return next((key for key in keys if isinstance(entries.config.get(key), int)), None)
