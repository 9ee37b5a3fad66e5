"""What a layer did, in values that can be compared: the tensors by number, everything else as it is.

`Noting` numbers the tensors of the layer that is noted, `Following` those of one that may repeat it: a
tensor has a number there if it is what has that number here. What cannot be compared is `Unsound`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from autotp.trace.hooks import Template, like
from autotp.trace.noted import plain

__all__ = [
    "GHOST", "PLAIN", "Border", "Different", "Following", "Ghost", "Kind", "Line", "Noting", "Recorder",
    "Unsound", "has_tensor", "state",
]  # fmt: skip

GHOST = "_repeated"  # the attribute of a tensor that a repetition made
PLAIN = frozenset([
    bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout,
    torch.memory_format, type,
])  # fmt: skip

_EXACT = PLAIN - {float}  # 0.0 equals -0.0


class Recorder(Protocol):
    """What is asked of the recorder."""

    recording: bool
    stack: list[tuple[str, int]]

    def node(self, tensor: torch.Tensor) -> fx.Node:
        """The node of a tensor."""

    def name(self, tensor: torch.Tensor) -> str | None:
        """The name of a parameter, a buffer, or another tensor of the model."""

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether it is a fake tensor of which is known where it comes from."""

    def memories(self, tensors: list[torch.Tensor]) -> set[Any]:
        """The memory of these tensors, views and what they view alike."""

    def template(self, tensor: torch.Tensor) -> Template:
        """How to make fake tensors like this one."""


class Ghost:
    """Which value of which repetition a tensor is; it hangs on the tensor."""

    __slots__ = ("repeat", "source", "stack")

    def __init__(self, repeat: int, source: fx.Node, stack: tuple[tuple[str, int], ...]) -> None:
        self.repeat, self.source, self.stack = repeat, source, stack


class Ref(int):
    """The number of a tensor among those of a layer's call, in the order in which they turn up."""


class New(Ref):
    """A tensor that a function makes."""


class Unsound(Exception):
    """Something that cannot be compared."""


class Different(BaseException):
    """The layer at `path` is not what it looks like; without a path, none is to be left out. No Exception:
    a model might catch it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


@dataclass(frozen=True)
class Line:
    function: Any
    args: Any
    kwargs: Any
    state: tuple[Any, ...]
    result: Any
    grads: tuple[tuple[int, bool], ...]  # the tensors whose requires_grad it changes
    acts: bool  # on torch's state alone: no tensor goes in or out


@dataclass(frozen=True)
class Border:
    kind: str
    path: str  # from the layer's on
    call: int
    places: tuple[tuple[str, int], ...]


@dataclass
class Kind:
    """What one layer did."""

    path: str
    call: int
    lines: list[Line | Border] = field(default_factory=list)
    # Tensors that it did not make: the suffix of its own one's name, or the node; and what they are.
    outer: dict[int, tuple[str | fx.Node, tuple[Any, ...]]] = field(default_factory=dict)
    made: dict[int, Callable[[], torch.Tensor]] = field(default_factory=dict)
    nodes: dict[int, fx.Node] = field(default_factory=dict)
    sound: bool = True
    followed: bool = False


class _Run:
    """The tensors of one layer's call, by number."""

    def __init__(self, recorder: Recorder, kind: Kind, path: str) -> None:
        self.recorder, self.kind, self.path = recorder, kind, path
        self.numbers: dict[int, int] = {}
        self.tensors: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> int:
        """The next number."""
        self.numbers[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        return len(self.tensors) - 1


class Noting(_Run):
    """The layer that is noted. `likes` says what each tensor was like last, `given` which ones the function
    that runs is given, `wrote` whether it wrote into any."""

    def __init__(self, recorder: Recorder, kind: Kind, path: str) -> None:
        super().__init__(recorder, kind, path)
        self.likes: list[tuple[Any, ...]] = []
        self.given: set[int] = set()
        self.wrote = False

    def add(self, tensor: torch.Tensor) -> int:
        """The next number."""
        self.likes.append(like(tensor))
        return super().add(tensor)

    def changed(self) -> list[tuple[int, bool]]:
        """The tensors of which a function changed whether they require a gradient. What it is not given it
        changes by a write alone.

        Raises Unsound where it changed anything else.
        """
        found = []
        for number in range(len(self.likes)) if self.wrote else sorted(self.given):
            was, now = self.likes[number], like(self.tensors[number])
            if now == was:
                continue
            if now[:-1] != was[:-1] or number in self.kind.outer:
                raise Unsound
            self.likes[number] = now
            found.append((number, now[-1]))
        return found

    def noted(self, tensor: torch.Tensor) -> int:
        """The number of a tensor that goes in; what the layer did not make is named."""
        known = self.numbers.get(id(tensor))
        if known is not None:
            self.given.add(known)
            return known
        number = self.add(tensor)
        self.given.add(number)
        name = self.recorder.name(tensor)
        own = name is not None and name.startswith(f"{self.path}.")
        if not self.recorder.knows(tensor):
            raise Unsound
        source: str | fx.Node = (
            name[len(self.path) :] if own and name is not None else self.recorder.node(tensor)
        )
        self.kind.outer[number] = (source, self.likes[number])
        return number

    def spec(self, value: Any) -> Any:
        """A value that goes in, as it is noted."""
        if isinstance(value, torch.Tensor):
            return Ref(self.noted(value))
        kind = type(value)
        if kind in (tuple, list, torch.Size):
            return kind([self.spec(v) for v in value]) if kind is not torch.Size else kind(map(plain, value))
        if kind is dict:
            return {k: self.spec(v) for k, v in value.items()}
        if kind is slice:
            return slice(*(self.spec(v) for v in (value.start, value.stop, value.step)))
        if kind in PLAIN:
            return value
        number = plain(value)
        if type(number) in PLAIN:
            return number
        raise Unsound

    def result(self, out: Any) -> Any:
        """A value that comes out, as it is noted."""
        if isinstance(out, torch.Tensor):
            known = self.numbers.get(id(out))
            if known is not None:
                return Ref(known)
            if self.recorder.name(out) is not None:  # `tensor.data` and the like
                return Ref(self.noted(out))
            if not self.recorder.knows(out):
                raise Unsound
            number = self.add(out)
            self.kind.made[number] = self.recorder.template(out)
            return New(number)
        if type(out) in (tuple, list) or type(out).__module__ == "torch.return_types":
            return (type(out), [self.result(o) for o in out])
        if type(out) in PLAIN or type(out) is torch.Size:
            return out
        raise Unsound


class Following(_Run):
    """A layer that may repeat it, as the `repeat`-th; `stack` is what runs around it."""

    def __init__(
        self, recorder: Recorder, kind: Kind, path: str, repeat: int, stack: tuple[tuple[str, int], ...]
    ) -> None:
        super().__init__(recorder, kind, path)
        self.given: dict[fx.Node, fx.Node] = {}
        self._repeat, self._stack = repeat, stack

    def number(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor in the layer that follows, if it is what stands there in the noted one."""
        known = self.numbers.get(id(tensor))
        if known is not None:
            return known
        outer = self.kind.outer.get(len(self.tensors))
        if outer is None or outer[1] != like(tensor):
            return None
        source = outer[0]
        name = self.recorder.name(tensor)
        if not self.recorder.knows(tensor):
            return None
        if isinstance(source, str):
            if name != f"{self.path}{source}":
                return None
        else:
            if name is not None and name.startswith(f"{self.path}."):
                return None
            here = self.recorder.node(tensor)
            if source in self.given or here in self.given.values():
                return None
            self.given[source] = here
        return self.add(tensor)

    def made(self, result: Any) -> Any:
        """What a function gives, made like what it gave there."""
        if type(result) is New:
            tensor = self.kind.made[result]()
            tensor.__dict__[GHOST] = Ghost(self._repeat, self.kind.nodes[result], self._stack)
            self.numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
            return tensor
        if type(result) is Ref:
            return self.tensors[result]
        if type(result) is tuple:
            made = [self.made(r) for r in result[1]]
            return made if result[0] is list else result[0](made)
        return result

    def same(self, spec: Any, value: Any) -> bool:
        """Whether a value is the one that was noted."""
        kind = type(value)
        if kind is not type(spec):
            if isinstance(value, torch.Tensor):
                return isinstance(spec, Ref) and self.number(value) == spec
            number = plain(value)
            return number is not value and self.same(spec, number)
        if kind in _EXACT:
            return bool(spec == value)
        if kind in (tuple, list):
            if len(spec) != len(value):
                return False
            return all(self.same(part, own) for part, own in zip(spec, value, strict=True))
        if kind is dict:
            return list(spec) == list(value) and all(self.same(spec[k], v) for k, v in value.items())
        if kind is slice:
            return all(
                self.same(s, v)
                for s, v in ((spec.start, value.start), (spec.stop, value.stop), (spec.step, value.step))
            )
        if kind is float:
            return bool(spec == value) and (value != 0.0 or str(spec) == str(value))
        return kind is torch.Size and bool(spec == value)


def state() -> tuple[Any, ...]:
    """What an op reads besides its arguments."""
    casts: tuple[Any, ...] = ()
    if _cast("cpu") or _cast("cuda"):
        casts = tuple(_cast(t) and torch.get_autocast_dtype(t) for t in ("cpu", "cuda"))
    return _gradients(), _inference(), _dtype(), casts


# Asked for every function of every layer.
_cast, _gradients, _inference = (
    torch.is_autocast_enabled,
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
)
_dtype = torch.get_default_dtype


def has_tensor(spec: Any) -> bool:
    """Whether a noted value has a tensor in it."""
    if isinstance(spec, dict):
        return any(map(has_tensor, spec.values()))
    if isinstance(spec, slice):
        return any(map(has_tensor, (spec.start, spec.stop, spec.step)))
    return isinstance(spec, Ref) or (isinstance(spec, (list, tuple)) and any(map(has_tensor, spec)))
