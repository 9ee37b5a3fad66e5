"""What stands around an edited expression when it runs.

While a model is proven, a wrapper lets numbers pass that it does not know, and notes them: the dual trace
shows whether they are right. On a sharded model it raises for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor

from autotp.diagnostic import UnprovenPath
from autotp.rewrite.edits.edit import Axes, Items, Local, Part, Size, Slow, Unproven, Whole, Wrapper
from autotp.trace.recorder import in_place_of

__all__ = ["Note", "localised", "swapped", "unproven", "wrapper_of"]

Note = Callable[[Any], None]


def localised(sizes: Sequence[Size], value: int, rank: int) -> int | None:
    """The rank's number for a number of the whole model, or None where none is known.

    >>> localised([Size(6, (4, 2))], 6, 1), localised([Size(6, (4, 2), times=True)], 18, 1)
    (2, 6)
    """
    for size in sizes:
        if value == size.whole:
            return size.parts[rank]
    for size in sizes:
        if size.times and value > 0 and value % size.whole == 0:
            return value // size.whole * size.parts[rank]
    return None


def wrapper_of(
    how: Wrapper, rank: int, where: str, note: Note | None, *, recorded: bool
) -> Callable[..., Any]:
    """The function that is called around the expression; `note` is given what it does not know. `recorded`
    it is while a model is proven, also where it raises as on a sharded one: without a note."""
    if isinstance(how, Local):
        return _local(how.sizes, rank, where, note)
    if isinstance(how, Unproven):
        return unproven(where)
    if isinstance(how, Part):
        return _part(how, rank, where, recorded=recorded)
    if isinstance(how, Axes):
        return _axes(dict(how.sizes), rank, where)
    if isinstance(how, Slow):
        return lambda enabled: False
    if isinstance(how, Whole):
        return _whole(how.sizes, rank, where, note)
    assert isinstance(how, Items)
    return _items(how, rank, where, note)


def _local(sizes: Sequence[Size], rank: int, where: str, note: Note | None) -> Callable[[Any], Any]:
    usual, part = (sizes[0].whole, sizes[0].parts[rank]) if sizes else (None, None)

    def local(value: Any) -> Any:
        if value == usual:  # what `localised` would give, in every call
            return part
        found = localised(sizes, value, rank)
        if found is not None:
            return found
        if note is not None:
            note(value)
            return value
        known = ", ".join(f"{s.whole}{' times n' if s.times else ''}" for s in sizes)
        raise UnprovenPath(
            f"{where}: the size {value} is none that was proven there ({known}); shard the model with "
            "inputs= that run it this way"
        )

    return local


def _axes(sizes: Mapping[str, Size], rank: int, where: str) -> Callable[[Any], Any]:
    def local(pairs: Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
        for name, length in pairs:
            if name in sizes and sizes[name].whole != length:
                raise UnprovenPath(f"{where}: {name}={length} was not proven there, but {sizes[name].whole}")
        return tuple((n, sizes[n].parts[rank] if n in sizes else length) for n, length in pairs)

    return local


def _whole(sizes: Sequence[Size], rank: int, where: str, note: Note | None) -> Callable[[Any], Any]:
    def whole(value: Any) -> Any:
        for size in sizes:
            if value == size.parts[rank]:
                return size.whole
        if note is not None:
            note(value)
            return value
        raise UnprovenPath(
            f"{where}: the size {value} of a rank's part is none that was proven there "
            f"({', '.join(str(s.parts[rank]) for s in sizes)}); shard the model with inputs= that run it "
            "this way"
        )

    return whole


def _items(how: Items, rank: int, where: str, note: Note | None) -> Callable[[Any], Any]:
    lengths = {length for length, _, _ in how.items}

    def local(values: Any) -> Any:
        found = list(values)
        if len(found) in how.other:
            return values
        if len(found) not in lengths:
            if note is not None:
                note(len(found))
                return values
            raise UnprovenPath(f"{where}: a shape of {len(found)} sizes was not proven there")
        for place in {p for n, p, _ in how.items if n == len(found)}:
            sizes = [s for n, p, s in how.items if n == len(found) and p == place]
            # what stays at a place is noted with it: (length, place, number)
            at = None if note is None else partial(_note_at, note, len(found), place)
            found[place] = _local(sizes, rank, where, at)(found[place])
        return found if isinstance(values, list) else tuple(found)

    return local


def _note_at(note: Note, length: int, place: int, value: Any) -> None:
    note((length, place, value))


def _part(how: Part, rank: int, where: str, *, recorded: bool) -> Callable[[Tensor], Tensor]:
    start, stop = how.deal.bounds(how.length, rank)

    def part(value: Tensor) -> Tensor:
        size = value.shape[how.dim] if how.dim < value.dim() else 0
        if size == 0 or size % how.length:
            raise UnprovenPath(
                f"{where}: a value of shape {list(value.shape)} is none of which a rank's part was proven "
                f"there: dim {how.dim} in groups of {how.length}"
            )
        before, after = value.shape[: how.dim], value.shape[how.dim + 1 :]
        groups = value.reshape(*before, size // how.length, how.length, *after)
        return groups.narrow(how.dim + 1, start, stop - start).flatten(how.dim, how.dim + 1)

    def stand_in(value: Tensor) -> Tensor:
        return in_place_of(value, part)

    return stand_in if recorded else part


def swapped(
    known: Sequence[tuple[FunctionType, Any]], passed: Sequence[Any], where: str, note: Note | None
) -> Callable[[Any], Any]:
    """The function that gives, for a function that is called, its edited copy. `passed` are those that were
    proven as they are."""

    def swap(value: Any) -> Any:
        function = value.__func__ if isinstance(value, MethodType) else value
        for original, copy in known:
            if function is original:
                return partial(copy, value.__self__) if isinstance(value, MethodType) else copy
        for other in passed:
            if function is other:
                return value
        if note is not None:
            note(function)
            return value
        raise UnprovenPath(
            f"{where}: {getattr(value, '__qualname__', value)} is called, which was not when the plan was "
            "proven; shard the model as it will run"
        )

    return swap


def unproven(where: str) -> Callable[[], None]:
    """What raises at the start of a branch that no trace reached."""

    def raises() -> None:
        raise UnprovenPath(
            f"{where}: no traced forward took this branch, so nothing is proven about it; shard the model "
            "with inputs= that take it"
        )

    return raises
