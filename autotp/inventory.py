"""What a plan is matched against: the modules of a model and their tensors, by name and shape.

Two sources give the same inventory: a live `nn.Module` (`autotp.trace.inventory`), and the headers of
a checkpoint folder (`autotp.checkpoint.inventory`), which need no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Inventory", "ModuleInfo", "TensorInfo"]


@dataclass(frozen=True)
class TensorInfo:
    """One parameter or buffer: its full name, global shape and dtype.

    `dtype` is the safetensors name (F32, BF16, I64, …). `role` is "parameter", "buffer" or "tensor"
    (headers cannot tell). `persistent` is False for buffers that a state_dict leaves out.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: float
    role: str = "tensor"
    persistent: bool = True

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(self.elements * self.itemsize)


@dataclass(frozen=True)
class ModuleInfo:
    """One module and the tensors it owns directly, by local name ("weight", "bias").

    `kind` is "linear" for the exact class nn.Linear, "embedding" for nn.Embedding and for subclasses whose
    forward computes through it (`autotp.trace.delegates`), "conv1d" for
    transformers' Conv1D (weight [in, out]), "norm" for a 1-D weight that normalises, "other" for any
    other class, and "unknown" where headers do not tell. `class_name` is for messages.
    """

    path: str
    kind: str
    tensors: Mapping[str, TensorInfo]
    class_name: str = ""


@dataclass(frozen=True)
class Inventory:
    """All modules that own tensors, in order.

    `modules` is keyed by module path ("" is the root). `aliases` maps each further name of a shared
    tensor to its first name: tied weights are one tensor under two names. `paths` lists every module
    path, also of modules without tensors (for nearest-name messages). `config` is the model's
    configuration (config.json) as a dict, empty when there is none.
    """

    modules: Mapping[str, ModuleInfo]
    aliases: Mapping[str, str] = field(default_factory=dict)
    paths: tuple[str, ...] = ()
    config: Mapping[str, object] = field(default_factory=dict)
    name: str = "model"

    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor by full name, shared ones under each of their names."""
        return {t.name: t for m in self.modules.values() for t in m.tensors.values()}
