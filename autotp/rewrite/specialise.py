"""Modules that read their tensors through mappings, have mappings at their border, or are edited.

Such a module gets a subclass of its own class. A tensor's name is a property there: `module.weight` is the
copied or sliced value, in whatever code reads it, while `parameters()`, `state_dict()` and
`load_state_dict` go on seeing the whole parameter. `forward` maps what goes in and what comes out, however
it is called (hooks would be passed by in `module.forward(x)`). Edited methods are attributes of it. The
class keeps its name, `isinstance` holds, deepcopy and pickle make it anew.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autotp import mappings
from autotp.comm import Group
from autotp.diagnostic import UnprovenPath
from autotp.part_size import check_size, held_sizes
from autotp.placement import Shard
from autotp.propagate.reads import Read
from autotp.propagate.regions import Region
from autotp.rewrite.edits.bind import methods
from autotp.rewrite.edits.edit import Edits
from autotp.rewrite.withheld import withheld
from autotp.trace.graph import called, named_place, numbers_in, parameters_of, tensors_in
from autotp.trace.handed import Reader, reader_of
from autotp.trace.signature import signature

__all__ = ["edit_anew", "specialise"]

_KEY = "_autotp_own"


@dataclass
class _Own:
    """What an instance does by itself: how it reads its tensors, by local name, its border (with the names of
    its forward's parameters, and which of them are copied), the cut dim of each of its own
    tensors and how much of it is held, its edits, and
    which of its weights is `handed` to code that does nothing with it, by the readers of each."""

    group: Group
    reads: dict[str, Read] = field(default_factory=dict)
    region: Region | None = None
    parameters: tuple[tuple[str, Any], ...] = ()
    copied: frozenset[str] = frozenset()
    held: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    edits: Edits = field(default_factory=Edits)
    handed: dict[str, frozenset[Reader]] = field(default_factory=dict)
    path: str = ""


def specialise(
    model: nn.Module,
    reads: Iterable[Read],
    regions: Iterable[Region],
    layouts: Mapping[str, Shard],
    aliases: Mapping[str, str],
    group: Group,
    edits: Edits,
    handed: Mapping[str, frozenset[Reader]],
) -> None:
    """Let every owner of a tensor that is named in `reads` read it mapped, each region map its border, and
    each module run its `edits`. What is `handed` to readers is withheld from them.

    Raises NoSource when a text that is to be edited is no longer what it was.
    """
    wanted = {read.name: read for read in reads}
    found: dict[str, _Own] = {}
    for region in regions:
        module = model.get_submodule(region.path)
        parameters = parameters_of(module.forward)
        copied = frozenset(named_place(parameters, place) for place in region.copied)
        held = held_sizes(module, region.path, layouts)
        found[region.path] = _Own(group, region=region, parameters=parameters, copied=copied, held=held)
    for path, module in model.named_modules():
        for key in (*module._parameters, *module._buffers):
            name = f"{path}.{key}" if path else key
            read = wanted.get(aliases.get(name, name))
            if read is not None:
                found.setdefault(path, _Own(group)).reads[key] = read
            elif name in handed:
                own = found.setdefault(path, _Own(group))
                own.handed[key], own.path = handed[name], name.rpartition(".")[0]
    for path in edits.modules():
        found.setdefault(path, _Own(group)).edits = edits.of(path)
    made = {path: _subclass(*_described(type(model.get_submodule(path)), own)) for path, own in found.items()}
    for path, own in found.items():
        module = model.get_submodule(path)
        module.__class__ = made[path]
        module.__dict__[_KEY] = own


def edit_anew(model: nn.Module, edits: Edits) -> None:
    """Let each edited module of a sharded model run its part of other `edits`. One whose class was changed
    since stays as it is."""
    for path, module in model.named_modules():
        own = module.__dict__.get(_KEY)
        ours = vars(type(module)).get("__reduce_ex__") is _reduce
        if isinstance(own, _Own) and ours and own.edits and own.edits != edits.of(path):
            own.edits = edits.of(path)
            module.__class__ = _subclass(*_described(type(module).__mro__[1], own))


_Described = tuple[type[nn.Module], tuple[str, ...], tuple[str, ...], bool, Edits, int, Group | None]
_MADE: dict[tuple[Any, ...], type[nn.Module]] = {}


def _described(base: type[nn.Module], own: _Own) -> _Described:
    """What decides the class of an instance."""
    rank = own.group.rank if own.edits else 0  # edits hold the rank's own numbers
    group = own.group if own.edits.mapped() else None
    return (
        base,
        tuple(sorted(own.reads)),
        tuple(sorted(own.handed)),
        own.region is not None,
        own.edits,
        rank,
        group,
    )


def _subclass(
    base: type[nn.Module],
    names: tuple[str, ...],
    handed: tuple[str, ...],
    border: bool,
    edits: Edits,
    rank: int,
    group: Group | None,
) -> type[nn.Module]:
    """The subclass of `base` in which `names` are read mapped, `handed` withheld; one for all instances."""
    key = (
        base,
        names,
        handed,
        border,
        edits,
        edits.functions(),
        rank,
        id(group),
    )  # the class keeps its group
    if key not in _MADE:
        body: dict[str, Any] = {name: property(_reader(name)) for name in names}
        body |= {name: property(_withholder(name)) for name in handed}
        body |= {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
        body["__reduce_ex__"] = _reduce
        body |= methods(base, edits, rank, group=group)
        if border:
            body["forward"] = _forward(body.get("forward", base.forward))
        _MADE[key] = type(base.__name__, (base,), body)
    return _MADE[key]


def _reduce(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    own: _Own = module.__dict__[_KEY]
    return _made_again, _described(type(module).__mro__[1], own), module.__dict__


def _made_again(*described: Any) -> nn.Module:
    made = _subclass(*described)
    return made.__new__(made)


# -- reads


def _reader(name: str) -> Callable[[nn.Module], Tensor | None]:
    def read(module: nn.Module) -> Tensor | None:
        stored = module._parameters.get(name)
        tensor = stored if stored is not None else module._buffers.get(name)
        if tensor is None:
            return None
        own: _Own = module.__dict__[_KEY]
        how = own.reads[name]
        if how.shared:
            return mappings.share(tensor, own.group)
        if how.held is not None:
            return mappings.copy_shared(tensor, own.group, shard=how.held)
        value = mappings.copy(tensor, own.group) if how.copied else tensor
        return mappings.slice(value, own.group, shard=how.shard) if how.shard is not None else value

    return read


def _withholder(name: str) -> Callable[[nn.Module], Tensor | None]:
    def read(module: nn.Module) -> Tensor | None:
        tensor = module._parameters.get(name)
        if tensor is None or torch.compiler.is_compiling():
            return tensor
        own: _Own = module.__dict__[_KEY]
        if reader_of(sys._getframe(1).f_code) in own.handed[name]:
            return withheld(tensor, f"{own.path}.{name}")
        return tensor

    return read


# -- borders


def _forward(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own: _Own = self.__dict__[_KEY]
        assert own.region is not None
        for name, (dim, held) in own.held.items():
            check_size(own.region.path or "the model", name, self._parameters.get(name), dim, held, own.group)
        given = called(own.parameters, args, kwargs)
        if torch.is_grad_enabled():  # a copy is for its gradient
            new = _mapped(given, own, own.copied, mappings.copy, "is called with")
            args, kwargs = _replaced((args, kwargs), new)
        if own.region.guard is not None:
            _guarded(own.region, own.region.guard.unlike(signature(own.parameters, args, kwargs)))
        output = inner(self, *args, **kwargs)
        return _replaced(output, _mapped(output, own, own.region.reduced, mappings.reduce, "returns"))

    return forward


def _guarded(region: Region, unlike: Mapping[str, str]) -> None:
    """Raise for a call that no trace has shown: another flag, a tensor for None, two flags together."""
    if unlike:
        told = ", ".join(f"{place}={word}" for place, word in unlike.items())
        raise UnprovenPath(
            f"{region.path or 'the model'} is called in another way than when its plan was proven: with "
            f"{told}; shard the model with inputs= that call it this way"
        )


def _mapped(
    value: Any, own: _Own, places: frozenset[str], mapping: Callable[..., Tensor], does: str
) -> dict[int, Tensor]:
    """The tensors at `places` mapped, each under the id of what it was. Where None stands there is nothing
    to map."""
    if not places:
        return {}
    assert own.region is not None
    found = {place: tensor for place, tensor, _ in tensors_in(value)}
    missing = sorted(places - found.keys())
    if missing:
        none = {place for place, other in numbers_in(value).items() if other is None}
        missing = [place for place in missing if place not in none]
    if missing:
        raise UnprovenPath(
            f"{own.region.path or 'the model'} {does} other tensors than when its plan was proven: there is "
            f"none at {', '.join(missing)}, but at {', '.join(sorted(found)) or 'no place'}; shard the model "
            "with inputs= that call it this way"
        )
    return {id(found[place]): mapping(found[place], own.group) for place in sorted(places) if place in found}


def _replaced(value: Any, new: dict[int, Tensor]) -> Any:
    return pytree.tree_map(lambda leaf: new.get(id(leaf), leaf), value) if new else value
