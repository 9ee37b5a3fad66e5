"""A tensor of the model that a checkpoint holds under another name, or in several parts.

transformers writes some models otherwise than they are: GPT-NeoX's `lm_head` as `embed_out`, experts one by
one, gate and up apart. As it loads them it renames, stacks and joins (its WeightRenaming and WeightConverter
of MergeModulelist and Concatenate); this reads the same table. A part is cut as its place in the whole is, so
each is converted, and read, alone.

    experts.gate_up_proj [experts, gate + up, in]   <-   experts.0.w1 [gate, in], experts.1.w1, …
                                                         experts.0.w3 [up, in], experts.1.w3, …
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotp.header import Entry
from autotp.placement import Deal, Shard

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Assembled", "assembled", "parts_of_layout", "under_the_models_names", "whole_shape"]


@dataclass(frozen=True)
class Assembled:
    """The stored names that make one tensor of the model.

    `parts` follow each other along `dim`, a dim of the whole; the names of one part are stacked along a new
    dim 0, or with `stacked` False are one.
    """

    parts: tuple[tuple[str, ...], ...]
    dim: int = 0
    stacked: bool = False


def assembled(model: nn.Module, stored: Collection[str]) -> dict[str, Assembled]:
    """{name in the model: what makes it}, of the names in a checkpoint that are not the model's own.

    Empty for models that are not transformers', and for what is turned or permuted as it is loaded.
    """
    own = model.state_dict(keep_vars=True)
    strange = [name for name in stored if name not in own]
    table = _table(model) if strange else None
    if table is None:
        return {}
    renamings, converters, rename = table
    found: dict[str, dict[str, list[str]]] = {}
    makers: dict[str, Any] = {}
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    prefix = str(getattr(model, "base_model_prefix", "") or "")
    for name in strange:
        plain, pattern = rename(name, renamings, converters)
        if plain == name:
            continue  # but for a prefix, which is another matter (names.py)
        target, pattern = rename(name, renamings, converters, prefix, own)
        if target in own and target not in stored:
            found.setdefault(target, {}).setdefault(pattern or "", []).append(name)
            makers[target] = by_pattern.get(pattern)
    made = {target: _made(names, makers[target]) for target, names in found.items()}
    return {target: one for target, one in made.items() if one is not None}


def _table(model: nn.Module) -> tuple[list[Any], list[Any], Any] | None:
    """What transformers does to the names and tensors of this model, and its function for names."""
    if not hasattr(model, "base_model_prefix"):
        return None
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # before transformers 5 there is no such table
        return None
    steps = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    return renamings, [step for step in steps if isinstance(step, WeightConverter)], rename_source_key


def _made(names: Mapping[str, list[str]], maker: Any) -> Assembled | None:
    """The names of one target, by the pattern that they match, as its maker puts them together."""
    if maker is None:
        (alone,) = names.values()
        return Assembled((tuple(alone),)) if len(alone) == 1 else None
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in maker.operations]
    stacked = steps[:1] == [("MergeModulelist", 0)]
    joins = [dim for kind, dim in steps[stacked:] if kind == "Concatenate" and isinstance(dim, int)]
    if len(joins) != len(steps) - stacked or len(joins) > 1 or any(dim < stacked for dim in joins):
        return None
    patterns = [pattern for pattern in maker.source_patterns if pattern in names]
    parts = tuple(tuple(sorted(names[pattern], key=_naturally)) for pattern in patterns)
    complete = len(patterns) == len(maker.source_patterns) and len({len(part) for part in parts}) == 1
    if not complete or not (stacked or len(parts[0]) == 1) or (len(parts) > 1 and not joins):
        return None
    return Assembled(parts, joins[0] if joins else 0, stacked)


def _naturally(name: str) -> list[tuple[int, int, str]]:
    """Numbers in a name by their size."""
    return [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in re.split(r"(\d+)", name)]


def whole_shape(made: Assembled, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape of what is assembled; None where the parts do not fit together."""
    if any(len({shapes[name] for name in part}) != 1 for part in made.parts):
        return None
    sizes = [(*([len(part)] if made.stacked else []), *shapes[part[0]]) for part in made.parts]
    if not all(made.dim < len(size) or len(sizes) == 1 for size in sizes):
        return None
    joined = list(sizes[0])
    for size in sizes[1:]:
        if [n for i, n in enumerate(size) if i != made.dim] != [
            n for i, n in enumerate(joined) if i != made.dim
        ]:
            return None
        joined[made.dim] += size[made.dim]
    return tuple(joined)


def parts_of_layout(
    layout: Shard | None, made: Assembled, shapes: Mapping[str, tuple[int, ...]]
) -> list[Shard | None] | None:
    """How each part is cut, for a layout of the whole; None where it cannot be: a piece of the dim is in two
    parts, or the dim is the one that names are stacked along."""
    shift = int(made.stacked)
    if layout is None:
        return [None] * len(made.parts)
    if layout.dim < shift:
        return None
    if len(made.parts) == 1 or layout.dim != made.dim:
        return [layout.at(layout.dim - shift)] * len(made.parts)
    sizes = [shapes[part[0]][made.dim - shift] for part in made.parts]
    pieces, cuts = list(layout.pieces(sum(sizes))), list[Shard | None]()
    for size in sizes:
        mine: list[tuple[int, Deal | None]] = []
        while pieces and sum(n for n, _ in mine) < size:
            mine.append(pieces.pop(0))
        if sum(n for n, _ in mine) != size:
            return None
        cuts.append(_cut(layout.dim - shift, mine))
    return cuts


def _cut(dim: int, pieces: Sequence[tuple[int, Deal | None]]) -> Shard | None:
    deals = [dealt for _, dealt in pieces]
    if all(dealt is None for dealt in deals):
        return None
    if len(set(pieces)) == 1:
        return Shard(dim, deals[0], groups=len(pieces))
    return Shard(dim, sections=tuple(pieces))


def under_the_models_names(
    entries: Mapping[str, Entry], made: Mapping[str, Assembled]
) -> tuple[dict[str, Entry], dict[str, Assembled]]:
    """The tensors of a checkpoint as the model names them, and what was assembled: all whose parts fit."""
    shapes = {name: entry.shape for name, entry in entries.items()}
    view, used = dict(entries), dict[str, Assembled]()
    for target, one in made.items():
        shape = whole_shape(one, shapes)
        dtypes = {entries[name].dtype for part in one.parts for name in part}
        if shape is None or len(dtypes) > 1:
            continue
        used[target] = one
        for part in one.parts:
            for name in part:
                view.pop(name)
        size = sum(entries[name].nbytes for part in one.parts for name in part)
        view[target] = Entry(target, dtypes.pop(), shape, 0, size)
    return view, used
