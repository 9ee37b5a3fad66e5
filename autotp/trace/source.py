"""From a running frame or a traceback to the line of the model that a person wrote."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar

import torch

from autotp.diagnostic import Span

__all__ = [
    "caller_span",
    "error_span",
    "is_editable",
    "is_installed",
    "is_library",
    "line_span",
    "outermost",
    "shown",
]

_LIBRARIES = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.path.abspath(os.__file__)) + os.sep,
)
# Packages that compute for the line that calls them: the line is what a person would change.
_HELPERS = tuple(
    f"{os.sep}site-packages{os.sep}{name}{os.sep}"
    for name in ("einops", "opt_einsum", "jaxtyping", "beartype")
)


@lru_cache(maxsize=4096)
def is_library(filename: str) -> bool:
    """Whether a file is torch's, autotp's, Python's, or that of a helper that computes for its caller."""
    if any(part in filename for part in _HELPERS):
        return True
    # The standard library's folder also holds site-packages, where models live.
    if "site-packages" in filename.rpartition(_LIBRARIES[2])[2]:
        return filename.startswith(_LIBRARIES[:2])
    return filename.startswith(_LIBRARIES) or filename.startswith("<frozen")


def is_installed(kind: type) -> bool:
    """Whether a class is of an installed package, and not of somebody's own files."""
    return "site-packages" in str(getattr(sys.modules.get(kind.__module__), "__file__", ""))


# What torch and einops wrote of layers as a person would, with sizes of the whole model in it.
_COMPOSED = frozenset([
    "multi_head_attention_forward", "_in_projection", "_in_projection_packed", "MultiheadAttention.forward",
    "Rearrange.forward", "Reduce.forward", "Unflatten.forward", "GroupNorm.forward",
    "Conv1d._conv_forward", "Conv2d._conv_forward", "Conv3d._conv_forward",
])  # fmt: skip


def is_editable(code: CodeType) -> bool:
    """Whether a function may be edited: one of the model, or of those that torch and einops compose."""
    return not is_library(code.co_filename) or (
        code.co_qualname in _COMPOSED
        and (code.co_filename.startswith(_LIBRARIES[0]) or _HELPERS[0] in code.co_filename)
    )


# Keyed by identity: code objects of equal functions in different files compare equal. The code is kept, so
# that its id stays its own.
_SPANS: dict[tuple[int, int], tuple[CodeType, Span]] = {}


def _span(code: CodeType, line: int, index: int) -> Span:
    key = (id(code), index)
    if key not in _SPANS:
        if len(_SPANS) > 65536:
            _SPANS.clear()
        _SPANS[key] = (code, _found(code, line, index))
    return _SPANS[key][1]


def _found(code: CodeType, line: int, index: int) -> Span:
    file = shown(code.co_filename)
    text = linecache.getline(code.co_filename, line).rstrip("\n")
    column, length = 1, max(1, len(text.strip()))
    if text.strip():
        column = len(text) - len(text.lstrip()) + 1
    for position, (start, stop, first, last) in enumerate(code.co_positions()):
        if position == index and start == line and first is not None:
            raw = text.encode()
            column = len(raw[:first].decode(errors="replace")) + 1
            end = last if stop == line and last is not None else len(raw)
            length = max(1, len(raw[first:end].decode(errors="replace")))
            break
    return Span(file, line, column, length, text)


def shown(filename: str) -> str:
    """The path as shown: from site-packages or from the working directory where it lies below one."""
    for marker in (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"):
        if marker in filename:
            return filename.rpartition(marker)[2]
    here = os.getcwd() + os.sep
    return filename[len(here) :] if filename.startswith(here) else filename


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


Function = TypeVar("Function", bound=Callable[..., Any])
_OUTERMOST: set[int] = set()  # ids of the code of functions that live as long as this module


def outermost(function: Function) -> Function:
    """Mark the function that runs a model: the lines that called it are none of the model's."""
    assert isinstance(function, FunctionType)
    _OUTERMOST.add(id(function.__code__))
    return function


def caller_span(depth: int = 1) -> Span | None:
    """The innermost line outside torch, autotp and the standard library, `depth` frames up, of those that
    run in the model: None for a model of torch's own modules."""
    for frame in _frames(sys._getframe(depth)):
        if id(frame.f_code) in _OUTERMOST:
            return None
        if not is_library(frame.f_code.co_filename):
            return _span(frame.f_code, frame.f_lineno, frame.f_lasti // 2)
    return None


def error_span(error: BaseException) -> Span | None:
    """The innermost line of a person's code in an exception's traceback."""
    found = None
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not is_library(code.co_filename):
            found = _span(code, traceback.tb_lineno, traceback.tb_lasti // 2)
        traceback = traceback.tb_next
    return found


def line_span(filename: str, line: int) -> Span | None:
    """A whole line, where no column is known; None for a line that no person wrote."""
    if is_library(filename):
        return None
    text = linecache.getline(filename, line).rstrip("\n")
    return Span(shown(filename), line, len(text) - len(text.lstrip()) + 1, max(1, len(text.strip())), text)
