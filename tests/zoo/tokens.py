"""Greedy generation with a cache: every rank is to give the tokens of the unsharded model."""

from __future__ import annotations

import copy
from typing import Any

import torch

from autotp.analysis import Analysis
from autotp.comm import Group, simulate
from autotp.diagnostic import UnprovenPath
from autotp.rewrite.apply import apply

__all__ = ["NEW", "tokens"]

NEW = 5  # tokens


def tokens(model: Any, analysis: Analysis) -> str:
    """ "same" or "different", "refused: …" where the sharded model raises UnprovenPath, "none: …" where the
    unsharded one does not generate."""
    base = _drawn(model)
    try:
        wanted = _generated(copy.deepcopy(base))
    except Exception as error:
        return f"none: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    copies = [copy.deepcopy(base) for _ in range(analysis.tp)]

    def rank(group: Group) -> torch.Tensor:
        apply(copies[group.rank], analysis, group)
        return _generated(copies[group.rank])

    try:
        found = simulate(analysis.tp, rank)
    except UnprovenPath as error:
        return f"refused: {str(error).rpartition('site-packages/')[2]}"
    return "same" if all(torch.equal(ids, wanted) for ids in found) else "different"


def _drawn(model: Any) -> Any:
    """A copy with weights that hide nothing, in float64 where it runs in it: tokens then have no ties."""
    base, generator = copy.deepcopy(model).eval(), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in base.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_((0.1 * noise).to(parameter.dtype))
    try:
        double = copy.deepcopy(base).double()
        _generated(copy.deepcopy(double), new=1)
    except Exception:
        return base
    return double


def _generated(model: Any, *, new: int = NEW) -> torch.Tensor:
    ids = torch.randint(6, 76, (2, 7), generator=torch.Generator().manual_seed(3))
    options = {"do_sample": False, "num_beams": 1, "use_cache": True, "pad_token_id": 0, "eos_token_id": None}
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, **options
    )
    assert isinstance(out, torch.Tensor) and out.shape[-1] >= 7 + new
    return out
