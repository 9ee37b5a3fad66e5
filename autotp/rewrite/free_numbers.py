"""Which numbers of a call may be any: nothing that is sharded depends on them, and the code never asks.

    x[:, start:]      a bound on a dim that is whole
    scale * h         a factor of a tensor

Whoever looks at a number otherwise (`int(n)`, `n % 2`, `range(n)`, `TABLE[n]`, f"{n}", a call) may take
another way for the next one, so that each is proven for itself. Besides, the traces with two other numbers
must be alike.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Iterator
from types import FunctionType
from typing import Any

from torch import fx, nn

from autotp.analysis import Analysis
from autotp.placement import INVARIANT, Shard, is_whole
from autotp.propagate.call import normal_dim
from autotp.propagate.compared import decides
from autotp.propagate.ops import arguments_of, op_name
from autotp.propagate.propagation import Propagation
from autotp.rewrite.edits.text import NoSource, source_of
from autotp.rewrite.further import Call, Further, proven_anew
from autotp.trace.graph import Val, called
from autotp.trace.noted import argument

__all__ = ["free_numbers"]


def free_numbers(
    twin: nn.Module,
    analysis: Analysis,
    call: Call,
    found: Further,
    parameters: tuple[tuple[str, Any], ...],
    new: Collection[str],
    *,
    training: bool,
    grad: bool,
) -> tuple[frozenset[str], Further]:
    """The arguments among the `new` ones of a call that is proven in whose place any number may stand, and
    the proof in which they were noted."""
    free: set[str] = set()
    given = called(parameters, call.args, call.kwargs)
    names = [name for name, _ in parameters]
    numbers = [n for n in names if n in new and (type(given.get(n)) is int or type(given.get(n)) is float)]
    if not numbers:
        return frozenset(), found
    noted = proven_anew(twin, analysis, call, None, training=training, grad=grad, numbers=True)
    if noted.reason or not _alike(found.propagation, noted.propagation):
        return frozenset(), found
    for name in numbers:
        value: Any = given[name]
        if not _only_computed(twin, name, noted):
            continue
        for other in (value + 1, value + 2):
            beside = call.with_argument(names.index(name), name, other)
            proven = proven_anew(twin, analysis, beside, None, training=training, grad=grad)
            if proven.reason or not _alike(found.propagation, proven.propagation):
                break
        else:
            free.add(name)
    return frozenset(free), noted


def _only_computed(twin: nn.Module, name: str, found: Further) -> bool:
    """Whether the forward only computes with tensors and this number, or slices tensors by it."""
    whole = found.propagation
    if decides(whole, argument(name)):
        return False
    forward = type(twin).forward
    if not isinstance(forward, FunctionType) or inspect.unwrap(forward) is not forward:
        return False
    try:
        node = source_of(forward.__code__, forward.__globals__).definition(forward.__code__)
    except NoSource:
        return False
    if node is None:
        return False
    sliced = [one.source.line for one in whole.trace.compared
              if one.bound and argument(name) in one.dims and one.source is not None]  # fmt: skip
    return all(_is_computed(around, sliced) for around in _uses(node, name))


def _uses(function: ast.AST, name: str) -> Iterator[list[ast.AST]]:
    """The expressions around each use of a name, the innermost first."""
    todo: list[tuple[ast.AST, list[ast.AST]]] = [(part, []) for part in getattr(function, "body", ())]
    while todo:
        node, around = todo.pop()
        if isinstance(node, ast.Name) and (node.id == name or node.id in _ANY_NAME):
            yield [node, *around]
        todo += [(part, [node, *around]) for part in ast.iter_child_nodes(node)]


_ANY_NAME = ("locals", "vars", "eval", "exec")


def _is_computed(around: list[ast.AST], sliced: list[int]) -> bool:
    use, *outer = around
    if not isinstance(use, ast.Name) or not isinstance(use.ctx, ast.Load) or not outer:
        return False
    if isinstance(outer[0], ast.UnaryOp) and isinstance(outer[0].op, ast.USub):
        outer = outer[1:]
    if isinstance(outer[0], ast.BinOp):
        return isinstance(outer[0].op, (ast.Add, ast.Sub, ast.Mult, ast.Div))
    if not isinstance(outer[0], ast.Slice):
        return False
    subscript = next(node for node in outer if isinstance(node, ast.Subscript))
    return any(subscript.lineno <= line <= (subscript.end_lineno or subscript.lineno) for line in sliced)


# -- whether anything that is not whole depends on a number

_SCALED = ("mul", "div")


def _alike(whole: Propagation, other: Propagation) -> bool:
    """Whether two numbers lead to the same ops, but for numbers of ops on whole values, factors, and bounds
    of slices of dims that are whole."""
    ours, theirs = whole.trace.ops(), other.trace.ops()
    if [op_name(n) for n in ours] != [op_name(n) for n in theirs]:
        return False
    return all(_free(whole, a, b) for a, b in zip(ours, theirs, strict=True))


def _free(whole: Propagation, ours: fx.Node, theirs: fx.Node) -> bool:
    mine, its = arguments_of(ours), arguments_of(theirs)
    differ = [name for name in mine.keys() | its.keys() if repr(mine.get(name)) != repr(its.get(name))]
    around = (*ours.all_input_nodes, ours)
    if not differ or all(is_whole(layout) for n in around for layout in whole.layouts.get(n, [INVARIANT])):
        return True
    name = op_name(ours)
    if name in _SCALED and set(differ) <= {"other"}:
        return True  # element by element; by a factor, of a sum as well
    source = ours.all_input_nodes[0]
    layout, val = whole.layouts.get(source, [INVARIANT])[0], source.meta["val"]
    if name != "slice" or not isinstance(layout, Shard) or not isinstance(val, Val):
        return False
    return set(differ) <= {"start", "end"} and normal_dim(mine.get("dim") or 0, len(val.shape)) != layout.dim
