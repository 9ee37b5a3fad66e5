"""Modules of torch and einops that keep a size of the whole model are edited like the model's own."""

from __future__ import annotations

import pytest
import torch

import autotp
from tests import library


@pytest.mark.parametrize(
    ("build", "edited", "tp"),
    [
        (library.unflatten, "local(self.unflattened_size)", 2),
        (library.rearrange, "axes_dims=local(self._axes_lengths)", 3),
        (library.depthwise, "local(self.groups)", 2),
        (library.groups, "local(self.num_groups)", 3),
    ],
)
def test_exact_with_the_rank_s_number(build, edited, tp):
    model = build()
    x = torch.randn(2, 7, model.out.in_features if isinstance(model, library.Heads) else 5)
    analysis = autotp.analyze(model, library.plan(model), tp=tp, inputs=x)
    changed = [line for line in analysis.edits.splitlines() if line.startswith("+ ")]
    assert analysis.ok and any(edited in line for line in changed)
    result = autotp.verify(model, library.plan(model), tp=tp, inputs=x)
    assert result.ok and result.tolerance == 1e-9, str(result)
