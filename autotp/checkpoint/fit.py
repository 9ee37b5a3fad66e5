"""Whether the tensors of a checkpoint fit a model: all that is missing, unexpected or mismatched, at once."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import nn

from autotp.checkpoint.names import resolve
from autotp.checkpoint.stored import Stored
from autotp.diagnostic import CheckpointError
from autotp.placement import Shard

__all__ = [
    "DTYPES",
    "NAMES",
    "Slots",
    "check_complete",
    "check_known",
    "misfits",
    "same_bits",
    "slots_of",
    "tied_names",
]

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SHOWN = 5  # names of one kind that a message lists
Slots = list[dict[str, torch.Tensor]]  # every parameter and persistent buffer once, under all its names


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same bit for bit; NaN equals itself, and 0 is not -0."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*bits)


def slots_of(model: nn.Module) -> Slots:
    """Every parameter and persistent buffer of a model, once, with all its names."""
    slots: dict[int, dict[str, torch.Tensor]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        persistent = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for key, tensor in {**module._parameters, **persistent}.items():
            if tensor is not None:
                slots.setdefault(id(tensor), {})[f"{path}.{key}" if path else key] = tensor
    return list(slots.values())


def misfits(
    model: nn.Module,
    slots: Slots,
    stored: Mapping[str, Stored],
    found: Mapping[str, str],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    layouts: Mapping[str, Shard],
    strict: bool,
) -> list[str]:
    """Every fault, a line each; none when the checkpoint fits.

    `found` maps the model's names to the checkpoint's, `shapes` and `layouts` are those of the cut tensors.
    Without `strict`, tensors that the model has not are no fault.
    """
    return [
        *(f"  missing: {names}" for names in _missing(model, slots, found)),
        *(f"  unexpected: {name}" for name in (_unexpected(model, stored, found) if strict else ())),
        *_mismatched(model, slots, stored, found, shapes, layouts),
    ]


def check_complete(source: Path, model: nn.Module, stored: Collection[str], found: Mapping[str, str]) -> None:
    """Refuse a checkpoint that lacks a tensor of its model, which could then not be loaded.

    `stored` are the checkpoint's names, `found` maps the model's to them. Raises CheckpointError with some of
    the names that are missing, and of those that the model has not: they tell what it was written as.
    """
    absent = _missing(model, slots_of(model), found)
    if not absent:
        return
    strange, kind = _unexpected(model, stored, found), type(model).__name__
    has = "a tensor" if len(absent) == 1 else f"{len(absent)} tensors"
    lines = [f"{source}: lacks {has} of {kind}, the model that the plan is proven on"]
    lines += _some("missing", absent) + _some("unexpected", strange)
    if strange:
        lines.append(
            f"  = help: if the checkpoint is written under other names than {kind} has, load it in "
            "transformers and save the model's state_dict() under its own names with safetensors, or give "
            'a plan for the stored names and check="shapes"; if it is of another class, name that in '
            "config.json's architectures"
        )
    else:
        lines.append(
            "  = help: add what is missing, or name the class that was saved in config.json's architectures; "
            'check="shapes" cuts what is there, without a proof'
        )
    raise CheckpointError("\n".join(lines))


def check_known(source: Path, model: nn.Module, stored: Collection[str], cut: Collection[str]) -> None:
    """Refuse a checkpoint of whose tensors the plan cuts some, `cut`, that its model has not.

    No proof speaks for those. What `check_complete` raises for missing ones is raised for these.
    """
    strange = [name for name in _unexpected(model, stored, _found(model, stored)) if name in cut]
    if not strange:
        return
    kind = type(model).__name__
    layers = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    says = f" ({layers} layers by config.json)" if type(layers) is int else ""
    has = "a tensor" if len(strange) == 1 else f"{len(strange)} tensors"
    lines = [
        f"{source}: holds {has} that the plan cuts, and that {kind}{says}, the model that the plan is proven "
        "on, has not",
        *_some("unexpected", strange),
        "  = help: correct config.json, or remove what does not belong to the model; "
        'check="shapes" cuts what is there, without a proof',
    ]
    raise CheckpointError("\n".join(lines))


def tied_names(model: nn.Module, stored: Collection[str]) -> dict[str, str]:
    """{one stored name: another} of tensors that the model ties, where the checkpoint holds both."""
    found, tied = _found(model, stored), dict[str, str]()
    for names in slots_of(model):
        first, *others = dict.fromkeys(found[name] for name in names if name in found) or [""]
        tied |= dict.fromkeys(others, first)
    return tied


def _found(model: nn.Module, stored: Collection[str]) -> dict[str, str]:
    """{the model's name: the checkpoint's}, of every name of every tensor."""
    names = [name for names in slots_of(model) for name in names]
    return resolve(names, stored, str(getattr(model, "base_model_prefix", "") or ""))


def _some(word: str, names: list[str]) -> list[str]:
    """The first names, a line each, and how many more there are."""
    more = len(names) - SHOWN
    return [f"  {word}: {name}" for name in names[:SHOWN]] + [f"  {word}: {more} more"] * (more > 0)


def _missing(model: nn.Module, slots: Slots, found: Mapping[str, str]) -> list[str]:
    """Tensors that the checkpoint has under none of their names, but for buffers that the class may miss.

    A tied one is told under all its names, joined by "or".
    """
    may_miss = _patterns(model, "_keys_to_ignore_on_load_missing")
    absent = [names for names in slots if not any(name in found for name in names)]
    return [
        " or ".join(names)
        for names in absent
        if any(tensor.is_meta or isinstance(tensor, nn.Parameter) for tensor in names.values())
        or not any(pattern.search(name) for pattern in may_miss for name in names)
    ]


def _patterns(model: nn.Module, attribute: str) -> list[re.Pattern[str]]:
    """What the class declares of the names in its checkpoints, as transformers' classes do."""
    return [re.compile(one) for one in getattr(model, attribute, None) or ()]


def _unexpected(model: nn.Module, stored: Collection[str], found: Mapping[str, str]) -> list[str]:
    """Names that the model has not, and neither computes nor declares that it ignores them."""
    prefix = str(getattr(model, "base_model_prefix", "") or "")
    used = set(found.values())
    computed = {
        f"{path}.{key}" if path else key
        for path, module in model.named_modules()
        for key in module._non_persistent_buffers_set
    }
    known = used | computed | set(resolve(computed, stored, prefix).values())
    ignored = _patterns(model, "_keys_to_ignore_on_load_unexpected")
    is_base = bool(prefix) and any(there == f"{prefix}.{name}" for name, there in found.items())

    def of_a_head(name: str) -> bool:  # of a model of which this one is the base
        return is_base and not name.startswith(f"{prefix}.")

    return [
        name
        for name in stored
        if name not in known and not of_a_head(name) and not any(pattern.search(name) for pattern in ignored)
    ]


def _mismatched(
    model: nn.Module,
    slots: Slots,
    stored: Mapping[str, Stored],
    found: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    layouts: Mapping[str, Shard],
) -> list[str]:
    """Tensors of another shape, kind of number, or cut than the model's."""
    faults = []
    for name, tensor in ((name, tensor) for names in slots for name, tensor in names.items()):
        if name not in found:
            continue
        there, wanted = stored[found[name]], shapes.get(name, tuple(tensor.shape))
        kind = DTYPES.get(there.entry.dtype)
        if there.shape != wanted:
            hint = _config_hint(model, wanted, there.shape)
            faults.append(f"  mismatched: {name} is {list(there.shape)}, the model's is {list(wanted)}{hint}")
        elif kind is None:
            faults.append(f"  mismatched: {name} is {there.entry.dtype}, which torch has no dtype for")
        elif kind.is_floating_point != tensor.dtype.is_floating_point:
            faults.append(f"  mismatched: {name} is {there.entry.dtype}, the model's is {tensor.dtype}")
        elif not there.is_cut(layouts.get(name)):
            cut, needed = (str(one) if one else "whole" for one in (there.shard, layouts.get(name)))
            was = "is in parts that cannot be cut so" if there.made else f"was cut as {cut}"
            faults.append(f"  mismatched: {name} {was}, the model needs {needed}")
    return faults


def _config_hint(model: nn.Module, wanted: tuple[int, ...], there: tuple[int, ...]) -> str:
    """Which entries of the config the model's size comes from, as far as the numbers tell."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    numbers = {k: v for k, v in (to_dict() if to_dict else {}).items() if type(v) is int and v > 1}
    differing = [size for size, other in zip(wanted, there, strict=False) if size != other]
    if len(wanted) != len(there) or not differing:
        return ""
    hints = [key for key, value in numbers.items() if value == differing[0]]
    if not hints:
        heads = {key: value for key, value in numbers.items() if key.endswith("heads")}
        hints = [
            f"{key} {value} × {other} {size}"
            for key, value in heads.items()
            for other, size in numbers.items()
            if other not in heads and value * size == differing[0] and "dim" in other
        ]
        return f" (config.json: {', '.join(hints)})" if hints else ""
    return f" (config.json: {', '.join(f'{key} {differing[0]}' for key in hints)})"
