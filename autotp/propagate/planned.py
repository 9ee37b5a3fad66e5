"""The layers of the plan, with their mappings around the op: what goes in, what comes out.

column   reads the whole input, gives a shard of the last dim (the whole with `gather_output`)
row      reads its own features (the whole with `split_input`), gives the whole
vocab    reads whole ids, gives whole rows
norm     reads its own features, gives them
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from autotp.match import Matches, Placed
from autotp.placement import INVARIANT, PARTIAL, REPLICATE, Layout, Shard
from autotp.propagate.call import Call, Conflict, Value, counted_once, needs_copy
from autotp.propagate.propagation import Propagation

__all__ = ["PlannedLayers", "raw_modules"]


def raw_modules(matches: Matches) -> set[str]:
    """The paths of modules of raw tensors: those of which a rule cuts one tensor by itself, layers too."""
    return {p.path.rpartition(".")[0] for p in matches.placed.values() if p.target == "tensor"}


class PlannedLayers:
    """The layers that a plan shards, in one walk: notes in `result` what they were given."""

    def __init__(self, result: Propagation) -> None:
        self.result = result
        self.placed = {p.path: p for p in result.matches.placed.values() if p.target == "module"}
        self.followed: set[str] = set()  # row layers whose cut is settled by a call
        # A layer's cut tensors may be used by that layer alone (tied tensors: by each of their layers).
        self.owners: dict[str, list[Placed]] = {}
        for placed in self.placed.values():
            for name in map(self.canonical, placed.layouts):
                if name in result.cuts:
                    self.owners.setdefault(name, []).append(placed)
        self.tables = frozenset(p.path for p in self.placed.values() if p.style == "vocab")

    def layer(self, call: Call) -> tuple[list[Layout], list[Layout]] | None:
        """What a layer of the plan gives, for its readers and by itself; None for any other call."""
        placed = self.placed.get(call.node.meta["module"])
        if placed is None or not placed.layouts or call.name not in _LAYERS:
            return None
        own = {self.canonical(name) for name in placed.layouts}
        used = {v.node.meta["name"] for v in call.values if v.node.op == "get_attr"} & self.result.cuts.keys()
        if not used or not used <= own:
            return None
        self.result.reached.add(placed.path)
        return _LAYERS[call.name](self, call, placed)

    def canonical(self, name: str) -> str:
        """The first name of a tensor."""
        return self.result.aliases.get(name, name)

    def whole_layer(self, call: Call) -> None:
        """A layer that no rule shards, given only a part of its features."""
        if call.name not in ("linear", "addmm"):
            return
        value: Value = call["mat1"] if call.name == "addmm" else call["input"]
        weight: Value = call["mat2"] if call.name == "addmm" else call["weight"]
        if value.shard is not None and value.shard.dim == value.rank - 1 and weight.whole:
            raise Conflict(
                "AT301",
                "a layer that is whole reads all features of its input; here they are sharded",
                blame=(value,),
                notes=(f"{value}",),
            )

    def _linear(self, call: Call, placed: Placed) -> tuple[list[Layout], list[Layout]]:
        transposed = call.name == "addmm"
        value: Value = call["mat1"] if transposed else call["input"]
        weight: Value = call["mat2"] if transposed else call["weight"]
        assert weight.shard is not None
        last = len(call.shape) - 1
        if placed.style == "column":
            return self._column(call, placed, value, weight.shard.at(last))
        return self._row(call, placed, value, weight)

    def _column(
        self, call: Call, placed: Placed, value: Value, cut: Shard
    ) -> tuple[list[Layout], list[Layout]]:
        if not value.whole:
            what = "a sum whose parts are still on the ranks" if value.partial else "a sharded value"
            raise Conflict(
                "AT314",
                f"a column layer reads its whole input on every rank; here it is given {what}",
                blame=(value,),
                notes=(f"{value}",),
            )
        if value.grad and value.layout == REPLICATE:  # its gradient is summed where it was copied
            self.result.uncopied.add(placed.path)
        conv1d = call.name == "addmm"
        if value.grad and value.layout == INVARIANT:
            entered = value.node.all_input_nodes[0] if conv1d else value.node
            self.result.copied.setdefault(placed.path, []).append(entered)
        # One head, on every rank: each has a part of its gradient.
        computed = REPLICATE if cut.deal is not None and cut.deal.whole else cut
        gathered = placed.rule.gather_output and not conv1d
        return [INVARIANT if gathered else computed], [computed]

    def _row(
        self, call: Call, placed: Placed, value: Value, weight: Value
    ) -> tuple[list[Layout], list[Layout]]:
        assert weight.shard is not None
        last = value.rank - 1
        if value.partial:
            raise Conflict(
                "AT310", "a row layer is given a sum whose parts are still on the ranks", blame=(value,)
            )
        if value.shard is None:
            if value.grad and value.layout == REPLICATE:
                raise needs_copy(call, value, value)
            if placed.rule.split_input:
                return [INVARIANT], [INVARIANT]
            raise Conflict(
                "AT302",
                "a row layer reads its own part of the input on each rank; here the input is whole",
                blame=(weight,),
                notes=(f"{value.name}: {list(value.shape)} replicate",),
            )
        if value.shard.dim != last:
            raise Conflict(
                "AT307",
                "a row layer reads its own features on each rank; here dim "
                f"{value.shard.dim} of the input is sharded",
                blame=(value, weight),
                notes=(f"{value}",),
            )
        if placed.rule.split_input and call.name != "addmm":
            raise Conflict(
                "AT302",
                "split_input is set, but the input is already sharded",
                blame=(weight, value),
                notes=(f"{value}",),
            )
        counted_once(call, value)
        if not value.shard.same_cut(weight.shard):
            if placed.declared or placed.path in self.followed:
                raise Conflict(
                    "AT307",
                    "a row layer's weight is cut differently from its input",
                    blame=(weight, value),
                    notes=(f"{value}", f"{weight}"),
                )
            # The plan leaves the cut open: a row layer's weight follows its input.
            self._recut(weight, value.shard.at(weight.shard.dim))
        self.followed.add(placed.path)
        given = PARTIAL if placed.path in self.result.unreduced else INVARIANT
        return [given], [given]

    def _recut(self, weight: Value, cut: Shard) -> None:
        name = weight.node.meta["name"]
        if not cut.fits(weight.shape[cut.dim]):
            raise Conflict("AT307", f"{weight.name} cannot be cut like its input", blame=(weight,))
        self.result.cuts[name] = cut
        self.result.layouts[weight.node] = self.result.computed[weight.node] = [cut]

    def _norm(self, call: Call, placed: Placed) -> tuple[list[Layout], list[Layout]]:
        """Its statistics are summed over the ranks, forward and backward."""
        value: Value = call["input"]
        weights = [v for v in (call["weight"], call["bias"]) if v is not None]
        if value.partial:
            raise Conflict(
                "AT310", "a norm is given a sum whose parts are still on the ranks", blame=(value,)
            )
        if value.shard is None or value.shard.dim != value.rank - 1:
            raise Conflict(
                "AT307",
                "a norm that is cut is given its own features on each rank; here they are whole",
                blame=(weights[0], value),
                notes=(f"{value}",),
            )
        counted_once(call, value)
        for weight in weights:
            if weight.shard is None or not weight.shard.same_cut(value.shard):
                raise Conflict(
                    "AT307",
                    "a norm's weight is cut differently from its input",
                    blame=(weight, value),
                    notes=(f"{value}", f"{weight}"),
                )
        return [value.shard], [value.shard]

    def _vocab(self, call: Call, placed: Placed) -> tuple[list[Layout], list[Layout]]:
        ids: Value = call["indices"]
        if not ids.whole:
            raise Conflict("AT314", "a vocab layer reads whole ids on every rank", blame=(ids,))
        return [INVARIANT], [INVARIANT]

    # A Conv1D has views around its product, so its scatter and gather stand at the module's border.

    def scattered(self, node: fx.Node, reader: fx.Node) -> Shard | None:
        """What a Conv1D that splits its input sees of it."""
        placed = self.placed.get(reader.meta.get("module", ""))
        if placed is None or not placed.rule.split_input or node.op == "get_attr":
            return None
        inside = (placed.path, reader.meta["call"]) in node.meta.get("stack", ())
        cut = None if inside else self._conv1d_cut(placed)
        return None if cut is None else cut.at(len(node.meta["val"].shape) - 1)

    def gathered(self, node: fx.Node) -> bool:
        """Whether the value leaves a Conv1D that gathers its output."""
        placed = self.placed.get(node.meta["module"])
        if placed is None or not placed.rule.gather_output or self._conv1d_cut(placed) is None:
            return False
        left = self.result.trace.left.get(placed.path, [])
        return any(value is node for call in left for _, value in call)

    def _conv1d_cut(self, placed: Placed) -> Shard | None:
        """The cut of a Conv1D's weight [in, out]; None for other layers."""
        name = f"{placed.path}.weight" if placed.path else "weight"
        cut = self.result.cuts.get(self.canonical(name))
        turned = cut is not None and cut.dim == {"column": 1, "row": 0}.get(placed.style)
        return cut if turned else None


_LAYERS: dict[str, Callable[[PlannedLayers, Call, Placed], tuple[list[Layout], list[Layout]]]] = {
    "linear": PlannedLayers._linear,
    "addmm": PlannedLayers._linear,
    "embedding": PlannedLayers._vocab,
    "layer_norm": PlannedLayers._norm,
    "rms_norm": PlannedLayers._norm,
}
