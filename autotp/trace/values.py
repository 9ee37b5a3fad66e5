"""The tensors of a recording and the nodes that they are: by identity, by name, by memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autotp.trace.graph import REPEATED, Trace, Val, tensors_in
from autotp.trace.hooks import Template, sizes
from autotp.trace.sameness import GHOST, Different, Ghost
from autotp.trace.source import caller_span

__all__ = ["Known", "Values", "val_of"]

_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Known:
    """What the recorder knows of tensors.

    `names` says of a tensor of the model, by its id, its name and origin; `owned` are those tensors;
    `copied` gives a copy of a real tensor, and `template` a way to make fake ones like a fake one, both
    outside of the recording; `memory` is what a tensor sees, and how, None where there is none.
    """

    names: Mapping[int, tuple[str, str]]
    owned: Sequence[torch.Tensor]
    is_fake: Callable[[Any], bool]
    copied: Callable[[torch.Tensor], torch.Tensor]
    template: Callable[[torch.Tensor], Template]
    memory: Callable[[torch.Tensor], tuple[Any, ...] | None]


class Values:
    """Makes and finds the nodes of a trace."""

    def __init__(self, known: Known) -> None:
        self.trace = Trace()
        self.stack: list[tuple[str, int]] = [("", 0)]
        self.custom: str | None = None  # the autograd.Function whose forward runs
        self._names, self._is_fake, self._copied = known.names, known.is_fake, known.copied
        self._template, self._key = known.template, known.memory
        self._shared: set[Any] = set()  # memory that several tensors made of one template see
        self._nodes: dict[int, fx.Node] = {}  # id(tensor) -> node
        # The same memory, seen through another object: `x.data`, or what a factory function hands out.
        self._memory: dict[tuple[Any, ...], fx.Node] = {}
        self._named_memory = {key: t for t in known.owned if (key := known.memory(t)) is not None}
        self._keep: list[Any] = []  # ids stay unique while their objects live
        self._constants = 0

    def place(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], of: str = "") -> None:
        """A placeholder for every tensor among the inputs that is not known yet."""
        for name, leaf, _ in tensors_in((args, dict(kwargs))):
            if id(leaf) in self._nodes or id(leaf) in self._names:
                continue
            if self._is_fake(leaf) and self._key(leaf) in self._memory:
                continue
            with _before_others(self.trace.graph):
                node = self.trace.graph.placeholder("input" + str(len(self._nodes)))
            node.meta.update(val=val_of(leaf), name=of + name, module="", source=None)
            self.bind(leaf, node)

    def bind(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """Let a tensor be a node."""
        self._nodes[id(tensor)] = node
        self._keep.append(tensor)
        key = self._key(tensor)
        if key is not None:
            self._memory[key] = node

    def node(self, tensor: torch.Tensor) -> fx.Node:
        """The node of a tensor; one is made for what is seen for the first time."""
        found = self._nodes.get(id(tensor))
        if found is not None:
            return found
        ghost = tensor.__dict__.get(GHOST)
        if ghost is not None:
            return self._repeated(tensor, ghost)
        named = self._names.get(id(tensor))
        if named is None:
            key = self._own_memory(tensor)
            if key is not None and key not in self._memory and key in self._named_memory:
                self.node(self._named_memory[key])
            if key is not None and key in self._memory:
                self._nodes[id(tensor)] = self._memory[key]
                self._keep.append(tensor)
                return self._memory[key]
            origin = "unknown" if self._is_fake(tensor) else "constant"
            named = (f"_constant{self._constants}", origin)
            self._constants += 1
        name, origin = named
        node = self.trace.graph.create_node("get_attr", name)
        if origin == "constant":
            node.meta["constant"] = self._copied(tensor)
        node.meta.update(
            val=val_of(tensor), origin=origin, name=name, module=self.stack[-1][0], source=caller_span(3)
        )
        self.bind(tensor, node)
        return node

    def _repeated(self, tensor: torch.Tensor, ghost: Ghost) -> fx.Node:
        node = self.trace.graph.create_node("call_function", REPEATED, (ghost.source, ghost.repeat))
        path, call = ghost.stack[-1]
        node.meta.update(
            module=path, call=call, stack=ghost.stack, source=ghost.source.meta.get("source"),
            custom=None, grads=set(), mutates=[], val=val_of(tensor),
        )  # fmt: skip
        self.bind(tensor, node)
        return node

    def name(self, tensor: torch.Tensor) -> str | None:
        """The name of a tensor of the model; None for any other."""
        named = self._names.get(id(tensor))
        return None if named is None else named[0]

    def place_of(self, tensor: torch.Tensor) -> str | None:
        """The name of a tensor's node, or `=` and the name of a tensor of the model; None for any other."""
        ghost = tensor.__dict__.get(GHOST)
        node = self._nodes.get(id(tensor)) if ghost is None else ghost.source
        if node is None and (key := self._own_memory(tensor)) is not None:
            node = self._memory.get(key)
        if node is not None:
            return f"={node.meta['name']}" if node.op == "get_attr" else str(node.name)
        name = self.name(tensor)
        return None if name is None else f"={name}"

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether it is a fake tensor of which is known where it comes from."""
        if not self._is_fake(tensor):
            return False
        if id(tensor) in self._nodes or id(tensor) in self._names or GHOST in tensor.__dict__:
            return True
        key = self._own_memory(tensor)
        return key is not None and (key in self._memory or key in self._named_memory)

    def _own_memory(self, tensor: torch.Tensor) -> tuple[Any, ...] | None:
        """The memory that tells which value a tensor is.

        Raises Different where several values share it.
        """
        key = self._key(tensor)
        if key is not None and key[0] in self._shared:
            raise Different("")
        return key

    def template(self, tensor: torch.Tensor) -> Template:
        """How to make fake tensors like this one."""
        made = self._template(tensor)
        self._shared.add(made.storage)
        return made

    def memories(self, tensors: list[torch.Tensor]) -> set[Any]:
        """The memory of these tensors, views and what they view alike."""
        return {key[0] for key in map(self._key, tensors) if key is not None}

    def argument(self, value: Any) -> Any:
        """An op's argument, as the graph has it."""
        if isinstance(value, torch.Tensor):
            return self.node(value)
        if isinstance(value, (list, tuple)):
            parts = [self.argument(v) for v in value]
            return tuple(parts) if type(value) is tuple else parts
        if isinstance(value, dict):
            return {k: self.argument(v) for k, v in value.items()}
        if value is None or isinstance(value, _PLAIN):
            return value
        return repr(value)

    def create(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor]
    ) -> fx.Node:
        """The node of an op call here and now."""
        grad = torch.is_grad_enabled()
        needs = {self.node(t) for t in inputs if grad and t.requires_grad}
        node = self.trace.graph.create_node("call_function", target, args, kwargs)
        path, call = self.stack[-1]
        node.meta.update(
            module=path,
            call=call,
            stack=tuple(self.stack),
            source=caller_span(3),
            custom=self.custom,
            grads=needs,
            mutates=[],
        )
        return node


def val_of(tensor: torch.Tensor) -> Val:
    shape = tuple(int(n) if isinstance(n, int) else -1 for n in sizes(tensor))
    return Val(shape, tensor.dtype, tensor.requires_grad)


@contextlib.contextmanager
def _before_others(graph: fx.Graph) -> Iterator[None]:
    """Placeholders stand before everything else."""
    first = next((n for n in graph.nodes if n.op != "placeholder"), None)
    if first is None:
        yield
    else:
        with graph.inserting_before(first):
            yield
