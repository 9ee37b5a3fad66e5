"""From a running frame to the line of the model that a person wrote."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FrameType

import torch

from autotp.diagnostic import Span

__all__ = ["caller_span"]

_LIBRARIES = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.path.abspath(os.__file__)) + os.sep,
)


@lru_cache(maxsize=4096)
def _is_library(filename: str) -> bool:
    # The standard library's folder also holds site-packages, where models live.
    if "site-packages" in filename.rpartition(_LIBRARIES[2])[2]:
        return filename.startswith(_LIBRARIES[:2])
    return filename.startswith(_LIBRARIES) or filename.startswith("<frozen")


@lru_cache(maxsize=65536)
def _span(code: CodeType, line: int, index: int) -> Span:
    file = _shown(code.co_filename)
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


def _shown(filename: str) -> str:
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


def caller_span(depth: int = 1) -> Span | None:
    """The innermost line outside torch, autotp and the standard library, `depth` frames up."""
    for frame in _frames(sys._getframe(depth)):
        if not _is_library(frame.f_code.co_filename):
            return _span(frame.f_code, frame.f_lineno, frame.f_lasti // 2)
    return None
