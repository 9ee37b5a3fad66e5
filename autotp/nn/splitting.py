"""A parallel layer made and applied in one call, as PaddlePaddle's `distributed.split`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from autotp.comm import Group, group_of
from autotp.diagnostic import UsageError
from autotp.mappings import Mesh
from autotp.nn.embedding import VocabParallelEmbedding
from autotp.nn.linear import ColumnParallelLinear, RowParallelLinear
from autotp.nn.master import InitMethod, drawn_alike, own_part

__all__ = ["split"]


def split(
    x: Tensor,
    size: Sequence[int],
    operation: Literal["linear", "embedding"],
    axis: int = 0,
    num_partitions: int = 1,
    gather_out: bool = True,
    weight_attr: InitMethod | None = None,
    bias_attr: InitMethod | bool | None = None,
    *,
    owner: nn.Module | None = None,
    name: str = "",
    group: Mesh = None,
) -> Tensor:
    """Make a parallel layer whose parameters are split into `num_partitions`, and apply it to `x`.

    operation    axis   size                  layer
    "linear"     0      (in, out)             RowParallelLinear
    "linear"     1      (in, out)             ColumnParallelLinear
    "embedding"  0      (vocabulary, width)   VocabParallelEmbedding

    `size` is PaddlePaddle's order, the reverse of torch's weight. `num_partitions` is the size of the
    group. `weight_attr` fills the full weight (default: xavier_normal_), `bias_attr` the full bias
    (default: zeros; False: no bias). The input of a row layer may be whole or this rank's part; its last
    size tells which. With `gather_out=False` a column layer returns this rank's columns, and a row layer
    or an embedding **the partial sum**, which is right only after a sum over the ranks.

    The layer is kept as the submodule `name` of `owner`, and used again by the next call with that name;
    without an owner each call makes new parameters.

    Raises UsageError for each argument that does not fit, by name and number; for a name, too, under which
    the owner has another module.

    >>> model = nn.Module()
    >>> split(torch.ones(2, 4), (4, 6), "linear", axis=1, owner=model, name="up").shape
    torch.Size([2, 6])
    >>> model.up.weight.shape
    torch.Size([6, 4])
    """
    ranks = group_of(group)
    _check(x, size, operation, axis, num_partitions, ranks, owner, name)
    _check_options(operation, gather_out, weight_attr, bias_attr)
    if operation == "linear" and not x.is_floating_point():
        raise UsageError(f"split: a linear layer takes floating-point numbers, not {x.dtype}")
    first, second = size
    if owner is not None and name in owner._modules:
        layer = _kept(owner._modules[name], name, operation, axis, first, second, gather_out, bias_attr)
    elif operation == "embedding":
        layer = VocabParallelEmbedding(
            first, second, init_method=weight_attr or nn.init.xavier_normal_, group=ranks, device=x.device
        )
        layer.reduce_output = gather_out
    else:
        layer = _linear(x, first, second, axis, gather_out, weight_attr, bias_attr, ranks)
    if owner is not None:
        owner.add_module(name, layer)
    if isinstance(layer, RowParallelLinear):
        layer.input_is_parallel = _is_parallel(x, layer)
    elif isinstance(layer, ColumnParallelLinear) and x.shape[-1] != first:
        raise UsageError(f"split: the input of a column layer has {x.shape[-1]} features, not {first}")
    y: Tensor = layer(x)
    return y


def _kept(
    layer: nn.Module | None,
    name: str,
    operation: str,
    axis: int,
    first: int,
    second: int,
    gather_out: bool,
    bias_attr: object,
) -> nn.Module:
    """The layer of an earlier call, which must be the one that this call describes."""
    now: tuple[object, ...] = (type(layer).__name__,)
    if isinstance(layer, VocabParallelEmbedding):
        now = ("embedding", 0, layer.num_embeddings, layer.embedding_dim, layer.reduce_output)
    elif isinstance(layer, RowParallelLinear):
        now = ("linear", 0, layer.in_features, layer.out_features, layer.reduce_output)
    elif isinstance(layer, ColumnParallelLinear):
        now = ("linear", 1, layer.in_features, layer.out_features, layer.gather_output)
    asked = (operation, axis, first, second, gather_out)
    if layer is None or now != asked:
        raise UsageError(
            f"split: the owner's {name!r} is {now}, and this call describes {asked}: operation, axis, size, "
            "gather_out; give each layer its own name"
        )
    has = getattr(layer, "bias", None) is not None
    if operation == "linear" and has != (bias_attr is not False):
        raise UsageError(
            f"split: the owner's {name!r} has {'a' if has else 'no'} bias, and this call's "
            f"bias_attr={bias_attr!r} describes another layer; give each layer its own name"
        )
    return layer


def _check_options(operation: str, gather_out: object, weight_attr: object, bias_attr: object) -> None:
    """Refuse options that would be taken for something else."""
    if type(gather_out) is not bool:
        raise UsageError(f"split: gather_out={gather_out!r} is not True or False")
    if weight_attr is not None and not callable(weight_attr):
        raise UsageError(f"split: weight_attr={weight_attr!r} is no function that fills a tensor")
    if not (bias_attr is None or type(bias_attr) is bool or callable(bias_attr)):
        raise UsageError(
            f"split: bias_attr={bias_attr!r} is no function that fills a tensor, no True or False"
        )
    if operation == "embedding" and (bias_attr is True or callable(bias_attr)):
        raise UsageError(f"split: bias_attr={bias_attr!r} of operation 'embedding', which has no bias")


def _check(
    x: object,
    size: Sequence[int],
    operation: str,
    axis: int,
    num_partitions: int,
    group: Group,
    owner: nn.Module | None,
    name: str,
) -> None:
    """Refuse what cannot mean anything."""
    if not isinstance(x, Tensor):
        raise UsageError(f"split: x must be a tensor, not {type(x).__name__}")
    if not (owner is None or isinstance(owner, nn.Module)) or not isinstance(name, str):
        raise UsageError(f"split: owner is a module and name a str, not {owner!r} and {name!r}")
    if operation not in ("linear", "embedding"):
        raise UsageError(f"split: operation={operation!r} is not 'linear' or 'embedding'")
    if not isinstance(size, Sequence):
        raise UsageError(f"split: size={size!r} is no pair of numbers")
    if len(size) != 2:
        raise UsageError(f"split: size={tuple(size)} has {len(size)} numbers, two are needed")
    axes = (0, 1) if operation == "linear" else (0,)
    if axis not in axes:
        allowed = " or ".join(map(str, axes))
        raise UsageError(f"split: axis={axis} of operation {operation!r} is not {allowed}")
    if num_partitions != group.size:
        raise UsageError(f"split: num_partitions={num_partitions!r}, but the group has {group.size} ranks")
    if (owner is None) != (name == ""):
        raise UsageError("split: owner and name go together: the layer is kept as the owner's submodule")
    taken = owner is not None and name not in owner._modules and hasattr(owner, name)
    if "." in name or taken:
        raise UsageError(f"split: name={name!r} is no name for a new submodule of the owner")


def _linear(
    x: Tensor,
    inputs: int,
    outputs: int,
    axis: int,
    gather_out: bool,
    weight_attr: InitMethod | None,
    bias_attr: InitMethod | bool | None,
    group: Group,
) -> RowParallelLinear | ColumnParallelLinear:
    """The linear layer of `axis`, with its bias filled."""
    init_method = weight_attr or nn.init.xavier_normal_
    layer: RowParallelLinear | ColumnParallelLinear
    if axis == 0:
        layer = RowParallelLinear(
            inputs,
            outputs,
            bias_attr is not False,
            init_method=init_method,
            group=group,
            device=x.device,
            dtype=x.dtype,
        )
        layer.reduce_output = gather_out
    else:
        layer = ColumnParallelLinear(
            inputs,
            outputs,
            bias_attr is not False,
            gather_output=gather_out,
            init_method=init_method,
            group=group,
            device=x.device,
            dtype=x.dtype,
        )
    if callable(bias_attr):
        whole = torch.empty(outputs, device=x.device, dtype=x.dtype)
        with torch.no_grad():
            with drawn_alike(group, whole.device):
                bias_attr(whole)
            cut = layer.layouts.get("bias")
            layer.bias.copy_(whole if cut is None else own_part(whole, cut, group.rank))
    return layer


def _is_parallel(x: Tensor, layer: RowParallelLinear) -> bool:
    """Whether the input of a row layer is this rank's part, by its last size."""
    local, whole = layer.weight.shape[1], layer.in_features
    if x.shape[-1] not in (local, whole):
        raise UsageError(
            f"split: the input of a row layer has {x.shape[-1]} features: "
            f"neither {whole}, the whole, nor {local}, the part of rank {layer.group.rank}"
        )
    return x.shape[-1] != whole
