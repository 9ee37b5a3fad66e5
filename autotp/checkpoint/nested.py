"""Where the weights are in what torch.save wrote: by themselves, or in dicts in dicts, beside other state."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from autotp.diagnostic import CheckpointError

__all__ = ["joined", "weights_of"]

DEEPEST = 16  # dicts in dicts
NESTED = ("state_dict", "model_state_dict", "model", "module")
STAGE = re.compile(r"model\d+")
# What trainers keep beside weights: their tensors are none of the model's.
STATE = re.compile(
    r"(?:.*_)?(?:opt|optim|optimizers?|rng|random|seed|lr|scheduler|scaler|loss|steps?|epochs?|iter|iteration"
    r"|score|args)s?(?:_.*)?"
)


def weights_of(path: Path, found: Any) -> Any:
    """The state_dict in `found`, the content of the file `path`: itself, or under one of NESTED.

    Raises CheckpointError where other weights stand beside it, which would be lost, and for the parts of
    pipeline stages. State of an optimizer, and copies under the same names (averages), are left alone.
    """
    for depth in range(DEEPEST):
        if not isinstance(found, Mapping):
            break
        stages = [key for key in found if isinstance(key, str) and STAGE.fullmatch(key)]
        if any(isinstance(found[key], Mapping) for key in stages) and not depth:
            _refuse(
                path,
                f"holds {', '.join(stages[:4])}: weights of several pipeline stages; only tensor-parallel "
                "parts are read",
            )
        key = next((key for key in NESTED if isinstance(found.get(key), Mapping)), None)
        if key is None:
            break
        lost = _beside(path, found, key)
        if lost and depth:
            break  # a module of that name, among others
        if lost:
            _refuse(
                path,
                f"tensor {lost!r} stands beside the weights under {key!r}, and would be lost; save the "
                "weights alone, in one dict",
            )
        found = found[key]
    return found


def joined(path: Path, table: Mapping[Any, Any]) -> dict[str, Any]:
    """What is in dicts in dicts by its keys joined by dots; raises CheckpointError for a name twice."""
    found: dict[str, Any] = {}
    for name, value in _flat(path, "", table, 0):
        if name in found:
            _refuse(path, f"the name {name!r} is there twice, by keys with dots and by dicts in dicts")
        found[name] = value
    return found


def _beside(path: Path, found: Mapping[Any, Any], key: str) -> str:
    """The name of a tensor that would be lost if only `found[key]` were taken, or nothing."""
    names = {name for name, _ in _flat(path, "", found[key], 0)}
    for other, value in found.items():
        if other == key or STATE.fullmatch(str(other)):
            continue
        if isinstance(value, torch.Tensor):
            return str(other)
        for name, tensor in _flat(path, "", value, 0) if isinstance(value, Mapping) else ():
            if isinstance(tensor, torch.Tensor) and tensor.dim() and name not in names:
                return f"{other}.{name}"
    return ""


def _flat(path: Path, prefix: str, table: Mapping[Any, Any], depth: int) -> Iterator[tuple[str, Any]]:
    if depth > DEEPEST:
        _refuse(path, "is nested too deeply")
    for key, value in table.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            yield from _flat(path, name, value, depth + 1)
        elif value is not None:  # Megatron's empty _extra_state
            yield name, value


def _refuse(path: Path, fault: str) -> NoReturn:
    raise CheckpointError(f"{path}: {fault}")
