"""What the model and its regions were called with in the traces, in words (`trace/signature.py`). Another
call may take another way.

A guard stands at the border of each region of raw tensors (`rewrite/specialise.py`) and at the model itself
(`rewrite/called.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from autotp.diagnostic import Span
from autotp.propagate.size_guards import SizeGuard, size_guards
from autotp.rewrite.edits.edit import Edits
from autotp.trace.consulted import Consulted
from autotp.trace.graph import Repeat, Trace
from autotp.trace.modes import Captured
from autotp.trace.signature import GRADIENT, FromInput, Words, coarse, with_gradient

__all__ = ["Call", "Guard", "Proven", "Traced", "calls_of", "guard_of"]

Call = frozenset[tuple[str, str]]
"""The words of a call."""
FREE = "a number"


@dataclass(frozen=True)
class Traced:
    """A call of the model that was traced: in training or evaluation, with or without gradients, and what
    comes out of what its code asks of the sizes of its inputs."""

    training: bool
    gradients: bool
    words: Call
    sizes: frozenset[SizeGuard] = frozenset()

    @property
    def key(self) -> tuple[bool, bool, Call]:
        """The call without its sizes."""
        return self.training, self.gradients, self.words


@dataclass
class Proven:
    """The calls of a model that are proven: those of the traces, and what was proven since. All ranks in one
    process learn together, and so do copies of a model.

    `free` are the arguments in whose place any number may stand; `states` the calls that were proven with
    other attributes of the model than when it was sharded. `read` is what the code that the traces ran reads
    besides, `written` the attributes that the forward itself writes, and whose earlier value it never reads,
    `left` those in which it leaves a part of a tensor on each rank. `reopened` are the edits since branches
    that no trace took were proven with such a call, the last ones last.
    """

    calls: frozenset[Traced]
    read: Consulted = field(default_factory=Consulted)
    written: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    free: frozenset[str] = frozenset()
    states: dict[str, set[Traced]] = field(default_factory=dict)
    reopened: list[Edits] = field(default_factory=list)

    def alike(self, state: str, call: Traced) -> list[Traced]:
        """The proven calls with these words; what is proven with gradients is without."""
        known = self.states.setdefault(state, set())
        every = frozenset((place, with_gradient(word)) for place, word in call.words)
        alike = {one.key for one in (
            call, replace(call, gradients=True), replace(call, gradients=True, words=every))}  # fmt: skip
        return [one for one in (*known, *(self.calls if not state else ())) if one.key in alike]

    def call(self, training: bool, gradients: bool, words: Words) -> Traced:
        """A call as it is remembered."""
        return Traced(training, gradients, _with_free(words, self.free))

    def learn(self, state: str, call: Traced, free: frozenset[str]) -> None:
        """Remember a call that was proven, with any number at the `free` places."""
        self.states.setdefault(state, set()).add(call)
        if free:
            self.free |= free
            self.states[state].add(replace(call, words=_with_free(dict(call.words), free)))

    def unlike(self, words: Words) -> list[str]:
        """The places of a call where no trace had the like."""
        known = frozenset[tuple[str, str]]().union(*(call.words for call in self.calls))
        return [
            place for place, word in words.items()
            if (place, word) not in known and (place, with_gradient(word)) not in known
        ]  # fmt: skip

    def shown(self, place: str) -> str:
        """What the traces gave an argument, in words."""
        every = {word for call in self.calls for where, word in call.words if where == place}
        found = sorted({word.removesuffix(GRADIENT) for word in every})
        return f"with {place}={' and '.join(found)}" if found else "without it"

    def __deepcopy__(self, memo: object) -> Proven:
        return self


@dataclass
class Guard:
    """How a region was called in the traces, and in calls that were proven since. At the `free` places stood
    numbers that the model's code made of sizes of its inputs: any may stand there. At those of `follows`
    they came from these arguments of the model, and are free where those are."""

    calls: frozenset[Call] = frozenset()
    free: frozenset[str] = frozenset()
    follows: dict[str, frozenset[str]] = field(default_factory=dict)

    def unlike(self, words: Words) -> dict[str, str]:
        """What of a call no trace has shown, by place: all of it where only its words together are new;
        nothing for a call like the traced ones."""
        call = _call(words, self.free)
        if call in self.calls:
            return {}
        known = frozenset[tuple[str, str]]().union(*self.calls)
        return dict(sorted(call - known or call))

    def learn(self, other: Guard, free: frozenset[str]) -> None:
        """Let through what another one does, too, and any number of these arguments of the model."""
        self.follows = {**other.follows, **self.follows}
        released = {place for place, names in self.follows.items() if names <= free}
        self.free |= other.free | released
        self.calls = frozenset(_call(dict(call), self.free) for call in self.calls | other.calls)

    def __deepcopy__(self, memo: object) -> Guard:
        return self


def guard_of(path: str, traces: Iterable[Trace]) -> Guard:
    """The guard of a module from all traced calls."""
    given = [words for trace in traces for words in _given(path, trace)]
    made: dict[str, frozenset[str]] = {}
    for place in {place for words in given for place in words}:
        found = [words[place] for words in given if place in words]
        from_input = [word.arguments for word in found if isinstance(word, FromInput)]
        if len(from_input) == len(found):
            made[place] = frozenset[str]().union(*from_input)
    free = frozenset(place for place, names in made.items() if not names)
    follows = {place: names for place, names in made.items() if names}
    return Guard(frozenset(_call(words, free) for words in given), free, follows)


def calls_of(
    found: Captured, parameters: tuple[tuple[str, Any], ...], handled: Iterable[Span]
) -> frozenset[Traced]:
    """The calls of the model itself in every mode that was traced; `handled` are the lines that handle values
    which are not whole. Where a call was traced as it runs, what it asks when it is exported counts no more.
    """
    lines, runs, exported = list(handled), set[Traced](), set[Traced]()
    for mode, given, trace in found.given:
        for turn, words in enumerate(given):
            sizes = size_guards(trace, turn, parameters, lines)
            kind = exported if mode.exporting else runs
            kind.add(Traced(mode.training, mode.grad, frozenset(words.items()), sizes))
    known = {one.key for one in runs}
    return frozenset(runs | {one for one in exported if one.key not in known})


def _with_free(words: Words, free: frozenset[str]) -> Call:
    return frozenset((place, FREE if place in free and _counts(w) else w) for place, w in words.items())


def _counts(word: str) -> bool:
    """Whether a word is that of a number."""
    return word.lstrip("-")[:1].isdigit()


def _call(words: Words, free: frozenset[str] | set[str]) -> Call:
    return frozenset((place, FREE if place in free else coarse(word)) for place, word in words.items())


def _given(path: str, trace: Trace) -> Iterator[Words]:
    """The calls of a module. One in a layer that repeats another is called as that one's is: of it the
    recording knows where numbers come from."""
    repeat = next((r for r in trace.repeats if _within(path, r.path)), None)
    yield from trace.given.get(path if repeat is None else _there(path, repeat), ())


def _within(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}.")


def _there(path: str, repeat: Repeat) -> str:
    return f"{repeat.of}{path[len(repeat.path) :]}"
