"""Blocks of a module, each with its right rules: [batch, sequence, width] to the same."""

from __future__ import annotations

from typing import Any

from tests.grammar.statements import on_features, on_heads, on_whole
from tests.grammar.writer import Writer

__all__ = ["BLOCKS"]

COLUMN, ROW = "column", "row"
HEADED = (
    "{h}.view({h}.shape[0], {h}.shape[1], -1, {d}).transpose(1, 2)", "{h}.unflatten(-1, (-1, {d})).transpose(1, 2)",
    "{h}.reshape(*{h}.shape[:-1], -1, {d}).permute(0, 2, 1, 3)", "{h}.view(*{h}.shape[:2], -1, {d}).swapaxes(1, 2)",
)  # fmt: skip
WRONGLY_HEADED = (
    "{h}.view({h}.shape[0], -1, {heads}, {d}).transpose(1, 2)", "{h}.unflatten(-1, ({heads}, {d})).transpose(1, 2)",
    "{h}.view({h}.shape[0], {h}.shape[1], {d}, -1).permute(0, 3, 1, 2)",
    "{h}.reshape({h}.shape[0], -1, {h}.shape[1], {d})", "{h}.view(*{h}.shape[:2], {heads}, -1).transpose(1, 2)",
)  # fmt: skip
TOGETHER = (
    "{h}.transpose(1, 2).flatten(2)", "{h}.permute(0, 2, 1, 3).reshape({h}.shape[0], {h}.shape[2], -1)",
    "{h}.transpose(1, 2).contiguous().view({h}.shape[0], {h}.shape[2], -1)",
)  # fmt: skip
WRONGLY_TOGETHER = (
    "{h}.transpose(1, 2).reshape({h}.shape[0], -1, {width})", "{h}.permute(0, 2, 3, 1).flatten(2)",
    "{h}.reshape({h}.shape[0], {h}.shape[2], -1)", "{h}.transpose(1, 2).flatten(2)[..., : {width}]",
)  # fmt: skip


def mlp(w: Writer, x: str, n: int) -> str:
    """column, statements, row."""
    wide = w.one(w.units(), w.units(), max(n, w.tp))
    h = w.let(f"{w.linear(n, wide, COLUMN)}({w.operand(x)})", "B", "S", wide)
    h = on_features(w, h, x, wide)
    return w.let(f"{w.linear(wide, n, ROW)}({w.operand(h)})", "B", "S", n)


def gated(w: Writer, x: str, n: int) -> str:
    """Two columns that meet, row."""
    wide = w.units()
    gate = w.let(f"{w.linear(n, wide, COLUMN)}({w.operand(x)})", "B", "S", wide)
    up = w.let(f"{w.linear(n, wide, COLUMN)}({w.operand(x)})", "B", "S", wide)
    gate = on_features(w, gate, x, wide)
    h = w.let(
        w.one("F.silu({g}) * {u}", "{g} + {u}", "torch.maximum({g}, {u})", "{g} * {u}.sigmoid()").format(
            g=w.operand(gate), u=w.operand(up)
        ),
        "B", "S", wide,
    )  # fmt: skip
    return w.let(f"{w.linear(wide, n, ROW)}({h})", "B", "S", n)


def fused(w: Writer, x: str, n: int) -> str:
    """One column of two sections that are taken apart, row."""
    w.uses("fused")
    w.uses("split")
    wide = w.units()
    both = w.let(f"{w.linear(n, 2 * wide, {'style': COLUMN, 'sections': 2})}({w.operand(x)})", "B", "S", 2 * wide)
    pair = w.let(w.one("{h}.chunk(2, -1)", "{h}.unflatten(-1, (2, -1)).unbind(-2)", "torch.split({h}, {h}.shape[-1] // 2, -1)",
                       "{h}.tensor_split(2, -1)").format(h=both))  # fmt: skip
    if w.strays():
        pair = w.let(w.one("{h}.unflatten(-1, (-1, 2)).unbind(-1)", "{h}.split({n}, -1)", "({h}[..., ::2], {h}[..., 1::2])",
                           "({h}[..., : {n}], {h}[..., {n} :])").format(h=both, n=wide))  # fmt: skip
    gate = w.let(f"{pair}[0]", "B", "S", wide)
    h = w.let(f"{on_features(w, gate, x, wide)} * {pair}[1]", "B", "S", wide)
    return w.let(f"{w.linear(wide, n, ROW)}({h})", "B", "S", n)


def attention(w: Writer, x: str, n: int) -> str:
    """q, k and v of heads, grouped or not, by the kernel or by hand."""
    w.uses("attention")
    w.uses("heads")
    w.uses("view")
    kv, times, d = w.units(5), w.one(1, 1, 2, 3), w.one(2, 3, 4)
    heads = kv * times
    rule = {"style": COLUMN, "heads": kv}
    if times == 1 and w.maybe(0.4):
        q, k, v = _from_one(w, x, n, heads, d)
    else:
        q = w.let(f"{w.linear(n, heads * d, rule)}({w.operand(x)})", "B", "S", heads * d)
        k = w.let(f"{w.linear(n, kv * d, rule)}({w.operand(x)})", "B", "S", kv * d)
        v = w.let(f"{w.linear(n, kv * d, rule)}({w.operand(x)})", "B", "S", kv * d)
        q, k, v = (_headed(w, h, heads if h == q else kv, d) for h in (q, k, v))
    q, k = on_heads(w, q, x, heads, d), on_heads(w, k, x, kv, d)
    if w.maybe(0.3):
        v = on_heads(w, v, x, kv, d)
    h = _attended(w, q, k, v, heads, times, d, x)
    table = WRONGLY_TOGETHER if w.strays() else TOGETHER
    h = w.let(w.one(*table).format(h=h, width=heads * d), "B", "S", heads * d)
    return w.let(f"{w.linear(heads * d, n, ROW)}({w.operand(h)})", "B", "S", n)


def _headed(w: Writer, h: str, heads: int, d: int) -> str:
    table = WRONGLY_HEADED if w.strays() else HEADED
    return w.let(w.one(*table).format(h=h, heads=heads, d=d), "B", heads, "S", d)


def _from_one(w: Writer, x: str, n: int, heads: int, d: int) -> tuple[str, str, str]:
    """q, k and v from one layer: a section each, or interleaved head by head."""
    w.uses("fused")
    w.uses("split")
    interleaved = w.maybe(0.5)
    rule: dict[str, Any] = {"style": COLUMN, "heads": heads}
    if interleaved == (not w.strays()):
        rule = {"style": COLUMN, "heads": heads}
    else:
        rule = {"style": COLUMN, "sections": 3, "heads": heads}
    h = w.let(f"{w.linear(n, 3 * heads * d, rule)}({w.operand(x)})", "B", "S", 3 * heads * d)
    if interleaved:
        text = w.one("{h}.unflatten(-1, (-1, 3, {d})).unbind(-2)", "{h}.view(*{h}.shape[:2], -1, {t}).chunk(3, -1)",
                     "{h}.view(*{h}.shape[:2], -1, {t}).split({d}, -1)")  # fmt: skip
    else:
        text = w.one("{h}.unflatten(-1, (3, -1, {d})).unbind(2)", "{h}.view(*{h}.shape[:2], 3, -1, {d}).unbind(2)",
                     "(c.unflatten(-1, (-1, {d})) for c in {h}.chunk(3, -1))")  # fmt: skip
    three = w.let(f"[c.transpose(1, 2) for c in {text.format(h=h, d=d, t=3 * d)}]")
    q, k, v = (w.let(f"{three}[{i}]", "B", heads, "S", d) for i in range(3))
    return q, k, v


def _attended(w: Writer, q: str, k: str, v: str, heads: int, times: int, d: int, x: str) -> str:
    shape = ("B", heads, "S", d)
    kernel = w.maybe(0.5)
    grouped = kernel and times > 1 and w.maybe(0.5)
    if times > 1 and not grouped:
        again = w.one("{h}.repeat_interleave({t}, 1)", "{h}[:, :, None].expand(-1, -1, {t}, -1, -1).flatten(1, 2)",
                      "{h}.unsqueeze(2).repeat(1, 1, {t}, 1, 1).flatten(1, 2)")  # fmt: skip
        if w.strays():
            again = "{h}.repeat(1, {t}, 1, 1)"
        k = w.let(again.format(h=k, t=times), *shape)
        v = w.let(again.format(h=v, t=times), *shape)
    q, k, v = (w.operand(h) for h in (q, k, v))
    if kernel:
        extra = ", enable_gqa=True" if grouped else ""
        extra += w.one("", ", is_causal=True", f", attn_mask={_bias(w, q, heads)}", ", scale=0.3")
        return w.let(f"F.scaled_dot_product_attention({q}, {k}, {v}{extra})", *shape)
    scores = w.one(f"{q} @ {k}.mT", f"torch.einsum('bhqd,bhkd->bhqk', {q}, {k})", f"torch.matmul({q}, {k}.transpose(-2, -1))")
    if w.strays():
        scores = w.one(f"{q} @ {k}.mT / {q}.shape[1]", f"torch.einsum('bhqd,bhkd->bqk', {q}, {k})[:, None]",
                       f"torch.einsum('bhqd,bgkd->bhqk', {q}, {k})")  # fmt: skip
    s = w.let(f"({scores}) * {w.one(f'{d} ** -0.5', f'{q}.shape[-1] ** -0.5', '0.5')}", "B", heads, "S", "S")
    if w.maybe(0.5):
        s = w.let(f"{s} + {_bias(w, q, heads)}", "B", heads, "S", "S")
    weights = w.let(f"{s}.softmax({w.one(-1, 3)})" if not w.strays() else f"{s}.softmax({w.one(1, 2)})")
    return w.let(w.one(f"{weights} @ {v}", f"torch.einsum('bhqk,bhkd->bhqd', {weights}, {v})"), *shape)


def _bias(w: Writer, q: str, heads: int) -> str:
    """A causal mask, slopes of each head, or a learned table: no mask of it knows the ranks."""
    causal = f"torch.zeros({q}.shape[2], {q}.shape[2]).masked_fill(torch.ones({q}.shape[2], {q}.shape[2]).triu(1).bool(), -9.0).to({q})"
    kind = w.one("causal", "slopes", "learned")
    if kind == "causal":
        return causal
    w.uses("read parameter")
    if kind == "learned":
        return f"{w.parameter(heads, 1, 1)} * torch.arange({q}.shape[2]).to({q})"
    slopes = w.buffer(f"2.0 ** -torch.arange(1, {heads} + 1)")
    if w.strays():
        slopes = w.one(f"torch.arange({q}.shape[1])", f"(2.0 ** -torch.arange(1, {heads} + 1))", f"{slopes}[: {q}.shape[1]]")
    return f"({slopes}.view(-1, 1, 1) * torch.arange({q}.shape[2])).to({q})"


def grouped(w: Writer, x: str, n: int) -> str:
    """An MLP of which the features are seen as heads."""
    w.uses("heads")
    w.uses("view")
    heads, d = w.units(), w.one(2, 3)
    h = w.let(f"{w.linear(n, heads * d, {'style': COLUMN, 'heads': heads})}({w.operand(x)})", "B", "S", heads * d)
    h = _headed(w, h, heads, d)
    h = on_heads(w, h, x, heads, d)
    h = w.let(w.one(*(WRONGLY_TOGETHER if w.strays() else TOGETHER)).format(h=h, width=heads * d), "B", "S", heads * d)
    return w.let(f"{w.linear(heads * d, n, ROW)}({w.operand(h)})", "B", "S", n)


def raw(w: Writer, x: str, n: int) -> str:
    """A module of raw parameters: nothing but its border can hold the mappings."""
    w.uses("raw parameter")
    wide = w.units()
    with w.inside("x") as scope:
        scope.values["x"] = ("B", "S", n)
        w1 = w.parameter(wide, n, rule={"style": COLUMN, "dim": 0})
        w2 = w.parameter(n, wide, rule={"style": ROW, "dim": 1})
        b1 = w.parameter(wide, rule={"style": COLUMN, "dim": 0}) if w.maybe(0.5) else None
        first = w.one(f"F.linear(x, {w1})", f"x @ {w1}.T", f"torch.einsum('bsd,fd->bsf', x, {w1})")
        h = w.let(f"{first} + {b1}" if b1 else first, "B", "S", wide)
        h = on_features(w, h, "x", wide)
        y = w.let(w.one(f"F.linear({h}, {w2})", f"{h} @ {w2}.t()", f"torch.einsum('bsf,df->bsd', {h}, {w2})"), "B", "S", n)
        y = w.let(w.one("{y}", "{y} * 0.5", "{y}.view({y}.shape)", "-{y}", "{y} + {y}").format(y=y), "B", "S", n)
        if w.strays():
            y = w.let(w.one("{y}.tanh()", "{y} + x", "{y} + {b}", "{y} * {y}", "{y} + 1", "{y} * {b}").format(
                y=y, b=w.parameter(n)), "B", "S", n)  # fmt: skip
    w.close(scope, y)
    part = w.keep("raw", f"{scope.name}()")
    return w.let(f"self.{part}({w.operand(x)})", "B", "S", n)


def experts(w: Writer, x: str, n: int) -> str:
    """Every expert on every token, weighted by a router."""
    w.uses("raw parameter")
    count, wide = w.one(2, 3), w.units(5)
    with w.inside("x", "r") as scope:
        w1 = w.parameter(count, wide, n, rule={"style": COLUMN, "dim": 1})
        w2 = w.parameter(count, n, wide, rule={"style": ROW, "dim": 2})
        h = w.let(w.one(f"torch.einsum('bsd,efd->ebsf', x, {w1})", f"(x[None] @ {w1}.mT[:, None])"))
        h = w.let(w.one("F.silu({h})", "F.gelu({h})", "{h} * {h}.sigmoid()").format(h=h))
        y = w.let(w.one(f"torch.einsum('ebsf,edf->ebsd', {h}, {w2})", f"{h} @ {w2}.mT[:, None]"))
        weighted = w.one(f"({y} * r.permute(2, 0, 1)[..., None]).sum(0)", f"torch.einsum('ebsd,bse->bsd', {y}, r)")
        if w.strays():
            weighted = w.one(f"{weighted}.tanh()", f"({y} + r.permute(2, 0, 1)[..., None]).sum(0)", f"{y}.amax(0)")
        y = w.let(weighted, "B", "S", n)
    w.close(scope, y)
    router = w.linear(n, count)
    weights = w.let(f"{router}({w.operand(x)}).{w.one('softmax(-1)', 'sigmoid()', 'relu()')}")
    part = w.keep("experts", f"{scope.name}()")
    return w.let(f"self.{part}({w.operand(x)}, {weights})", "B", "S", n)


def gathered(w: Writer, x: str, n: int) -> str:
    """A column that gathers, a row that splits: each alone, whole statements in between."""
    w.uses("gather")
    wide = w.units()
    h = w.let(f"{w.linear(n, wide, {'style': COLUMN, 'gather_output': True})}({w.operand(x)})", "B", "S", wide)
    h = on_whole(w, h, wide)
    rule = {"style": ROW, "split_input": True} if w.maybe(0.7) else None
    return w.let(f"{w.linear(wide, n, rule)}({h})", "B", "S", n)


def shared(w: Writer, x: str, n: int) -> str:
    """A block of its own class that runs twice."""
    w.uses("shared")
    block = w.one(mlp, gated, attention)
    with w.inside("x") as scope:
        scope.values["x"] = ("B", "S", n)
        y = block(w, "x", n)
        y = w.let(f"{y} + x", "B", "S", n)
    w.close(scope, y)
    part = w.keep("block", f"{scope.name}()")
    first = w.let(f"self.{part}({w.operand(x)})", "B", "S", n)
    return w.let(f"self.{part}({w.one(first, f'torch.tanh({first})')})", "B", "S", n)


def tied(w: Writer, x: str, n: int) -> str:
    """Two layers of one weight, one after the other."""
    w.uses("tied")
    wide = w.units()
    first, second = w.linear(n, wide, COLUMN), w.linear(n, wide, COLUMN)
    outs = w.linear(wide, n, ROW), w.linear(wide, n, ROW)
    w.scope.init.append(f"{second}.weight = {first}.weight")
    if w.maybe(0.4):
        w.scope.init.append(f"{outs[1]}.weight = {outs[0]}.weight")
    for layer, out in zip((first, second), outs, strict=True):
        h = w.let(f"F.gelu({layer}({w.operand(x)}))", "B", "S", wide)
        x = w.let(f"{x} + {out}({h})", "B", "S", n)
    return x


def whole(w: Writer, x: str, n: int) -> str:
    """Layers that no rule cuts."""
    h = on_whole(w, w.let(f"{w.linear(n, n, w.one(None, 'replicate'))}({w.operand(x)})", "B", "S", n), n)
    if w.strays():
        n2 = w.one(n, n + 1)
        return w.let(f"{w.linear(n2, n)}({h if n2 == n else f'F.pad({h}, (0, 1))'})", "B", "S", n)
    return h


BLOCKS = (mlp, mlp, gated, fused, attention, attention, grouped, raw, experts, gathered, shared, tied, whole)
