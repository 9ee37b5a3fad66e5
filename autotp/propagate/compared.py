"""What the model's code compares must not come out one way unsharded and another way on a rank.

A comparison of sizes that are cut with numbers of the model comes out the same in every run, so that the dual
trace has shown it. One that has both a size that is cut and a size of the input in it may come out in any
way: `if x.shape[1] < h.shape[-1]` differs on a rank for a sequence between its part and the whole. So does
`h[..., : x.shape[1]]` (a slice compares its bounds with the size) and a split into parts of that size.
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
from autotp.trace.graph import Val
from autotp.trace.noted import Dim

__all__ = ["comparisons", "decides"]


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


class _Comparisons:
    def __init__(self, whole: Propagation) -> None:
        self.whole = whole
        self.nodes = {_owner(n): n for n in whole.trace.graph.nodes if n.op != "output"}
        inputs = (n for n in self.nodes.values() if n.op == "placeholder")
        self.sizes = {size for n in inputs for size in _shape(n) if size > 1}

    def found(self) -> Iterator[Finding]:
        for one in self.whole.trace.compared:
            cut = next((dim for dim in sorted(one.dims) if self.is_cut(dim)), None)
            free = next((dim for dim in sorted(one.dims) if self._is_free(dim)), None)
            if cut is None or free is None or (one.equal and self._is_merged(cut)):
                continue
            node = self.nodes[cut[0]]
            conflict = Conflict(
                "AT328",
                f"a size of which each rank has a part ({self._size(cut)} unsharded) is compared with a size "
                f"of the input ({self._size(free)} in the trace): for some inputs it comes out another way "
                "on a rank",
                help=("compare with the whole number: keep it in an attribute of the module",),
            )
            yield Finding(node, conflict, origins_of(self.whole, node), one.source)
        for node in self.whole.trace.ops():
            length = arguments_of(node).get("split_size") if op_name(node) == "split" else None
            if not isinstance(length, int):
                continue
            source = node.all_input_nodes[0]
            cut = (_owner(source), (arguments_of(node).get("dim") or 0) % len(_shape(source)))
            if length > self._size(cut) and self.is_cut(cut) and self._counts_input(length):
                message = (
                    f"split into parts of {length}, a size of the input, of a dim of {self._size(cut)} that "
                    "is cut: for some inputs a rank has one part where the whole value has more"
                )
                yield Finding(node, Conflict("AT328", message), origins_of(self.whole, node))

    def _counts_input(self, number: int) -> bool:
        return any(number % size == 0 for size in self.sizes)

    def _size(self, dim: Dim) -> int:
        return _shape(self.nodes[dim[0]])[dim[1]]

    def is_cut(self, dim: Dim) -> bool:
        """Whether each rank has a part of a dim."""
        node = self.nodes.get(dim[0])
        if node is None:
            return False
        layout = self.whole.layouts.get(node, [INVARIANT])[0]
        shape = _shape(node)
        return any(
            local_shape(shape, layout, r)[dim[1]] != shape[dim[1]] for r in range(self.whole.matches.tp)
        )

    def _is_merged(self, dim: Dim) -> bool:
        """Whether it is a batch and something cut in one dim: what equals it has the batch in it, too, and
        each rank's trace shows that they are equal there."""
        layout = self.whole.layouts[self.nodes[dim[0]]][0]
        groups = layout.groups if isinstance(layout, Shard) and layout.dim == dim[1] else 1
        return groups > 1 and self._counts_input(groups)

    def _is_free(self, dim: Dim) -> bool:
        """Whether it is a multiple of a size of the inputs, and none of a parameter's."""
        node = self.nodes.get(dim[0])
        if node is None or node.op == "get_attr" or self.is_cut(dim):
            return False
        return self._size(dim) > 0 and self._counts_input(self._size(dim))


def _owner(node: fx.Node) -> str:
    return f"={node.meta['name']}" if node.op == "get_attr" else node.name


def _shape(node: fx.Node) -> tuple[int, ...]:
    val = node.meta["val"]
    return val.shape if isinstance(val, Val) else ()
