"""Modules of torch and einops that keep a size of the whole model are edited like the model's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autotp
from tests import library
from tests.models import verified


def given(model: nn.Module) -> torch.Tensor:
    if isinstance(model, library.Images):
        return torch.randn(2, 3, *[4] * (2 if isinstance(model.up, nn.Conv2d) else 3))
    width = {library.Heads: 15, library.Channels: 5, library.Pooled: 6}[type(model)]
    return torch.randn(2, 7, width)


@pytest.mark.parametrize(
    ("build", "edited", "tp"),
    [
        (library.unflatten, "local(self.unflattened_size)", 2),
        (library.rearrange, "axes_dims=local(self._axes_lengths)", 3),
        (library.depthwise, "local(self.groups)", 2),
        (library.groups, "local(self.num_groups)", 3),
        (lambda: library.Images(nn.Conv2d, 15), "local(self.groups)", 2),
        (lambda: library.Pooled("h", "max"), "axes_dims=local(self._axes_lengths)", 2),
        (lambda: library.Pooled("d", "mean"), "return mean(", 3),
    ],
)
def test_exact_with_the_rank_s_number(build, edited, tp):
    model = build()
    x = given(model)
    analysis = autotp.analyze(model, library.plan(model), tp=tp, inputs=x)
    changed = [line for line in analysis.edits.splitlines() if line.startswith("+ ")]
    assert analysis.ok and any(edited in line for line in changed)
    result = verified(model, analysis, inputs=x)
    assert result.ok and result.tolerance == 1e-9, str(result)


@pytest.mark.parametrize(
    ("model", "code"),
    [
        (library.Images(nn.Conv3d, 5), "AT304"),  # groups of several channels
        (library.Images(nn.Conv2d, 1), "AT307"),  # it reads all channels
        (library.Pooled("d", "max"), "AT303"),
        (library.Pooled("d", "sum"), "AT305"),  # the next layer would read a part of a sum
    ],
    ids=["groups", "one group", "max", "sum"],
)
def test_what_would_need_all_heads_is_refused(model, code):
    analysis = autotp.analyze(model, library.plan(model), tp=2, inputs=given(model))
    assert {d.code for d in analysis.diagnostics if d.severity == "error"} == {code}
