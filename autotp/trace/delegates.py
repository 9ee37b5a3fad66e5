"""Subclasses of a layer whose forward computes through the layer's own: `super().forward(ids) * self.scale`.

Such a class may be parallel without a change of its code: put a parallel layer behind it in the order of
classes, and `super()` finds that one. That holds only where the forward never reads the weight by itself, so
its source is looked into: `self` stands only in `self.name`, the weight only for its device and dtype, and
methods that it calls are looked into as well. What cannot be read is not one of these.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator

from torch import nn

__all__ = ["adds_nothing", "delegates"]

_HARMLESS = ("device", "dtype")  # of the weight
_TABLES = ("_parameters", "parameters", "named_parameters", "state_dict", "__dict__", "get_parameter")


_OWN = frozenset([  # what a class may have of its own, although every class has it
    "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__parameters__",
    "__init__", "__repr__", "extra_repr", "reset_parameters", "__constants__", "__firstlineno__",
    "__static_attributes__",
])  # fmt: skip


def adds_nothing(kind: type[nn.Module], layer: type[nn.Module]) -> bool:
    """Whether `kind` is a subclass of `layer` that computes as it does: it overrides nothing but how an
    instance is made, filled and shown. What else it has of its own, the layer's forward never asks for.

    >>> adds_nothing(nn.modules.linear.NonDynamicallyQuantizableLinear, nn.Linear)
    True
    """
    if not issubclass(kind, layer) or kind is layer:
        return False
    own = kind.__mro__[: kind.__mro__.index(layer)]
    if kind.__mro__[len(own) :] != layer.__mro__ or any(layer not in one.__mro__ for one in own):
        return False  # other bases beside the layer
    known = {*dir(layer), "weight", "bias", "in_features", "out_features", "__getattribute__"} - _OWN
    return not any(known & vars(one).keys() for one in own)


_KNOWN: dict[tuple[type[nn.Module], type[nn.Module]], bool] = {}


def delegates(kind: type[nn.Module], layer: type[nn.Module]) -> bool:
    """Whether `kind` is a subclass of `layer` that computes through `layer.forward`, and only so.

    >>> class Scaled(nn.Embedding):
    ...     def forward(self, ids):
    ...         return super().forward(ids) * 3
    >>> delegates(Scaled, nn.Embedding)
    True
    """
    if (kind, layer) not in _KNOWN:
        _KNOWN[kind, layer] = _delegates(kind, layer)
    return _KNOWN[kind, layer]


def _delegates(kind: type[nn.Module], layer: type[nn.Module]) -> bool:
    own = kind.__mro__[: kind.__mro__.index(layer)] if issubclass(kind, layer) else ()
    bases = kind.__mro__[len(own) :]
    if not own or bases != layer.__mro__ or any(layer not in one.__mro__ for one in own):
        return False  # the layer itself, or one with other bases beside it
    if any("__getattr__" in vars(one) or "__getattribute__" in vars(one) for one in own):
        return False
    if any("__call__" in vars(one) for one in own):
        return False
    return not any("forward" in vars(one) for one in own) or _through(own, "forward", set())


def _through(own: tuple[type[nn.Module], ...], name: str, seen: set[str]) -> bool:
    """Whether the method `name`, in each of the classes that have it, leaves the weight to the layer."""
    seen.add(name)
    for one in own:
        if name not in vars(one):
            continue
        tree = _source(vars(one)[name])
        if tree is None or not _harmless(tree):
            return False
        if name == "forward" and not _calls_super(tree):
            return False
        for other in set(_attributes(tree)) - seen:
            defined = [vars(c)[other] for c in own if other in vars(c)]
            if any(hasattr(d, "__get__") for d in defined) and not _through(own, other, seen):
                return False
    return True


def _source(function: object) -> ast.FunctionDef | None:
    """The parsed text of a method."""
    if not inspect.isfunction(function):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return None
    found = tree.body[0]
    return found if isinstance(found, ast.FunctionDef) and found.args.args else None


def _harmless(function: ast.FunctionDef) -> bool:
    """Whether `self` is only asked for attributes, and never for the weight's values."""
    this = function.args.args[0].arg
    above = {id(child): node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(function):
        if not isinstance(node, ast.Name) or node.id != this:
            continue
        attribute = above.get(id(node))
        if not isinstance(attribute, ast.Attribute) or attribute.attr in _TABLES:
            return False
        if attribute.attr == "weight":
            use = above.get(id(attribute))
            if not isinstance(use, ast.Attribute) or use.attr not in _HARMLESS:
                return False
    return not any(
        isinstance(n, ast.Name) and n.id in ("getattr", "vars", "locals") for n in ast.walk(function)
    )


def _calls_super(function: ast.FunctionDef) -> bool:
    """Whether it calls `super().forward(...)`, without arguments to `super`."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "forward"
        and isinstance(node.func.value, ast.Call)
        and isinstance(node.func.value.func, ast.Name)
        and node.func.value.func.id == "super"
        and not node.func.value.args
        for node in ast.walk(function)
    )


def _attributes(function: ast.FunctionDef) -> Iterator[str]:
    """The attributes of `self` that are used."""
    this = function.args.args[0].arg
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == this:
            yield node.attr
