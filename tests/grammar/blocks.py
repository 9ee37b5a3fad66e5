"""Blocks of a module, each with its right rules: [batch, sequence, width] to the same."""

from __future__ import annotations

from typing import Any

from tests.grammar.statements import on_features, on_heads, on_whole
from tests.grammar.writer import Writer

__all__ = ["BLOCKS"]


def mlp(w: Writer, x: str, n: int) -> str:
    """column, statements, row."""
    wide = w.one(w.units(), w.units(), max(n, w.tp))
    h = w.layer(x, n, wide, "column")
    return w.layer(on_features(w, h, x, wide), wide, n, "row")


def gated(w: Writer, x: str, n: int) -> str:
    """Two columns that meet, row."""
    wide = w.units()
    gate, up = w.layer(x, n, wide, "column"), w.layer(x, n, wide, "column")
    gate = on_features(w, gate, x, wide)
    h = w.let(w.form("gate", g=w.operand(gate), u=w.operand(up)), "B", "S", wide)
    return w.layer(h, wide, n, "row")


def fused(w: Writer, x: str, n: int) -> str:
    """One column of two sections that are taken apart, row."""
    w.uses("fused")
    w.uses("split")
    wide = w.units()
    both = w.layer(x, n, 2 * wide, {"style": "column", "sections": 2})
    pair = w.let(w.form("halves", h=both, n=wide))
    gate = on_features(w, w.let(f"{pair}[0]", "B", "S", wide), x, wide)
    return w.layer(w.let(f"{gate} * {pair}[1]", "B", "S", wide), wide, n, "row")


def attention(w: Writer, x: str, n: int) -> str:
    """q, k and v of heads, grouped or not, by the kernel or by hand."""
    w.uses("attention")
    w.uses("heads")
    w.uses("view")
    kv, times, d = w.units(5), w.one(1, 1, 2, 3), w.one(2, 3, 4)
    heads = kv * times
    if times == 1 and w.maybe(0.4):
        q, k, v = _from_one(w, x, n, heads, d)
    else:
        counts = (heads, kv, kv)
        layers = [w.layer(x, n, many * d, {"style": "column", "heads": kv}) for many in counts]
        q, k, v = (_headed(w, h, many, d) for h, many in zip(layers, counts, strict=True))
    q, k = on_heads(w, q, x, heads, d), on_heads(w, k, x, kv, d)
    if w.maybe(0.3):
        v = on_heads(w, v, x, kv, d)
    return _together(w, _attended(w, q, k, v, heads, times, d), heads, d, n)


def grouped(w: Writer, x: str, n: int) -> str:
    """An MLP of which the features are seen as heads."""
    w.uses("heads")
    w.uses("view")
    heads, d = w.units(), w.one(2, 3)
    h = _headed(w, w.layer(x, n, heads * d, {"style": "column", "heads": heads}), heads, d)
    return _together(w, on_heads(w, h, x, heads, d), heads, d, n)


def _headed(w: Writer, h: str, heads: int, d: int) -> str:
    return w.let(w.form("headed", h=h, heads=heads, d=d), "B", heads, "S", d)


def _together(w: Writer, h: str, heads: int, d: int, n: int) -> str:
    h = w.let(w.form("together", h=h, width=heads * d), "B", "S", heads * d)
    return w.layer(h, heads * d, n, "row")


def _from_one(w: Writer, x: str, n: int, heads: int, d: int) -> list[str]:
    """q, k and v from one layer: a section each, or interleaved head by head."""
    w.uses("fused")
    w.uses("split")
    interleaved = w.maybe(0.5)
    rule: dict[str, Any] = {"style": "column", "heads": heads}
    if interleaved == w.strays():
        rule["sections"] = 3
    h = w.layer(x, n, 3 * heads * d, rule)
    three = w.form("interleaved" if interleaved else "thirds", h=h, d=d, t=3 * d)
    three = w.let(f"[c.transpose(1, 2) for c in {three}]")
    return [w.let(f"{three}[{i}]", "B", heads, "S", d) for i in range(3)]


def _attended(w: Writer, q: str, k: str, v: str, heads: int, times: int, d: int) -> str:
    shape = ("B", heads, "S", d)
    kernel = w.maybe(0.5)
    grouped = kernel and times > 1 and w.maybe(0.5)
    if times > 1 and not grouped:
        k, v = (w.let(w.form("repeated", h=h, t=times), *shape) for h in (k, v))
    q, k, v = (w.operand(h) for h in (q, k, v))
    if kernel:
        extra = ", enable_gqa=True" * grouped
        extra += w.one("", ", is_causal=True", f", attn_mask={_bias(w, q, heads)}", ", scale=0.3")
        return w.let(f"F.scaled_dot_product_attention({q}, {k}, {v}{extra})", *shape)
    scale = w.one(f"{d} ** -0.5", f"{q}.shape[-1] ** -0.5", "0.5")
    s = w.let(f"({w.form('scores', q=q, k=k)}) * {scale}", "B", heads, "S", "S")
    if w.maybe(0.5):
        s = w.let(f"{s} + {_bias(w, q, heads)}", "B", heads, "S", "S")
    p = w.let(w.form("weights", s=s))
    return w.let(w.form("attended", p=p, v=v), *shape)


def _bias(w: Writer, q: str, heads: int) -> str:
    """A causal mask, slopes of each head, or a learned table."""
    kind = w.one("causal", "slopes", "learned")
    if kind == "causal":
        mask = f"torch.ones({q}.shape[2], {q}.shape[2]).triu(1).bool()"
        return f"torch.zeros({q}.shape[2], {q}.shape[2]).masked_fill({mask}, -9.0).to({q})"
    w.uses("read parameter")
    if kind == "learned":
        return f"{w.parameter(heads, 1, 1)} * torch.arange({q}.shape[2]).to({q})"
    slopes = w.form("slopes", b=w.buffer(f"2.0 ** -torch.arange(1, {heads} + 1)"), q=q, heads=heads)
    return f"({slopes} * torch.arange({q}.shape[2])).to({q})"


def raw(w: Writer, x: str, n: int) -> str:
    """A module of raw parameters: nothing but its border can hold the mappings."""
    w.uses("raw parameter")
    wide = w.units()
    with w.inside("x") as scope:
        scope.values["x"] = ("B", "S", n)
        w1 = w.parameter(wide, n, rule={"style": "column", "dim": 0})
        w2 = w.parameter(n, wide, rule={"style": "row", "dim": 1})
        first = w.form("into", w=w1)
        if w.maybe(0.5):
            first += f" + {w.parameter(wide, rule={'style': 'column', 'dim': 0})}"
        h = on_features(w, w.let(first, "B", "S", wide), "x", wide)
        y = w.let(w.form("out of", h=h, w=w2), "B", "S", n)
        y = w.let(w.form("sum", y=y, b=w.parameter(n) if w.wild else ""), "B", "S", n)
    w.close(scope, y)
    return w.part(scope, x, n)


def experts(w: Writer, x: str, n: int) -> str:
    """Every expert on every token, weighted by a router."""
    w.uses("raw parameter")
    count, wide = w.one(2, 3), w.units(5)
    with w.inside("x", "r") as scope:
        w1 = w.parameter(count, wide, n, rule={"style": "column", "dim": 1})
        w2 = w.parameter(count, n, wide, rule={"style": "row", "dim": 2})
        h = w.let(w.form("into experts", w=w1))
        h = w.let(w.one("F.silu({h})", "F.gelu({h})", "{h} * {h}.sigmoid()").format(h=h))
        y = w.let(w.form("out of experts", h=h, w=w2))
        y = w.let(w.form("weighted", y=y), "B", "S", n)
    w.close(scope, y)
    router = w.linear(n, count)
    weights = w.let(f"{router}({w.operand(x)}).{w.one('softmax(-1)', 'sigmoid()', 'relu()')}")
    return w.part(scope, x, n, weights)


def gathered(w: Writer, x: str, n: int) -> str:
    """A column that gathers, a row that splits: each alone, whole statements in between."""
    w.uses("gather")
    wide = w.units()
    h = on_whole(w, w.layer(x, n, wide, {"style": "column", "gather_output": True}), wide)
    return w.layer(h, wide, n, {"style": "row", "split_input": True} if w.maybe(0.7) else None)


def shared(w: Writer, x: str, n: int) -> str:
    """A block of its own class that runs twice."""
    w.uses("shared")
    with w.inside("x") as scope:
        scope.values["x"] = ("B", "S", n)
        y = w.one(mlp, gated, attention)(w, "x", n)
        y = w.let(f"{y} + x", "B", "S", n)
    w.close(scope, y)
    first = w.part(scope, x, n)
    again = w.one(first, f"torch.tanh({first})")
    return w.let(f"self.{w.parts[-1]}({again})", "B", "S", n)


def tied(w: Writer, x: str, n: int) -> str:
    """Two layers of one weight, one after the other."""
    w.uses("tied")
    wide = w.units()
    first, second = w.linear(n, wide, "column"), w.linear(n, wide, "column")
    outs = w.linear(wide, n, "row"), w.linear(wide, n, "row")
    w.scope.init.append(f"{second}.weight = {first}.weight")
    if w.maybe(0.4):
        w.scope.init.append(f"{outs[1]}.weight = {outs[0]}.weight")
    for layer, out in zip((first, second), outs, strict=True):
        h = w.let(f"F.gelu({layer}({w.operand(x)}))", "B", "S", wide)
        x = w.let(f"{x} + {out}({h})", "B", "S", n)
    return x


def whole(w: Writer, x: str, n: int) -> str:
    """A layer that no rule cuts."""
    return on_whole(w, w.layer(x, n, n, w.one(None, "replicate")), n)


BLOCKS = (
    mlp,
    shared,
    gated,
    fused,
    attention,
    attention,
    grouped,
    raw,
    experts,
    gathered,
    shared,
    tied,
    whole,
)
