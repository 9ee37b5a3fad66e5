"""From the frames of a traced call to the place of an edit: its expression, and which calls lead there."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FrameType, FunctionType
from typing import Any

from autotp.rewrite.edits.compile import holds, made_from, made_of
from autotp.rewrite.edits.edit import Call, Edit, Function, Wrapper
from autotp.rewrite.edits.locate import NOTHING, Site, located, method_of, outer
from autotp.rewrite.edits.text import NoSource
from autotp.trace.source import is_editable

__all__ = ["frames_of", "placed", "sites_of"]


def frames_of(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of the forward that is recorded, the innermost first."""
    while frame is not None:
        if frame.f_code.co_name == "record" and frame.f_globals.get("__name__") == "autotp.trace.recorder":
            return
        yield frame
        frame = frame.f_back


def sites_of(frames: Sequence[FrameType]) -> Iterator[tuple[int, Site]]:
    """The located expressions of the model's own frames. Helpers that compute for the line that calls them
    (einops) are passed over."""
    for level, frame in enumerate(frames):
        if not is_editable(frame.f_code):
            continue
        site = located(frame)
        if site is not None:
            yield level, site


def placed(
    frames: Sequence[FrameType], level: int, paths: Mapping[int, str], span: tuple[int, int], wrapper: Wrapper
) -> Edit:
    """The edit at `span` of the function of frames[level], with the calls that lead to it from a method of a
    module of the model.

    Raises NoSource when a call on the way cannot be named.
    """
    own = [*frames]
    level = outer(own, level)
    chain: list[tuple[FrameType, FunctionType]] = []
    callees: list[object] = []
    spans: list[tuple[int, int]] = []
    while True:
        frame = own[level]
        code = _original(frame.f_code)
        method = method_of(frame)
        if method is not None and method[1] and id(method[0]) in paths:
            chain.append((frame, made_from(method[2])))
            functions = [_function(f) for _, f in reversed(chain)]
            calls = tuple(
                Call(function, *at, callee)
                for function, at, callee in zip(
                    functions[:-1], reversed(spans), reversed(callees), strict=True
                )
            )
            return Edit(paths[id(method[0])], method[1], calls, functions[-1], *span, wrapper)
        above = next((k for k in range(level + 1, len(own)) if is_editable(own[k].f_code)), None)
        if above is None:
            raise NoSource(f"{code.co_qualname} is called by no method of a module")
        site = located(own[above], ast.Call)
        named = _callee(site, code, method) if site is not None else None
        if site is None or named is None:
            raise NoSource(
                f"{own[above].f_code.co_filename}:{own[above].f_lineno}: the call of {code.co_qualname} "
                "cannot be told from its text"
            )
        expression, callee, function = named
        chain.append((frame, function))
        callees.append(callee)
        spans.append(site.source.span(expression))
        level = outer(own, above)


def _callee(
    site: Site, code: CodeType, method: tuple[Any, str, FunctionType, Any] | None
) -> tuple[ast.expr, object, FunctionType] | None:
    """(the expression that gives the function, what it gives, the function with `code` in it)"""
    assert isinstance(site.node, ast.Call)
    for expression in (site.node.func, *site.node.args, *(k.value for k in site.node.keywords)):
        value = site.plain(expression)
        value = getattr(value, "__func__", value)
        function = holds(value, code) if value is not NOTHING else None
        if function is not None:
            return expression, value, function
    if method is not None:  # `super().forward(x)`, a method of an object that an expression makes
        value = getattr(method[3], "__func__", method[3])
        return site.node.func, value, made_from(method[2])
    return None


def _original(code: CodeType) -> CodeType:
    made = made_of(code)
    return made.original.__code__ if made is not None else code


def _function(function: FunctionType) -> Function:
    code = function.__code__
    return Function(code.co_filename, code.co_firstlineno, code.co_qualname, function)
