"""The dual trace: run the module once more as a rank, with the rank's local shapes, and compare.

The op sequence must be the same, every result must have the shape that its layout predicts, every tensor
argument must come from the same op, and every other argument must be what `arguments.expected` says. This
finds what raises nothing: OPT's `view(b, -1, heads, head_dim)` with half the heads runs, and is wrong.
It proves shapes and arguments, not sums: those are the layout rules' part.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from autotp.match import Placed
from autotp.placement import Shard
from autotp.propagate.arguments import Local, expected, local_shape
from autotp.propagate.call import Conflict
from autotp.propagate.engine import Finding, Propagation, arguments_of, op_name
from autotp.propagate.reads import Read
from autotp.propagate.regions import Region
from autotp.trace.graph import GRADIENT, REPEATED, Repeat, Trace, TraceError, Val, tensors_in
from autotp.trace.inventory import kind_of
from autotp.trace.layers import Layers
from autotp.trace.modes import Mode
from autotp.trace.recorder import Guide

__all__ = [
    "SILENT", "compare", "distinct_ranks", "failed", "finding_at", "finding_in", "local_call", "silent",
    "trace_rank",
]  # fmt: skip

SILENT = frozenset(["contiguous", "alias"])  # ops that may or may not be there, by the strides


def distinct_ranks(shapes: Mapping[str, tuple[int, ...]], cuts: Mapping[str, Shard], tp: int) -> list[int]:
    """One rank for each distinct vector of local shapes."""
    seen: dict[tuple[Any, ...], int] = {}
    for rank in range(tp):
        key = tuple(cut.local_shape(shapes[name], rank) for name, cut in cuts.items())
        seen.setdefault(key, rank)
    return list(seen.values())


def trace_rank(
    module: nn.Module,
    mode: Mode,
    whole: Propagation,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    placed: Mapping[str, Placed],
    aliases: Mapping[str, str],
    rank: int,
    guide: Guide | None = None,
    layers: Layers | None = None,
) -> Trace:
    """The module as `rank` runs it in `mode`; layers that gather or split do so at their border. `guide` is
    the recorder's."""
    cuts, reads = whole.cuts, whole.reads

    def weight_cut(layer: Placed) -> Shard:
        return next(cuts[aliases.get(n, n)] for n in layer.layouts if n.rpartition(".")[2] == "weight")

    def before(path: str, inputs: tuple[Any, ...]) -> Any:
        layer = placed.get(path)
        if layer is None or not layer.rule.split_input or not inputs:
            return None
        whole = inputs[0]
        held = weight_cut(layer).local_size(whole.shape[-1], rank)
        return (whole.narrow(-1, 0, held).clone(), *inputs[1:])

    def after(path: str, output: Any) -> Any:
        layer = placed.get(path)
        if layer is None or not layer.rule.gather_output or not isinstance(output, torch.Tensor):
            return None
        cut = weight_cut(layer)
        weight = next(n for n in layer.layouts if n.rpartition(".")[2] == "weight")
        size = shapes[aliases.get(weight, weight)][cut.dim]
        return output.narrow(-1, 0, 1).expand(*output.shape[:-1], size).clone()

    parts = {**cuts, **{name: read.shard for name, read in reads.items() if read.shard is not None}}
    held = {name: cut.local_shape(shapes[name], rank) for name, cut in parts.items()}
    with _as_sharded(module, reads, whole.regions, aliases), _by_weight(module, placed):
        return mode.capture(
            module, shapes=held, before=before, after=after, like=whole.trace, guide=guide, layers=layers
        )


@contextlib.contextmanager
def _as_sharded(
    module: nn.Module, reads: Mapping[str, Read], regions: Mapping[str, Region], aliases: Mapping[str, str]
) -> Iterator[None]:
    """Read the tensors that are read mapped as the sharded model will: through a property of the class, and
    map at a region's border in its class's forward. Here both give an alias, so that what passes them by can
    be told."""
    swapped: list[tuple[nn.Module, type[nn.Module]]] = []
    made: dict[tuple[int, str], torch.Tensor] = {}
    try:
        for path, owner in module.named_modules():
            keys = [*owner._parameters, *owner._buffers]
            names = [k for k in keys if aliases.get(n := f"{path}.{k}" if path else k, n) in reads]
            body: dict[str, Any] = {name: property(_aliased(name, made)) for name in names}
            if path in regions:
                body["forward"] = _bordered(regions[path], type(owner))
            if body:
                swapped.append((owner, type(owner)))
                owner.__class__ = type(type(owner).__name__, (type(owner),), body)
        yield
    finally:
        for owner, own in swapped:
            owner.__class__ = own


def _bordered(region: Region, base: type[nn.Module]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = aliased((args, kwargs), region.copied)
        return aliased(base.forward(self, *args, **kwargs), region.reduced)

    def aliased(value: Any, places: frozenset[str]) -> Any:
        found = {id(t): torch.ops.aten.alias.default(t) for p, t, _ in tensors_in(value) if p in places}
        return pytree.tree_map(lambda leaf: found.get(id(leaf), leaf), value)

    return forward


@contextlib.contextmanager
def _by_weight(module: nn.Module, placed: Mapping[str, Placed]) -> Iterator[None]:
    """Conv1Ds and norms of the plan take their size from their weight, as the parallel layers do."""
    swapped: list[tuple[nn.Module, type[nn.Module]]] = []
    rows: list[tuple[nn.Module, int]] = []
    try:
        for path in placed:
            owner = module.get_submodule(path)
            if placed[path].style == "vocab" and owner.__dict__.get("padding_idx") is not None:
                rows.append((owner, owner.__dict__["padding_idx"]))
                owner.__dict__["padding_idx"] = None  # of all rows; the parallel layer knows whose it is
            forward = _BY_WEIGHT.get(kind_of(owner)) if placed[path].layouts else None
            if forward is not None:
                swapped.append((owner, type(owner)))
                owner.__class__ = type(type(owner).__name__, (type(owner),), {"forward": forward})
        yield
    finally:
        for owner, own in swapped:
            owner.__class__ = own
        for owner, row in rows:
            owner.__dict__["padding_idx"] = row


def _conv1d(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
    return y.view((*x.size()[:-1], self.weight.size(1)))


def _norm(self: Any, input: torch.Tensor) -> torch.Tensor:
    if isinstance(self, nn.RMSNorm):
        return F.rms_norm(input, tuple(self.weight.shape), self.weight, self.eps)
    return F.layer_norm(input, tuple(self.weight.shape), self.weight, self.bias, self.eps)


_BY_WEIGHT: dict[str, Callable[..., torch.Tensor]] = {"conv1d": _conv1d, "norm": _norm}


def _aliased(
    name: str, made: dict[tuple[int, str], torch.Tensor]
) -> Callable[[nn.Module], torch.Tensor | None]:
    def read(owner: nn.Module) -> torch.Tensor | None:
        stored = owner._parameters.get(name)
        tensor = owner._buffers.get(name) if stored is None else stored
        if tensor is None:
            return None
        key = (id(tensor), name)  # one object for every reading, as the tensor itself is
        if key not in made:
            made[key] = torch.ops.aten.alias.default(tensor)
        return made[key]

    return read


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


def same_repeats(whole: Trace, local: Trace) -> bool:
    """Whether the same layers are left out of both, repeating the same on the same values."""
    return _repeats(whole) == _repeats(local)


def silent(node: fx.Node) -> bool:
    """Whether an op may be left out. TorchScript detaches what has no gradient, in some runs."""
    return op_name(node) in SILENT or (op_name(node) == "detach" and not node.meta["grads"])


def _repeats(trace: Trace) -> list[Any]:
    """The repetitions, and what each is given, in names that both traces have."""
    ids: dict[fx.Node, Any] = {}
    ops = 0
    for node in trace.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            ids[node] = (node.op, node.meta["name"])
        elif node.target in (REPEATED, operator.getitem):
            ids[node] = (str(node.target), ids[node.all_input_nodes[0]], node.args[1])
        elif node.op == "call_function" and op_name(node) in SILENT:
            ids[node] = ids[node.all_input_nodes[0]]
        elif node.op == "call_function":
            ids[node], ops = (ops,), ops + 1
    paths = [r.path for r in trace.repeats]

    def own(repeat: Repeat, there: Any, here: Any) -> bool:
        """A tensor of the layer itself, that a property handed out in an earlier call."""
        if there[:1] != ("get_attr",) or here[:2] != (str(REPEATED), there):
            return False
        return repeat.renamed(there[1]) is not None and paths[here[2]] == repeat.path

    given = [(r, [(ids[a], ids[b]) for a, b in r.given]) for r in trace.repeats]
    return [(r.path, r.of, r.call, [pair for pair in pairs if not own(r, *pair)]) for r, pairs in given]


def compare(whole: Propagation, local: Trace, rank: int, *, broken: bool = False) -> Finding | None:
    """The first op where a rank's run is not its part of the whole run; `broken` for a run that raised, of
    which only the beginning is there."""
    return _Comparison(whole, rank).run(local, broken=broken)


class _Comparison:
    def __init__(self, whole: Propagation, rank: int) -> None:
        self.whole = whole
        self.rank = rank
        self.ids: dict[fx.Node, Any] = {}

    def run(self, local: Trace, *, broken: bool) -> Finding | None:
        wanted, got = self.whole.trace.ops(), local.ops()
        for graph in (self.whole.trace.graph, local.graph):
            self._number(graph)
        finding = self._constants(local) or self._raw_reads(local) or self._past_borders(local)
        if finding is not None:
            return finding
        i = j = 0
        while i < len(wanted) and j < len(got):
            if op_name(wanted[i]) != op_name(got[j]):
                if self._silent(wanted[i]):
                    self.ids[wanted[i]] = self._id(wanted[i].all_input_nodes[0])
                    i += 1
                    continue
                if _left_out(got[j], *_around(got[j])):
                    self.ids[got[j]] = self._id(got[j].all_input_nodes[0])
                    j += 1
                    continue
                return self._other_op(wanted[i], got[j])
            self.ids[wanted[i]] = self.ids[got[j]] = ("op", i)
            finding = self._op(wanted[i], got[j])
            if finding is not None:
                return finding
            i, j = i + 1, j + 1
        if broken:
            return None
        if not all(map(silent, (*wanted[i:], *got[j:]))):
            node = wanted[i] if i < len(wanted) else got[j]
            return self._finding(
                node if i < len(wanted) else wanted[-1],
                "AT315",
                f"rank {self.rank} runs {len(got)} ops, the unsharded model {len(wanted)}: "
                f"a rank's smaller sizes take another branch",
                source=node,
            )
        return self._numbers(local)

    def _silent(self, wanted: fx.Node) -> bool:
        """Whether the rank may leave out an op of the whole run."""
        source = wanted.all_input_nodes[0] if wanted.all_input_nodes else None
        if silent(wanted) or source is None or source not in self.whole.computed:
            return silent(wanted)
        (before, *_), (after, *_) = (_results(self.whole, n, self.rank) for n in (source, wanted))
        return _left_out(wanted, before, after)

    def _numbers(self, local: Trace) -> Finding | None:
        """What a forward gives back besides tensors, and leaves on the model, must be the same on a rank."""
        whole = self.whole.trace
        for does, ours, theirs in (
            ("returns", whole.returned, local.returned),
            ("leaves on the model", whole.kept, local.kept),
        ):
            for place in dict.fromkeys([*ours, *theirs]):
                want, got = ours.get(place, _NOTHING), theirs.get(place, _NOTHING)
                if _said(want) != _said(got):
                    return self._finding(
                        whole.ops()[-1],
                        "AT313",
                        f"the forward {does} {_said(got)}{f' at {place}' if place else ''} on rank "
                        f"{self.rank}, and {_said(want)} unsharded",
                        help=("take it from a value that is whole on every rank",),
                    )
        return None

    def _raw_reads(self, local: Trace) -> Finding | None:
        for node in local.graph.nodes:
            if node.op == "get_attr" and node.meta["name"] in self.whole.reads:
                past = next((u for u in node.users if u.op != "output" and op_name(u) != "alias"), None)
                if past is not None:
                    name = node.meta["name"]
                    short = name.rpartition(".")[2]
                    found = next(n for n in self.whole.trace.graph.nodes if n.meta.get("name") == name)
                    message = (
                        f"{name} meets shards, so it is mapped where its module reads it "
                        f"(`self.{short}`); here it is read past that"
                    )
                    return self._finding(next(iter(found.users)), "AT312", message, source=past)
        return None

    def _past_borders(self, local: Trace) -> Finding | None:
        """What a region maps at its border must go in and come out by it alone."""
        for path, region in self.whole.regions.items():
            calls = zip(local.entered.get(path, []), local.left.get(path, []), strict=False)
            for here, (entered, gone) in (((path, call), both) for call, both in enumerate(calls)):
                for place, node in entered:
                    inside = [u for u in node.users if here in u.meta.get("stack", ())]
                    past = next((u for u in inside if op_name(u) != "alias"), None)
                    if place in region.copied and past is not None:
                        return self._past(path, f"is given {place}", past)
                for place, node in gone:
                    if place in region.reduced and op_name(node) == "alias":
                        others = (u for u in node.all_input_nodes[0].users if u is not node)
                        past = next((u for u in others if here not in u.meta.get("stack", ())), None)
                        if past is not None:
                            return self._past(path, f"returns {place or 'its result'}", past)
        return None

    def _past(self, path: str, does: str, past: fx.Node) -> Finding:
        message = (
            f"{path or 'the model'} owns sharded tensors and has a mapping at its border where it {does}; "
            "here that value is read past the border"
        )
        return self._finding(past, "AT319", message, help=("hand it over as an argument or a result",))

    def _constants(self, local: Trace) -> Finding | None:
        """Tensors that the forward makes of numbers must be the same numbers on a rank."""
        theirs = {n.meta["name"]: n.meta.get("constant") for n in local.graph.nodes if n.op == "get_attr"}
        for node in self.whole.trace.graph.nodes:
            value = node.meta.get("constant") if node.op == "get_attr" else None
            if value is None or node.meta["name"] not in theirs:
                continue
            other = theirs[node.meta["name"]]
            if other is None or not _equal(value, other):
                user = next(iter(node.users), node)
                return self._finding(
                    user,
                    "AT313",
                    f"a tensor of numbers is {_shown(other)} on rank {self.rank}, "
                    f"and {_shown(value)} unsharded",
                    help=_CONSTANT,
                )
        return None

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

    def _finding(
        self,
        node: fx.Node,
        code: str,
        message: str,
        *notes: str,
        source: fx.Node | None = None,
        help: tuple[str, ...] = (),
    ) -> Finding:
        return Finding(
            source or node, Conflict(code, message, notes=notes, help=help), _origins(self.whole, node)
        )

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
                f"{op_name(wanted)} gives {_shapes(shapes)} on rank {self.rank}, "
                f"its part of the whole is {_shapes(results)}",
                f"unsharded: {_shapes(tuple(v.shape for v in _vals(wanted) if v is not None))}",
                help=_CONSTANT,
            )
        return None

    def _arguments(self, wanted: fx.Node, got: fx.Node) -> Finding | None:
        ours, theirs = _named(wanted), _named(got)
        local = local_call(self.whole, wanted, self.rank)
        for name in sorted(ours.keys() | theirs.keys()):
            here = theirs.get(name)
            if _has_node(ours.get(name)) or _has_node(here):
                if self._places(ours.get(name)) != self._places(here):
                    return self._finding(
                        wanted,
                        "AT315",
                        f"{op_name(wanted)} reads another value on rank {self.rank} than unsharded",
                        source=got,
                    )
                continue
            want = expected(op_name(wanted), name, local, here)
            if _plain(want) != _plain(here):
                return self._finding(
                    wanted,
                    "AT313",
                    f"{op_name(wanted)} is called with {name}={here} on rank {self.rank}; "
                    f"its part of the whole needs {name}={want}",
                    f"unsharded: {name}={ours.get(name)}",
                    source=got,
                    help=_LOCAL if _plain(want) == ours.get(name) else _CONSTANT,
                )
        return None

    def _places(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return self._id(argument)
        if isinstance(argument, (list, tuple)):
            return [self._places(a) for a in argument]
        return argument


_CONSTANT = (
    "the model uses a size of the whole model here; read it off the tensor (x.shape, or -1), so that it "
    "follows the shard",
)
_LOCAL = (
    "the model uses a rank's own size here, and the op needs that of the whole model: keep the number in an "
    "attribute, or gather the value first",
)


_NOTHING = object()


def _said(value: object) -> str:
    return "nothing" if value is _NOTHING else repr(value)


def _named(node: fx.Node) -> dict[str, Any]:
    return {name: _plain(value) for name, value in arguments_of(node).items()}


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and torch.equal(one.nan_to_num(), other.nan_to_num())
    )


def _shown(value: torch.Tensor | None) -> str:
    return "none" if value is None else str(value.tolist()) if value.numel() <= 4 else str(list(value.shape))


def _plain(value: Any) -> Any:
    """Lists for every sequence, so that spellings compare."""
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _has_node(value: Any) -> bool:
    return isinstance(value, fx.Node) or (isinstance(value, list) and any(_has_node(v) for v in value))


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


def _shapes(shapes: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join(str(list(s)) for s in shapes)


def failed(whole: Propagation, error: TraceError, rank: int) -> Finding:
    """A rank's run that raises although the unsharded one does not: where it left the way, or where it
    raised."""
    left = compare(whole, error.trace, rank, broken=True) if error.trace is not None else None
    if left is not None:
        return left
    found = finding_in(
        whole,
        error.module,
        "AT315",
        f"the unsharded model runs, rank {rank} with its local sizes does not: {error}",
        help=_CONSTANT,
    )
    if error.source is not None:
        found.node.meta["source"] = error.source
    return found


def finding_in(
    whole: Propagation,
    path: str,
    code: str,
    message: str,
    help: tuple[str, ...] = (),
    only: Callable[[fx.Node], bool] | None = None,
) -> Finding:
    """A finding at the first op (of `only` those) of the module `path` that has to do with a shard."""
    inside = [n for n in whole.trace.ops() if _within(n.meta["module"], path)]
    inside = [n for n in inside if only is None or only(n)]
    node = next((n for n in inside if _origins(whole, n)), (inside or whole.trace.ops())[0])
    return Finding(node, Conflict(code, message, help=help), _origins(whole, node))


def finding_at(whole: Propagation, tensor: str, code: str, message: str) -> Finding:
    """A finding at the op that reads the tensor of that name."""
    node = next(n for n in whole.trace.graph.nodes if n.op == "get_attr" and n.meta["name"] == tensor)
    user = next(iter(node.users))
    return Finding(user, Conflict(code, message), _origins(whole, user))


def _within(path: str, root: str) -> bool:
    return not root or path == root or path.startswith(f"{root}.")


def _origins(whole: Propagation, node: fx.Node) -> tuple[str, ...]:
    """The nearest sharded layers above a node."""
    found: set[str] = set()
    frontier, seen = [node], set()
    while frontier and not found:
        current = frontier.pop(0)
        if current in seen:
            continue
        seen.add(current)
        if current.op == "get_attr" and any(isinstance(x, Shard) for x in whole.layouts.get(current, [])):
            found.add(current.meta["name"].rpartition(".")[0])
        frontier += current.all_input_nodes
    return tuple(sorted(found))
