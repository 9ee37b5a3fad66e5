"""Does code decide anything by the number of a layer?

Layers of one kind may stand for each other only where the model treats them alike. `if i % 2`, `i in
self.skipped`, `self.layers[7]` do not; handing the number on (to a cache, to a list of the config) does.
What has no source is taken to decide.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import lru_cache

__all__ = ["decides_by_attribute", "decides_by_position"]

_DECIDING = (ast.Mod, ast.FloorDiv)


def decides_by_attribute(kind: type, attribute: str) -> bool:
    """Does a method of the class, but `__init__`, decide by `self.<attribute>`?

    >>> class Layer:
    ...     def forward(self, x):
    ...         return x
    >>> decides_by_attribute(Layer, "layer_idx")
    False
    """
    return any(
        tree is None or any(_is_own(part, attribute) for test in _tests(tree) for part in ast.walk(test))
        for tree in _methods(kind)
    )


def decides_by_position(kind: type, name: str) -> bool:
    """Does a method of the class treat the elements of `self.<name>` by their position?"""
    for tree in _methods(kind):
        if tree is None:
            return True
        if not any(_is_own(part, name) for part in ast.walk(tree)):
            continue
        counted = _counters(tree)
        if any(isinstance(p, ast.Name) and p.id in counted for t in _tests(tree) for p in ast.walk(t)):
            return True
        if any(not _is_even(part, name) for part in ast.walk(tree) if isinstance(part, ast.Subscript)):
            return True
    return False


@lru_cache(maxsize=4096)
def _methods(kind: type) -> tuple[ast.AST | None, ...]:
    return tuple(_trees(kind))


def _trees(kind: type) -> Iterator[ast.AST | None]:
    """The methods of a class and of what it inherits from, torch aside; None for one without source."""
    for owner in kind.__mro__:
        if owner is object or owner.__module__.partition(".")[0] == "torch":
            continue
        for name, member in vars(owner).items():
            function = inspect.unwrap(member) if callable(member) else getattr(member, "__func__", None)
            if name == "__init__" or not inspect.isfunction(function):
                continue
            try:
                yield ast.parse(textwrap.dedent(inspect.getsource(function)))
            except (OSError, TypeError, SyntaxError):
                yield None


def _is_own(node: ast.AST, attribute: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == attribute


def _tests(tree: ast.AST) -> Iterator[ast.AST]:
    """Every expression that decides: a condition, a comparison, a remainder."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif (
            isinstance(node, (ast.Compare, ast.BoolOp, ast.Match))
            or (isinstance(node, ast.BinOp) and isinstance(node.op, _DECIDING))
        ):  # fmt: skip
            yield node


def _counters(tree: ast.AST) -> set[str]:
    """The names that count: `i` of `for i, layer in enumerate(…)`, `for i in range(…)`, `i += 1`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.comprehension)) and isinstance(node.iter, ast.Call):
            called = getattr(node.iter.func, "id", "")
            target = node.target
            if called == "enumerate" and isinstance(target, ast.Tuple):
                target = target.elts[0]
            if called in ("enumerate", "range") and isinstance(target, ast.Name):
                found.add(target.id)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def _is_even(node: ast.Subscript, name: str) -> bool:
    """Is a subscript of `self.<name>` one that treats all elements alike: none of it, a variable, the first,
    the last, or a slice up to a number of the config?"""
    if not _is_own(node.value, name):
        return True
    index = node.slice
    if isinstance(index, ast.Slice):
        return index.lower is None and index.step is None and isinstance(index.upper, ast.Attribute)
    if isinstance(index, ast.UnaryOp) and isinstance(index.op, ast.USub):
        return isinstance(index.operand, ast.Constant) and index.operand.value == 1
    return isinstance(index, ast.Name) or (isinstance(index, ast.Constant) and index.value == 0)
