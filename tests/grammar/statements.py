"""Statements between the layers, chosen from the templates."""

from __future__ import annotations

from typing import Any

from tests.grammar.templates import FEATURES, HEADS
from tests.grammar.writer import Writer

__all__ = ["on_features", "on_heads", "on_whole"]

Table = dict[str, tuple[list[str], list[str]]]


def on_features(w: Writer, h: str, x: str, n: int) -> str:
    """Nothing to three statements on a value of which the features are cut; `x` is whole."""
    for _ in range(w.one(0, 1, 1, 2, 3)):
        h = _read(w, h, (n,), (1,)) if w.maybe(0.25) else _statement(w, FEATURES, h, x, n, ("B", "S", n))
    return h


def on_heads(w: Writer, h: str, x: str, heads: int, n: int) -> str:
    """Nothing to two statements on [batch, heads, sequence, features] of which the heads are cut."""
    shape = ("B", heads, "S", n)
    for _ in range(w.one(0, 0, 1, 2)):
        kind = w.one("statement", "statement", "norm", "read")
        if kind == "norm":
            h = _norm(w, h, n, shape)
        elif kind == "read":
            h = _read(w, h, (heads, 1, 1), (n,), (heads, 1, n), (1,))
        else:
            h = _statement(w, HEADS, h, x, n, shape)
    return h


def on_whole(w: Writer, x: str, n: int) -> str:
    """Nothing to two statements on a whole value: anything goes."""
    shape = ("B", "S", n)
    for _ in range(w.one(0, 1, 2)):
        if w.maybe(0.3):
            x = _norm(w, x, n, shape)
            continue
        production = w.one(*FEATURES)
        w.uses(production)
        right, wrong = FEATURES[production]
        x = w.let(w.one(*right, *wrong).format(h=x, x=w.operand(x), n=n), *shape)
        x = w.let(f"torch.tanh({x})", *shape)
    return x


def _statement(w: Writer, table: Table, h: str, x: str, n: int, shape: tuple[Any, ...]) -> str:
    production = w.one(*table)
    w.uses(production)
    return w.let(w.pick(table[production], h=w.operand(h), x=w.operand(x), n=n), *shape)


def _norm(w: Writer, h: str, n: int, shape: tuple[Any, ...]) -> str:
    w.uses("norm")
    # Of a row that is zero but for rounding, RMSNorm with its own eps makes rounding 10^8 times as large.
    layer = w.keep("norm", w.one(f"nn.LayerNorm({n})", f"nn.RMSNorm({n}, eps=1e-6)"))
    return w.let(f"self.{layer}({h})", *shape)


def _read(w: Writer, h: str, *shapes: tuple[int, ...]) -> str:
    """A parameter or buffer that the plan does not name, read on a shard."""
    w.uses("read parameter")
    shape = w.one(*shapes)
    sizes = ", ".join(map(str, shape))
    values = f"torch.rand({sizes}, generator=torch.Generator().manual_seed(3)) + 0.5"
    tensor = w.parameter(*shape) if w.maybe(0.7) else w.buffer(values)
    return w.let(w.form("read", h=w.operand(h), t=tensor), *w.scope.values.get(h, ()))
