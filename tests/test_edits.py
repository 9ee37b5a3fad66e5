"""Edits of the model's own code, from the trace to the numbers."""

from __future__ import annotations

import pytest
import torch

import autotp
from tests import edited


@pytest.mark.parametrize(("heads", "tp"), [(3, 2), (7, 3)])
def test_a_nanogpt_is_exact_on_whole_heads(heads, tp):
    model = edited.NanoGPT(heads=heads, layers=1)
    ids = torch.randint(0, 53, (2, 5))
    result = autotp.verify(model, edited.nanogpt_plan(heads), tp=tp, inputs=ids)
    assert result.ok and result.tolerance == 1e-9, str(result)


def test_the_edits_of_every_layer_are_one_diff():
    analysis = autotp.analyze(edited.NanoGPT(), edited.nanogpt_plan(6), tp=2)
    assert analysis.ok
    assert len(analysis.code.modules()) == 2
    changed = [line[1:].strip() for line in analysis.edits.splitlines() if line.startswith("+ ")]
    assert changed == [
        "q, k, v = self.c_attn(x).split(local(self.n_embd), dim=2)",
        "k = k.view(B, T, local(self.n_head), C // self.n_head).transpose(1, 2)",
        "q = q.view(B, T, local(self.n_head), C // self.n_head).transpose(1, 2)",
        "v = v.view(B, T, local(self.n_head), C // self.n_head).transpose(1, 2)",
        "return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, local(C)))",
    ]


def test_one_expression_with_two_needs_is_refused():
    analysis = autotp.analyze(edited.TwoNeeds(), {"fc1": "column", "fc2": "row"}, tp=2)
    (found,) = [d for d in analysis.diagnostics if d.severity == "error"]
    assert found.code == "AT327"
    assert found.message == (
        "one expression of TwoNeeds.forward in the model would have to be two things on a rank: 4 would have "
        "to be 2, 2 on the ranks, and 4, 4"
    )
    assert analysis.edits == "" and not analysis.code
