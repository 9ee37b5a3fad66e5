"""How numbers are computed of sizes: what is asked of them can be asked again for other sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Dim", "Formula", "Size", "result_of", "step_of"]

Dim = tuple[str, int]
"""The name of a node, and one of its dims; or what `argument` gives."""


@dataclass(frozen=True)
class Size:
    """A size as it was read: the dim, and the number."""

    dim: Dim
    number: int


Formula = Any
"""How a number was computed: a `Size`, a plain number, (a text with {0}, {1} in it, the formulas of those),
or None where that is not known."""


_BINARY = {
    "add": "({0} + {1})", "sub": "({0} - {1})", "mul": "({0} * {1})", "floordiv": "({0} // {1})",
    "truediv": "({0} / {1})", "mod": "({0} % {1})", "divmod": "({0} // {1}, {0} % {1})",
    "pow": "({0} ** {1})", "lshift": "({0} << {1})", "rshift": "({0} >> {1})", "and": "({0} & {1})",
    "or": "({0} | {1})",
    "xor": "({0} ^ {1})", "lt": "({0} < {1})", "le": "({0} <= {1})", "gt": "({0} > {1})",
    "ge": "({0} >= {1})", "eq": "({0} == {1})", "ne": "({0} != {1})",
}  # fmt: skip
_UNARY = {
    "neg": "(-{0})", "abs": "abs({0})", "pos": "(+{0})", "invert": "(~{0})", "floor": "({0} // 1)",
    "ceil": "(-(-{0} // 1))", "trunc": "int({0})", "round": "round({0})", "bit_length": "({0}).bit_length()",
    "int": "int({0})", "float": "float({0})", "bool": "bool({0})",
}  # fmt: skip
_MOST = 64  # operations in one formula


def result_of(name: str, parts: Sequence[Formula]) -> Formula:
    """The formula of an operator's result, by those of what it is given; None where it is not known.

    >>> result_of("__rsub__", [Size(("x", 1), 7), 2])
    ('({0} - {1})', 2, Size(dim=('x', 1), number=7))
    """
    name, parts = name.strip("_"), list(parts)
    if name not in _BINARY and name.startswith("r") and name[1:] in _BINARY:
        name, parts = name[1:], parts[::-1]
    text = _UNARY.get(name) if len(parts) == 1 else _BINARY.get(name) if len(parts) == 2 else None
    if text is None or any(part is None for part in parts) or sum(map(_operations, parts)) > _MOST:
        return None
    if name in _DIVIDES and (isinstance(parts[1], (Size, tuple)) or not parts[1]):
        return None  # by what may be zero for other sizes
    return (text, *parts)


_DIVIDES = ("floordiv", "truediv", "mod", "divmod", "pow", "lshift", "rshift")


def _operations(formula: Formula) -> int:
    return 1 + sum(map(_operations, formula[1:])) if isinstance(formula, tuple) else 0


_FEW = 4


def step_of(value: Any) -> Any:
    """A number that may name a dim; None for any other.

    >>> step_of(2), step_of(77)
    (2, None)
    """
    return value if -_FEW <= value < _FEW else None
