"""Models of the hub: from a config.json to a module whose parameters take no memory, and its proof.

transformers is asked for only here, and only when an architecture has to be built.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from autotp.analysis import Analysis
from autotp.decide import decide
from autotp.diagnostic import CheckpointError, UsageError
from autotp.dry_run import PlanLike

MOST_PARAMETERS = 200_000  # far more than any model has: a config of millions of layers would not end

__all__ = ["build", "config_folder", "model_type", "prove"]


def config_folder(source: str | Path) -> Path:
    """The folder whose config.json describes `source`: a folder, a file in it, or the config itself.

    Raises CheckpointError when there is none.
    """
    path = Path(source)
    folder = path if path.is_dir() else path.parent
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file or folder")
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder}: there is no config.json, so the architecture is not known\n"
            '  = help: check="shapes" goes by the names and shapes of the weights alone\n'
            "  = help: or give the model: model= of from_pretrained and convert, --model of `autotp convert`"
        )
    return folder


def model_type(source: str | Path) -> str | None:
    """The `model_type` of a checkpoint's config.json, or None where there is none."""
    path = Path(source)
    config = (path if path.is_dir() else path.parent) / "config.json"
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    kind = found.get("model_type") if isinstance(found, dict) else None
    return kind if isinstance(kind, str) else None


def build(source: str | Path) -> nn.Module:
    """The model that a checkpoint's config.json names, in eval mode, its parameters on the meta device.

    Buffers are real: a checkpoint does not hold the ones that are computed (rotary frequencies, position
    ids). No code of the checkpoint is run.

    Raises UsageError when transformers is not installed, CheckpointError when it cannot build the model.
    """
    folder = config_folder(source)
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "building a model from its config.json needs transformers\n  = help: pip install 'autotp[hf]'"
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        names = getattr(config, "architectures", None) or []
        known = [getattr(transformers, n, None) for n in names if isinstance(n, str)]
        factory = next((c for c in known if isinstance(c, type)), None)
        with _parameters_on_meta():
            model = factory(config) if factory is not None else transformers.AutoModel.from_config(config)
    except Exception as error:
        kind = model_type(folder) or "unknown"
        first, *more = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        reason = f"{first} {more[0]}" if more and first.endswith(":") else first
        raise CheckpointError(
            f"{folder / 'config.json'}: transformers {transformers.__version__} cannot build this model "
            f"(model_type {kind}): {type(error).__name__}: {reason}\n"
            '  = help: correct it; without a load check="shapes" goes by the names and shapes of the weights '
            "alone; a load takes a model of your own: model="
        ) from error
    assert isinstance(model, nn.Module)
    return model.eval()


def prove(source: str | Path, plan: PlanLike | None, tp: int, *, inputs: Any = None) -> Analysis:
    """The proven analysis of the model that a checkpoint's config.json names; no weight is read."""
    return decide(build(source), plan, tp=tp, inputs=inputs)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Every parameter moves to the meta device as it is registered; its initial values are never drawn."""

    count = 0

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        nonlocal count
        count += 1
        if count > MOST_PARAMETERS:
            raise ValueError(f"it has more than {MOST_PARAMETERS} parameters; correct the number of layers")
        if parameter is None or parameter.is_meta:
            return parameter
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        with _Undrawn():
            yield
    finally:
        handle.remove()


class _Undrawn(TorchFunctionMode):
    """Filling a meta tensor is nothing to do."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        filled = args[0] if args else (kwargs or {}).get("tensor")  # torch.nn.init names it
        if isinstance(filled, torch.Tensor) and filled.is_meta:
            name = getattr(func, "__name__", "")
            if name.endswith("_") and not name.endswith("__"):
                return filled
        return func(*args, **(kwargs or {}))
