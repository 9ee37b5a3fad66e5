"""What an edit is: a piece of a function's text, and what is put around it. Data only; knows nothing of torch.

An edit is made in a method of one module, or in a function that the method calls: each call on the way is
named, so that only this caller gets the edited copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import FunctionType

__all__ = ["Call", "Edit", "Function", "Items", "Local", "Size", "Wrapper", "joined"]


@dataclass(frozen=True)
class Function:
    """A function of the model's code: its file, the first line of its code, and its qualified name."""

    file: str
    line: int
    name: str
    live: FunctionType = field(compare=False, repr=False)


@dataclass(frozen=True)
class Call:
    """The expression at bytes start…stop of `function` that gives the function which is called."""

    function: Function
    start: int
    stop: int
    callee: object = field(compare=False, repr=False)


@dataclass(frozen=True)
class Size:
    """A number of the whole model and what stands for it on each rank; with `times`, a factor of what is
    passed (batch · heads), which keeps its other factor."""

    whole: int
    parts: tuple[int, ...]
    times: bool = False


@dataclass(frozen=True)
class Local:
    """`local(expression)`: a number of the whole model becomes the rank's."""

    sizes: tuple[Size, ...]


@dataclass(frozen=True)
class Items:
    """`local(sequence)`: (length of the sequence, place, the number there)."""

    items: tuple[tuple[int, int, Size], ...]


Wrapper = Local | Items


@dataclass(frozen=True)
class Edit:
    """A wrapper around bytes start…stop of `function`, for `module` alone.

    `method` is the method of the module in which the edit, or the first of `calls`, stands.
    """

    module: str
    method: str
    calls: tuple[Call, ...]
    function: Function
    start: int
    stop: int
    wrapper: Wrapper

    @property
    def site(self) -> tuple[object, ...]:
        """Where it is, as a key."""
        return (self.module, self.method, self.calls, self.function, self.start, self.stop)


class TwoNeeds(Exception):
    """One expression would have to be two things."""


def joined(one: Wrapper, other: Wrapper) -> Wrapper:
    """Both wrappers of one expression as one.

    >>> joined(Local((Size(6, (3, 3)),)), Local((Size(4, (2, 2)),)))
    Local(sizes=(Size(whole=4, parts=(2, 2), times=False), Size(whole=6, parts=(3, 3), times=False)))

    Raises TwoNeeds when they contradict each other.
    """
    if isinstance(one, Local) and isinstance(other, Local):
        sizes = sorted({*one.sizes, *other.sizes}, key=lambda s: (s.whole, s.times))
        for first, second in zip(sizes, sizes[1:], strict=False):
            if first.whole == second.whole and first.parts != second.parts:
                raise TwoNeeds(f"{first.whole} would have to be {first.parts} and {second.parts}")
        return Local(tuple(sizes))
    if isinstance(one, Items) and isinstance(other, Items):
        items = sorted({*one.items, *other.items}, key=lambda i: (i[0], i[1], i[2].whole))
        for a, b in zip(items, items[1:], strict=False):
            if a[:2] == b[:2] and a[2].whole == b[2].whole and a[2].parts != b[2].parts:
                raise TwoNeeds(f"{a[2].whole} would have to be {a[2].parts} and {b[2].parts}")
        return Items(tuple(items))
    raise TwoNeeds("it would have to be a number and a sequence")
