"""Small models as inventories, made by hand, and what matching a plan with them says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotp.diagnostic import errors, render
from autotp.inventory import Inventory, ModuleInfo, TensorInfo
from autotp.match import Matches, match
from autotp.plan import as_plan

CLASSES = {
    "linear": "Linear",
    "embedding": "Embedding",
    "conv1d": "Conv1D",
    "norm": "LayerNorm",
    "other": "Mixer",
}


GATHERED = {"style": "column", "gather_output": True}


def module(path: str, kind: str, **shapes: tuple[int, ...]) -> ModuleInfo:
    tensors = {name: TensorInfo(f"{path}.{name}", shape, "F32", 4) for name, shape in shapes.items()}
    return ModuleInfo(path, kind, tensors, CLASSES.get(kind, ""))


def linear(path: str, inputs: int, outputs: int, *, bias: bool = True) -> ModuleInfo:
    biases = {"bias": (outputs,)} if bias else {}
    return module(path, "linear", weight=(outputs, inputs), **biases)


def model(
    *modules: ModuleInfo, aliases: Mapping[str, str] | None = None, config: Mapping[str, object] | None = None
) -> Inventory:
    paths = {".".join(m.path.split(".")[:n]): None for m in modules for n in range(1, m.path.count(".") + 2)}
    return Inventory({m.path: m for m in modules}, aliases or {}, tuple(paths), config or {}, "Model")


MLP = model(linear("fc1", 16, 33), module("norm", "norm", weight=(33,), bias=(33,)), linear("fc2", 33, 16))


ATTENTION = model(
    linear("layers.0.self_attn.q_proj", 48, 48, bias=False),
    linear("layers.1.self_attn.q_proj", 48, 48, bias=False),
    module("layers.0.self_attn", "other", sinks=(3,)),
    module("embed", "embedding", weight=(3, 48)),
    module("norm", "norm", weight=(48,)),
    module("conv", "other", weight=(4, 3, 3)),
    config={"num_attention_heads": 3, "num_key_value_heads": 1, "vocab_size": 3, "dropout": 0.1},
)


def clean(plan: Any, inventory: Inventory, tp: int) -> Matches:
    found = match(as_plan(plan), inventory, tp)
    assert not errors(found.diagnostics), render(found.diagnostics)
    return found


def only(plan: Any, inventory: Inventory, tp: int = 2) -> str:
    """The text of the one finding."""
    diagnostics = match(as_plan(plan), inventory, tp).diagnostics
    assert len(diagnostics) == 1, render(diagnostics)
    return diagnostics[0].render()
