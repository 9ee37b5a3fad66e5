"""An exported program in the form that the recorder gives: the same ops, module paths with call indexes, and
sources (whole lines, no columns). What a gradient flows to is worked out from the graph."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autotp.trace.exporting import Watch
from autotp.trace.graph import Output, Trace, TraceError, Val, tensors_in
from autotp.trace.source import line_span

__all__ = ["Converted"]

_CALLED = re.compile(r"@(\d+)$")
_FRAME = re.compile(r'File "([^"]*)", line (\d+), in ')
# Ops whose result has no gradient although an input has one.
_NO_GRADIENT = re.compile(r"aten::(detach_?|new_\w+|\w+_like)$")


class Converted:
    """An exported program in the form of a recording."""

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        watch: Watch,
        first: Mapping[str, str],
        *,
        grad: bool,
        inputs: Any,
    ) -> None:
        self.trace = Trace(calls=watch.calls, given=watch.given, returned=watch.returned, route="export")
        self._needs: set[fx.Node] = set()  # nodes that a gradient flows to
        self._root = program.graph_module
        nodes: dict[fx.Node, Any] = {}
        signature = program.graph_signature
        owned = {
            **{k: (v, "parameter") for k, v in signature.inputs_to_parameters.items()},
            **{k: (v, "buffer") for k, v in signature.inputs_to_buffers.items()},
            **{k: (v, "constant") for k, v in signature.inputs_to_lifted_tensor_constants.items()},
        }
        names = iter([name for name, _, _ in tensors_in(inputs)])
        holders: dict[str, fx.Node] = {}
        for old in program.graph.nodes:
            if (
                old.op == "placeholder"
                and old.name not in owned
                and isinstance(old.meta["val"], torch.Tensor)
            ):
                new = self.trace.graph.placeholder(f"input{len(holders)}")
                val = _val(old.meta["val"], grad=grad)
                new.meta.update(val=val, name=next(names), module="", source=None)
                holders[old.name] = nodes[old] = self._noted(new, val.grad)
        for old in program.graph.nodes:
            if old.op == "placeholder" and old.name in owned:
                name, origin = owned[old.name]
                name = first.get(name, name)
                val = _val(old.meta["val"], grad=grad and origin == "parameter")
                new = self.trace.graph.create_node("get_attr", name)
                new.meta.update(
                    val=val, name=name, origin=origin, module=name.rpartition(".")[0], source=None
                )
                nodes[old] = self._noted(new, val.grad)
        results = self._run(program.graph, nodes, grad=grad)
        for (where, cached), node in zip(watch.outputs, results, strict=True):
            self.trace.outputs.append(Output(where, node, cached))
        self.trace.graph.output(tuple(o.node for o in self.trace.outputs))

    def _noted(self, node: fx.Node, needs: bool) -> fx.Node:
        if needs:
            self._needs.add(node)
        return node

    def _run(self, graph: fx.Graph, nodes: dict[fx.Node, Any], *, grad: bool) -> list[Any]:
        """Every op of a graph, those of the graphs inside of it in their place; its results."""
        results: list[Any] = []
        for old in graph.nodes:
            if old.op == "output":
                results = list(fx.map_arg(old.args[0], lambda n: nodes[n]))
            elif old.op == "get_attr":
                nodes[old] = self._attribute(old)
            elif old.op == "call_function":
                nodes[old] = self._call(old, nodes, grad=grad)
        return results

    def _attribute(self, old: fx.Node) -> Any:
        value = self._root
        for part in str(old.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            return value
        node = self.trace.graph.create_node("get_attr", str(old.target))
        node.meta.update(
            val=_val(value, grad=False), name=str(old.target), origin="constant", module="", source=None
        )
        return node

    def _call(self, old: fx.Node, nodes: dict[fx.Node, Any], *, grad: bool) -> Any:
        args: tuple[Any, ...]
        args, kwargs = fx.map_arg((old.args, old.kwargs), lambda n: nodes[n])
        if old.target is operator.getitem and not isinstance(args[0], fx.Node):
            results: Any = args[0]
            return results[args[1]]
        if any(isinstance(a, fx.GraphModule) for a in args):
            return self._inner(old, args, grad=grad)
        if old.target is torch.ops.autotp.stand_in.default:
            return args[0]
        if old.target is torch.ops.autotp.note.default:
            assert isinstance(args[0], fx.Node)
            return self._crossed(args[0], *json.loads(str(args[1])))
        node = self.trace.graph.create_node("call_function", old.target, args, kwargs)
        inputs = node.all_input_nodes
        mutated = _mutated(node)
        schema = getattr(old.target, "_schema", None)
        needs = {n for n in inputs if n in self._needs} if grad else set()
        flows = bool(needs) and (schema is None or not _NO_GRADIENT.match(schema.name))
        value = old.meta.get("val")
        stack = _stack(old)
        path, call = stack[-1]
        node.meta.update(
            module=path,
            call=call,
            stack=stack,
            source=_source(old),
            custom=None,
            grads=needs,
            mutates=mutated,
        )
        if isinstance(value, (list, tuple)):
            node.meta["val"] = [_val(v, grad=flows) if isinstance(v, torch.Tensor) else None for v in value]
        elif isinstance(value, torch.Tensor):
            node.meta["val"] = _val(value, grad=flows)
        else:
            node.meta["val"] = None
        if old.target is operator.getitem:
            of, index = args
            assert isinstance(of, fx.Node) and isinstance(index, int)
            node.meta.update(val=of.meta["val"][index], grads=set())
            flows = of in self._needs
        val = node.meta["val"]
        return self._noted(node, flows and (isinstance(val, list) or (val is not None and val.grad)))

    def _crossed(self, node: fx.Node, kind: str, path: str, call: int, name: str) -> None:
        calls = (self.trace.entered if kind == "entered" else self.trace.left).setdefault(path, [])
        calls += [[] for _ in range(call + 1 - len(calls))]
        calls[call].append((name, node))

    def _inner(self, old: fx.Node, args: tuple[Any, ...], *, grad: bool) -> Any:
        """The graph of a region: `torch.no_grad`, `torch.enable_grad`, autocast."""
        name = str(old.target)
        position = next((i for i, a in enumerate(args) if isinstance(a, fx.GraphModule)), None)
        if position is None or name not in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            raise TraceError(
                f"torch.export gives an operator that is not an op: {name}", _stack(old)[-1][0], _source(old)
            )
        if name == "wrap_with_set_grad_enabled":
            grad = grad and bool(args[0])
        inner: fx.GraphModule = args[position]
        holders = [n for n in inner.graph.nodes if n.op == "placeholder"]
        was, self._root = self._root, inner
        try:
            return self._run(inner.graph, dict(zip(holders, args[position + 1 :], strict=True)), grad=grad)
        finally:
            self._root = was


def _mutated(node: fx.Node) -> list[fx.Node]:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    found: list[Any] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            found += value if isinstance(value, (list, tuple)) else [value]
    return [n for n in found if isinstance(n, fx.Node)]


def _stack(node: fx.Node) -> tuple[tuple[str, int], ...]:
    """The modules around a node, the innermost last, each with its call index."""
    found = [("", 0)]
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        called = _CALLED.search(key)
        found.append((_CALLED.sub("", path), int(called[1]) if called else 0))
    return tuple(found)


def _source(node: fx.Node) -> Any:
    spans = [line_span(file, int(line)) for file, line in _FRAME.findall(node.meta.get("stack_trace") or "")]
    return next((span for span in reversed(spans) if span is not None), None)


def _val(tensor: torch.Tensor, *, grad: bool) -> Val:
    shape = tuple(int(n) if isinstance(n, int) else -1 for n in tensor.shape)
    return Val(shape, tensor.dtype, grad and _differentiable(tensor.dtype))


def _differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
