"""Which expression of the model gives an op the wrong number.

Frames from the inside out; in each the call that runs, first by position (the j-th size of a view is the
j-th argument), then by value, then in a sequence that an argument holds. A number that was computed from
local ones already is mended at a leaf of its expression: `bh // self.num_heads`.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from autotp.placement import Shard
from autotp.propagate.heads import GATHER
from autotp.propagate.mapped import STATISTICS, divisor
from autotp.propagate.propagation import Propagation
from autotp.rewrite.edits.edit import Axes, Items, Local, Mapped, Size, Whole, Wrapper
from autotp.rewrite.edits.locate import NOTHING, Site, number
from autotp.rewrite.edits.wrap import localised

__all__ = [
    "Found", "Wrong", "find", "find_operand", "find_whole", "in_arguments", "in_check", "mapped_at",
]  # fmt: skip


@dataclass(frozen=True)
class Wrong:
    """A number that an op is given: `got`, where this rank needs `need`. It is the `place`-th of `length`
    sizes, or an argument by itself (`place` None), called `name` in the op's schema.

    `size` is the number of the whole model with its parts; `said` that number. Where it is not what the call
    was given, that was computed of a rank's own sizes.
    """

    op: str
    name: str
    place: int | None
    length: int
    got: int
    need: int
    said: int | None
    size: Size | None

    @property
    def constant(self) -> bool:
        """Whether the op was given the number of the whole model."""
        return self.size is not None and self.got == self.said


@dataclass(frozen=True)
class Found:
    """The expression at a frame, and what goes around it."""

    level: int
    site: Site
    node: ast.expr | ast.AugAssign
    wrapper: Wrapper


def find(wrong: Wrong, sites: Sequence[tuple[int, Site]], tables: Sequence[Size], rank: int) -> Found | None:
    """The edit for a wrong number. `sites` are the located expressions with the levels of their frames, the
    innermost first; `tables` the sizes of the model that are cut."""
    for position, (level, site) in enumerate(sites):
        found = _here(wrong, site, first=position == 0) if wrong.size is not None else None
        # An edit that is there already may be what is wrong: the expression has two needs.
        if found is not None and (wrong.constant or _edited_from(wrong, site, found[0])):
            wrapper = _wrapper(wrong, site, *found)
            if wrapper is not None:
                return Found(level, site, found[0], wrapper)
        leaf = _flow(wrong, site, tables, rank, first=position == 0)
        if leaf is not None:
            return Found(level, site, leaf[0], Local((leaf[1],)))
    return None


def _edited_from(wrong: Wrong, site: Site, node: ast.expr) -> bool:
    return bool(site.plain(node) == wrong.said and site.value(node) == wrong.got)


def _wrapper(wrong: Wrong, site: Site, node: ast.expr, place: int | None) -> Wrapper | None:
    assert wrong.size is not None
    if place is None:
        return Local((wrong.size,))
    values = site.value(node)
    length = len(values) if values is not NOTHING else 0
    return Items(((length, place, wrong.size),)) if length else None


def _here(wrong: Wrong, site: Site, *, first: bool) -> tuple[ast.expr, int | None] | None:
    """(expression, place in it when it is a sequence)"""
    if isinstance(site.node, ast.Subscript):
        return _bound(wrong, site, site.node)
    if not isinstance(site.node, ast.Call):
        return None
    given = [*site.node.args, *(k.value for k in site.node.keywords)]
    if first and wrong.place is not None:
        at = _by_position(wrong, site.node, given)
        if at is not None and site.value(at) in (NOTHING, wrong.got):
            return at, None
    flat = list(_flat(given))
    same = [
        e for e in flat if not isinstance(e, ast.Starred) and number(v := site.value(e)) and v == wrong.got
    ]
    if len(same) == 1:
        return same[0], None
    if same:
        by_name = [k.value for k in site.node.keywords if k.value in same and k.arg == wrong.name]
        return (by_name[0], None) if by_name else None
    return _sequence(wrong, site, flat)


def _flat(given: Sequence[ast.expr]) -> Iterator[ast.expr]:
    for one in given:
        if isinstance(one, (ast.Tuple, ast.List)):
            yield from one.elts
        else:
            yield one


def _by_position(wrong: Wrong, call: ast.Call, given: Sequence[ast.expr]) -> ast.expr | None:
    """The expression of the size at `wrong.place`."""
    assert wrong.place is not None
    literal = [e for e in given if isinstance(e, (ast.Tuple, ast.List))]
    if literal:
        elements: Sequence[ast.expr] = literal[0].elts if len(literal) == 1 else ()
    elif call.keywords:
        return None
    else:
        elements = call.args
    starred = [k for k, e in enumerate(elements) if isinstance(e, ast.Starred)]
    if not starred:
        return elements[wrong.place] if len(elements) == wrong.length else None
    if len(starred) > 1:
        return None
    if wrong.place < starred[0]:
        return elements[wrong.place]
    behind = wrong.length - wrong.place
    return elements[len(elements) - behind] if behind < len(elements) - starred[0] else None


def _sequence(wrong: Wrong, site: Site, flat: Sequence[ast.expr]) -> tuple[ast.expr, int] | None:
    for one in flat:
        expression = one.value if isinstance(one, ast.Starred) else one
        values = site.value(expression)
        if not isinstance(values, (tuple, list)):
            continue
        places = [k for k, v in enumerate(values) if number(v) and v == wrong.got]
        if not places:
            continue
        if wrong.place in places and len(values) == wrong.length:
            return expression, wrong.place
        if len(places) == 1:
            return expression, places[0]
    return None


def _bound(wrong: Wrong, site: Site, node: ast.Subscript) -> tuple[ast.expr, None] | None:
    """The bound of a slice, `x[:, a:b]`."""
    slices = [s for s in ast.walk(node.slice) if isinstance(s, ast.Slice)]
    named = [s.lower if wrong.name == "start" else s.upper for s in slices]
    same = [b for b in named if b is not None and site.value(b) == wrong.got]
    return (same[0], None) if len(same) == 1 else None


# -- tensors


def find_operand(
    tensor: object, sites: Sequence[tuple[int, Site]], in_method: Callable[[int], bool], place: int, of: int
) -> tuple[int, Site, ast.expr] | None:
    """The expression that gives this tensor to the call, as far out as it is handed on, up to a method of a
    module: which helper computes inside may be chosen anew when the model runs. It is in one `place` of all
    tensors that the op is given."""
    found: tuple[int, Site, ast.expr] | None = None
    for level, site in sites:
        worth = [(e, site.value(e)) for e in _operands(site.node)]
        # What cannot be evaluated again, a call, may be it: the dual trace shows whether it is.
        same = [e for e, value in worth if value is tensor] or [e for e, v in worth if v is NOTHING]
        if found is None and len(same) == of:  # each is a call: by its place
            same = same[place : place + 1]
        if len(same) != 1:
            return found
        found = level, site, same[0]
        if in_method(level):
            return found
    return found


def _operands(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Call):
        owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        return [*owner, *_flat([*node.args, *(k.value for k in node.keywords)])]
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    return [node.value] if isinstance(node, (ast.AugAssign, ast.Subscript)) else []


def mapped_at(site: Site, level: int, whole: Propagation, node: fx.Node, operand: object) -> Found | None:
    """The expression that is the op's result, with its mappings."""
    if isinstance(site.node, ast.AugAssign):  # `a += b`, and then a is mapped
        name = site.node.target
        if not isinstance(name, ast.Name) or whole.mapped[node] != ("reduce",):
            return None
        return Found(level, site, site.node, Mapped(("reduce",), operand=name.id))
    if not isinstance(site.node, ast.expr):
        return None
    how, source = whole.mapped[node], node.all_input_nodes[0]
    if how == GATHER:
        made, shape = whole.computed[node][0], node.meta["val"].shape
        assert isinstance(made, Shard)
        parts = tuple(made.local_size(shape[made.dim], rank) for rank in range(made.tp))
        back = made.dim - len(shape)
        cut = Mapped(how, Size(shape[made.dim], parts), dim=back, shard=made.at(0))
        return Found(level, site, site.node, cut)
    if how[0] not in STATISTICS:
        return Found(level, site, site.node, Mapped(how))
    shard, shape = whole.layouts[source][0], source.meta["val"].shape
    assert isinstance(shard, Shard)
    parts = tuple(shard.local_size(shape[shard.dim], rank) for rank in range(shard.tp))
    size = Size(shape[shard.dim], parts)
    if how[0] == "mean":
        return Found(level, site, site.node, Mapped(how, size))
    given = [e for e in _operands(site.node) if site.value(e) is operand]
    texts = [site.source.text(e) for e in given]
    if len(texts) != 1 or "\n" in texts[0]:
        return None  # it is computed once more from its operand, which must be a name
    return Found(level, site, site.node, Mapped(how, size, divisor(node), texts[0]))


# -- numbers that are computed of local ones


def find_whole(
    got: float, need: float, sites: Sequence[tuple[int, Site]], tables: Sequence[Size], rank: int
) -> Found | None:
    """The size of a rank's own part in the expression of a number, which makes it right as the whole one."""
    for level, site in sites:
        for operand in _operands(site.node):
            for source in (operand, *_assigned(site, operand)):
                worth = site.value(source)
                if not isinstance(worth, (int, float)) or worth != got:
                    continue
                calls = [n for n in ast.walk(source) if isinstance(n, ast.Call)]  # x.size(-1), len(x)
                for leaf in (*_leaves(site, source), *calls):
                    value = site.value(leaf)
                    for size in tables:
                        if size.parts[rank] == value and _with(site, source, {leaf: size.whole}) == need:
                            return Found(level, site, leaf, Whole((replace(size, times=False),)))
    return None


def _flow(
    wrong: Wrong, site: Site, tables: Sequence[Size], rank: int, *, first: bool
) -> tuple[ast.expr, Size] | None:
    """One leaf of the argument's expression, or of the assignment of its name, that makes it right."""
    if not isinstance(site.node, (ast.Call, ast.Subscript)):
        return None
    for expression in _suspects(wrong, site, first=first):
        for source in (expression, *_assigned(site, expression)):
            worth = site.value(source)
            wanted = _wanted(wrong, worth)
            if wanted is NOTHING:
                continue
            right = [(leaf, size) for leaf, size, worth in _localised(site, source, tables, rank)
                     if worth == wanted]  # fmt: skip
            if right:  # of those that help this rank one that would help the others, too
                return next((one for one in right if _fits(wrong, site, source, *one)), right[0])
    return None


def _fits(wrong: Wrong, site: Site, expression: ast.expr, leaf: ast.expr, size: Size) -> bool:
    """Whether a size of a leaf gives every rank what it needs, where the rest of the expression is alike."""
    value = site.value(leaf)
    for rank, need in enumerate(wrong.size.parts if wrong.size is not None else ()):
        local = localised((size,), value, rank)
        wanted = _wanted(replace(wrong, need=need), site.value(expression))
        if local is None or _with(site, expression, {leaf: local}) != wanted:
            return False
    return True


def _localised(
    site: Site, expression: ast.expr, tables: Sequence[Size], rank: int
) -> Iterator[tuple[ast.expr, Size, Any]]:
    """Each leaf that a size of the tables changes, and what the expression is worth then."""
    for leaf in _leaves(site, expression):
        value = site.value(leaf)
        for size in tables:
            local = localised((size,), value, rank)
            if local is not None and local != value:
                yield leaf, size, _with(site, expression, {leaf: local})


def _wanted(wrong: Wrong, worth: object) -> object:
    """What an expression should be worth, where it is worth the wrong number or holds it."""
    if number(worth):
        return wrong.need if worth == wrong.got else NOTHING
    if wrong.place is None or not isinstance(worth, (tuple, list)) or len(worth) != wrong.length:
        return NOTHING
    if worth[wrong.place] != wrong.got:
        return NOTHING
    return [*worth[: wrong.place], wrong.need, *worth[wrong.place + 1 :]]


def _suspects(wrong: Wrong, site: Site, *, first: bool) -> Iterator[ast.expr]:
    if isinstance(site.node, ast.Subscript):
        yield from (
            b
            for s in ast.walk(site.node.slice)
            if isinstance(s, ast.Slice)
            for b in (s.lower, s.upper)
            if b is not None
        )
        return
    assert isinstance(site.node, ast.Call)
    given = [*site.node.args, *(k.value for k in site.node.keywords)]
    at = _by_position(wrong, site.node, given) if first and wrong.place is not None else None
    if at is not None:
        yield at
    for one in _flat(given):
        expression = one.value if isinstance(one, ast.Starred) else one
        if expression is not at:
            yield expression


def _assigned(site: Site, expression: ast.expr) -> Iterator[ast.expr]:
    """What a name was assigned last above the call."""
    if not isinstance(expression, ast.Name):
        return
    function = next(
        (p for p in site.source.parents(site.node) if isinstance(p, (ast.FunctionDef, ast.AsyncFunctionDef))),
        None,
    )
    if function is None:
        return
    before = site.source.span(site.node)[0]
    last: ast.Assign | None = None
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and site.source.span(node)[1] <= before:
            targets = [t for t in node.targets if isinstance(t, ast.Name) and t.id == expression.id]
            if targets and (last is None or site.source.span(node) > site.source.span(last)):
                last = node
    if last is not None:
        yield last.value


def _leaves(site: Site, expression: ast.expr) -> list[ast.expr]:
    """Names and attributes that are numbers, those of objects (`self.heads`) first."""
    found = [
        n
        for n in ast.walk(expression)
        if isinstance(n, (ast.Name, ast.Attribute, ast.Subscript)) and number(site.value(n))
    ]
    return sorted(found, key=lambda n: not isinstance(n, ast.Attribute))


def _with(site: Site, expression: ast.expr, values: dict[ast.expr, int]) -> object:
    """The expression's worth with other values at some of its leaves."""
    memo = {id(leaf): ast.copy_location(ast.Constant(value), leaf) for leaf, value in values.items()}
    changed = copy.deepcopy(expression, memo)
    worth = site.plain(changed)
    return list(worth) if isinstance(worth, (tuple, list)) else worth


# -- the model's own checks of sizes


def in_check(site: Site, tables: Sequence[Size], rank: int) -> Iterator[tuple[ast.expr, Size]]:
    """The leaves of the test around a `raise` (or of an assert) with each of which it would not be raised."""
    test, passes = _test(site)
    if test is None:
        return
    for leaf, size, worth in _localised(site, test, tables, rank):
        if worth is not NOTHING and bool(worth) is passes:
            yield leaf, size


def in_arguments(site: Site, tables: Sequence[Size], rank: int) -> Iterator[tuple[ast.expr, Wrapper]]:
    """The numbers among a call's arguments, also in pairs (name, number), that are sizes of the model."""
    assert isinstance(site.node, ast.Call)
    for one in _flat([*site.node.args, *(k.value for k in site.node.keywords)]):
        value = site.value(one)
        pairs = value if isinstance(value, tuple) and all(map(_named_length, value)) else ()
        for size in tables:
            if number(value) and localised((size,), value, rank) not in (None, value):
                yield one, Local((size,))
            for name, length in pairs:
                if size.whole == length != size.parts[rank]:
                    yield one, Axes(((name, replace(size, times=False)),))


def _named_length(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and number(value[1])


def _test(site: Site) -> tuple[ast.expr | None, bool]:
    node = site.node
    if isinstance(node, ast.Assert):
        return node.test, True
    around = next(iter(site.source.parents(node)), None)
    if isinstance(around, ast.If):
        return around.test, node not in around.body
    return None, False
