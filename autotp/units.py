"""How a rule deals a dim to the ranks: its heads and sections, resolved against a model's config.

    column                       129 features over 2          -> 65 + 64, one feature is a unit
    heads: num_attention_heads   3 heads of 16 over 2         -> 2 + 1 heads = 32 + 16 features
    sections: 2                  gate|up of 2 x 33 over 2     -> 17 + 16 of each half
    sections: [96, 48, 48]       q|k|v, each dealt by itself

The first `units mod tp` ranks hold one unit more; a unit is never cut; fewer units than ranks is
refused. This file knows nothing of torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from autotp.placement import Deal, Shard, deal, join_pieces
from autotp.rule import Rule

__all__ = ["Fault", "listed_sizes", "shard_of", "unit_name"]

ABSENT = {  # (model_type, key) -> the key whose value transformers takes when a config lacks this one
    ("llama", "num_key_value_heads"): "num_attention_heads",
}


@dataclass(frozen=True)
class Fault:
    """Why a rule cannot be followed; `match` adds the place and the module."""

    code: str
    message: str
    notes: tuple[str, ...] = ()
    help: tuple[str, ...] = ()


def unit_name(heads: int | str | None, feature: str) -> str:
    """What one calls the units that are dealt.

    >>> unit_name("num_attention_heads", "output features"), unit_name("n_head", ""), unit_name(None, "rows")
    ('attention heads', 'heads', 'rows')
    """
    if heads is None:
        return feature
    if isinstance(heads, int):
        return "heads"
    words = [word for word in heads.lower().split("_") if word not in ("num", "n")]
    name = " ".join(words).replace("key value", "kv") or "heads"
    return name if name.endswith("s") else name + "s"


def counted(number: int, name: str) -> str:
    """A number with its noun: 1 attention head, 3 rows."""
    return f"{number} {name[:-1] if number == 1 and name.endswith('s') else name}"


def listed_sizes(units: int) -> str:
    """The tp sizes that a number of units allows.

    >>> listed_sizes(3), listed_sizes(1), listed_sizes(32)
    ('1, 2, 3', '1', '1 to 32')
    """
    return ", ".join(map(str, range(1, units + 1))) or "none" if units <= 8 else f"1 to {units}"


def divisors(size: int) -> str:
    """The smallest dozen of the numbers that divide a size.

    >>> divisors(48)
    '1, 2, 3, 4, 6, 8, 12, 16, 24, 48'
    """
    return ", ".join([str(n) for n in range(1, min(size, 4096) + 1) if size % n == 0][:12])


def stand_in(key: str, config: Mapping[str, object]) -> str | None:
    """The key whose value transformers takes where a config has no value for `key`."""
    if config.get(key) is not None:
        return None
    return ABSENT.get((str(config.get("model_type")), key))


def from_config(key: str, what: str, config: Mapping[str, object]) -> int | Fault:
    """The whole number that a model's config gives for a key."""
    value = config.get(stand_in(key, config) or key)
    if isinstance(value, int) and not isinstance(value, bool):
        return value if value >= 1 else Fault("AT205", f"{what}: {key} is {value} in the model's config")
    if value is not None:
        return Fault("AT205", f"{what}: {key} is no whole number in the model's config, but {value!r:.60}")
    if not config:
        message = f"{what}: {key} is a config key, and this model has no config"
        return Fault("AT205", message, help=(f"write the number itself: `{what}: N`",))
    numbers = [k for k, v in config.items() if isinstance(v, int) and not isinstance(v, bool)]
    near = difflib.get_close_matches(key, numbers, n=3, cutoff=0.6)
    help = (f"did you mean {' or '.join(f'`{name}`' for name in near)}?",) if near else ()
    return Fault("AT205", f"{what}: the model's config has no {key}", help=help)


def _sizes(rule: Rule, size: int, feature: str, config: Mapping[str, object]) -> list[int] | Fault:
    """The sizes of the sections of a dim; the whole dim when there are none."""
    if rule.sections is None:
        return [size]
    if isinstance(rule.sections, int):
        if size % rule.sections:
            message = f"{rule.sections} equal sections do not divide {counted(size, feature)}"
            return Fault("AT204", message, help=(f"numbers that divide {size}: {divisors(size)}",))
        return [size // rule.sections] * rule.sections
    sizes: list[int] = []
    for section in rule.sections:
        found = from_config(section, "sections", config) if isinstance(section, str) else section
        if isinstance(found, Fault):
            return found
        sizes.append(found)
    if sum(sizes) != size:
        together = f"{' + '.join(map(str, sizes))} = {sum(sizes)}"
        names = ", ".join(
            f"{s} = {n}" for s, n in zip(rule.sections, sizes, strict=True) if isinstance(s, str)
        )
        notes = (f"in the model's config: {names}",) if names else ()
        help = ("sections are counted in elements of the dim, not in heads",)
        message = f"the sections are {together}, but there are {counted(size, feature)}"
        return Fault("AT204", message, notes, help)
    return sizes


def shard_of(
    rule: Rule, *, dim: int, size: int, feature: str, tp: int, config: Mapping[str, object]
) -> Shard | Fault:
    """How a rule cuts a dim of `size` elements over `tp` ranks, or why it cannot.

    `feature` is what an element is called: "output features", "input features", "rows".

    >>> rule = Rule(style="column", heads=3)
    >>> str(shard_of(rule, dim=0, size=48, feature="output features", tp=2, config={}))
    'shard(dim 0: 2+1 of 3)'
    """
    heads = rule.heads
    units = from_config(heads, "heads", config) if isinstance(heads, str) else heads
    if isinstance(units, Fault):
        return units
    sizes = _sizes(rule, size, feature, config)
    if isinstance(sizes, Fault):
        return sizes
    name = unit_name(heads, feature)
    notes: tuple[str, ...] = ()
    if isinstance(heads, str):
        through = " = ".join(filter(None, (heads, stand_in(heads, config))))
        notes = (f"heads: {through} = {units} in the model's config",)
    pieces: list[tuple[int, Deal | None]] = []
    for length in sizes:
        count = units or length
        part = "" if len(sizes) == 1 else " of a section"
        if count < tp:
            few = name.rsplit(" ", 1)[-1]
            message = f"{counted(count, name)}{part} over tp={tp}: fewer {few} than ranks"
            return Fault("AT203", message, notes, (f"tp sizes that work here: {listed_sizes(count)}",))
        if length % count:
            message = f"{counted(count, name)} do not divide {counted(length, feature)}{part}"
            help = (f"numbers that divide {length}: {divisors(length)}",)
            return Fault("AT204", message, notes, help)
        pieces.append((length, deal(count, tp)))
    shard = join_pieces(dim, pieces)
    assert isinstance(shard, Shard)
    return shard
