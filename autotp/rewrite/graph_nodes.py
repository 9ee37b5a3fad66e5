"""From an exported program to a GraphModule of calls: mappings in the place of marks, parts as parameters."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from autotp.comm import Group
from autotp.comm.group import KnownGroup
from autotp.diagnostic import UsageError
from autotp.marks import Call
from autotp.placement import Shard
from autotp.rewrite.apply import sharded
from autotp.rewrite.graph_module import Assemble, Check, ShardedGraph, put

__all__ = ["build"]


def build(
    program: ExportedProgram,
    twin: nn.Module,
    calls: Sequence[Call],
    check: Check,
    group: Group,
    *,
    originals: nn.Module,
) -> ShardedGraph:
    """The GraphModule of an exported `twin`; tensors that belong to `originals` are refused.

    Raises UsageError for a result that is no plain structure of tensors and numbers.
    """
    return _Builder(program, twin, calls, check, group, originals).module()


class _Builder:
    def __init__(
        self,
        program: ExportedProgram,
        twin: nn.Module,
        calls: Sequence[Call],
        check: Check,
        group: Group,
        originals: nn.Module,
    ) -> None:
        self.twin, self.calls, self.name = twin, calls, type(twin).__name__
        self.exported = program.module(check_guards=False)
        self.graph = fx.Graph()
        self.held: dict[str, Any] = {"autotp_group": group}
        self.attributes: dict[str, fx.Node] = {}
        self.own: dict[str, Tensor] = {
            **dict(twin.named_parameters(remove_duplicate=False)),
            **dict(twin.named_buffers(remove_duplicate=False)),
        }
        own = {t.untyped_storage().data_ptr() for t in (*originals.parameters(), *originals.buffers())}
        for constant in program.constants.values():
            if isinstance(constant, Tensor) and constant.untyped_storage().data_ptr() in own - {0}:
                raise UsageError(
                    f'shard(form="graph"): {self.name}: a copy of it still reads the weights of the '
                    "original, through a function that holds one of its modules\n  = help: shard in place"
                )
        self._check = check
        self._form = program.call_spec.out_spec

    def module(self) -> ShardedGraph:
        """Copy the exported nodes, one after another."""
        inputs = [n for n in self.exported.graph.nodes if n.op == "placeholder"]
        new: dict[fx.Node, Any] = {}
        names = iter(self._check.sizes)
        tensors = [n for n in inputs if isinstance(n.meta.get("val"), Tensor)]
        placed = {node: self.graph.placeholder(name) for node, name in zip(tensors, names, strict=True)}
        self.held["autotp_check"] = self._check
        checked = self.graph.call_module("autotp_check", tuple(placed.values()))
        for at, node in enumerate(tensors):
            new[node] = self.graph.call_function(operator.getitem, (checked, at))
            new[node].meta = dict(node.meta)
        self._copy(self.exported, new)
        (output,) = (n for n in self.exported.graph.nodes if n.op == "output")
        leaves = fx.map_arg(output.args[0], new.__getitem__)
        self.graph.output(self._assembled(leaves))
        return self._finished()

    def _copy(self, source: fx.GraphModule, new: dict[fx.Node, Any]) -> None:
        """Copy the nodes between the inputs and the output."""
        for node in source.graph.nodes:
            if node.op in ("placeholder", "output") or node in new:
                continue
            if node.op == "get_attr":
                value = operator.attrgetter(node.target)(source)
                new[node] = value if isinstance(value, fx.GraphModule) else self._tensor(node.target, value)
                continue
            args = fx.map_arg(node.args, new.__getitem__)
            kwargs = fx.map_arg(node.kwargs, new.__getitem__)
            if node.target is torch.ops.autotp.call.default:
                new[node] = self._call(self.calls[args[1]], args[0])
            elif node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
                new[node] = self._inlined(args[0], args[1], args[2:])
            elif any(isinstance(arg, fx.GraphModule) for arg in args):
                raise UsageError(
                    f'shard(form="graph"): {self.name}: {node.target} runs a part of the forward in a mode '
                    "of its own (autocast, a condition), which is no node of a graph\n"
                    "  = help: shard in place"
                )
            elif node.target is operator.getitem and isinstance(args[0], tuple):
                new[node] = args[0][args[1]]
            else:
                new[node] = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
            if isinstance(new[node], fx.Node) and not new[node].meta:
                new[node].meta = dict(node.meta)

    def _call(self, call: Call, tensors: Sequence[Any]) -> fx.Node:
        """The call that a mark stands for."""
        return self.graph.call_function(
            call.function, tuple(tensors), {key: self._hold(value) for key, value in call.keywords.items()}
        )

    def _hold(self, value: Any) -> Any:
        """A group or a cut, as an attribute of the module; other values as they are."""
        if not isinstance(value, (KnownGroup, Shard)):
            return value
        name = next((key for key, kept in self.held.items() if kept is value or kept == value), None)
        if name is None:
            name = f"autotp_cut_{sum(isinstance(kept, Shard) for kept in self.held.values())}"
            self.held[name] = value
        return self._attribute_node(name)

    def _attribute_node(self, name: str) -> fx.Node:
        """One node for an attribute, made where it is needed first."""
        if name not in self.attributes:
            self.attributes[name] = self.graph.create_node("get_attr", name)
        return self.attributes[name]

    def _inlined(self, enabled: bool, part: fx.GraphModule, args: Sequence[Any]) -> Any:
        """A part that ran without gradients: its nodes, and results that have none."""
        new: dict[fx.Node, Any] = dict(
            zip((n for n in part.graph.nodes if n.op == "placeholder"), args, strict=True)
        )
        self._copy(part, new)
        (output,) = (n for n in part.graph.nodes if n.op == "output")
        results = fx.map_arg(output.args[0], new.__getitem__)
        if enabled:
            return results

        def cut_off(value: Any) -> Any:
            is_tensor = isinstance(value, fx.Node) and isinstance(value.meta.get("val"), Tensor)
            return self.graph.call_function(torch.ops.aten.detach.default, (value,)) if is_tensor else value

        return tuple(cut_off(value) for value in results)

    def _tensor(self, name: str, value: Any) -> fx.Node:
        """A parameter or buffer of the copy under its own name; another constant under the exporter's."""
        self.held.setdefault(name, self.own.get(name, value))
        return self._attribute_node(name)

    def _assembled(self, leaves: Sequence[Any]) -> Any:
        form = self._form
        _refuse_odd(form, self.name)
        if form.type is None:
            return leaves[0]
        if form.type is tuple and all(child.type is None for child in form.children()):
            return tuple(leaves)
        self.held["autotp_assemble"] = Assemble(form)
        return self.graph.call_module("autotp_assemble", tuple(leaves))

    def _finished(self) -> ShardedGraph:
        root = nn.Module()
        for name, value in self.held.items():
            put(root, name, value)
        root.train(self.twin.training)
        with warnings.catch_warnings():  # that an attribute is a group or a cut, and no tensor
            warnings.filterwarnings("ignore", ".*does not reference an nn.Module.*")
            self.graph.lint()
        module = ShardedGraph(root, self.graph, class_name=self.name)
        module.train(self.twin.training)
        memory = sharded(self.twin)
        assert memory is not None
        modules = self.twin.named_modules()
        module.keep(memory, {path: frozenset(m._non_persistent_buffers_set) for path, m in modules})
        return module


def _refuse_odd(form: pytree.TreeSpec, name: str) -> None:
    """A result is tensors and numbers in tuples, lists and dicts: what is more than its values is refused."""
    if form.type is not None and not issubclass(form.type, (tuple, list, dict)):
        raise UsageError(
            f'shard(form="graph"): {name}: its forward returns a {form.type.__name__}, which is no '
            "structure of tensors alone\n"
            "  = help: call it so that it returns none (use_cache=False), or shard in place"
        )
    for child in form.children():
        _refuse_odd(child, name)
