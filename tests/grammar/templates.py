"""Statements as text: right on a shard, and (after `wrong`) wrong there or in need of a mapping.

`{h}` is the value, `{n}` the size of its last dim in the whole model, `{x}` a whole value of the same width.
"""

from __future__ import annotations

__all__ = ["FEATURES", "FORMS", "HEADS"]


def _read(text: str) -> dict[str, tuple[list[str], list[str]]]:
    """name -> (right, wrong) from the indented lines under each name."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    name, wrong = "", False
    for line in filter(str.strip, text.splitlines()):
        if line.startswith(" "):
            found[name][wrong].append(line.strip())
        elif line == "wrong":
            wrong = True
        else:
            name, wrong = line, False
            found[name] = ([], [])
    return found


# A value [batch, sequence, features] of which the features are cut, to another of the same shape.
FEATURES = _read("""
activation
    F.gelu({h})
    F.silu({h})
    torch.tanh({h})
    {h}.sigmoid()
    F.relu({h})
    F.softplus({h})
    {h}.clamp(-1, 1)
    F.leaky_relu({h}, 0.1)
    torch.where({h} > 0, {h}, 0.1 * {h})
    {h}.masked_fill({h} < -1, 0.0)
    {h} * {h}.sigmoid()
    F.dropout({h}, 0.0, self.training)
    F.elu({h}).square()
    {h}.abs().sqrt() + 1
    F.hardtanh({h}) - {h}.relu() ** 2
    torch.addcmul({h}, {h}, {h}, value=0.5)
    torch.lerp({h}, {h}.tanh(), 0.3)
wrong
    F.glu(torch.cat([{h}, {h}], -1))
    {h} * torch.sigmoid({x}.mean(-1, keepdim=True))
residual
    {h} + torch.tanh({h})
    {h} - 0.5 * {h}.detach()
    {h} + {h} * 0.1
    torch.add({h}, {h}, alpha=2)
    {h}.clone().mul_(0.5).add_({h})
    1 - {h}
    torch.stack([{h}, {h}.tanh()]).sum(0)
wrong
    {h} + {x}.sum(-1, keepdim=True)
    {h} * {x}[..., :1]
    {h} + {x}.mean()
view
    {h}.reshape(-1, {h}.shape[-1]).view({h}.shape)
    {h}.transpose(1, 2).tanh().transpose(2, 1)
    {h}.flatten(0, 1).unflatten(0, {h}.shape[:2])
    {h}.unsqueeze(-1).squeeze(-1)
    {h}.permute(2, 0, 1).permute(1, 2, 0)
    {h}.view(*{h}.shape[:2], -1)
    {h}[None][0]
    {h}.reshape({h}.shape[0], -1, {h}.shape[-1])
    {h}.mT.contiguous().mT
    {h}.unsqueeze(2).flatten(2)
    {h}.movedim(-1, 0).movedim(0, -1)
    {h}.unsqueeze(1).expand(-1, 2, -1, -1).sum(1)
    {h}.contiguous().view(-1, {h}.size(2)).view_as({h})
    {h}.repeat(2, 1, 1)[: {h}.shape[0]]
wrong
    {h}.view({h}.shape[0], -1, {n})
    {h}.reshape(-1, {n}).view(*{h}.shape[:2], {n})
    {h}.reshape({h}.shape[0], {h}.shape[2], -1).mT
    {h}.flatten(1).unflatten(1, (-1, {n}))
    {h}.transpose(1, 2).reshape({h}.shape)
    {h}.flatten().view({h}.shape[0], {h}.shape[1], -1)
reduction
    {h} - {h}.mean(1, keepdim=True)
    {h}.cumsum(1)
    {h}.softmax(1)
    {h} + {h}.amax(1, keepdim=True)
    {h} / (1 + {h}.square().sum(0, keepdim=True)).sqrt()
    {h} + {h}.sum(1, keepdim=True)
    F.normalize({h}, dim=1)
    {h} + {h}.std(1, keepdim=True)
    {h} + {h}.logsumexp(1, keepdim=True)
    {h}.sort(1).values
    {h}.cummax(1).values
    {h} + {h}.max(1, keepdim=True).values
    {h} + {h}.mean((0, 1))
    {h}.log_softmax(1)
wrong
    {h}.softmax(-1)
    {h} - {h}.mean(-1, keepdim=True)
    {h}.cumsum(-1)
    {h}.sort(-1).values
    {h} + {h}.std(-1, keepdim=True)
    F.normalize({h}, dim=-1)
    {h} + {h}.sum(-1, keepdim=True)
    F.layer_norm({h}, {h}.shape[-1:])
    {h} + {h}.amax(-1, keepdim=True)
    {h} / (1 + {h}.norm())
    {h} + {h}.mean()
    {h} + {h}.square().sum()
    {h} * {h}.argmax(-1, keepdim=True)
    {h} - {h}.topk(1, -1).values
    {h} + {h}.logsumexp((1, 2), keepdim=True)
    {h}.cumprod(-1)
    {h} + ({h} > 0).sum(-1, keepdim=True)
    {h} + {h}.median(-1, keepdim=True).values
    {h} / {h}.abs().max()
    {h} + torch.linalg.vector_norm({h}, dim=-1, keepdim=True)
shape arithmetic
    {h} / {h}.shape[1]
    {h} * {h}.shape[0] ** -0.5
    {h} * (1 / {h}.size(1))
    {h} / len({h})
    {h} + torch.arange({h}.shape[1])[:, None]
    {h} * torch.ones({h}.shape[1], 1)
    {h} + {h}.sum(1, keepdim=True) / {h}.shape[1]
    {h} * {x}.shape[-1] ** -0.5
    {h} / {h}.flatten(0, 1).shape[0]
    {h} + torch.zeros_like({h})
    {h} * torch.full_like({h}, 0.5)
    {h} * {h}.dim()
wrong
    {h} * {h}.shape[-1] ** -0.5
    {h} + torch.arange({h}.shape[-1])
    {h} / {h}.numel()
    {h} + {h}.sum(-1, keepdim=True) / {h}.shape[-1]
    {h} * {h}[0].numel()
    {h} * {h}.stride(1)
    {h} * torch.linspace(0, 1, {h}.shape[-1])
    {h} * torch.ones({h}.shape[-1]).sum()
    {h} * torch.tensor(float({h}.shape[-1]))
    {h} * torch.ones({n})
    {h} + torch.arange({n})
    {h} + 0 * {h}.new_zeros({h}.shape[-1] * 2).shape[0]
    {h} * sum(1 for _ in range({h}.size(2)))
    {h} * torch.eye({h}.shape[-1]).diagonal()
    {h} * torch.ones_like({h}).sum(-1, keepdim=True)
    {h} @ torch.eye({h}.shape[-1], dtype={h}.dtype)
    {h} @ torch.ones({n}, {n}, dtype={h}.dtype)
    {h} * {h}.new_ones({h}.shape)
    {h} + {h}.new_zeros({h}.shape[-1])
    {h} + torch.ones_like({h}).cumsum(-1)
    {h} * torch.ones({h}.shape).mean(-1, keepdim=True)
split
    torch.cat([{h}[:, 1:], {h}[:, :1]], 1)
    {h}.roll(1, 1)
    {h}.flip(1)
    {h}.narrow(1, 0, 1) + {h}
    {h}[:, torch.arange({h}.shape[1])]
    F.pad({h}, (0, 0, 1, 0))[:, 1:]
    {h}[:, -1:] + {h}
    torch.cat({h}.split(2, 1), 1)
    {h}[:, ::2].mean(1, keepdim=True) + {h}
    torch.stack({h}.unbind(1), 1)
    torch.cat([{h}, {h}], -1).chunk(2, -1)[0]
    {h}.select(1, 0)[:, None] - {h}
    torch.stack([{h}, {h}.tanh()], -1).unbind(-1)[1]
    {h}.diff(dim=1, prepend={h}[:, :1])
wrong
    {h}.roll(1, -1)
    {h}.flip(-1)
    {h}[..., :1] + {h}
    torch.cat([{h}[..., 1:], {h}[..., :1]], -1)
    {h}[..., [0]] * {h}
    F.pad({h}, (1, 0))[..., 1:]
    torch.stack([{h}, {h}], -1).flatten(-2)[..., ::2]
    torch.cat({h}.split(2, -1)[::-1], -1)
    {h}.diff(dim=-1, prepend={h}[..., :1])
    {h}.index_select(-1, torch.arange({n} - 1, -1, -1))
    {h}.narrow(-1, 0, 1) * {h}
    torch.cat([{h}, {h}], -1)[..., 1 : {h}.shape[-1] + 1]
    {h}.gather(-1, {h}.argsort(-1))
""")

# A value [batch, heads, sequence, features] of which the heads are cut, to another of the same shape.
HEADS = _read("""
activation
    torch.tanh({h})
    F.silu({h})
    {h}.clamp(-2, 2)
wrong
    {h} * {x}.mean()
residual
    {h} + {h}.tanh()
    {h} - 0.1 * {h}.detach()
wrong
    {h} + {h}.sum(1, keepdim=True)
view
    {h}.transpose(1, 2).transpose(1, 2)
    {h}.flatten(0, 1).unflatten(0, {h}.shape[:2])
    {h}.reshape(-1, *{h}.shape[2:]).view({h}.shape)
    {h}.transpose(1, 2).flatten(2).unflatten(-1, (-1, {n})).transpose(1, 2)
    {h}.permute(1, 0, 2, 3).permute(1, 0, 2, 3)
wrong
    {h}.transpose(1, 2).reshape({h}.shape[0], -1, {h}.shape[1], {n}).transpose(1, 2)
    {h}.reshape({h}.shape[0], -1, {h}.shape[2], {n}).flip(1)
    {h}.reshape({h}.shape)[:, :1] * {h}
    {h}.flatten(2).view({h}.shape[0], {h}.shape[1], {h}.shape[2], -1)
reduction
    F.normalize({h}, dim=-1)
    {h} - {h}.mean(-1, keepdim=True)
    F.layer_norm({h}, ({n},))
    {h} * ({h}.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    {h}.softmax(-1)
    {h}.cumsum(2)
    {h} + {h}.amax(2, keepdim=True)
wrong
    {h}.softmax(1)
    {h} - {h}.mean(1, keepdim=True)
    F.layer_norm({h}, {h}.shape[1:])
    {h} / {h}.norm()
    {h} + {h}.amax((1, 2), keepdim=True)
shape arithmetic
    {h} * {h}.shape[-1] ** -0.5
    {h} / {h}.shape[2]
    {h} + torch.arange({h}.shape[2])[:, None]
    {h} * torch.ones({h}.shape[-1])
    {h} / {n} ** 0.5
wrong
    {h} / {h}.shape[1]
    {h} + torch.arange({h}.shape[1])[:, None, None]
    {h} * torch.linspace(0, 1, {h}.shape[1]).view(-1, 1, 1)
    {h} * {h}.shape[1] ** -0.5
    {h} * 2 ** -torch.arange(1, {h}.shape[1] + 1.0).view(-1, 1, 1)
split
    torch.cat([-{h}[..., 1:], {h}[..., :1]], -1)
    torch.cat({h}.chunk(2, -1)[::-1], -1)
    {h}.roll(1, 2)
    {h}.flip(-1)
    {h} * torch.cat([{h}[..., :1].cos(), {h}[..., 1:].sin()], -1)
wrong
    {h}.roll(1, 1)
    {h}.flip(1)
    torch.cat([{h}[:, 1:], {h}[:, :1]], 1)
    {h}[:, [0]] + {h}
""")

# What blocks are made of, by name.
FORMS = _read("""
headed
    {h}.view({h}.shape[0], {h}.shape[1], -1, {d}).transpose(1, 2)
    {h}.unflatten(-1, (-1, {d})).transpose(1, 2)
    {h}.reshape(*{h}.shape[:-1], -1, {d}).permute(0, 2, 1, 3)
    {h}.view(*{h}.shape[:2], -1, {d}).swapaxes(1, 2)
wrong
    {h}.view({h}.shape[0], -1, {heads}, {d}).transpose(1, 2)
    {h}.unflatten(-1, ({heads}, {d})).transpose(1, 2)
    {h}.view({h}.shape[0], {h}.shape[1], {d}, -1).permute(0, 3, 1, 2)
    {h}.reshape({h}.shape[0], -1, {h}.shape[1], {d})
    {h}.view(*{h}.shape[:2], {heads}, -1).transpose(1, 2)
together
    {h}.transpose(1, 2).flatten(2)
    {h}.permute(0, 2, 1, 3).reshape({h}.shape[0], {h}.shape[2], -1)
    {h}.transpose(1, 2).contiguous().view({h}.shape[0], {h}.shape[2], -1)
wrong
    {h}.transpose(1, 2).reshape({h}.shape[0], -1, {width})
    {h}.permute(0, 2, 3, 1).flatten(2)
    {h}.reshape({h}.shape[0], {h}.shape[2], -1)
    {h}.transpose(1, 2).flatten(2)[..., : {width}]
gate
    F.silu({g}) * {u}
    {g} + {u}
    torch.maximum({g}, {u})
    {g} * {u}.sigmoid()
wrong
    {g} @ {u}.mT @ {u}
    torch.cat([{g}, {u}], -1).chunk(2, -1)[1] * {g}
    F.cosine_similarity({g}, {u}, -1)[..., None] * {g}
halves
    {h}.chunk(2, -1)
    {h}.unflatten(-1, (2, -1)).unbind(-2)
    torch.split({h}, {h}.shape[-1] // 2, -1)
    {h}.tensor_split(2, -1)
wrong
    {h}.unflatten(-1, (-1, 2)).unbind(-1)
    {h}.split({n}, -1)
    ({h}[..., ::2], {h}[..., 1::2])
    ({h}[..., : {n}], {h}[..., {n} :])
interleaved
    {h}.unflatten(-1, (-1, 3, {d})).unbind(-2)
    {h}.view(*{h}.shape[:2], -1, {t}).chunk(3, -1)
    {h}.view(*{h}.shape[:2], -1, {t}).split({d}, -1)
thirds
    {h}.unflatten(-1, (3, -1, {d})).unbind(2)
    {h}.view(*{h}.shape[:2], 3, -1, {d}).unbind(2)
    [c.unflatten(-1, (-1, {d})) for c in {h}.chunk(3, -1)]
repeated
    {h}.repeat_interleave({t}, 1)
    {h}[:, :, None].expand(-1, -1, {t}, -1, -1).flatten(1, 2)
    {h}.unsqueeze(2).repeat(1, 1, {t}, 1, 1).flatten(1, 2)
wrong
    {h}.repeat(1, {t}, 1, 1)
scores
    {q} @ {k}.mT
    torch.einsum('bhqd,bhkd->bhqk', {q}, {k})
    torch.matmul({q}, {k}.transpose(-2, -1))
wrong
    {q} @ {k}.mT / {q}.shape[1]
    torch.einsum('bhqd,bhkd->bqk', {q}, {k})[:, None]
    torch.einsum('bhqd,bgkd->bhqk', {q}, {k})
weights
    {s}.softmax(-1)
    F.softmax({s}, dim=3)
    ({s} - {s}.amax(-1, keepdim=True)).softmax(-1)
wrong
    {s}.softmax(1)
    {s} / (1 + {s}.abs().sum((1, 3), keepdim=True))
attended
    {p} @ {v}
    torch.einsum('bhqk,bhkd->bhqd', {p}, {v})
wrong
    torch.einsum('bhqk,bgkd->bhqd', {p}, {v})
slopes
    {b}.view(-1, 1, 1)
    {b}[:, None, None]
wrong
    torch.arange({q}.shape[1]).view(-1, 1, 1)
    (2.0 ** -torch.arange(1, {heads} + 1)).view(-1, 1, 1)
    {b}[: {q}.shape[1]].view(-1, 1, 1)
    ({b} / {b}.sum()).view(-1, 1, 1)
read
    {h} * {t}
    {h} + {t}
    {h} * (1 + {t})
    {h} * {t}.exp()
    {t} - {h}
wrong
    {h} * {t}.softmax(0)
    {h} * {t}.mean()
    {h} + {t}.cumsum(0)
    {h} * {t}.norm()
into
    F.linear(x, {w})
    x @ {w}.T
    torch.einsum('bsd,fd->bsf', x, {w})
out of
    F.linear({h}, {w})
    {h} @ {w}.t()
    torch.einsum('bsf,df->bsd', {h}, {w})
sum
    {y} * 1
    {y} * 0.5
    {y}.view({y}.shape)
    -{y}
    {y} + {y}
wrong
    {y}.tanh()
    {y} + x
    {y} + {b}
    {y} * {y}
    {y} + 1
    {y} * {b}
into experts
    torch.einsum('bsd,efd->ebsf', x, {w})
    x[None] @ {w}.mT[:, None]
out of experts
    torch.einsum('ebsf,edf->ebsd', {h}, {w})
    {h} @ {w}.mT[:, None]
weighted
    ({y} * r.permute(2, 0, 1)[..., None]).sum(0)
    torch.einsum('ebsd,bse->bsd', {y}, r)
wrong
    torch.einsum('ebsd,bse->bsd', {y}, r).tanh()
    ({y} + r.permute(2, 0, 1)[..., None]).sum(0)
    {y}.amax(0)
""")
