"""The tensors of an op call: those that it is given, those that it writes into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["gives_number", "tensors_of", "written_by"]


def gives_number(func: Any, out: Any, inputs: list[torch.Tensor]) -> bool:
    """`x.item()`: a value leaves the tensors; a sharded one must not lose its trace there. Its sizes do:
    what is made of them is compared."""
    numbers = (torch.SymInt, torch.SymFloat, torch.SymBool, bool, int, float, complex)
    of_shape = func in (torch.ops.aten.size.int, torch.ops.aten.sym_size.int)
    return bool(inputs) and isinstance(out, numbers) and not of_shape


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among an op's arguments or results."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_of(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_of(part)


def written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an op call writes into."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    found: list[torch.Tensor] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += tensors_of(value)
    return found
