"""What an edit is: a piece of a function's text, and what is put around it. Knows nothing of torch.

An edit is made in a method of one module, or in a function that the method calls: each call on the way is
named, so that only this caller gets the edited copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pickle import PicklingError, UnpicklingError
from types import FunctionType

from autotp.placement import Deal, Shard
from autotp.rewrite.edits.compile import found_again

__all__ = [
    "Axes", "Call", "Edit", "Edits", "Function", "Items", "Local", "Mapped", "Part", "Size", "Slow",
    "TwoNeeds", "Unproven", "Whole", "Wrapper", "joined",
]  # fmt: skip


@dataclass(frozen=True)
class Function:
    """A function of the model's code: its file, the first line of its code, and its qualified name."""

    file: str
    line: int
    name: str
    live: FunctionType = field(compare=False, repr=False)

    def __reduce__(self) -> tuple[object, ...]:
        """By its place: what a decorator holds has no name that pickle would find."""
        if found_again(self.live.__module__, self.line, self.name) is not self.live:
            raise PicklingError(
                f"{self.file}:{self.line}: {self.name}, of which the model has an edited copy, is not found "
                "by its name (a lambda, a function in a function); save the model's state_dict instead"
            )
        return _again, (self.live.__module__, self.file, self.line, self.name)


def _again(module: str, file: str, line: int, name: str) -> Function:
    live = found_again(module, line, name)
    if live is None:
        raise UnpicklingError(
            f"{file}:{line}: {name} is not there any more: the pickled model has an edited copy of it"
        )
    return Function(file, line, name, live)


@dataclass(frozen=True)
class Call:
    """The expression at bytes start…stop of `function` that gives the function which is called."""

    function: Function
    start: int
    stop: int
    callee: object = field(compare=False, repr=False)

    def __reduce__(self) -> tuple[object, ...]:
        """The callee by its place where it has one: a class method is not found as a function."""
        callee, code = self.callee, getattr(self.callee, "__code__", None)
        if isinstance(callee, FunctionType) and code is not None:
            module, line, name = callee.__module__, code.co_firstlineno, code.co_qualname
            if found_again(module, line, name) is callee:
                return _call_again, (self.function, self.start, self.stop, (module, line, name))
        return Call, (self.function, self.start, self.stop, callee)


def _call_again(function: Function, start: int, stop: int, callee: tuple[str, int, str]) -> Call:
    return Call(function, start, stop, found_again(*callee))


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
    """`local(sequence)`: (length of the sequence, place, the number there). Sequences of the `other` lengths
    stay as they are."""

    items: tuple[tuple[int, int, Size], ...]
    other: tuple[int, ...] = ()


@dataclass(frozen=True)
class Unproven:
    """The start of a branch that no trace took: `unproven()` raises. An empty span stands before a
    statement; another one is that of an expression, `(unproven() or (expression))`."""


@dataclass(frozen=True)
class Part:
    """`part(tensor)`: a rank's part of a whole value without a gradient. Its dim is groups of `length`
    elements, each dealt to the ranks by `deal`; how many groups there are (a batch) the tensor says."""

    dim: int
    length: int
    deal: Deal


@dataclass(frozen=True)
class Whole:
    """`whole(number)`: a number that a rank reads off its own part becomes that of the whole model."""

    sizes: tuple[Size, ...]


@dataclass(frozen=True)
class Mapped:
    """`copy(mean(tensor))`: the value goes through mappings over the ranks, the first one first.

    `size` is the number of elements that a statistic is taken over, with the ranks'; a variance is computed
    from the value of the text `operand`, `along` a dim: (dim, keepdim, what is taken off that number). Of
    `a += b` the `operand` is a, which is mapped after it. What is gathered has `size` elements on `dim`
    (from the end), cut as `shard`.
    """

    how: tuple[str, ...]
    size: Size | None = None
    along: tuple[int, bool, float] | None = None
    operand: str = ""
    dim: int = 0
    shard: Shard | None = None


@dataclass(frozen=True)
class Axes:
    """`local(pairs)`: of pairs (name, length) each one that has a size of the whole model, as einops' layers
    keep them."""

    sizes: tuple[tuple[str, Size], ...]


@dataclass(frozen=True)
class Slow:
    """`slow(enabled)`: no, whatever torch says of its fused kernels."""


Wrapper = Local | Items | Part | Unproven | Whole | Mapped | Axes | Slow


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

    edit: Edit | None = None


def joined(one: Wrapper, other: Wrapper) -> Wrapper:
    """Both wrappers of one expression as one.

    >>> joined(Local((Size(6, (3, 3)),)), Local((Size(4, (2, 2)),))).sizes
    (Size(whole=4, parts=(2, 2), times=False), Size(whole=6, parts=(3, 3), times=False))

    Raises TwoNeeds when they contradict each other.
    """
    if isinstance(one, Local) and isinstance(other, Local):
        return Local(_sizes([*one.sizes, *other.sizes]))
    if isinstance(one, Items) and isinstance(other, Items):
        places: dict[tuple[int, int], list[Size]] = {}
        for length, place, size in (*one.items, *other.items):
            places.setdefault((length, place), []).append(size)
        lengths = sorted({*one.other, *other.other})
        both = next((n for n in lengths if any(n == length for length, _ in places)), None)
        if both is not None:
            raise TwoNeeds(f"a shape of {both} sizes would have to change and to stay")
        return Items(tuple((*at, s) for at in sorted(places) for s in _sizes(places[at])), tuple(lengths))
    if isinstance(one, Axes) and isinstance(other, Axes):
        named = dict(one.sizes)
        if any(named.setdefault(name, size) != size for name, size in other.sizes):
            raise TwoNeeds("one length would have to be two numbers on a rank")
        return Axes(tuple(sorted(named.items(), key=lambda pair: pair[0])))
    if isinstance(one, Whole) and isinstance(other, Whole):
        return Whole(tuple(sorted({*one.sizes, *other.sizes}, key=lambda s: (s.whole, s.parts))))
    if isinstance(one, Mapped) and isinstance(other, Mapped):
        longer, shorter = (one, other) if len(one.how) >= len(other.how) else (other, one)
        # Without gradients there is nothing to copy; a copy is right there as well.
        if longer == replace(shorter, how=(*shorter.how, *["copy"] * (len(longer.how) - len(shorter.how)))):
            return longer
    if one == other:
        return one
    raise TwoNeeds("it would have to be two things")


def _sizes(sizes: Iterable[Size]) -> tuple[Size, ...]:
    ordered = sorted(set(sizes), key=lambda s: (s.whole, s.times, s.parts))
    for first, second in pairwise(ordered):
        if first.whole == second.whole and first.parts != second.parts:
            raise TwoNeeds(
                f"{first.whole} would have to be {_listed(first.parts)} on the ranks, "
                f"and {_listed(second.parts)}"
            )
    return tuple(ordered)


def _listed(parts: tuple[int, ...]) -> str:
    return ", ".join(map(str, parts))


@dataclass(frozen=True)
class Edits:
    """All edits of a model. `passed` are the functions that may be called where others are edited:
    (function, start, stop, what is called)."""

    edits: tuple[Edit, ...] = ()
    passed: tuple[tuple[Function, int, int, object], ...] = field(default=(), repr=False)

    def __bool__(self) -> bool:
        return bool(self.edits)

    def __or__(self, more: Iterable[Edit]) -> Edits:
        """With more edits; of one expression, joined.

        Raises TwoNeeds, with the site in `.edit`, where two contradict each other.
        """
        found = {e.site: e for e in self.edits}
        for edit in more:
            known = found.get(edit.site)
            try:
                wrapper = edit.wrapper if known is None else joined(known.wrapper, edit.wrapper)
            except TwoNeeds as error:
                error.edit = edit
                raise
            found[edit.site] = replace(edit, wrapper=wrapper)
        return replace(self, edits=tuple(found.values()))

    def mapped(self) -> bool:
        """Whether any edit is a mapping over the ranks."""
        return any(isinstance(edit.wrapper, Mapped) for edit in self.edits)

    def modules(self) -> Mapping[str, tuple[Edit, ...]]:
        """The edits of each module."""
        found: dict[str, tuple[Edit, ...]] = {}
        for edit in self.edits:
            found[edit.module] = (*found.get(edit.module, ()), edit)
        return found

    def of(self, path: str) -> Edits:
        """The edits of one module alone."""
        return replace(self, edits=tuple(replace(e, module="") for e in self.edits if e.module == path))

    def functions(self) -> tuple[int, ...]:
        """The identities of the live functions: lambdas of two instances are two functions at one place."""
        return tuple(id(f.live) for e in self.edits for f in (*(c.function for c in e.calls), e.function))

    def __deepcopy__(self, memo: object) -> Edits:
        return self
