"""A recorded function, run as a whole and as each rank, with the arguments that the rules predict."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from autotp.match import Matches
from autotp.placement import Layout, Partial, Replicate, Shard
from autotp.plan import Plan
from autotp.propagate.arguments import Local, expected, local_shape
from autotp.propagate.call import Conflict
from autotp.propagate.engine import Engine
from autotp.propagate.flexible import Grant
from autotp.propagate.ops import op_name
from autotp.propagate.propagation import Propagation
from autotp.trace.recorder import Val, record
from tests.layouts import Placed, indices, part, parts, sides, tensor

__all__ = ["Recorded"]

_PLAN = Plan(rules={"fc1": "column"})  # an engine wants one; its layers are not in these graphs


class _Module(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


class Recorded:
    """A recorded function of tensors: what the rules say of it, what it gives as a whole and rank by rank."""

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
        grants: dict[fx.Node, Layout] = {}
        while True:
            result, wanted = self._walk(combination, tp, grants)
            if wanted is None:
                return result
            if not wanted or wanted.items() <= grants.items():
                return None
            grants = wanted | grants

    def _walk(
        self, combination: Sequence[Placed], tp: int, grants: dict[fx.Node, Layout]
    ) -> tuple[Propagation, dict[fx.Node, Layout] | None]:
        """One walk; after a conflict the layouts that fresh and expanded values would take."""
        result = Propagation(self.trace, Matches(tp, _PLAN, {}, {}, ()), {}, {}, grants=grants)
        engine = Engine(result, {})
        for node in self.trace.graph.nodes:
            if node.op == "placeholder":
                engine._set(node, [combination[self.places.index(node)][0]])
            elif node.target is operator.getitem:
                engine._set(node, [result.layouts[node.args[0]][node.args[1]]])
            elif node.op == "call_function":
                try:
                    layouts, computed = engine._call(node)
                except Conflict as conflict:
                    wanted = engine.remedies(node, conflict)
                    given = all(isinstance(w, Grant) for w in wanted)
                    return result, {w.node: w.layout for w in wanted if isinstance(w, Grant)} if given else {}
                engine._set(node, layouts, op=computed)
        return result, None

    def run(self, combination: Sequence[Placed], tp: int) -> bool:
        result = self.layouts(combination, tp)
        if result is None:
            return False
        self.execute(result, combination, tp)
        return True

    # -- execution

    def execute(self, result: Propagation, combination: Sequence[Placed], tp: int) -> None:
        out, upstream, grads = self._whole(tuple(g for _, g in combination))
        held = [parts(t, layout, tp) for t, (layout, _) in zip(self.tensors, combination, strict=True)]
        layouts = [result.layouts[n][0] for n in self.outputs]
        gradients = [
            sides(g, layout, tp) if g is not None else [None] * tp
            for g, layout in zip(upstream, layouts, strict=True)
        ]
        found, back = [], []
        ops = [op_name(n) for n in self.trace.ops()]
        said = f"{ops} tp {tp} of {[_say(p) for p in combination]} -> {[str(x) for x in layouts]}"
        for rank in range(tp):
            leaves = [
                p[rank].detach().clone().requires_grad_(g)
                for p, (_, g) in zip(held, combination, strict=True)
            ]
            try:
                values = self._local(result, leaves, rank)
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                raise AssertionError(f"{said}: rank {rank} raises {error}") from error
            found.append(values)
            back.append(_backward(values, [s[rank] for s in gradients], leaves))
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
                self._close(value, part(want, layout, rank), f"{said}, rank {rank}")

    def _compare_grad(self, want: torch.Tensor, got: list[Any], layout: Layout, said: str) -> None:
        got = [torch.zeros_like(part(want, layout, r)) if g is None else g for r, g in enumerate(got)]
        if isinstance(layout, Replicate):
            self._close(torch.stack(got).sum(0), want, said)
        elif isinstance(layout, Shard):
            # What several ranks hold has the sum of their gradients; what one rank holds has its own.
            total = torch.zeros_like(want)
            for rank, value in enumerate(got):
                total.index_add_(layout.dim, indices(layout, want.shape[layout.dim], rank), value)
            self._close(total, want, said)
        else:
            for rank, value in enumerate(got):
                self._close(value, part(want, layout, rank), f"{said}, rank {rank}")


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
