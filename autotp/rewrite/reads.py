"""Whole parameters and buffers that are transformed where they are read.

The module gets a subclass of its own class in which the tensor's name is a property: `module.weight`
is the copied or sliced value, in whatever code reads it, while `parameters()`, `state_dict()` and
`load_state_dict` go on seeing the whole parameter. The class keeps its name; `isinstance` holds; pickle
makes the subclass anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from autotp import mappings
from autotp.comm import Group
from autotp.propagate.reads import Read

__all__ = ["install"]

_KEY = "_autotp_reads"  # on an instance: (group, {local name: Read})


def install(model: nn.Module, reads: Iterable[Read], aliases: Mapping[str, str], group: Group) -> None:
    """Let every owner of a tensor that is named in `reads` read it transformed."""
    wanted = {read.name: read for read in reads}
    found: dict[str, dict[str, Read]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for key in (*module._parameters, *module._buffers):
            name = f"{path}.{key}" if path else key
            read = wanted.get(aliases.get(name, name))
            if read is not None:
                found.setdefault(path, {})[key] = read
    for path, own in found.items():
        module = model.get_submodule(path)
        if _KEY not in module.__dict__:
            module.__class__ = _reading(type(module), tuple(sorted(own)))
            module.__dict__[_KEY] = (group, own)


_MADE: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}


def _reading(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The subclass of `base` in which `names` are read through their mappings; one for all instances."""
    if (base, names) in _MADE:
        return _MADE[base, names]
    body: dict[str, Any] = {name: property(_reader(name)) for name in names}
    body |= {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    body["__reduce_ex__"] = _reduce
    made = _MADE[base, names] = type(base.__name__, (base,), body)
    return made


def _reader(name: str) -> Any:
    def read(module: nn.Module) -> torch.Tensor | None:
        stored = module._parameters.get(name)
        tensor = stored if stored is not None else module._buffers.get(name)
        if tensor is None:
            return None
        group, reads = module.__dict__[_KEY]
        how: Read = reads[name]
        value = mappings.copy(tensor, group) if how.copied else tensor
        return mappings.slice(value, group, shard=how.shard) if how.shard is not None else value

    return read


def _reduce(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    base = type(module).__mro__[1]
    return _made_again, (base, tuple(sorted(module.__dict__[_KEY][1]))), module.__dict__


def _made_again(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    made = _reading(base, names)
    return made.__new__(made)
