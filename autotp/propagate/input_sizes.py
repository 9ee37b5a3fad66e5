"""Which sizes of a forward's inputs a size inside of it is.

From a value back to what it was computed of, an op at a time, as long as it is plain where a dim comes from.
What is lost on the way (a tensor made of numbers, a window) is a size of the inputs where it equals one: the
sizes of made samples are primes. Where several are equal it may be any of them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from autotp.propagate.call import normal_dim
from autotp.propagate.ops import arguments_of, op_name
from autotp.trace.formulas import Formula, Size
from autotp.trace.graph import REPEATED, Trace, Val, named_place

__all__ = ["LENGTH", "Inputs"]

LENGTH = "the length of the cache"
"""Where a size comes from that no tensor among the inputs has."""


@dataclass(frozen=True)
class _From:
    """The dim of a node."""

    node: fx.Node
    dim: int

    @property
    def size(self) -> int:
        return _shape(self.node)[self.dim]


class Inputs:
    """The sizes of the inputs of one forward of a trace, the `turn`-th; `parameters` are the forward's."""

    def __init__(self, trace: Trace, turn: int, parameters: tuple[tuple[str, Any], ...]) -> None:
        self.trace = trace
        self.nodes = {_owner(node): node for node in trace.graph.nodes if node.op != "output"}
        entered = trace.entered.get("", [])
        self.places = {
            node: named_place(parameters, place)
            for place, node in (entered[turn] if turn < len(entered) else ())
        }
        self.sizes = [
            Size((place, d), n)
            for node, place in self.places.items()
            for d, n in enumerate(_shape(node))
            if n > 1
        ]
        cached = [_shape(o.node) for o in trace.outputs if o.cached] if turn else []
        self.lengths = {shape[-2] for shape in cached if len(shape) > 2}
        self._known: dict[tuple[fx.Node, int], list[Formula]] = {}

    def of(self, size: Size) -> list[Formula]:
        """What a size that the code read may be: any of these; none, where that is not known."""
        name, dim = size.dim
        node = self.nodes.get(name)
        if node is not None and dim < len(_shape(node)):
            return self._of(_From(node, dim))
        return [size.number] if name.startswith("=") else self._equal(size.number)

    def everything(self) -> list[Size]:
        """All sizes of the inputs."""
        return self.sizes

    def _of(self, at: _From) -> list[Formula]:
        key = (at.node, at.dim)
        if key not in self._known:
            self._known[key] = [at.size]  # while it is looked for
            self._known[key] = self._found(at)
        return self._known[key]

    def _found(self, at: _From) -> list[Formula]:
        while True:
            if at.node in self.places:
                return [Size((self.places[at.node], at.dim), at.size)]
            if at.node.op == "get_attr":
                return [at.size]
            if at.node.op == "placeholder":
                return self._equal(at.size, earlier=True)
            before = list(_before(at))
            if any(isinstance(one, _From) and one.dim >= len(_shape(one.node)) for one in before):
                before = []
            if len(before) != 1 or not isinstance(before[0], _From):
                break
            at = before[0]
        if not before:
            return self._equal(at.size) or ([at.size] if _is_part(at) else [])
        text, *parts = before
        if not parts:
            return [text]  # a number
        found = [[part] if isinstance(part, int) else self._of(part) for part in parts]
        formulas: list[Formula] = found[0]
        for more in found[1:]:
            formulas = [(text, one, other) for one in formulas for other in more]
        return formulas

    def _equal(self, number: int, *, earlier: bool = False) -> list[Formula]:
        """The sizes of the inputs that a number equals."""
        same: list[Formula] = [size for size in self.sizes if size.number == number]
        if not same and number in self.lengths:
            same = [Size((LENGTH, 0), number)]
        return same if same or number > 1 or earlier else [number]


def _before(at: _From) -> Iterator[Any]:
    """Where the dim of an op's result comes from: one dim; a number; a text and the dims whose sizes it
    computes with; or nothing that is known."""
    node, dim, n = at.node, at.dim, at.size
    sources = [each for each in node.all_input_nodes if _shape(each) or isinstance(each.meta["val"], Val)]
    if node.target is REPEATED:
        yield _From(node.args[0], dim)  # type: ignore[arg-type]
        return
    if node.target is operator.getitem:
        source = node.all_input_nodes[0]
        yield from _of_several(source, at)
        return
    if not sources:
        return
    named, name, first = arguments_of(node), op_name(node), sources[0]
    whole = _shape(first)
    if name in _MOVES:
        yield _From(first, _MOVES[name](named, len(whole))[dim])
    elif name == "cat":
        # Beside others an empty tensor of one dim adds nothing.
        parts = [part for part in named["tensors"] if len(_shape(part)) == len(_shape(node))]
        if dim != normal_dim(named.get("dim") or 0, len(_shape(node))):
            yield _From(parts[0], dim)
        else:
            yield "({0} + {1})"
            yield from (_From(part, dim) for part in parts)
    elif name in _VIEWS:
        yield from _of_view(first, at)
    elif name in ("linear", "matmul", "mm", "bmm", "addmm"):
        a, b = (sources[1], sources[2]) if name == "addmm" else (sources[0], sources[1])
        last = dim == len(_shape(node)) - 1
        if name == "linear":
            yield _From(b, 0) if last else _From(a, dim)
        elif len(_shape(a)) == len(_shape(b)) == len(_shape(node)):
            yield _From(b if last else a, dim)
    elif name == "embedding":
        ids = sources[1]
        yield _From(ids, dim) if dim < len(_shape(ids)) else n
    else:
        yield from _of_like(node, sources, named, at)


def _of_like(node: fx.Node, sources: list[fx.Node], named: dict[str, Any], at: _From) -> Iterator[Any]:
    """An op whose results have the dims of what it is given, broadcast, or without those that it reduces."""
    first, rank = sources[0], len(_shape(node))
    whole = _shape(first)
    if len(whole) > rank:
        dims = named.get("dim")
        dims = [dims] if isinstance(dims, int) else dims
        if not dims:
            return
        gone = {normal_dim(d, len(whole)) for d in dims}
        kept = [d for d in range(len(whole)) if d not in gone]
        if len(kept) == rank and whole[kept[at.dim]] == at.size:
            yield _From(first, kept[at.dim])
        return
    for source in sources:
        shape = _shape(source)
        there = at.dim - (rank - len(shape))
        if there >= 0 and shape[there] == at.size:
            yield _From(source, there)
            return


def _of_several(source: fx.Node, at: _From) -> Iterator[Any]:
    """One of several results."""
    inputs = source.all_input_nodes
    if not inputs:
        return
    whole, shape, named = _shape(inputs[0]), _shape(at.node), arguments_of(source)
    dim = at.dim
    if op_name(source) == "unbind":
        dim += dim >= normal_dim(named.get("dim") or 0, len(whole))
    elif len(whole) != len(shape):
        return
    if whole[dim] == at.size:
        yield _From(inputs[0], dim)
    elif _is_number(_From(inputs[0], dim)):
        yield at.size


def _is_part(at: _From) -> bool:
    """Whether an op takes a part of a dim, or makes one of another size of it, whose size is the model's."""
    sources = [each for each in at.node.all_input_nodes if len(_shape(each)) == len(_shape(at.node))]
    name = op_name(at.node)
    if name == "histc":
        return True  # a bin for each expert, say
    if not sources or name in _SIZED or name.startswith("new_"):
        return False
    there = _From(sources[0], at.dim)
    return there.size > 1 and _is_number(there)


_SIZED = ("expand", "repeat", "tile", "repeat_interleave", "pad", "constant_pad_nd", "index", "gather")


def _is_number(at: _From) -> bool:
    """Whether a size is one of the model, and of no input."""
    for _ in range(4096):
        if at.node.op in ("get_attr", "placeholder"):
            return at.node.op == "get_attr"
        before = list(_before(at))
        if any(isinstance(one, _From) and one.dim >= len(_shape(one.node)) for one in before):
            return False
        if len(before) != 1:
            return bool(before) and all(_is_number(b) for b in before[1:] if isinstance(b, _From))
        if not isinstance(before[0], _From):
            return True
        at = before[0]
    return False


def _of_view(source: fx.Node, at: _From) -> Iterator[Any]:
    """The dims of a view are those of its source, or groups of them."""
    theirs, ours = list(_shape(source)), list(_shape(at.node))
    i = j = 0
    while i < len(theirs) or j < len(ours):
        left, right = [i], [j]
        a = theirs[i] if i < len(theirs) else 1
        b = ours[j] if j < len(ours) else 1
        i, j = i + 1, j + 1
        while a != b:
            if a < b and i < len(theirs):
                a *= theirs[i]
                left.append(i)
                i += 1
            elif b < a and j < len(ours):
                b *= ours[j]
                right.append(j)
                j += 1
            else:
                return
        if at.dim not in right:
            continue
        from_ = [_From(source, d) for d in left if d < len(theirs)]
        from_ = [one for one in from_ if one.size != 1] or from_[:1]
        others = math.prod(ours[d] for d in right if d != at.dim)
        if len(right) == 1 and len(from_) == 1:
            yield from_[0]
        elif len(right) == 1 and from_:
            yield "({0} * {1})"
            yield from from_
        elif others == 1 and len(from_) == 1:
            yield from_[0]
        elif at.size == 1 or (from_ and all(map(_is_number, from_))):
            yield at.size
        return


def _transposed(named: dict[str, Any], rank: int) -> list[int]:
    order = list(range(rank))
    one, other = normal_dim(named["dim0"], rank), normal_dim(named["dim1"], rank)
    order[one], order[other] = other, one
    return order


def _squeezed(named: dict[str, Any], rank: int) -> list[int]:
    gone = normal_dim(named["dim"], rank)
    return [d for d in range(rank) if d != gone]


_VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze")
_MOVES = {
    "transpose": _transposed,
    "t": lambda named, rank: list(range(rank))[::-1],
    "permute": lambda named, rank: [normal_dim(d, rank) for d in named["dims"]],
    "select": _squeezed,
}


def _owner(node: fx.Node) -> str:
    return f"={node.meta['name']}" if node.op == "get_attr" else node.name


def _shape(node: fx.Node) -> tuple[int, ...]:
    val = node.meta.get("val")
    return val.shape if isinstance(val, Val) else ()
