"""A sharded model as a graph: the module that holds it, and what stands at its two ends."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from autotp.diagnostic import UnprovenPath, UsageError
from autotp.rewrite.apply import Sharded, remember, sharded

__all__ = ["Assemble", "Check", "ShardedGraph", "Sizes", "put"]

Sizes = dict[str, tuple[int | str, ...]]
_OP = type(torch.ops.aten.add.Tensor)  # it is no name of a module, so pickle cannot find it


class ShardedGraph(fx.GraphModule):
    """A GraphModule whose copies and pickles still know how it is sharded, and what it does not save.

    `takes` are the names of its inputs, `fixed` the flags and numbers that it was made with.
    """

    takes: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = MappingProxyType({})

    def keep(self, memory: Sharded, unsaved: Mapping[str, frozenset[str]]) -> None:
        """Remember how the model is sharded; `unsaved` are the non-persistent buffers, by module."""
        remember(self, memory)
        self.unsaved = dict(unsaved)
        for path, module in self.named_modules():
            module._non_persistent_buffers_set |= unsaved.get(path, frozenset()) & module._buffers.keys()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the graph gives. Flags may be passed as they were when it was made; in it they are fixed.

        Raises UsageError for another value, and for what is no input.
        """
        for name in kwargs.keys() - self.takes:
            value = kwargs.pop(name)
            if name not in self.fixed:
                raise UsageError(f"{name} is no input of the graph, which takes {', '.join(self.takes)}")
            if type(value) is not type(self.fixed[name]) or value != self.fixed[name]:
                raise UsageError(
                    f"{name} is {value!r}, the graph is for {self.fixed[name]!r}: pass it in inputs= of shard"
                )
        return super().__call__(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> fx.GraphModule:
        copied = super().__deepcopy__(memo)
        assert isinstance(copied, ShardedGraph)
        copied.takes, copied.fixed = self.takes, self.fixed
        memory = sharded(self)
        assert memory is not None
        copied.keep(memory, self.unsaved)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        """Attributes and nodes; torch's own way runs the code again, which makes constants of what it can."""
        state = {key: value for key, value in self.__dict__.items() if key != "_graph"}
        return _read_again, (state, _written(self.graph), type(self).__name__)


@dataclass(frozen=True)
class _Node:
    """Stands for a node of the graph, by its name."""

    name: str


def _written(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Every node as data."""

    def named(value: Any) -> Any:
        return _Node(value.name) if isinstance(value, fx.Node) else value

    return [
        (
            node.op,
            str(node.target) if isinstance(node.target, _OP) else node.target,
            map_aggregate(node.args, named),
            map_aggregate(node.kwargs, named),
            node.name,
        )
        for node in graph.nodes
    ]


def _read_again(state: dict[str, Any], nodes: Sequence[tuple[Any, ...]], name: str) -> ShardedGraph:
    """The module of attributes and nodes."""
    root, graph = nn.Module(), fx.Graph()
    root.__dict__.update(state)
    made: dict[str, fx.Node] = {}

    def node_of(value: Any) -> Any:
        return made[value.name] if isinstance(value, _Node) else value

    for op, target, args, kwargs, own in nodes:
        if op == "call_function" and isinstance(target, str):
            target = operator.attrgetter(target)(torch.ops)
        made[own] = graph.create_node(
            op, target, map_aggregate(args, node_of), map_aggregate(kwargs, node_of), own
        )
    module = ShardedGraph(root, graph, class_name=name)
    module.__dict__.update(state)
    return module


def put(root: nn.Module, name: str, value: Any) -> None:
    """Give `root` an attribute of a dotted name: a parameter, buffer, module or other value."""
    *path, key = name.split(".")
    owner = root
    for part in path:
        if part not in owner._modules:
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        owner.register_buffer(key, value)
    else:
        setattr(owner, key, value)


class Check(nn.Module):
    """The first node: refuses inputs of other sizes or dtypes, and another mode, than the graph is for."""

    def __init__(
        self,
        sizes: Sizes,
        bounds: Mapping[str, Mapping[str, int]],
        dtypes: Mapping[str, torch.dtype],
        training: bool,
    ) -> None:
        super().__init__()
        self.sizes, self.dtypes = sizes, dict(dtypes)
        self.limits = {size: bound["max"] for size, bound in bounds.items() if "max" in bound}
        self.captured_in_training = self.training = training

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The inputs themselves."""
        if self.training != self.captured_in_training:
            modes = ("eval", "train")
            raise UnprovenPath(
                f"this graph was made in {modes[self.captured_in_training]} mode, and is in "
                f"{modes[self.training]} mode now; set the mode of the model before shard"
            )
        known: dict[str, int] = {}
        for tensor, (name, wanted) in zip(tensors, self.sizes.items(), strict=True):
            if tensor.ndim != len(wanted):
                raise UsageError(f"{name} has {tensor.ndim} dims, the graph is for {len(wanted)}")
            if tensor.dtype != self.dtypes[name]:
                raise UsageError(f"{name} is {tensor.dtype}, the graph is for {self.dtypes[name]}")
            for dim, size in enumerate(wanted):
                live = tensor.shape[dim]
                if isinstance(size, str):
                    if size in self.limits and live > self.limits[size]:
                        raise UsageError(
                            f"dim {dim} of {name} is {live}, the graph is for at most {self.limits[size]}"
                        )
                    size = known.setdefault(size, live)
                if live != size:
                    raise UsageError(f"dim {dim} of {name} is {live}, the graph is for {size}")
        return tensors

    def extra_repr(self) -> str:
        """The sizes that the graph is for; a name is an open size."""
        return ", ".join(f"{name}: [{', '.join(map(str, sizes))}]" for name, sizes in self.sizes.items())


class Assemble(nn.Module):
    """The last node: the results in the forward's own form."""

    def __init__(self, form: pytree.TreeSpec) -> None:
        super().__init__()
        self.form = form

    def forward(self, *leaves: Any) -> Any:
        """What the model returns."""
        return pytree.tree_unflatten(list(leaves), self.form)

    def __getstate__(self) -> dict[str, Any]:
        """A form is pickled as nested tuples: torch's own leaves warn when they are read."""
        return self.__dict__ | {"form": _nested(self.form)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state | {"form": _form(state["form"])})  # type: ignore[no-untyped-call]


def _nested(form: pytree.TreeSpec) -> Any:
    return (
        None if form.is_leaf() else (form.type, form.context, [_nested(child) for child in form.children()])
    )


def _form(nested: Any) -> pytree.TreeSpec:
    if nested is None:
        return pytree.treespec_leaf()
    kind, context, children = nested
    return pytree.TreeSpec(kind, context, [_form(child) for child in children])
