"""The branches of a function, of which some may be taken that no trace took.

Such a branch holds constants that were never compared, ops that no rule has seen, and reads that nothing
copies. It matters where it may do anything with a tensor: a call, arithmetic, an element. One that raises,
warns, or asks how the model runs does not.
"""

from __future__ import annotations

import ast
import builtins
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import nn

from autotp.rewrite.edits.text import Source

__all__ = ["Branch", "Span", "branches"]

Span = tuple[int, int]


@dataclass(frozen=True)
class Branch:
    """Where the start of a branch is marked, and all of its text. An empty `mark` stands before a statement,
    another one is that of an expression."""

    mark: Span
    text: Span

    def is_in(self, other: Branch) -> bool:
        """Whether its text is of another one's."""
        return other.text[0] <= self.text[0] and self.text[1] <= other.text[1]


# Methods of containers, strings and loggers: what they are called on is not known before it runs.
_PLAIN = frozenset(
    [
        "append", "debug", "endswith", "extend", "format", "get", "info", "items", "join", "keys", "lower",
        "startswith", "upper", "warn", "warning", "warning_once",
    ]
)  # fmt: skip
_LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Pass)


def branches(source: Source, function: FunctionType, owner: object = None) -> Iterator[Branch]:
    """The branches that matter, the outer ones first. `owner` is the function's first argument, if known."""
    node = source.definition(function.__code__)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        names = _names(node, function, owner)
        yield from _in_list(source, node.body, names)


def _names(
    node: ast.FunctionDef | ast.AsyncFunctionDef, function: FunctionType, owner: object
) -> Mapping[str, Any]:
    """What the function's names stand for before it runs: globals, free variables, its first argument."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    names = {**vars(builtins), **function.__globals__}
    for name, cell in cells:
        try:
            names[name] = cell.cell_contents
        except ValueError:
            continue
    for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
        names.pop(argument.arg, None)
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            names.pop(inner.id, None)
    first = [*node.args.posonlyargs, *node.args.args][:1]
    if owner is not None and first:
        names[first[0].arg] = owner
    return names


def _in_list(source: Source, statements: Sequence[ast.stmt], names: Mapping[str, Any]) -> Iterator[Branch]:
    """The branches inside of these statements, and what follows where one of them may leave early."""
    for place, statement in enumerate(statements):
        rest = statements[place + 1 :]
        if rest and _bodies(statement) and _leaves(statement) and _matters(rest, names):
            yield from _mark(source, rest, _text(source, rest))
        inner = _without_arguments(statement, names)
        for body in [*_bodies(statement), *_nested(statement)]:
            if _matters(body, inner):
                yield from _mark(source, body, _text(source, body))
            yield from _in_list(source, body, inner)
        yield from _arms(source, statement, names)


def _nested(statement: ast.stmt) -> list[list[ast.stmt]]:
    """The body of a function inside: it runs when it is called, if at all."""
    return [statement.body] if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)) else []


def _without_arguments(node: ast.AST, names: Mapping[str, Any]) -> Mapping[str, Any]:
    """The names inside of a function's body: what it is given is not known."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return names
    given = {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
    return {name: value for name, value in names.items() if name not in given}


def _text(source: Source, statements: Sequence[ast.stmt]) -> Span:
    return source.span(statements[0])[0], source.span(statements[-1])[1]


def _bodies(statement: ast.stmt) -> list[list[ast.stmt]]:
    found: list[list[ast.stmt]] = []
    if isinstance(statement, (ast.If, ast.For, ast.AsyncFor, ast.While)):
        found = [statement.body, statement.orelse]
    elif isinstance(statement, ast.Try):
        found = [*(h.body for h in statement.handlers), statement.orelse]
    elif isinstance(statement, ast.Match):
        found = [case.body for case in statement.cases]
    return [body for body in found if body]


def _held(statement: ast.stmt) -> list[ast.stmt]:
    """The statements that always run with a compound one."""
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        return statement.body
    return [*statement.body, *statement.finalbody] if isinstance(statement, ast.Try) else []


def _leaves(statement: ast.stmt) -> bool:
    return any(isinstance(n, _LEAVING) for n in ast.walk(statement))


def _mark(source: Source, statements: Sequence[ast.stmt], text: Span) -> Iterator[Branch]:
    """Where the start of these statements is marked: `;` cannot stand before a compound statement."""
    for first in statements:
        if isinstance(first, _DEFINITIONS):
            continue
        if isinstance(first, (ast.If, ast.While)):
            yield Branch(source.span(first.test), text)
        elif isinstance(first, (ast.For, ast.AsyncFor)):
            yield Branch(source.span(first.iter), text)
        elif isinstance(first, (ast.With, ast.AsyncWith)):
            yield Branch(source.span(first.items[0].context_expr), text)
        elif isinstance(first, ast.Match):
            yield Branch(source.span(first.subject), text)
        elif isinstance(first, ast.Try):
            yield from _mark(source, first.body, text)
        else:
            start, _ = source.span(first)
            yield Branch((start, start), text)
        return


def _arms(source: Source, statement: ast.stmt, names: Mapping[str, Any]) -> Iterator[Branch]:
    """The expressions that may be evaluated or not, when their statement runs."""
    for held in _held(statement):
        yield from _in_list(source, [held], names)
    for node in _own(statement):
        inner = _without_arguments(node, names)
        for arm in _maybe(node):
            if any(_shapes_or_calls(n, inner) for n in ast.walk(arm)):
                yield Branch(source.span(arm), source.span(arm))


def _maybe(node: ast.AST) -> list[ast.expr]:
    """The two values of `a if test else b`, what follows an `and` or `or`, what a loop in an expression
    makes, and the body of a lambda."""
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    if isinstance(node, ast.BoolOp):
        return node.values[1:]
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
        return [node.elt]
    if isinstance(node, ast.DictComp):
        return [node.value]
    return [node.body] if isinstance(node, ast.Lambda) else []


def _own(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement that run whenever it does: not the bodies of its branches."""
    inside = {id(s) for body in _bodies(statement) for s in body} | {id(s) for s in _held(statement)}
    todo: list[ast.AST] = [statement]
    while todo:
        node = todo.pop()
        if id(node) in inside or (node is not statement and isinstance(node, _DEFINITIONS)):
            continue
        yield node
        todo += ast.iter_child_nodes(node)


def _matters(statements: Sequence[ast.stmt], names: Mapping[str, Any]) -> bool:
    """Whether anything is done with tensors when these statements run. What leaves by an exception does not
    go on with anything."""
    for statement in statements:
        if isinstance(statement, ast.Raise):
            return False
        if isinstance(statement, _DEFINITIONS):
            continue
        held = _held(statement)
        if held and _matters(held, names):
            return True
        if any(_shapes_or_calls(node, names) for node in _own(statement)):
            return True
        if isinstance(statement, (ast.Return, ast.Continue, ast.Break)):
            return False
    return False


def _shapes_or_calls(node: ast.AST, names: Mapping[str, Any]) -> bool:
    """Whether a node works on tensors in a way that depends on how they are cut, or may do so."""
    if isinstance(node, ast.Subscript):  # of a tensor, if it is not by a word
        return not (isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str))
    if isinstance(node, ast.BinOp):
        return not (_plain(node.left, names) and _plain(node.right, names))
    if isinstance(node, ast.AugAssign):
        return True
    if isinstance(node, ast.Compare):
        asked = all(isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in node.ops)
        return not asked and not any(_plain_word(each) for each in (node.left, *node.comparators))
    if not isinstance(node, ast.Call):
        return False
    called = _resolved(node.func, names)
    if called is None:
        return not isinstance(node.func, ast.Attribute) or node.func.attr not in _PLAIN
    return not _harmless(called)


def _plain_word(expression: ast.expr) -> bool:
    return isinstance(expression, ast.Constant) and isinstance(expression.value, str)


def _plain(expression: ast.expr, names: Mapping[str, Any]) -> bool:
    """Whether an operand is no tensor."""
    if isinstance(expression, ast.BinOp):
        return _plain(expression.left, names) and _plain(expression.right, names)
    if isinstance(expression, (ast.Constant, ast.JoinedStr)):
        return True
    return isinstance(_resolved(expression, names), (int, float, str))


def _resolved(expression: ast.expr, names: Mapping[str, Any]) -> Any:
    """What an expression of names and attributes stands for; None where that is not known before it runs."""
    if isinstance(expression, ast.Name):
        return names.get(expression.id)
    if isinstance(expression, ast.Attribute):
        held = _resolved(expression.value, names)
        if held is None or isinstance(getattr(type(held), expression.attr, None), property):
            return None
        return getattr(held, expression.attr, None)
    return None


def _harmless(called: Callable[..., Any]) -> bool:
    """Classes, Python's own functions, loggers, and torch's questions (`torch.is_grad_enabled`)."""
    if isinstance(called, type):
        return not issubclass(called, nn.Module)
    if isinstance(getattr(called, "__self__", None), logging.Logger):
        return True
    where = getattr(called, "__module__", None) or ""
    package = where.partition(".")[0]
    if package == "torch" or isinstance(called, nn.Module):
        return getattr(called, "__name__", "").startswith("is_") or where.startswith("torch.compiler")
    return package in ("", "autotp") or (package in sys.stdlib_module_names and package != "__main__")
