"""Statements between the layers: right on a shard, or wrong there, by the dim that is cut.

`{h}` is the value, `{n}` the size of its last dim in the whole model, `{x}` a whole value.
"""

from __future__ import annotations

from tests.grammar.writer import Writer

__all__ = ["on_features", "on_heads", "on_whole"]

# [batch, sequence, features]. Right when the features are cut, and when nothing is.
FEATURES: dict[str, tuple[str, ...]] = {
    "activation": (
        "F.gelu({h})", "F.silu({h})", "torch.tanh({h})", "{h}.sigmoid()", "F.relu({h})", "F.softplus({h})",
        "{h}.clamp(-1, 1)", "F.leaky_relu({h}, 0.1)", "torch.where({h} > 0, {h}, 0.1 * {h})",
        "{h}.masked_fill({h} < -1, 0.0)", "{h} * {h}.sigmoid()", "F.dropout({h}, 0.0, self.training)",
        "F.elu({h}).square()", "{h}.abs().sqrt() + 1", "F.hardtanh({h}) - {h}.relu() ** 2",
        "torch.addcmul({h}, {h}, {h}, value=0.5)", "torch.lerp({h}, {h}.tanh(), 0.3)",
    ),
    "residual": (
        "{h} + torch.tanh({h})", "{h} - 0.5 * {h}.detach()", "{h} + {h} * 0.1", "torch.add({h}, {h}, alpha=2)",
        "{h}.clone().mul_(0.5).add_({h})", "1 - {h}", "torch.stack([{h}, {h}.tanh()]).sum(0)",
    ),
    "view": (
        "{h}.reshape(-1, {h}.shape[-1]).view({h}.shape)", "{h}.transpose(1, 2).tanh().transpose(2, 1)",
        "{h}.flatten(0, 1).unflatten(0, {h}.shape[:2])", "{h}.unsqueeze(-1).squeeze(-1)",
        "{h}.permute(2, 0, 1).permute(1, 2, 0)", "{h}.view(*{h}.shape[:2], -1)", "{h}[None][0]",
        "{h}.reshape({h}.shape[0], -1, {h}.shape[-1])", "{h}.mT.contiguous().mT", "{h}.unsqueeze(2).flatten(2)",
        "{h}.movedim(-1, 0).movedim(0, -1)", "{h}.unsqueeze(1).expand(-1, 2, -1, -1).sum(1)",
        "{h}.view(-1, {h}.size(2)).view_as({h})", "{h}.repeat(2, 1, 1)[: {h}.shape[0]]",
    ),
    "reduction": (
        "{h} - {h}.mean(1, keepdim=True)", "{h}.cumsum(1)", "{h}.softmax(1)",
        "{h} + {h}.amax(1, keepdim=True)", "{h} / (1 + {h}.square().sum(0, keepdim=True)).sqrt()",
        "{h} + {h}.sum(1, keepdim=True)", "F.normalize({h}, dim=1)", "{h} + {h}.std(1, keepdim=True)",
        "{h} + {h}.logsumexp(1, keepdim=True)", "{h}.sort(1).values", "{h}.cummax(1).values",
        "{h} + {h}.max(1, keepdim=True).values", "{h} + {h}.mean((0, 1))", "{h}.log_softmax(1)",
    ),
    "shape arithmetic": (
        "{h} / {h}.shape[1]", "{h} * {h}.shape[0] ** -0.5", "{h} * (1 / {h}.size(1))", "{h} / len({h})",
        "{h} + torch.arange({h}.shape[1])[:, None]", "{h} * torch.ones({h}.shape[1], 1)",
        "{h} + {h}.sum(1, keepdim=True) / {h}.shape[1]", "{h} * {x}.shape[-1] ** -0.5",
        "{h} / {h}.flatten(0, 1).shape[0]", "{h} + torch.zeros_like({h})", "{h} * {h}.new_ones({h}.shape)",
        "{h} + {h}.new_zeros({h}.shape[-1])", "{h} * torch.full_like({h}, 0.5)", "{h} * {h}.dim()",
    ),
    "split": (
        "torch.cat([{h}[:, 1:], {h}[:, :1]], 1)", "{h}.roll(1, 1)", "{h}.flip(1)",
        "{h}.narrow(1, 0, 1) + {h}", "{h}[:, torch.arange({h}.shape[1])]",
        "F.pad({h}, (0, 0, 1, 0))[:, 1:]", "{h}[:, -1:] + {h}", "torch.cat({h}.split(2, 1), 1)",
        "{h}[:, ::2].mean(1, keepdim=True) + {h}", "torch.stack({h}.unbind(1), 1)",
        "torch.cat([{h}, {h}], -1).chunk(2, -1)[0]", "{h}.select(1, 0)[:, None] - {h}",
        "torch.stack([{h}, {h}.tanh()], -1).unbind(-1)[1]", "{h}.diff(dim=1, prepend={h}[:, :1])",
    ),
}  # fmt: skip

# Right on a whole value, wrong (or in need of a mapping) where the features are cut.
WRONG: dict[str, tuple[str, ...]] = {
    "activation": ("F.glu(torch.cat([{h}, {h}], -1))", "{h} * torch.sigmoid({x}.mean(-1, keepdim=True))"),
    "residual": ("{h} + {x}.sum(-1, keepdim=True)", "{h} * {x}[..., :1]", "{h} + {x}.mean()"),
    "view": (
        "{h}.view({h}.shape[0], -1, {n})", "{h}.reshape(-1, {n}).view(*{h}.shape[:2], {n})",
        "{h}.reshape({h}.shape[0], {h}.shape[2], -1).mT", "{h}.flatten(1).unflatten(1, (-1, {n}))",
        "{h}.transpose(1, 2).reshape({h}.shape)", "{h}.flatten().view({h}.shape[0], {h}.shape[1], -1)",
    ),
    "reduction": (
        "{h}.softmax(-1)", "{h} - {h}.mean(-1, keepdim=True)", "{h}.cumsum(-1)", "{h}.sort(-1).values",
        "{h} + {h}.std(-1, keepdim=True)", "F.normalize({h}, dim=-1)", "{h} + {h}.sum(-1, keepdim=True)",
        "F.layer_norm({h}, {h}.shape[-1:])", "{h} + {h}.amax(-1, keepdim=True)", "{h} / (1 + {h}.norm())",
        "{h} + {h}.mean()", "{h} + {h}.square().sum()", "{h} * {h}.argmax(-1, keepdim=True)",
        "{h} - {h}.topk(1, -1).values", "{h} + {h}.logsumexp((1, 2), keepdim=True)", "{h}.cumprod(-1)",
        "{h} + ({h} > 0).sum(-1, keepdim=True)", "{h} + {h}.median(-1, keepdim=True).values",
        "{h} / {h}.abs().max()", "{h} + torch.linalg.vector_norm({h}, dim=-1, keepdim=True)",
    ),
    "shape arithmetic": (
        "{h} * {h}.shape[-1] ** -0.5", "{h} + torch.arange({h}.shape[-1])", "{h} / {h}.numel()",
        "{h} + {h}.sum(-1, keepdim=True) / {h}.shape[-1]", "{h} * {h}[0].numel()", "{h} * {h}.stride(1)",
        "{h} * torch.linspace(0, 1, {h}.shape[-1])", "{h} * torch.ones({h}.shape[-1]).sum()",
        "{h} * torch.tensor(float({h}.shape[-1]))", "{h} * torch.ones({n})", "{h} + torch.arange({n})",
        "{h} + 0 * {h}.new_zeros({h}.shape[-1] * 2).shape[0]", "{h} * sum(1 for _ in range({h}.size(2)))",
        "{h} * torch.eye({h}.shape[-1]).diagonal()", "{h} * torch.ones_like({h}).sum(-1, keepdim=True)",
        "{h} @ torch.eye({h}.shape[-1], dtype={h}.dtype)", "{h} @ torch.ones({n}, {n}, dtype={h}.dtype)",
        "{h} + torch.ones_like({h}).cumsum(-1)", "{h} * torch.ones({h}.shape).mean(-1, keepdim=True)",
    ),
    "split": (
        "{h}.roll(1, -1)", "{h}.flip(-1)", "{h}[..., :1] + {h}", "torch.cat([{h}[..., 1:], {h}[..., :1]], -1)",
        "{h}[..., [0]] * {h}", "F.pad({h}, (1, 0))[..., 1:]", "torch.stack([{h}, {h}], -1).flatten(-2)[..., ::2]",
        "torch.cat({h}.split(2, -1)[::-1], -1)", "{h}.diff(dim=-1, prepend={h}[..., :1])",
        "{h}.index_select(-1, torch.arange({n} - 1, -1, -1))", "{h}.narrow(-1, 0, 1) * {h}",
        "torch.cat([{h}, {h}], -1)[..., 1 : {h}.shape[-1] + 1]", "{h}.gather(-1, {h}.argsort(-1))",
    ),
}  # fmt: skip

# [batch, heads, sequence, head_dim]. Right when the heads are cut.
HEADS: dict[str, tuple[str, ...]] = {
    "activation": ("torch.tanh({h})", "F.silu({h})", "{h}.clamp(-2, 2)"),
    "residual": ("{h} + {h}.tanh()", "{h} - 0.1 * {h}.detach()"),
    "view": (
        "{h}.transpose(1, 2).transpose(1, 2)", "{h}.flatten(0, 1).unflatten(0, {h}.shape[:2])",
        "{h}.reshape(-1, *{h}.shape[2:]).view({h}.shape)", "{h}.transpose(1, 2).flatten(2).unflatten(-1, (-1, {n})).transpose(1, 2)",
        "{h}.permute(1, 0, 2, 3).permute(1, 0, 2, 3)",
    ),
    "reduction": (
        "F.normalize({h}, dim=-1)", "{h} - {h}.mean(-1, keepdim=True)", "F.layer_norm({h}, ({n},))",
        "{h} * ({h}.square().mean(-1, keepdim=True) + 1e-6).rsqrt()", "{h}.softmax(-1)", "{h}.cumsum(2)",
        "{h} + {h}.amax(2, keepdim=True)",
    ),
    "shape arithmetic": (
        "{h} * {h}.shape[-1] ** -0.5", "{h} / {h}.shape[2]", "{h} + torch.arange({h}.shape[2])[:, None]",
        "{h} * torch.ones({h}.shape[-1])", "{h} / {n} ** 0.5",
    ),
    "split": (
        "torch.cat([-{h}[..., 1:], {h}[..., :1]], -1)", "torch.cat({h}.chunk(2, -1)[::-1], -1)",
        "{h}.roll(1, 2)", "{h}.flip(-1)", "{h} * torch.cat([{h}[..., :1].cos(), {h}[..., 1:].sin()], -1)",
    ),
}  # fmt: skip

WRONG_ON_HEADS: dict[str, tuple[str, ...]] = {
    "residual": ("{h} + {h}.sum(1, keepdim=True)",),
    "view": (
        "{h}.transpose(1, 2).reshape({h}.shape[0], -1, {h}.shape[1], {n}).transpose(1, 2)",
        "{h}.reshape({h}.shape[0], -1, {h}.shape[2], {n}).flip(1)", "{h}.reshape({h}.shape)[:, :1] * {h}",
        "{h}.flatten(2).view({h}.shape[0], {h}.shape[1], {h}.shape[2], -1)",
    ),
    "reduction": (
        "{h}.softmax(1)", "{h} - {h}.mean(1, keepdim=True)", "F.layer_norm({h}, {h}.shape[1:])",
        "{h} / {h}.norm()", "{h} + {h}.amax((1, 2), keepdim=True)",
    ),
    "shape arithmetic": (
        "{h} / {h}.shape[1]", "{h} + torch.arange({h}.shape[1])[:, None, None]",
        "{h} * torch.linspace(0, 1, {h}.shape[1]).view(-1, 1, 1)", "{h} * {h}.shape[1] ** -0.5",
        "{h} * 2 ** -torch.arange(1, {h}.shape[1] + 1.0).view(-1, 1, 1)",
    ),
    "split": ("{h}.roll(1, 1)", "{h}.flip(1)", "torch.cat([{h}[:, 1:], {h}[:, :1]], 1)", "{h}[:, [0]] + {h}"),
}  # fmt: skip


def _statement(w: Writer, right: dict, wrong: dict, h: str, x: str, n: int, shape: tuple) -> str:
    table = wrong if w.strays() else right
    production = w.one(*table)
    w.uses(production)
    text = w.one(*table[production])
    return w.let(text.format(h=w.operand(h), x=w.operand(x), n=n), *shape)


def on_features(w: Writer, h: str, x: str, n: int) -> str:
    """Nothing to three statements on a value of which the features are cut; `x` is whole."""
    for _ in range(w.one(0, 1, 1, 2, 3)):
        if w.maybe(0.25):
            h = _read(w, h, (n,), (1,), ())
        else:
            h = _statement(w, FEATURES, WRONG, h, x, n, ("B", "S", n))
    return h


def on_heads(w: Writer, h: str, x: str, heads: int, n: int) -> str:
    """Nothing to two statements on [batch, heads, sequence, features] of which the heads are cut."""
    shape = ("B", heads, "S", n)
    for _ in range(w.one(0, 0, 1, 2)):
        kind = w.one("statement", "statement", "norm", "read")
        if kind == "norm":
            w.uses("norm")
            layer = w.keep("norm", w.one(f"nn.LayerNorm({n})", f"nn.RMSNorm({n})"))
            h = w.let(f"self.{layer}({h})", *shape)
        elif kind == "read":
            h = _read(w, h, (heads, 1, 1), (n,), (heads, 1, n), ())
        else:
            h = _statement(w, HEADS, WRONG_ON_HEADS, h, x, n, shape)
    return h


def on_whole(w: Writer, x: str, n: int) -> str:
    """Nothing to two statements on a whole value: anything goes."""
    for _ in range(w.one(0, 1, 2)):
        if w.maybe(0.3):
            w.uses("norm")
            layer = w.keep("norm", w.one(f"nn.LayerNorm({n})", f"nn.RMSNorm({n})", f"nn.GroupNorm(1, {n})"))
            turn = ".mT" * ("Group" in w.scope.init[-1])
            x = w.let(f"self.{layer}({x}{turn}){turn}", "B", "S", n)
        else:
            wrong = {k: v for k, v in WRONG.items() if k != "shape arithmetic"}
            table = w.one(FEATURES, FEATURES, {**wrong, "shape arithmetic": WRONG["shape arithmetic"][:8]})
            production = w.one(*table)
            w.uses(production)
            x = w.let(w.one(*table[production]).format(h=x, x=w.operand(x), n=n), "B", "S", n)
            x = w.let(f"torch.tanh({x})", "B", "S", n)
    return x


def _read(w: Writer, h: str, *shapes: tuple[int, ...]) -> str:
    """A parameter or buffer that the plan does not name, read on a shard."""
    w.uses("read parameter")
    shape = w.one(*shapes)
    sizes = ", ".join(map(str, shape))
    if w.maybe(0.7):
        tensor = w.parameter(*shape) if shape else w.parameter(1)
    else:
        tensor = w.buffer(f"torch.linspace(0.5, 1.5, {max([1, *shape])}).expand({sizes or 1}).clone()" if len(shape) < 2
                          else f"torch.rand({sizes}, generator=torch.Generator().manual_seed(3)) + 0.5")
    text = w.one("{h} * {t}", "{h} + {t}", "{h} * (1 + {t})", "{h} * {t}.exp()", "{t} - {h}")
    if w.strays():
        text = w.one("{h} * {t}.softmax(0)", "{h} * {t}.mean()", "{h} + {t}.cumsum(0)", "{h} * {t}.norm()")
    return w.let(text.format(h=w.operand(h), t=tensor), *w.scope.values.get(h, ()))
