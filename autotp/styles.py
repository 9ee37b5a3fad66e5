"""What each style cuts: the tensors of one module, or one parameter or buffer by itself.

    column   y = x @ W.T + b    W [out, in]: out is cut, and b with it    (tied to the units of `heads`)
    row      y = x @ W.T + b    W [out, in]: in is cut, b is whole
    vocab    y = W[ids]         W [vocabulary, width]: the rows are cut
    column   y = norm(x) * w + b    of a LayerNorm or RMSNorm: w and b are cut, and x is

transformers' Conv1D keeps its weight as [in, out]. Where only the headers of a file are known, a 2-D
`weight` may be a linear layer or an embedding, and the style decides. Numbers of heads and sections:
`autotp.units`. This file knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from autotp.inventory import ModuleInfo, TensorInfo
from autotp.placement import Shard
from autotp.rule import Rule
from autotp.units import Fault, counted, shard_of

__all__ = ["cut_module", "cut_tensor", "is_norm", "shown"]

KINDS = {  # style -> the kinds of module that it cuts, and their name
    "column": (("linear", "conv1d", "unknown"), "a linear layer"),
    "row": (("linear", "conv1d", "unknown"), "a linear layer"),
    "vocab": (("embedding", "unknown"), "an embedding"),
}
NORMS = ("LayerNorm", "RMSNorm")  # of torch; over one dim
WEIGHT_DIM = {"column": 0, "row": 1, "vocab": 0}  # of a weight [out, in] or [vocabulary, width]
FEATURE = {"column": "output features", "row": "input features", "vocab": "rows"}
KIND_NAME = {
    "linear": "a linear layer",
    "embedding": "an embedding",
    "conv1d": "a Conv1D",
    "norm": "a norm",
    "other": "another module",
    "unknown": "a module of a checkpoint",
}
WHAT_FITS = {  # kind -> what to write instead
    "embedding": "an embedding is cut by `vocab`",
    "linear": "a linear layer is cut by `column` or `row`",
    "conv1d": "a Conv1D is cut by `column` or `row`",
    "norm": "leave the rule out: a norm of whole values is whole on every rank",
}


def shown(tensor: TensorInfo) -> str:
    """A tensor's dtype and shape, as in `f32[32,16]`."""
    return f"{tensor.dtype.lower()}[{','.join(map(str, tensor.shape))}]"


def _local_shapes(module: ModuleInfo) -> str:
    return ", ".join(f"{name} {shown(tensor)}" for name, tensor in module.tensors.items())


def _called(module: ModuleInfo) -> str:
    return module.class_name or KIND_NAME[module.kind]


def is_norm(module: ModuleInfo) -> bool:
    """Whether a module is a norm over one dim that `column` cuts: torch's own, with a weight."""
    return module.kind == "norm" and module.class_name in NORMS and _is_vector(module)


def _is_vector(module: ModuleInfo) -> bool:
    """Whether a module has a weight of one dim, and no bias of another size."""
    weight = module.tensors.get("weight")
    bias = module.tensors.get("bias", weight)
    return weight is not None and bias is not None and len(weight.shape) == 1 and bias.shape == weight.shape


def _is_cut_norm(rule: Rule, module: ModuleInfo) -> bool:
    """A norm over one dim, each rank of which is given its features. Where only headers are known, a vector
    is one if the rule states its dim."""
    told = module.kind == "unknown" and rule.dim is not None
    return rule.style == "column" and (is_norm(module) or (told and _is_vector(module)))


def _cut_norm(
    rule: Rule, module: ModuleInfo, *, tp: int, config: Mapping[str, object]
) -> dict[str, Shard] | Fault:
    weight = module.tensors["weight"]
    option = "gather_output" if rule.gather_output else "split_input" if rule.split_input else None
    if option is not None or rule.dim not in (None, 0, -1):
        what = option or f"dim {rule.dim}"
        return Fault("AT207", f"{what} is not for a norm, whose weight has one dim", (_local_shapes(module),))
    shard = shard_of(rule, dim=0, size=weight.shape[0], feature="features", tp=tp, config=config)
    if isinstance(shard, Fault):
        return shard
    return {t.name: shard for name, t in module.tensors.items() if name in ("weight", "bias")}


def _unfit(rule: Rule, module: ModuleInfo) -> Fault | None:
    """Why a style does not cut this module at all."""
    kinds, wanted = KINDS[rule.style]
    weight = module.tensors.get("weight")
    notes = (_local_shapes(module),)
    message = f"style {rule.style} cuts {wanted}, not {_called(module)}"
    if module.kind not in kinds:
        tensor = next((name for name, t in module.tensors.items() if len(t.shape) > 1), None)
        fits = WHAT_FITS.get(module.kind)
        if fits is None and tensor is not None:
            last = module.path.rpartition(".")[2]
            fits = f"a rule on its tensor states the dim: `{last}.{tensor}: {{style: {rule.style}, dim: 0}}`"
        elif fits is None and module.tensors:
            fits = "leave the rule out: what code computes on a shard by hand, as a norm does, needs none"
        return Fault("AT206", message, notes, (fits,) if fits else ())
    if weight is None:
        return Fault("AT206", f"style {rule.style} cuts a `weight`, and there is none", notes)
    if len(weight.shape) != 2:
        dims = counted(len(weight.shape), "dims")
        help = (WHAT_FITS["norm"],) if len(weight.shape) == 1 else ()
        return Fault("AT206", f"style {rule.style} cuts a matrix, and the weight has {dims}", notes, help)
    if rule.style == "vocab" and "bias" in module.tensors:
        return Fault("AT206", "it has a bias, so it is no embedding", notes, (WHAT_FITS["linear"],))
    return None


def _weight_dim(rule: Rule, module: ModuleInfo) -> int | Fault:
    """The dim of the weight that the style cuts, checked against the rule's own `dim`."""
    usual = WEIGHT_DIM[rule.style]
    dim = 1 - usual if module.kind == "conv1d" else usual
    if rule.dim is None:
        return dim
    given = rule.dim + 2 if rule.dim < 0 else rule.dim
    if given not in (0, 1):
        return Fault("AT207", f"dim is {rule.dim}, and the weight has dims 0 and 1", (_local_shapes(module),))
    if module.kind != "unknown" and given != dim:
        order = "[in, out]" if module.kind == "conv1d" else "[out, in]"
        message = f"style {rule.style} cuts dim {dim} of a weight {order}, not dim {rule.dim}"
        return Fault("AT207", message, (_local_shapes(module),), ("leave `dim` out",))
    return given


def _bias_misfits(rule: Rule, module: ModuleInfo, dim: int) -> Fault | None:
    """A bias that is not as long as the weight has outputs: the weight lies the other way round."""
    weight, bias = module.tensors["weight"], module.tensors.get("bias")
    outputs = dim if rule.style == "column" else 1 - dim
    if bias is None or bias.shape == (weight.shape[outputs],):
        return None
    elements = counted(bias.elements, "elements")
    message = f"the bias has {elements}, and dim {outputs} of the weight {weight.shape[outputs]}"
    turned = len(bias.shape) == 1 and bias.shape[0] == weight.shape[1 - outputs] and rule.dim is None
    hint = f"a weight [in, out], as in Conv1D, is told by `dim: {1 - dim}`"
    return Fault("AT207", message, (_local_shapes(module),), (hint,) if turned else ())


def cut_module(
    rule: Rule,
    module: ModuleInfo,
    *,
    tp: int,
    config: Mapping[str, object],
    ruled: Collection[str] = (),
    beside: Collection[int] = (),
) -> dict[str, Shard] | Fault:
    """The cuts of a module's tensors by full name, or why the rule does not fit it.

    `ruled` are the tensors that have a rule of their own, `beside` the numbers of heads that `shard_of`
    takes.
    """
    if rule.style == "replicate":
        return {}
    if _is_cut_norm(rule, module):
        return _cut_norm(rule, module, tp=tp, config=config)
    if fault := _unfit(rule, module):
        return fault
    dim = _weight_dim(rule, module)
    if isinstance(dim, Fault):
        return dim
    if fault := _bias_misfits(rule, module, dim):
        return fault
    unknown = [n for n, t in module.tensors.items() if n not in ("weight", "bias") and t.name not in ruled]
    if unknown and module.kind != "embedding":  # whose class uses them on the rows, when these are whole
        last = module.path.rpartition(".")[2]
        message = f"style {rule.style} does not know its {' and '.join(f'`{name}`' for name in unknown)}"
        help = (f"give it a rule: `{last}.{unknown[0]}: replicate`, or {{style: {rule.style}, dim: …}}",)
        return Fault("AT214", message, (_local_shapes(module),), help)
    weight, bias = module.tensors["weight"], module.tensors.get("bias")
    feature = FEATURE[rule.style]
    shard = shard_of(
        rule, dim=dim, size=weight.shape[dim], feature=feature, tp=tp, config=config, beside=beside
    )
    if isinstance(shard, Fault):
        return Fault(shard.code, shard.message, (*shard.notes, _local_shapes(module)), shard.help)
    cuts = {weight.name: shard}
    if bias is not None and rule.style == "column":
        cuts[bias.name] = shard.at(0)
    return cuts


def cut_tensor(
    rule: Rule,
    tensor: TensorInfo,
    *,
    tp: int,
    config: Mapping[str, object],
    owner: ModuleInfo,
    beside: Collection[int] = (),
) -> dict[str, Shard] | Fault:
    """The cut of one parameter or buffer by its full name, or why the rule does not fit it."""
    if rule.style == "replicate":
        return {}
    module, _, local = tensor.name.rpartition(".")
    last = module.rpartition(".")[2]
    notes = (f"{local} {shown(tensor)}",)
    option = "gather_output" if rule.gather_output else "split_input" if rule.split_input else None
    if rule.style == "vocab":
        help = (f"write `{local}: {{style: column, dim: 0}}` to cut its rows",)
        return Fault("AT206", "style vocab cuts an embedding module, not a tensor by itself", notes, help)
    if option is not None:
        return Fault("AT207", f"{option} is for layers, and this is a tensor by itself", notes)
    if rule.dim is None:
        whole_layer = owner.kind in ("linear", "conv1d", "unknown") and local in ("weight", "bias") and last
        line = f"add the dim that is cut: `{local}: {{style: {rule.style}, dim: 0}}`"
        line = f"for the whole layer write `{last}: {rule.style}`" if whole_layer else line
        return Fault("AT207", "a rule on a parameter or buffer states its dim", notes, (line,))
    rank = len(tensor.shape)
    if not -rank <= rule.dim < rank:
        return Fault("AT207", f"dim is {rule.dim}, and the tensor has {counted(rank, 'dims')}", notes)
    dim = rule.dim % rank
    feature = f"elements of dim {dim}"
    shard = shard_of(
        rule, dim=dim, size=tensor.shape[dim], feature=feature, tp=tp, config=config, beside=beside
    )
    if isinstance(shard, Fault):
        return Fault(shard.code, shard.message, (*shard.notes, *notes), shard.help)
    return {tensor.name: shard}
