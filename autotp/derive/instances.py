"""The same rules in every layer: where else a set of rules fits, by the numbers in the names.

Numbers that all the rules' names have in common, at the same place, are a layer's (or an expert's) number.
The other layers are those of which each name exists, with tensors of the same shapes and kinds. That a
layer only looks alike is found when its rules are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from autotp.derive.assignment import Board

__all__ = ["Instances"]

Name = tuple[str, ...]


class Instances:
    """Finds the places of a model where names are alike but for numbers."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.alike: dict[Name, list[Name]] = {}
        for name in (*board.inventory.modules, *board.tensors):
            parts = tuple(name.split("."))
            self.alike.setdefault(_general(parts), []).append(parts)

    def of(self, keys: Sequence[str]) -> Iterator[dict[str, str]]:
        """For each place, the keys there, by the keys given; the given place comes first."""
        names = [tuple(key.split(".")) for key in keys]
        shared = len(list(takewhile(lambda parts: len(set(parts)) == 1, zip(*names, strict=False))))
        places = [i for i in range(shared) if names[0][i].isdigit()]
        yield {key: key for key in keys}
        if not places:
            return
        for other in self.alike[_general(names[0])]:
            if other == names[0] or any(
                a != b for i, (a, b) in enumerate(zip(names[0], other, strict=True)) if i not in places
            ):
                continue
            numbers = {i: other[i] for i in places}
            mapped = {
                key: ".".join(numbers.get(i, part) for i, part in enumerate(name))
                for key, name in zip(keys, names, strict=True)
            }
            if all(self._alike(key, mapped[key]) for key in keys):
                yield mapped

    def _alike(self, key: str, other: str) -> bool:
        tensors = self.board.tensors
        if key in tensors:
            return other in tensors and tensors[key].shape == tensors[other].shape
        modules = self.board.inventory.modules
        if other not in modules or modules[key].kind != modules[other].kind:
            return False
        one, two = modules[key].tensors, modules[other].tensors
        return {n: t.shape for n, t in one.items()} == {n: t.shape for n, t in two.items()}


def _general(name: Name) -> Name:
    return tuple("*" if part.isdigit() else part for part in name)
