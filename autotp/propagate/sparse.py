"""The same walk as the engine's, only where something is sharded: for trying many plans on one trace.

Whatever no shard and no mapping reaches is `Invariant`, and is not visited. Nothing else differs, but that
the walk stops at the first conflict when it is asked to. What is found is tried, not proven.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx

from autotp.placement import INVARIANT, Layout
from autotp.propagate.engine import Engine, Walk
from autotp.propagate.propagation import Propagation
from autotp.trace.graph import Trace

__all__ = ["sparse"]


class _Index:
    """What a sparse walk looks up in a trace, made once for each trace."""

    def __init__(self, trace: Trace) -> None:
        self.places = {node: place for place, node in enumerate(trace.graph.nodes)}
        self.nodes = list(self.places)
        self.tensors: dict[str, list[fx.Node]] = defaultdict(list)
        for node in self.nodes:
            if node.op == "get_attr":
                self.tensors[node.meta["name"]].append(node)
        self.backward = [n for n in self.nodes if n.meta.get("backward")]


def sparse(trace: Trace, *, until_conflict: bool = False) -> Walk:
    """The engine for `propagate` that visits only what a shard reaches in this trace."""
    index = _Index(trace)
    return lambda result, kinds: _Sparse(result, kinds, index, until_conflict)


class _Layouts(dict[fx.Node, list[Layout]]):
    """Layouts of which only those that are not Invariant are held; `unknown` have none."""

    def __init__(self) -> None:
        super().__init__()
        self.unknown: set[fx.Node] = set()

    def __missing__(self, node: fx.Node) -> list[Layout]:
        if node in self.unknown:
            raise KeyError(node)
        vals = node.meta.get("val")
        return [INVARIANT] * (len(vals) if isinstance(vals, list) else 1)

    def __contains__(self, node: object) -> bool:
        return node not in self.unknown

    def get(self, node: fx.Node, default: Any = None) -> Any:
        return default if node in self.unknown else self[node]


class _Sparse(Engine):
    def __init__(
        self, result: Propagation, kinds: Mapping[str, str], index: _Index, until_conflict: bool
    ) -> None:
        super().__init__(result, kinds)
        self.index = index
        self.until_conflict = until_conflict

    def run(self) -> Propagation:
        """Walk the graph in order from the sharded tensors on."""
        nodes, places = self.index.nodes, self.index.places
        layouts = _Layouts()
        self.result.layouts, self.result.computed = layouts, _Layouts()
        self.origins = defaultdict(frozenset)
        heap = sorted({places[node] for node in self._starts()})
        queued = set(heap)
        while heap:
            node = nodes[heapq.heappop(heap)]
            if node.op == "get_attr":
                self._attribute(node)
            elif node.op == "call_function":
                self._guarded(node)
            if self.result.findings and self.until_conflict:
                return self.result
            if not dict.__contains__(layouts, node):
                layouts.unknown.add(node)
            elif all(layout == INVARIANT for layout in layouts[node]):
                continue
            for place in (places[user] for user in node.users if user.op != "output"):
                if place not in queued:
                    queued.add(place)
                    heapq.heappush(heap, place)
        self._outputs()
        self._foreign_backward()
        return self.result

    def _starts(self) -> Iterator[fx.Node]:
        for name in (*self.result.cuts, *self.result.reads):
            yield from self.index.tensors.get(name, ())
        yield from self.result.grants
        yield from self.result.mapped
        for path, region in self.result.regions.items():
            for call, entered in enumerate(self.result.trace.entered.get(path, ())):
                for place, node in entered:
                    if place in region.copied:
                        yield from (u for u in node.users if (path, call) in u.meta.get("stack", ()))

    def _foreign_backward(self) -> None:
        if self.index.backward:
            super()._foreign_backward()
