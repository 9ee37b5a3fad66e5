"""Where the search starts: every matrix that the forward uses, in the order of its use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autotp.derive.assignment import Board
from autotp.plan import Rule
from autotp.trace.graph import Trace

__all__ = ["Seed", "seeds"]


@dataclass(frozen=True)
class Seed:
    """A tensor that may be cut, the rule's key, and the rules to begin with."""

    name: str
    key: str
    rules: tuple[Rule, ...]


def seeds(board: Board, traces: list[Trace]) -> Iterator[Seed]:
    """The matrices of the model, by their first names, as the traces read them."""
    seen: set[str] = set()
    for trace in traces:
        for node in trace.graph.nodes:
            name = node.meta.get("name") if node.op == "get_attr" else None
            if name is None or name in seen or node.meta["origin"] != "parameter" or not node.users:
                continue
            seen.add(name)
            tensor = board.tensors.get(name)
            if tensor is not None and len(tensor.shape) > 1:
                yield Seed(name, board.key(name), _rules(board, name))


def _rules(board: Board, name: str) -> tuple[Rule, ...]:
    """An embedding's rows, a layer's output features, any dim of another tensor."""
    names = board.names.get(name, [name])
    if board.key(name) != name:
        kinds = {board.owner(n).kind for n in names}
        return (Rule(style="vocab" if board.owner(name).kind == "embedding" else "column"),) if kinds else ()
    shape = board.tensors[name].shape
    return tuple(Rule(style="column", dim=dim) for dim, size in enumerate(shape) if size >= board.tp)
