"""How a rule deals a dim to the ranks: its heads and sections, resolved against a model's config.

    column                       129 features over 2          -> 65 + 64, one feature is a unit
    heads: num_attention_heads   3 heads of 16 over 2         -> 2 + 1 heads = 32 + 16 features
    sections: 2                  gate|up of 2 x 33 over 2     -> 17 + 16 of each half
    sections: [96, 48, 48]       q|k|v, each dealt by itself
    heads: [12, 6, 6]            q|k|v in one weight, of 12, 6 and 6 heads that are equally wide

The first `units mod tp` ranks hold one unit more; a unit is never cut. Of the heads that stand beside each
other in one module, the fewest are dealt first (kv heads), and their multiples (query heads) follow them: 6
query heads of 2 kv heads are 2 + 1 + 2 + 1 over 4. Heads that are fewer than the ranks are shared, if there
are multiples of them that are not: what is summed over must be on one rank only. Else they are refused.
This file knows nothing of torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from autotp.placement import Deal, Shard, deal, join_pieces, joined, shared_deal
from autotp.rule import Rule

__all__ = ["Fault", "heads_of", "listed_sizes", "shard_of", "unit_name"]

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


def unit_name(heads: int | str | tuple[int | str, ...] | None, feature: str) -> str:
    """What one calls the units that are dealt.

    >>> unit_name("num_attention_heads", "output features"), unit_name("n_head", ""), unit_name(None, "rows")
    ('attention heads', 'heads', 'rows')
    """
    if heads is None:
        return feature
    if isinstance(heads, (int, tuple)):
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
    """The whole number that a model's config gives for a key; dots lead into a config inside of it.

    >>> from_config("text_config.num_heads", "heads", {"text_config": {"num_heads": 6}})
    6
    """
    value: object = config
    for part in (stand_in(key, config) or key).split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, int) and not isinstance(value, bool):
        return value if value >= 1 else Fault("AT205", f"{what}: {key} is {value} in the model's config")
    if value is not None:
        return Fault("AT205", f"{what}: {key} is no whole number in the model's config, but {value!r:.60}")
    if not config:
        message = f"{what}: {key} is a config key, and this model has no config that tells numbers"
        return Fault("AT205", message, help=(f"write the number itself: `{what}: N`",))
    numbers = [k for k, v in config.items() if isinstance(v, int) and not isinstance(v, bool)]
    near = difflib.get_close_matches(key, numbers, n=3, cutoff=0.6)
    help = (f"did you mean {' or '.join(f'`{name}`' for name in near)}?",) if near else ()
    return Fault("AT205", f"{what}: the model's config has no {key}", help=help)


def heads_of(rule: Rule, config: Mapping[str, object]) -> tuple[int, ...] | Fault:
    """The numbers of heads that a rule gives: none, one, or one for each section."""
    given = rule.heads if isinstance(rule.heads, tuple) else () if rule.heads is None else (rule.heads,)
    found: list[int] = []
    for one in given:
        number = from_config(one, "heads", config) if isinstance(one, str) else one
        if isinstance(number, Fault):
            return number
        found.append(number)
    return tuple(found)


def _sizes(
    rule: Rule, heads: tuple[int, ...], size: int, feature: str, config: Mapping[str, object]
) -> list[int] | Fault:
    """The sizes of the sections of a dim; the whole dim when there are none."""
    if rule.sections is None and len(heads) > 1:
        if size % sum(heads):
            together = f"{' + '.join(map(str, heads))} = {sum(heads)}"
            help = ("heads that are not equally wide need the sizes of their `sections`, too",)
            return Fault("AT204", f"{together} heads do not divide {counted(size, feature)}", help=help)
        return [number * (size // sum(heads)) for number in heads]
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


def _dealt(units: int, tp: int, beside: Collection[int]) -> Deal:
    """The deal of `units`, which follow the units of which they are a multiple."""
    found = None
    for number in sorted({n for n in beside if units % n == 0} | {units}):
        if found is None:
            found = shared_deal(number, tp)
        elif number % found.declared == 0:
            found = joined(found, number // found.declared)
    assert found is not None
    return found


def shard_of(
    rule: Rule,
    *,
    dim: int,
    size: int,
    feature: str,
    tp: int,
    config: Mapping[str, object],
    beside: Collection[int] = (),
) -> Shard | Fault:
    """How a rule cuts a dim of `size` elements over `tp` ranks, or why it cannot.

    `feature` is what an element is called: "output features", "input features", "rows". `beside` are the
    numbers of heads of the column rules in the same module.

    >>> rule = Rule(style="column", heads=3)
    >>> str(shard_of(rule, dim=0, size=48, feature="output features", tp=2, config={}))
    'shard(dim 0: 2+1 of 3)'
    """
    heads = heads_of(rule, config)
    if isinstance(heads, Fault):
        return heads
    sizes = _sizes(rule, heads, size, feature, config)
    if isinstance(sizes, Fault):
        return sizes
    if len(heads) > 1 and len(heads) != len(sizes):
        return Fault("AT204", f"{len(heads)} numbers of heads for {counted(len(sizes), 'sections')}")
    beside = {*beside, *heads} if rule.style == "column" else beside
    pieces: list[tuple[int, Deal | None]] = []
    for place, length in enumerate(sizes):
        count = heads[place % len(heads)] if heads else length
        name = rule.heads[place] if isinstance(rule.heads, tuple) else rule.heads
        what = _Units(count, unit_name(name, feature), "" if len(sizes) == 1 else " of a section", name)
        if count < tp and (not heads or rule.style != "column" or not _sharable(count, tp, beside)):
            shared = heads and rule.style == "column"
            return _too_few(what, tp, config, {n for n in beside if shared and n % count == 0})
        if length % count:
            message = f"{counted(count, what.name)} do not divide {counted(length, feature)}{what.part}"
            help = (f"numbers that divide {length}: {divisors(length)}",)
            return Fault("AT204", message, _told(what, config), help)
        pieces.append((length, _dealt(count, tp, beside) if heads else deal(count, tp)))
    shard = join_pieces(dim, pieces)
    if isinstance(shard, Shard):
        return shard
    return Shard(dim, shared_deal(1, tp))  # one head, or several sections of one: whole on every rank


def _sharable(units: int, tp: int, beside: Collection[int]) -> bool:
    """Whether ranks may hold the same units: multiples of them, which are enough, are dealt inside."""
    return any(number >= tp and number % units == 0 for number in beside)


@dataclass(frozen=True)
class _Units:
    """What is dealt: how many, what one calls them, of which part of the dim, and how the rule gives them."""

    count: int
    name: str
    part: str
    given: int | str | None


def _told(what: _Units, config: Mapping[str, object]) -> tuple[str, ...]:
    if not isinstance(what.given, str):
        return ()
    through = " = ".join(filter(None, (what.given, stand_in(what.given, config))))
    return (f"heads: {through} = {what.count} in the model's config",)


def _too_few(what: _Units, tp: int, config: Mapping[str, object], multiples: Collection[int]) -> Fault:
    """Fewer units than ranks. Ranks share heads only where a rule beside declares multiples of them."""
    few = what.name.rsplit(" ", 1)[-1]
    message = f"{counted(what.count, what.name)}{what.part} over tp={tp}: fewer {few} than ranks"
    help = [f"tp sizes that work here: {listed_sizes(max(what.count, *multiples, 0))}"]
    queries = config.get("num_attention_heads")
    for_queries = what.given == "num_key_value_heads" and isinstance(queries, int) and queries >= tp
    if for_queries and isinstance(queries, int) and queries % what.count == 0:
        help.append(
            "ranks can share kv heads where the query heads beside them are dealt: "
            "`heads: num_attention_heads` on the query layer and on the row layer after it"
        )
    return Fault("AT203", message, _told(what, config), tuple(help))
