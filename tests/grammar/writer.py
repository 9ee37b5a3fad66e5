"""Writes a module's source and its plan, one statement at a time."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.grammar.templates import FORMS

__all__ = ["Chooser", "Scope", "Sentence", "Writer"]

T = TypeVar("T")
_files = itertools.count()


class Chooser(Protocol):
    """Where choices come from: hypothesis, or random.Random."""

    def choice(self, seq: Sequence[T], /) -> T: ...


@dataclass(frozen=True)
class Sentence:
    """A module as source text (its last class is the module), a plan, and a number of ranks.

    `right` says that the plan is right by construction, `productions` which ones of the grammar stand in it.
    """

    source: str
    plan: dict[str, Any]
    tp: int
    productions: frozenset[str]
    right: bool
    ids: bool
    width: int

    def build(self, seed: int = 0) -> nn.Module:
        """The module, in float64: weights of order one, biases and norms that hide nothing."""
        name = f"<sentence {next(_files)}>"
        # As for any source that is not a file: errors show its lines.
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(keepends=True), name)
        space: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "__name__": "sentence"}
        exec(compile(self.source, name, "exec"), space)
        model: nn.Module = space["Net"]().double().eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(drawn * 0.5 + 0.1)
        return model

    def inputs(self, batch: int, sequence: int, seed: int = 1) -> Tensor:
        """What one forward takes."""
        generator = torch.Generator().manual_seed(seed)
        if self.ids:
            return torch.randint(0, 11, (batch, sequence), generator=generator)
        return torch.randn(batch, sequence, self.width, generator=generator, dtype=torch.float64)

    def __str__(self) -> str:
        rules = "\n".join(f"  {name}: {rule}" for name, rule in self.plan.items())
        return f"{self.source}\ntp {self.tp}, plan{' (right by construction)' * self.right}\n{rules}\n"


@dataclass
class Scope:
    """One class: what its __init__ and its forward do. `values` are its variables, with their shapes."""

    name: str
    arguments: tuple[str, ...]
    init: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    values: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def source(self, result: str) -> str:
        """The class as text."""
        init = "".join(f"        {line}\n" for line in self.init)
        body = "".join(f"        {line}\n" for line in self.body)
        arguments = ", ".join(self.arguments)
        return (
            f"class {self.name}(nn.Module):\n    def __init__(self):\n        super().__init__()\n{init}\n"
            f"    def forward(self, {arguments}):\n{body}        return {result}\n\n\n"
        )


class Writer:
    """Writes into the innermost open class. With `wild` above 0 some statements are wrong on a shard, and
    some operands another variable of the same shape."""

    def __init__(self, choose: Chooser, tp: int, wild: float) -> None:
        self.choose, self.tp, self.wild = choose, tp, wild
        self.counter = itertools.count()
        self.scopes: list[Scope] = []
        self.classes: list[str] = []
        self.rules: dict[str, Any] = {}
        self.linears: list[str] = []
        self.parts: list[str] = []
        self.used: set[str] = set()

    # -- choices

    def one(self, *options: T) -> T:
        return self.choose.choice(options)

    def maybe(self, chance: float) -> bool:
        return self.choose.choice(range(100)) < 100 * chance

    def strays(self) -> bool:
        """Whether to write something that is wrong on a shard here."""
        return self.wild > 0 and self.maybe(self.wild)

    def uses(self, production: str) -> None:
        self.used.add(production)

    def units(self, most: int = 7) -> int:
        """How many heads or features are dealt: at least one for each rank, mostly uneven."""
        return self.one(*range(self.tp, max(most, self.tp) + 1))

    def pick(self, forms: tuple[list[str], list[str]], **values: Any) -> str:
        """One of the right or, where the sentence strays, of the wrong forms of a statement."""
        right, wrong = forms
        return self.one(*(wrong if wrong and self.strays() else right)).format(**values)

    def form(self, name: str, **values: Any) -> str:
        """One of the forms of that name."""
        return self.pick(FORMS[name], **values)

    # -- text

    @property
    def scope(self) -> Scope:
        return self.scopes[-1]

    @contextmanager
    def inside(self, *arguments: str) -> Iterator[Scope]:
        """Write a class of its own."""
        scope = Scope(f"Part{next(self.counter)}", arguments)
        self.scopes.append(scope)
        yield scope
        self.scopes.pop()

    def close(self, scope: Scope, result: str) -> None:
        self.classes.append(scope.source(result))

    def keep(self, prefix: str, expression: str) -> str:
        """An attribute made in __init__; returns its name without `self.`."""
        name = f"{prefix}{next(self.counter)}"
        self.scope.init.append(f"self.{name} = {expression}")
        return name

    def let(self, expression: str, *shape: Any) -> str:
        """A statement of the forward; returns its variable. Shapes are nominal: "B", "S" and numbers."""
        name = f"v{next(self.counter)}"
        self.scope.body.append(f"{name} = {expression}")
        if shape:
            self.scope.values[name] = shape
        return name

    def operand(self, name: str) -> str:
        """The variable, or (where the sentence is wild) another one of its shape."""
        shape = self.scope.values.get(name)
        if shape is None or not (self.wild and self.maybe(self.wild / 4)):
            return name
        return self.one(*(other for other, its in self.scope.values.items() if its == shape))

    # -- layers and tensors

    def layer(self, x: str, fan_in: int, fan_out: int, rule: Any = None) -> str:
        """A linear layer and its call."""
        return self.let(f"{self.linear(fan_in, fan_out, rule)}({self.operand(x)})", "B", "S", fan_out)

    def part(self, scope: Scope, x: str, n: int, *more: str) -> str:
        """A closed class's instance and its call."""
        self.parts.append(self.keep("part", f"{scope.name}()"))
        return self.let(f"self.{self.parts[-1]}({', '.join([self.operand(x), *more])})", "B", "S", n)

    def linear(self, fan_in: int, fan_out: int, rule: Any = None) -> str:
        """A linear layer with its rule; returns what calls it."""
        name = self.keep("fc", f"nn.Linear({fan_in}, {fan_out}, bias={self.one(True, True, False)})")
        self.linears.append(name)
        if rule is not None:
            self.rules[name] = rule
        self.uses("linear")
        return f"self.{name}"

    def parameter(self, *shape: int, rule: Any = None) -> str:
        """A raw parameter; returns what reads it."""
        name = self.keep("w", f"nn.Parameter(torch.zeros({', '.join(map(str, shape))}))")
        if rule is not None:
            self.rules[name] = rule
        return f"self.{name}"

    def buffer(self, expression: str) -> str:
        """A buffer; returns what reads it."""
        name = f"b{next(self.counter)}"
        self.scope.init.append(f'self.register_buffer("{name}", {expression})')
        return f"self.{name}"
