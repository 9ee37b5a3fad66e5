"""Rules against execution: run an op on every rank's part, put the parts together, compare with the whole.

A case is a function of tensors. It is recorded like a model's forward; every layout of its inputs is given
to the engine; where the engine accepts, each rank runs the recorded ops on its own parts, with the arguments
that `arguments.expected` predicts, and forward values and gradients must be those of the whole run. The
parts are cut here by index lists, not by `autotp.slicing`.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from autotp.match import Matches
from autotp.placement import (
    INVARIANT,
    PARTIAL,
    REPLICATE,
    Deal,
    Layout,
    Partial,
    Replicate,
    Shard,
    deal,
)
from autotp.plan import Plan
from autotp.propagate.arguments import Local, expected, local_shape
from autotp.propagate.call import Conflict
from autotp.propagate.engine import Propagation, _Engine, op_name
from autotp.trace.recorder import Val, record

__all__ = ["Case", "Placed", "Tally", "cut", "cuts", "hold", "placements", "tensor"]

Placed = tuple[Layout, bool]  # a layout, and whether a gradient flows
Choices = Callable[[int], Sequence[Sequence[Placed]]]


@dataclass(frozen=True, eq=False)
class Case:
    """A function of tensors to try.

    `few` limits the cuts of each dim, `choices(tp)` gives the placements of each input instead. `takes`
    are layouts at tp 2 that must be accepted; `never` says that nothing but whole values may be.
    """

    function: Callable[..., Any]
    inputs: tuple[Any, ...]
    few: int = 9
    choices: Choices | None = None
    tps: tuple[int, ...] = (2, 3)
    tolerance: float = 1e-10
    takes: tuple[tuple[Layout, ...], ...] = ()
    never: bool = False

    @cached_property
    def recorded(self) -> _Recorded:
        """The recorded ops, and the whole run."""
        return _Recorded(self.function, self.inputs, self.tolerance)


@dataclass(frozen=True)
class Tally:
    """How many layout combinations an op took and refused, all whole ones left out."""

    accepted: int
    refused: int
    taken: frozenset[tuple[Layout, ...]]


def tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Random values in 0.2…1.2, safe for logarithms and roots."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.rand(shape, generator=generator, dtype=torch.float64) + 0.2).to(dtype)


def _deals(size: int, tp: int) -> list[Deal]:
    """Every deal of a size's units; over three ranks also two units, of which two ranks hold the same."""
    found = [deal(units, tp) for units in range(tp, size + 1) if size % units == 0]
    if tp == 3 and size % 2 == 0:
        found.append(Deal(2, ((0, 1), (0, 1), (1, 2))))
    return list(dict.fromkeys(found))


def cuts(dim: int, size: int, tp: int) -> Iterator[Shard]:
    """Ways to cut a dim of `size`: every deal, 2 and 3 groups, unequal sections, sections that are whole."""
    for dealt in _deals(size, tp):
        yield Shard(dim, dealt)
    for groups in (2, 3):
        if size % groups == 0:
            for dealt in _deals(size // groups, tp)[:2]:
                yield Shard(dim, dealt, groups)
    first = next((n for n in range(size - 1, tp - 1, -1) if n % tp == 0), 0)
    if first:
        rest = size - first
        yield Shard(dim, sections=((first, deal(tp, tp)), (rest, None)))
        if rest >= tp and rest != first:
            yield Shard(dim, sections=((first, deal(tp, tp)), (rest, deal(rest, tp))))


def placements(value: torch.Tensor, tp: int, *, few: int = 9) -> list[Placed]:
    """Every layout of a tensor that a test tries."""
    differentiable = value.is_floating_point() or value.is_complex()
    shards = [s for dim, size in enumerate(value.shape) for s in _some(list(cuts(dim, size, tp)), few)]
    if not differentiable:
        return [(INVARIANT, False), *((s, False) for s in shards)]
    found: list[Placed] = [(INVARIANT, True), (INVARIANT, False), (REPLICATE, True), (PARTIAL, True)]
    return [*found, *((s, True) for s in shards)]


def _some(shards: list[Shard], few: int) -> list[Shard]:
    """The first, and the last: a plain deal and one with sections."""
    return shards if len(shards) <= few else [*shards[: few - 1], shards[-1]]


def cut(dim: int, units: int = 2, *, tp: int = 2, groups: int = 1) -> Shard:
    """A shard of a dim."""
    return Shard(dim, deal(units, tp), groups)


def hold(case: Case) -> Tally:
    """Try a case on every combination of layouts; each accepted one must be exact."""
    accepted = refused = 0
    taken: set[tuple[Layout, ...]] = set()
    for tp in case.tps:
        tensors = case.recorded.tensors
        per_input = case.choices(tp) if case.choices else [placements(t, tp, few=case.few) for t in tensors]
        for combination in itertools.product(*per_input):
            layouts = tuple(layout for layout, _ in combination)
            went = case.recorded.run(combination, tp)
            if any(isinstance(layout, (Partial, Shard)) for layout in layouts):
                accepted, refused = accepted + went, refused + (not went)
            if went:
                taken.add(layouts)
    tally = Tally(accepted, refused, frozenset(taken))
    assert (accepted == 0) if case.never else accepted, f"{tally.accepted} accepted, {tally.refused} refused"
    missing = [layouts for layouts in case.takes if layouts not in taken]
    assert not missing, f"refused: {[[str(x) for x in layouts] for layouts in missing]}"
    return tally


_PLAN = Plan(rules={"fc1": "column"})  # an engine wants one; its layers are not in these graphs


class _Module(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


class _Recorded:
    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...], tolerance: float) -> None:
        self.inputs, self.tolerance = inputs, tolerance
        self.tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
        self.trace = record(_Module(function), inputs, {}, grad=True)
        self.places = [n for n in self.trace.graph.nodes if n.op == "placeholder"]
        assert len(self.places) == len(self.tensors), "each input once"
        self.outputs = [o.node for o in self.trace.outputs]
        self.original = {n: n.meta["val"] for n in self.trace.graph.nodes if "val" in n.meta}
        self.grads = {n: set(n.meta["grads"]) for n in self.trace.ops()}
        self.wholes: dict[tuple[bool, ...], tuple[list[torch.Tensor], list[torch.Tensor], list[Any]]] = {}

    # -- the rules' answer

    def layouts(self, combination: Sequence[Placed], tp: int) -> Propagation | None:
        needs = dict(zip(self.places, (grad for _, grad in combination), strict=True))
        for node, val in self.original.items():
            if node.op == "call_function":
                grads = self.grads.get(node)
                flows = {n for n in node.all_input_nodes if needs.get(n) and (grads is None or n in grads)}
                node.meta["grads"] = flows
                needs[node] = bool(flows)
                for written in node.meta["mutates"] if flows else ():
                    needs.update(dict.fromkeys(_seen_through(written), True))
            node.meta["val"] = _with_grad(val, needs.get(node, False))
        result = Propagation(self.trace, Matches(tp, _PLAN, {}, {}, ()), {}, {})
        engine = _Engine(result, {})
        for node in self.trace.graph.nodes:
            if node.op == "placeholder":
                engine._set(node, [combination[self.places.index(node)][0]])
            elif node.target is operator.getitem:
                engine._set(node, [result.layouts[node.args[0]][node.args[1]]])
            elif node.op == "call_function":
                try:
                    layouts, computed = engine._call(node)
                except Conflict:
                    return None
                engine._set(node, layouts, op=computed)
        return result

    def run(self, combination: Sequence[Placed], tp: int) -> bool:
        result = self.layouts(combination, tp)
        if result is None:
            return False
        self.execute(result, combination, tp)
        return True

    # -- execution

    def execute(self, result: Propagation, combination: Sequence[Placed], tp: int) -> None:
        out, upstream, grads = self._whole(tuple(g for _, g in combination))
        parts = [_parts(t, layout, tp) for t, (layout, _) in zip(self.tensors, combination, strict=True)]
        layouts = [result.layouts[n][0] for n in self.outputs]
        sides = [
            _sides(g, layout, tp) if g is not None else [None] * tp
            for g, layout in zip(upstream, layouts, strict=True)
        ]
        found, back = [], []
        ops = [op_name(n) for n in self.trace.ops()]
        said = f"{ops} tp {tp} of {[_say(p) for p in combination]} -> {[str(x) for x in layouts]}"
        for rank in range(tp):
            leaves = [
                p[rank].detach().clone().requires_grad_(g)
                for p, (_, g) in zip(parts, combination, strict=True)
            ]
            try:
                values = self._local(result, leaves, rank)
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                raise AssertionError(f"{said}: rank {rank} raises {error}") from error
            found.append(values)
            back.append(_backward(values, [s[rank] for s in sides], leaves))
        for index, (want, layout) in enumerate(zip(out, layouts, strict=True)):
            self._compare(want, [f[index].detach() for f in found], layout, f"{said}: value {index}")
        for index, (want, (layout, grad)) in enumerate(zip(grads, combination, strict=True)):
            if grad and want is not None:
                self._compare_grad(
                    want, [b[index] for b in back], layout, f"{said}: gradient of input {index}"
                )

    def _whole(self, needs: tuple[bool, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor], list[Any]]:
        if needs not in self.wholes:
            leaves = [t.detach().clone().requires_grad_(g) for t, g in zip(self.tensors, needs, strict=True)]
            out = self._replay(leaves)
            upstream = [tensor(*o.shape, seed=7, dtype=o.dtype) if o.requires_grad else None for o in out]
            grads = _backward(out, upstream, leaves)
            self.wholes[needs] = ([o.detach() for o in out], upstream, grads)
        return self.wholes[needs]

    def _replay(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        values: dict[fx.Node, Any] = {n: _used(t) for n, t in zip(self.places, leaves, strict=True)}
        for node in self.trace.graph.nodes:
            if node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
        return [values[n] for n in self.outputs]

    def _local(self, result: Propagation, leaves: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
        values: dict[fx.Node, Any] = {n: _used(t) for n, t in zip(self.places, leaves, strict=True)}
        for node in self.trace.graph.nodes:
            if node.op != "call_function":
                continue
            if node.target is operator.getitem:
                values[node] = values[node.args[0]][node.args[1]]
                continue
            args, kwargs = _predicted(result, node, rank)
            args, kwargs = fx.map_arg((args, kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
        return [values[n] for n in self.outputs]

    # -- comparison

    def _close(self, got: torch.Tensor, want: torch.Tensor, said: str) -> None:
        assert got.shape == want.shape, f"{said}: shape {list(got.shape)}, not {list(want.shape)}"
        if not want.is_floating_point() and not want.is_complex():
            assert torch.equal(got, want), f"{said}: {got} instead of {want}"
        else:
            assert torch.equal(got.isnan(), want.isnan()), f"{said}: not a number elsewhere"
            got, want = got.nan_to_num(), want.nan_to_num()
            far = (got - want).abs().max().item() if want.numel() else 0.0
            assert far <= self.tolerance * max(1.0, want.abs().max().item() if want.numel() else 1.0), (
                f"{said}: off by {far:.2e}"
            )

    def _compare(self, want: torch.Tensor, got: list[torch.Tensor], layout: Layout, said: str) -> None:
        if isinstance(layout, Partial):
            self._close(torch.stack(got).sum(0), want, said)
        else:
            for rank, value in enumerate(got):
                self._close(value, _part(want, layout, rank), f"{said}, rank {rank}")

    def _compare_grad(self, want: torch.Tensor, got: list[Any], layout: Layout, said: str) -> None:
        got = [torch.zeros_like(_part(want, layout, r)) if g is None else g for r, g in enumerate(got)]
        if isinstance(layout, Replicate):
            self._close(torch.stack(got).sum(0), want, said)
        elif isinstance(layout, Shard):
            # What several ranks hold has the sum of their gradients; what one rank holds has its own.
            total = torch.zeros_like(want)
            for rank, value in enumerate(got):
                total.index_add_(layout.dim, _indices(layout, want.shape[layout.dim], rank), value)
            self._close(total, want, said)
        else:
            for rank, value in enumerate(got):
                self._close(value, _part(want, layout, rank), f"{said}, rank {rank}")


def _seen_through(node: fx.Node) -> Iterator[fx.Node]:
    """A value and what it is a view of: a write into one is seen in all."""
    yield node
    schema = getattr(node.target, "_schema", None)
    if schema is not None and any(r.alias_info is not None for r in schema.returns):
        yield from _seen_through(node.all_input_nodes[0])


def _say(placed: Placed) -> str:
    layout, grad = placed
    return f"{layout}{'' if grad else ' (no gradient)'}"


def _with_grad(val: Any, grad: bool) -> Any:
    if isinstance(val, list):
        return [_with_grad(v, grad) for v in val]
    return (
        replace(val, grad=grad and (val.dtype.is_floating_point or val.dtype.is_complex))
        if isinstance(val, Val)
        else val
    )


def _used(leaf: torch.Tensor) -> torch.Tensor:
    """Not the leaf itself, so that ops may write in place."""
    return leaf.clone()


def _indices(shard: Shard, size: int, rank: int) -> torch.Tensor:
    """The elements of the dim that `rank` holds, by their places."""
    pieces = shard.sections or ((size // shard.groups, shard.deal),) * shard.groups
    held: list[int] = []
    offset = 0
    for length, dealt in pieces:
        if dealt is None:
            held += range(offset, offset + length)
        else:
            unit = length // dealt.units
            start, stop = dealt.ranges[rank]
            held += range(offset + start * unit, offset + stop * unit)
        offset += length
    return torch.tensor(held, dtype=torch.long)


def _part(value: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    if not isinstance(layout, Shard):
        return value
    return value.index_select(layout.dim, _indices(layout, value.shape[layout.dim], rank))


def _parts(value: torch.Tensor, layout: Layout, tp: int) -> list[torch.Tensor]:
    """What each rank holds of an input: its slice, the whole, or a random part of the sum."""
    if isinstance(layout, Partial):
        rest = [tensor(*value.shape, seed=11 + rank, dtype=value.dtype) for rank in range(tp - 1)]
        return [*rest, value - sum(rest)]
    return [_part(value, layout, rank) for rank in range(tp)]


def _sides(gradient: torch.Tensor, layout: Layout, tp: int) -> list[torch.Tensor]:
    """What each rank has of the gradient of a result with this layout.

    A value that several ranks hold has a part of its gradient on each of them.
    """
    if isinstance(layout, Replicate):
        return _parts(gradient, PARTIAL, tp)
    if not isinstance(layout, Shard):
        return [gradient] * tp
    size = gradient.shape[layout.dim]
    left, sides = gradient.clone(), []
    for rank in range(tp):
        held = _indices(layout, size, rank)
        later = torch.cat([_indices(layout, size, r) for r in range(rank + 1, tp)] or [held[:0]])
        last = ~torch.isin(held, later)
        rest = left.index_select(layout.dim, held)
        shape = [1] * rest.dim()
        shape[layout.dim] = -1
        side = torch.where(last.view(shape), rest, tensor(*rest.shape, seed=13 + rank, dtype=rest.dtype))
        left.index_add_(layout.dim, held, -side)
        sides.append(side)
    return sides


def _backward(
    values: Sequence[torch.Tensor], upstream: Sequence[Any], leaves: Sequence[torch.Tensor]
) -> list[Any]:
    pairs = [(v, g) for v, g in zip(values, upstream, strict=True) if g is not None and v.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs or not wanted:
        return [None] * len(leaves)
    grads = iter(torch.autograd.grad([v for v, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    return [next(grads) if leaf.requires_grad else None for leaf in leaves]


def _predicted(result: Propagation, node: fx.Node, rank: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments as this rank must pass them."""
    schema = node.target._schema  # type: ignore[union-attr]
    names = [a.name for a in schema.arguments]
    ours = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    ours |= {names[i]: _plain(v) for i, v in enumerate(node.args)} | {
        k: _plain(v) for k, v in node.kwargs.items()
    }
    source = next(iter(node.all_input_nodes), None)
    vals = node.meta["val"]
    items = vals if isinstance(vals, list) else [vals]
    results = tuple(
        local_shape(v.shape, layout, rank) for v, layout in zip(items, result.computed[node], strict=True)
    )
    layout = result.layouts[source][0] if source is not None else result.computed[node][0]
    shape = source.meta["val"].shape if source is not None and isinstance(source.meta["val"], Val) else ()
    local = Local(rank, ours, shape, layout, results)

    def predict(name: str, value: Any) -> Any:
        return value if _has_node(value) else expected(op_name(node), name, local, _plain(value))

    args = tuple(predict(names[i], v) for i, v in enumerate(node.args))
    return args, {k: predict(k, v) for k, v in node.kwargs.items()}


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _has_node(value: Any) -> bool:
    return isinstance(value, fx.Node) or (
        isinstance(value, (list, tuple)) and any(_has_node(v) for v in value)
    )
