"""What the model's code compares must not come out one way unsharded and another way on a rank.

A comparison of sizes that are cut with numbers of the model comes out the same in every run, so that the dual
trace has shown it. One that has both a size that is cut and a size of the input in it may come out in any
way: `if x.shape[1] < h.shape[-1]` differs on a rank for a sequence between its part and the whole. So does
`h[..., : x.shape[1]]` (a slice compares its bounds with the size) and a split into parts of that size.

A size that is cut may be compared as a plain number, too (`int(h.shape[-1])`): then a rank's trace compares
the size of the input with another number. And what is compared with a size that is cut may be a size of the
input by another name (`len(x)`): where the code asks anything of sizes that are cut, the proof is made again
with inputs of those sizes (`trace/witnesses.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autotp.placement import INVARIANT, Shard
from autotp.propagate.arguments import local_shape
from autotp.propagate.call import Conflict
from autotp.propagate.findings import origins_of
from autotp.propagate.ops import arguments_of, op_name
from autotp.propagate.propagation import Finding, Propagation
from autotp.trace.formulas import Dim
from autotp.trace.graph import Trace, Val
from autotp.trace.noting import by_shape

__all__ = ["asked_of_cuts", "compared_otherwise", "comparisons", "decides"]


def comparisons(whole: Propagation) -> list[Finding]:
    """The comparisons that have both in them."""
    return list(_Comparisons(whole).found()) if whole.cuts else []


def decides(whole: Propagation, argument: Dim) -> bool:
    """Whether the model's code asks something of an argument, so that another number may take another way: a
    slice does not, of a dim that is whole."""
    known = _Comparisons(whole)
    return any(
        argument in one.dims and (not one.bound or any(map(known.is_cut, one.dims)))
        for one in whole.trace.compared
    )


def compared_otherwise(whole: Propagation, local: Trace, rank: int) -> Finding | None:
    """A size of the input that a rank compares with another number than the unsharded model."""
    theirs = {(one.place, one.values) for one in local.compared}
    known = _Comparisons(whole)
    for one in whole.trace.compared:
        if one.bound or one.escaped or (one.place, one.values) in theirs or any(map(known.is_cut, one.dims)):
            continue
        free = next((dim for dim in sorted(one.dims) if known.is_free(dim)), None)
        if free is not None:
            node = known.node(free)
            assert node is not None
            there = sorted({o.values for o in local.compared if o.place == one.place and not o.escaped})
            message = (
                f"a size of the input ({known.size(free)} in the trace) is compared: {_said(one.values)} "
                f"unsharded, {' and '.join(map(_said, there)) or 'nothing'} on rank {rank}: for some inputs "
                "it comes out another way on a rank"
            )
            return Finding(node, Conflict("AT328", message, help=_HELP), origins_of(whole, node), one.source)
    return None


def _said(values: tuple[int | float | str, ...]) -> str:
    return " with ".join(map(str, values))


def asked_of_cuts(whole: Propagation) -> set[tuple[int, int]]:
    """The sizes that are cut of which the model's code asks anything, but whether they equal other sizes;
    each with that of a rank's part. What equals a batch and something cut in one dim grows with the batch:
    no size of the inputs is the one to try."""
    known = _Comparisons(whole)
    asked = {(dim, one.equal) for one in whole.trace.compared if not one.sizes for dim in one.dims}
    cut = {dim for dim, equal in asked if known.is_cut(dim) and not (equal and known.is_merged(dim))}
    return {(known.size(dim), part) for dim in cut for part in known.parts(dim) if part != known.size(dim)}


_HELP = ("compare with the whole number: keep it in an attribute of the module",)


class _Comparisons:
    def __init__(self, whole: Propagation) -> None:
        self.whole = whole
        self.nodes = {_owner(n): n for n in whole.trace.graph.nodes if n.op != "output"}
        self.shaped: dict[str, list[fx.Node]] = {}  # an exported trace knows tensors by their shapes
        for node in self.nodes.values() if whole.trace.route == "export" else ():
            self.shaped.setdefault(by_shape(_shape(node)), []).append(node)
        inputs = (n for n in self.nodes.values() if n.op == "placeholder")
        self.sizes = {size for n in inputs for size in _shape(n) if size > 1}

    def found(self) -> Iterator[Finding]:
        for one in self.whole.trace.compared:
            cut = next((dim for dim in sorted(one.dims) if self.is_cut(dim)), None)
            free = next((dim for dim in sorted(one.dims) if self.is_free(dim)), None)
            if cut is not None and free is None and not one.bound and self.is_merged(cut):
                free = cut  # a batch and what is cut, in one dim
            if cut is None or free is None or one.escaped or (one.equal and self.is_merged(cut)):
                continue
            node = self.node(cut)
            assert node is not None
            conflict = Conflict(
                "AT328",
                f"a size of which each rank has a part ({self.size(cut)} unsharded) is compared with a size "
                f"of the input ({self.size(free)} in the trace): for some inputs it comes out another way "
                "on a rank",
                help=_HELP,
            )
            yield Finding(node, conflict, origins_of(self.whole, node), one.source)
        for node in self.whole.trace.ops():
            message = self._parts_of_input(node)
            if message:
                yield Finding(node, Conflict("AT328", message), origins_of(self.whole, node))

    def _parts_of_input(self, node: fx.Node) -> str:
        length = arguments_of(node).get("split_size") if op_name(node) == "split" else None
        if not isinstance(length, int):
            return ""
        source = node.all_input_nodes[0]
        cut = (_owner(source), (arguments_of(node).get("dim") or 0) % len(_shape(source)))
        if length <= self.size(cut) or not self.is_cut(cut) or not self._counts_input(length):
            return ""
        return (
            f"split into parts of {length}, a size of the input, of a dim of {self.size(cut)} that "
            "is cut: for some inputs a rank has one part where the whole value has more"
        )

    def _counts_input(self, number: int) -> bool:
        return any(number % size == 0 for size in self.sizes)

    def node(self, dim: Dim) -> fx.Node | None:
        """The tensor of a dim; of several of that shape, one that is cut there."""
        name, at = dim
        same = self.shaped.get(name, [])
        return self.nodes.get(name) or next((n for n in same if self._cut(n, at)), next(iter(same), None))

    def size(self, dim: Dim) -> int:
        """The size of a dim unsharded."""
        node = self.node(dim)
        assert node is not None
        return _shape(node)[dim[1]]

    def is_cut(self, dim: Dim) -> bool:
        """Whether each rank has a part of a dim."""
        node = self.node(dim)
        return node is not None and self._cut(node, dim[1])

    def _cut(self, node: fx.Node, dim: int) -> bool:
        return self._parts(node, dim) != {_shape(node)[dim]}

    def parts(self, dim: Dim) -> set[int]:
        """The sizes of a dim on the ranks."""
        node = self.node(dim)
        assert node is not None
        return self._parts(node, dim[1])

    def _parts(self, node: fx.Node, dim: int) -> set[int]:
        layout = self.whole.layouts.get(node, [INVARIANT])[0]
        return {local_shape(_shape(node), layout, r)[dim] for r in range(self.whole.matches.tp)}

    def is_merged(self, dim: Dim) -> bool:
        """Whether it is a batch and something cut in one dim: what equals it has the batch in it, too, and
        each rank's trace shows that they are equal there."""
        node = self.node(dim)
        assert node is not None
        layout = self.whole.layouts[node][0]
        groups = layout.groups if isinstance(layout, Shard) and layout.dim == dim[1] else 1
        return groups > 1 and self._counts_input(groups)

    def is_free(self, dim: Dim) -> bool:
        """Whether it is a multiple of a size of the inputs, and none of a parameter's."""
        node = self.node(dim)
        if node is None or node.op == "get_attr" or self.is_cut(dim):
            return False
        return self.size(dim) > 0 and self._counts_input(self.size(dim))


def _owner(node: fx.Node) -> str:
    return f"={node.meta['name']}" if node.op == "get_attr" else node.name


def _shape(node: fx.Node) -> tuple[int, ...]:
    val = node.meta["val"]
    return val.shape if isinstance(val, Val) else ()
