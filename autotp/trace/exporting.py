"""What is noted while `torch.export` runs a module: calls, borders, where it failed, what replaces values.

An exported program says of each op in which module it is, and no more. So tensors that cross the border of a
module, and values that a boundary replaces, are marked by ops of our own; `trace/exported.py` takes them out.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autotp.trace.calls import Boundary
from autotp.trace.graph import numbers_in, parameters_of, tensors_in
from autotp.trace.signature import Words, signature

__all__ = ["Watch"]


@torch.library.custom_op("autotp::stand_in", mutates_args=())
def _stand_in(value: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Marks where a boundary replaces a value by one of another shape; it is taken out of the trace."""
    return value.new_empty(shape)


@_stand_in.register_fake
def _(value: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return value.new_empty(shape)


@torch.library.custom_op("autotp::note", mutates_args=())
def _note(value: torch.Tensor, where: str) -> torch.Tensor:
    """Says that a value goes into or comes out of a module; it is taken out of the trace."""
    return value.new_empty(0)


@_note.register_fake
def _(value: torch.Tensor, where: str) -> torch.Tensor:
    return value.new_empty(0)


class Watch:
    """Counts calls, notes where the forward failed, puts boundaries in place, and takes the tensors out of
    the result, whatever holds them: torch.export knows plain containers only."""

    def __init__(self, root: nn.Module, before: Boundary | None, after: Boundary | None) -> None:
        self.calls: dict[str, int] = {}
        self.given: dict[str, list[Words]] = {}
        self.returned: dict[str, Any] = {}
        self.outputs: list[tuple[str, bool]] = []
        self.failed = ""
        self.raised: list[tuple[Exception, str]] = []  # what no run raises, and in which module
        self._inside: list[str] = []
        self._error: BaseException | None = None
        paths: dict[int, str] = {}
        for path, module in root.named_modules():
            paths.setdefault(id(module), path)
        for module in root.modules():
            path = paths[id(module)]
            module.__dict__["forward"] = self._watched(path, module.forward, before, after)

    def _watched(
        self, path: str, inner: Callable[..., Any], before: Boundary | None, after: Boundary | None
    ) -> Callable[..., Any]:
        parameters = parameters_of(inner)

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not path:
                self.calls.clear()
                self.given.clear()
            self.calls[path] = call = self.calls.get(path, 0) + 1
            self.given.setdefault(path, []).append(signature(parameters, args, kwargs))
            _border(path, call - 1, "entered", (args, kwargs))
            self._inside.append(path)
            try:
                if before is not None:
                    args = tuple(_replaced(a, b) for a, b in _aside(lambda v: before(path, v), args))
                out = inner(*args, **kwargs)
                if after is not None:
                    (out,) = (_replaced(a, b) for a, b in _aside(lambda v: (after(path, v[0]),), (out,)))
                _border(path, call - 1, "left", out)
                if not path:
                    self.returned = numbers_in(out)
                    found = list(tensors_in(out))
                    self.outputs = [(name, cached) for name, _, cached in found]
                    return [tensor for _, tensor, _ in found]
                return out
            except Exception as error:
                if self._error is not error:
                    self._error, self.failed = error, path
                raise
            finally:
                self._inside.pop()

        return forward

    def told(self, error: Exception) -> None:
        """A value is asked for that is not known; the model's code may catch what that raises."""
        if self._inside:
            self.raised.append((error, self._inside[-1]))


def _border(path: str, call: int, kind: str, value: Any) -> None:
    for name, tensor, _ in tensors_in(value, caches=False):
        torch.ops.autotp.note(tensor, json.dumps([kind, path, call, name]))


def _aside(boundary: Callable[[tuple[Any, ...]], Any], values: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    """Each value, with the shape that the boundary gives it where it is a tensor and gets another. The
    boundary runs in a thread of its own, where nothing is exported, on tensors that are only like the real
    ones."""
    likes = [(tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else None for v in values]
    answer: list[Any] = []

    def run() -> None:
        made = [
            torch.empty(k[0], dtype=k[1], device="meta") if k else v
            for k, v in zip(likes, values, strict=True)
        ]
        try:
            answer.append(boundary(tuple(made)))
        except Exception as error:
            answer.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(answer[0], Exception):
        raise answer[0]
    replaced = [None] * len(values) if answer[0] is None else answer[0]
    for old, new in zip(values, replaced, strict=True):
        changed = isinstance(new, torch.Tensor) and tuple(new.shape) != tuple(old.shape)
        yield old, tuple(new.shape) if changed else None


def _replaced(value: Any, shape: tuple[int, ...] | None) -> Any:
    return value if shape is None else torch.ops.autotp.stand_in(value, list(shape))
