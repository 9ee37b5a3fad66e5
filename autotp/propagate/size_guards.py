"""What the model's code asks of the sizes of its inputs, and what came out: another outcome is another way.

    if x.shape[1] > 40                 the outcome of x.shape[1] > 40
    min(len(x), 3)                     the length, since nobody can say what it is compared with
    for i in range(x.shape[1])         the number
    x.shape[1] // 40                   whether it may name a dim, or a place in a table, and which

A proof holds for calls with the same outcomes. Where a size inside of the forward cannot be told by those of
the inputs, it holds for inputs of the sizes of the trace.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotp.diagnostic import Span
from autotp.propagate.input_sizes import Inputs
from autotp.trace.formulas import Formula, Size, step_of
from autotp.trace.graph import Trace
from autotp.trace.noted import Asked

__all__ = ["SizeGuard", "holds", "size_guards"]

_MOST = 8  # meanings of one question


@dataclass(frozen=True)
class SizeGuard:
    """A question of sizes, and what comes out: `text` has {0}, {1} for the sizes, each a place among the
    inputs and a dim. `where` it is asked."""

    text: str
    sizes: tuple[tuple[str, int], ...]
    outcome: Any
    where: str = field(compare=False, default="")

    def source(self, terms: Sequence[str]) -> str:
        """The guard as an expression of Python, whose sizes are these terms."""
        text = self.text.format(*terms)
        if isinstance(self.outcome, bool):  # torch.compile cannot compare a condition of a free size with one
            return text if self.outcome else f"not {text}"
        return f"{text} == {self.outcome!r}"


NAMES: Mapping[str, Any] = {"__builtins__": {}, "abs": abs, "int": int, "float": float, "bool": bool,
                            "round": round, "max": max, "step": step_of}  # fmt: skip
"""What the text of a guard may name."""


def holds(guards: Iterable[SizeGuard], sizes: Mapping[tuple[str, int], int]) -> SizeGuard | None:
    """The first guard that does not hold for these sizes of inputs; one that asks a size that is not there
    does not."""
    for guard in guards:
        if any(size not in sizes for size in guard.sizes):
            return guard
        if not eval(guard.source([str(sizes[size]) for size in guard.sizes]), dict(NAMES)):
            return guard
    return None


def size_guards(
    trace: Trace, turn: int, parameters: tuple[tuple[str, Any], ...], handled: Iterable[Span] | None
) -> frozenset[SizeGuard]:
    """The guards of one forward of a trace. Of what code may ask unseen, only that counts whose function has
    one of the lines that are `handled`; None: all of it does."""
    asked = trace.asked[turn] if turn < len(trace.asked) else {}
    inputs = Inputs(trace, turn, parameters)
    lines = None if handled is None else {(span.file, span.line) for span in handled}
    known = {(one.line, one.inside, _numbers(one.formula)) for one in asked if _is_named(one, inputs)}
    found: dict[SizeGuard, None] = {}
    for one in asked:
        if one.unseen and lines is not None and not _handles(one, lines):
            continue
        # A layer that repeats another asks the same of tensors that are known by their shapes.
        if not _is_named(one, inputs) and (one.line, one.inside, _numbers(one.formula)) in known:
            continue
        found |= dict.fromkeys(_guards(one, inputs))
    return frozenset(found)


def _handles(one: Asked, lines: set[tuple[str, int]]) -> bool:
    file, first, last = one.inside
    return any(name == file and first <= line <= last for name, line in lines)


def _is_named(one: Asked, inputs: Inputs) -> bool:
    return all(name in inputs.nodes or name.startswith("=") for name, _ in one.dims)


def _numbers(formula: Formula) -> Any:
    """A formula with the numbers of the trace."""
    if isinstance(formula, tuple):
        return (formula[0], *map(_numbers, formula[1:]))
    return formula.number if isinstance(formula, Size) else formula


def _guards(one: Asked, inputs: Inputs) -> Iterator[SizeGuard]:
    where = f"{one.inside[0]}:{one.line}"
    sizes = list(dict.fromkeys(_sizes(one.formula)))
    meanings = [inputs.of(size) for size in sizes]
    number = 1
    for each in meanings:
        number *= len(each)
    made: list[SizeGuard] = []
    if one.formula is not None and 0 < number <= _MOST:
        for chosen in itertools.product(*meanings):
            guard = _guard(_put(one.formula, dict(zip(sizes, chosen, strict=True))), one.outcome, where)
            traced = {size.dim: size.number for size in _all_sizes(chosen)}
            if guard.sizes and holds([guard], traced) is not None:
                break
            made.append(guard)
        else:
            yield from (guard for guard in made if guard.sizes)
            return
    if one.formula is None and not any(_depends(name, dim, inputs) for name, dim in one.dims):
        return
    for size in inputs.everything():
        yield SizeGuard("{0}", (size.dim,), size.number, where)


def _depends(name: str, dim: int, inputs: Inputs) -> bool:
    node = inputs.nodes.get(name)
    if node is None:
        return not name.startswith("=")
    shape = node.meta["val"].shape
    return inputs.of(Size((name, dim), shape[dim])) != [shape[dim]]


def _sizes(formula: Formula) -> Iterator[Size]:
    if isinstance(formula, Size):
        yield formula
    elif isinstance(formula, tuple):
        for part in formula[1:]:
            yield from _sizes(part)


def _all_sizes(formulas: Iterable[Formula]) -> Iterator[Size]:
    for formula in formulas:
        yield from _sizes(formula)


def _put(formula: Formula, chosen: Mapping[Size, Formula]) -> Formula:
    if isinstance(formula, Size):
        return chosen[formula]
    if isinstance(formula, tuple):
        return (formula[0], *(_put(part, chosen) for part in formula[1:]))
    return formula


def _guard(formula: Formula, outcome: Any, where: str) -> SizeGuard:
    places = list(dict.fromkeys(size.dim for size in _sizes(formula)))

    def text(part: Formula) -> str:
        if isinstance(part, Size):
            return f"{{{places.index(part.dim)}}}"
        if isinstance(part, tuple):
            return str(part[0]).format(*map(text, part[1:]))
        return f"({part!r})"

    return SizeGuard(text(formula), tuple(places), outcome, where)
