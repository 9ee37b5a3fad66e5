"""The dual trace: run the module once more as a rank, with the rank's local shapes, and compare.

The op sequence must be the same, every result must have the shape that its layout predicts, every tensor
argument must come from the same op, and every other argument must be what `arguments.expected` says. This
finds what raises nothing: OPT's `view(b, -1, heads, head_dim)` with half the heads runs, and is wrong.
It proves shapes and arguments, not sums: those are the layout rules' part.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from autotp.placement import describe
from autotp.propagate.alike import has_node, plain, shapes_said
from autotp.propagate.arguments import Local, expected, local_shape
from autotp.propagate.beside import left, taken
from autotp.propagate.compared import compared_otherwise
from autotp.propagate.findings import CONSTANT, finding_in, finding_of
from autotp.propagate.heads import GATHER, HELP
from autotp.propagate.mapped import MARK, stripped
from autotp.propagate.ops import arguments_of, op_name, silent, spoken
from autotp.propagate.propagation import Finding, Propagation
from autotp.propagate.repeated import Unlike, same_repeats
from autotp.trace.graph import GRADIENT, OPAQUE, REPEATED, Trace, TraceError, Val

__all__ = ["compare", "failed", "local_call"]


def _vals(node: fx.Node) -> list[Val | None]:
    vals = node.meta["val"]
    return vals if isinstance(vals, list) else [vals]


def _results(whole: Propagation, node: fx.Node, rank: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of an op's results on a rank."""
    return tuple(
        local_shape(val.shape, layout, rank) if val is not None else ()
        for val, layout in zip(_vals(node), whole.computed[node], strict=True)
    )


def local_call(whole: Propagation, node: fx.Node, rank: int) -> Local:
    """An op call of the whole trace as `rank` must see it."""
    source = next(iter(node.all_input_nodes), None)
    layouts = whole.layouts.get(source, []) if source is not None else []
    val = source.meta["val"] if source is not None else None
    return Local(
        rank,
        _named(node),
        val.shape if isinstance(val, Val) else (),
        layouts[0] if layouts else whole.computed[node][0],
        _results(whole, node, rank),
    )


def compare(whole: Propagation, local: Trace, rank: int, *, broken: bool = False) -> Finding | None:
    """The first op where a rank's run is not its part of the whole run; `broken` for a run that raised, of
    which only the beginning is there.

    Raises Unlike where a rank leaves out other layers that repeat each other.
    """
    return _Comparison(whole, rank).run(local, broken=broken)


class _Comparison:
    def __init__(self, whole: Propagation, rank: int) -> None:
        self.whole = whole
        self.rank = rank
        self.ids: dict[fx.Node, Any] = {}
        self.made: dict[Any, fx.Node] = {}  # the ops of the whole trace by their ids

    def run(self, local: Trace, *, broken: bool) -> Finding | None:
        wanted, got = self.whole.trace.ops(), local.ops()
        for graph in (self.whole.trace.graph, local.graph):
            self._number(graph)
        finding = taken(self.whole, local, self.rank)
        if finding is not None:
            return finding
        i = j = 0
        while i < len(wanted) and j < len(got):
            if op_name(got[j]) == MARK:
                finding = self._marked(got[j])
                if finding is not None:
                    return finding
                j += 1
                continue
            if op_name(wanted[i]) != op_name(got[j]):
                if self._silent(wanted[i]):
                    self.ids[wanted[i]] = self._seen(wanted[i].all_input_nodes[0])
                    i += 1
                    continue
                if _left_out(got[j], *_around(got[j])):
                    self.ids[got[j]] = self._id(got[j].all_input_nodes[0])
                    j += 1
                    continue
                return self._other_op(wanted[i], got[j])
            self.ids[wanted[i]] = self.ids[got[j]] = ("op", i)
            self.made["op", i] = wanted[i]
            finding = self._op(wanted[i], got[j])
            if finding is not None:
                return finding
            i, j = i + 1, j + 1
        if broken:
            return None
        for node in filter(silent, (*wanted[i:], *got[j:])):
            self.ids[node] = self._seen(node.all_input_nodes[0])
        for mark in (n for n in got[j:] if op_name(n) == MARK):
            finding = self._marked(mark)
            if finding is not None:
                return finding
        if not all(silent(n) or op_name(n) == MARK for n in (*wanted[i:], *got[j:])):
            node = wanted[i] if i < len(wanted) else got[j]
            return self._finding(
                node if i < len(wanted) else wanted[-1],
                "AT315",
                f"rank {self.rank} runs {len(got)} ops, the unsharded model {len(wanted)}: "
                f"a rank's smaller sizes take another branch",
                source=node,
            )
        if not same_repeats(self.whole.trace, local, self._seen, self._id):
            raise Unlike
        return (
            self._ends(local)
            or left(self.whole, local, self.rank)
            or compared_otherwise(self.whole, local, self.rank)
        )

    def _ends(self, local: Trace) -> Finding | None:
        """What leaves the forward behind a mapping, or must not."""
        whole = self.whole.trace
        ours, theirs = (*whole.outputs, *whole.stored), (*local.outputs, *local.stored)
        for one, other in zip(ours, theirs, strict=False):
            if one.node in self.whole.mapped and self._seen(one.node) != self._id(other.node):
                return self._unmapped(one.node)
            behind = other.node.op == "call_function" and op_name(other.node) == MARK
            if behind and self._seen(one.node) != self._id(other.node):
                step = other.node.args[2]
                message = f"the forward gives back a value that goes through {step} for another reader"
                help = () if step == "share" else HELP
                return self._finding(one.node, "AT303", message, source=other.node, help=help)
        return None

    def _marked(self, mark: fx.Node) -> Finding | None:
        """A mapping in the edited code: it must be one that the layouts ask for, of the right values."""
        value, others, step, *_ = mark.args
        assert isinstance(value, fx.Node) and isinstance(others, (list, tuple))
        source = self._id(value)
        if step == "share":
            if source not in (self._seen(n) for _, n in self.whole.shared):
                return self._mapping(mark, "share stands around a value that is not shared there")
            self.ids[mark] = (step, source)
            return None
        if step == "copy" and source in (self._seen(n) for _, n in self.whole.copied_in):
            self.ids[mark] = (step, source)
            return None
        made = self.made.get(stripped(source))
        asked = self.whole.mapped.get(made, ()) if made is not None else ()
        operands = [self._id(n) for n in others if isinstance(n, fx.Node)]
        if made is None or step not in asked:
            if step == "copy" and not _grad(value):
                self.ids[mark] = source  # without a gradient a copy is the value itself
                return None
            return self._mapping(mark, f"{step} stands around a value that is not mapped there")
        if operands and operands != [self._seen(n) for n in made.all_input_nodes[:1]]:
            return self._mapping(mark, f"{step} is given another value than the {op_name(made)}")
        self.ids[mark] = (step, source)
        return None

    def _mapping(self, node: fx.Node, message: str) -> Finding:
        return self._finding(self.whole.trace.ops()[0], "AT303", message, source=node)

    def _seen(self, node: fx.Node) -> Any:
        """A value of the whole trace as its readers must see it: behind its mappings."""
        found = self._id(node)
        if node.target is REPEATED:
            found = (str(REPEATED), self._seen(node.all_input_nodes[0]), node.args[1])
        for step in self.whole.mapped.get(node, ()):
            found = found if step == "copy" and not _grad(node) else (step, found)
        return found

    def _given(self, reader: fx.Node, node: fx.Node) -> Any:
        """A value as one of its readers must be given it."""
        found = self._seen(node)
        if (reader, node) in self.whole.copied_in:
            return ("copy", found)
        return ("share", found) if (reader, node) in self.whole.shared else found

    def _silent(self, wanted: fx.Node) -> bool:
        """Whether the rank may leave out an op of the whole run."""
        source = wanted.all_input_nodes[0] if wanted.all_input_nodes else None
        if silent(wanted) or source is None or source not in self.whole.computed:
            return silent(wanted)
        (before, *_), (after, *_) = (_results(self.whole, n, self.rank) for n in (source, wanted))
        return _left_out(wanted, before, after)

    def _number(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.op == "placeholder":
                self.ids[node] = ("input", node.meta["name"])
            elif node.op == "get_attr":
                self.ids[node] = ("tensor", node.meta["name"])

    def _id(self, node: fx.Node) -> Any:
        if node.target in (operator.getitem, REPEATED):
            return (str(node.target), self._id(node.all_input_nodes[0]), node.args[1])
        if node.target is GRADIENT:
            return (str(node.target), self._id(node.all_input_nodes[0]))
        return self.ids.get(node)

    def _finding(self, node: fx.Node, code: str, message: str, *notes: str, **known: Any) -> Finding:
        return finding_of(self.whole, node, code, message, *notes, **known)

    def _other_op(self, wanted: fx.Node, got: fx.Node) -> Finding:
        return self._finding(
            wanted,
            "AT315",
            f"the unsharded model runs {op_name(wanted)} here, rank {self.rank} runs {op_name(got)}: "
            "a rank's smaller sizes take another branch",
            source=got,
        )

    def _op(self, wanted: fx.Node, got: fx.Node) -> Finding | None:
        results = _results(self.whole, wanted, self.rank)
        finding = self._arguments(wanted, got)
        if finding is not None:
            return finding
        vals = got.meta["val"]
        shapes = tuple(v.shape if v is not None else () for v in (vals if isinstance(vals, list) else [vals]))
        if shapes != results:
            return self._finding(
                wanted,
                "AT313",
                f"{op_name(wanted)} gives {shapes_said(shapes)} on rank {self.rank}, "
                f"its part of the whole is {shapes_said(results)}",
                f"unsharded: {shapes_said(tuple(v.shape for v in _vals(wanted) if v is not None))}",
                help=CONSTANT,
            )
        return None

    def _arguments(self, wanted: fx.Node, got: fx.Node) -> Finding | None:
        ours, theirs = _named(wanted), _named(got)
        local = local_call(self.whole, wanted, self.rank)

        def given(node: fx.Node) -> Any:
            return self._given(wanted, node)

        for name in sorted(ours.keys() | theirs.keys()):
            here = theirs.get(name)
            if has_node(ours.get(name)) or has_node(here):
                if self._places(ours.get(name), given) != self._places(here, self._id):
                    lacking = self._unmapped(ours.get(name)) or self._uncopied(wanted, ours.get(name))
                    if lacking is not None:
                        return lacking
                    return self._finding(
                        wanted,
                        "AT315",
                        f"{op_name(wanted)} reads another value on rank {self.rank} than unsharded",
                        source=got,
                    )
                continue
            if wanted.target is OPAQUE:
                if ours.get(name) == here:
                    continue
                return self._finding(wanted, "AT326", f"{_HANGS}, on rank {self.rank}", help=(_WHOLE,))
            want = expected(op_name(wanted), name, local, here)
            if plain(want) != plain(here):
                return self._finding(
                    wanted,
                    "AT313",
                    f"{op_name(wanted)} is called with {name}={here} on rank {self.rank}; "
                    f"its part of the whole needs {name}={want}",
                    f"unsharded: {name}={ours.get(name)}",
                    source=got,
                    help=_LOCAL if plain(want) == ours.get(name) else CONSTANT,
                )
        return None

    def _places(self, argument: Any, of: Callable[[fx.Node], Any]) -> Any:
        """Where the tensors of an argument come from."""
        if isinstance(argument, fx.Node):
            return of(argument)
        if isinstance(argument, (list, tuple)):
            return [self._places(a, of) for a in argument]
        return argument

    def _unmapped(self, argument: Any) -> Finding | None:
        """The mapped value among an argument's, if its mapping stands nowhere in the code yet."""
        values = argument if isinstance(argument, (list, tuple)) else [argument]
        value = next((v for v in values if isinstance(v, fx.Node) and v in self.whole.mapped), None)
        if value is None:
            return None
        if self.whole.mapped[value] == GATHER:
            return self._head(value)
        source = next(iter(value.all_input_nodes))
        layout = self.whole.layouts[source][0]
        note = f"{spoken(source)} {list(source.meta['val'].shape)} {describe(layout)}"
        message = f"{op_name(value)} over a dim that is sharded: each rank has only its part"
        return self._finding(value, "AT303", message, note)

    def _uncopied(self, reader: fx.Node, argument: Any) -> Finding | None:
        """A head that is not given a copy yet."""
        values = argument if isinstance(argument, (list, tuple)) else [argument]
        lacking = any((reader, v) in self.whole.copied_in for v in values if isinstance(v, fx.Node))
        if lacking and self.whole.at_use:
            message = (
                f"{op_name(reader)} meets a shard with a value that is used whole as well, and no expression "
                "of the model's code is known where it could be copied for this use alone"
            )
            return self._finding(
                reader, "AT305", message, help=("use it on sharded values in a statement of its own",)
            )
        return self._head(reader) if lacking else None

    def _head(self, node: fx.Node) -> Finding:
        message = (
            f"{op_name(node)} with a table that is sharded by words: each rank has the logits of its own"
        )
        return self._finding(node, "AT312", message, help=HELP)


def _grad(node: fx.Node) -> bool:
    return any(val is not None and val.grad for val in _vals(node))


_HANGS = "its forward asks for the value of a tensor, and its ops hang on the size of something that is cut"
_WHOLE = "keep the number of the whole model in an attribute of the module"
_LOCAL = (
    "the model uses a rank's own size here, and the op needs that of the whole model: keep the number in an "
    "attribute, or gather the value first",
)


def _named(node: fx.Node) -> dict[str, Any]:
    return {name: plain(value) for name, value in arguments_of(node).items()}


def _around(node: fx.Node) -> tuple[Sequence[int], ...]:
    """The shapes of an op's first input and of its first result."""
    found = [v for n in (*node.all_input_nodes[:1], node) for v in _vals(n)[:1]]
    return tuple(v.shape for v in found if v is not None) if len(found) == 2 else ()


def _left_out(node: fx.Node, before: Sequence[int] = (), after: Sequence[int] = (-1,)) -> bool:
    """Whether an op may or may not be there: by the strides, or, where `x[...] = y` assigns, by whether y has
    the very shape of what it is written into. `before` and `after` are the shapes around the op."""
    if silent(node):
        return True
    if op_name(node) not in ("view", "expand") or any(
        op_name(u) not in ("copy", "expand") for u in node.users
    ):
        return False
    more = len(before) - len(after)
    return more >= 0 and tuple(before[more:]) == tuple(after) and set(before[:more]) <= {1}


def failed(whole: Propagation, error: TraceError, rank: int) -> Finding:
    """A rank's run that raises although the unsharded one does not: where it left the way, or where it
    raised."""
    parted = compare(whole, error.trace, rank, broken=True) if error.trace is not None else None
    if parted is not None:
        return parted
    found = finding_in(
        whole,
        error.module,
        "AT315",
        f"the unsharded model runs, rank {rank} with its local sizes does not: {error}",
        help=CONSTANT,
    )
    if error.source is not None:
        found.node.meta["source"] = error.source
    return found
