"""The inventory of a live module: what a plan is matched against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from autotp.inventory import Inventory, ModuleInfo, TensorInfo
from autotp.trace.delegates import adds_nothing, delegates

__all__ = ["inventory", "kind_of"]

_LAZY = (UninitializedParameter, UninitializedBuffer)
# The names that safetensors gives to dtypes.
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip


_FORWARDS = ("torch.nn.modules.linear", "torch.nn.modules.sparse", "torch.nn.modules.normalization",
             "transformers.pytorch_utils")  # fmt: skip


def kind_of(module: nn.Module) -> str:
    """What a module is to a plan; only the exact classes with torch's own forward count, since a subclass or
    a patched forward may compute otherwise, and subclasses that are seen to add nothing (linear layers) or to
    compute through torch's (embeddings)."""
    if "forward" not in vars(module) and delegates(type(module), nn.Embedding):
        return "embedding"
    if "forward" in vars(module) or type(module).forward.__module__ not in _FORWARDS:
        return "other"
    if type(module) is nn.Linear or adds_nothing(type(module), nn.Linear):
        return "linear"
    if type(module) is nn.Embedding:
        return "embedding"
    if type(module) in (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm):
        return "norm"
    if f"{type(module).__module__}.{type(module).__qualname__}" == "transformers.pytorch_utils.Conv1D":
        return "conv1d"
    return "other"


def inventory(module: nn.Module) -> Inventory:
    """Every module of `module` that owns tensors, with shared tensors under each of their names.

    >>> list(inventory(nn.Sequential(nn.Linear(4, 8), nn.ReLU())).tensors())
    ['0.weight', '0.bias']
    """
    modules: dict[str, ModuleInfo] = {}
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    paths: list[str] = []
    for path, owner in module.named_modules(remove_duplicate=False):
        paths.append(path)
        tensors: dict[str, TensorInfo] = {}
        for role, table in (("parameter", owner._parameters), ("buffer", owner._buffers)):
            for key, tensor in table.items():
                if tensor is None:
                    continue
                name = f"{path}.{key}" if path else key
                persistent = role == "parameter" or key not in owner._non_persistent_buffers_set
                tensors[key] = TensorInfo(
                    name,
                    () if isinstance(tensor, _LAZY) else tuple(tensor.shape),
                    _DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")),
                    tensor.dtype.itemsize,
                    role,
                    persistent,
                )
                if id(tensor) in first:
                    aliases[name] = first[id(tensor)]
                else:
                    first[id(tensor)] = name
        if tensors:
            modules[path] = ModuleInfo(path, kind_of(owner), tensors, type(owner).__name__)
    return Inventory(modules, aliases, tuple(paths), _config(module), type(module).__name__)


def _config(module: nn.Module) -> dict[str, Any]:
    """The model's configuration: as transformers' models carry it, or the numbers and words of a dict, a
    dataclass or another plain object."""
    config = getattr(module, "config", None)
    to_dict = getattr(config, "to_dict", None)
    if not callable(to_dict):
        plain = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
        return {k: v for k, v in plain.items() if isinstance(k, str) and isinstance(v, (int, str))}
    found = dict(to_dict())
    # A config that maps names (n_head for num_attention_heads) answers to both.
    for name, own in (getattr(config, "attribute_map", None) or {}).items():
        found.setdefault(name, found.get(own))
    return found
