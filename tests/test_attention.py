"""torch's own attention, encoder and decoder layers: their raw tensors, and their fused kernels."""

from __future__ import annotations

import copy

import pytest
import torch

import autotp
from autotp.comm import simulate
from autotp.rewrite.apply import apply
from tests import attention
from tests.models import verified

FFN = {"linear1": "column", "linear2": "row"}
X, MEMORY = torch.randn(4, 6, 20), torch.randn(7, 6, 20)
BATCH_FIRST = torch.randn(2, 6, 20)
PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])


@pytest.mark.parametrize(
    ("model", "heads", "inputs", "tp"),
    [
        (attention.Attention(heads=5, batch_first=True), 5, (BATCH_FIRST, None, PADDING), 2),
        (attention.Attention(heads=5, dropout=0.2), 5, (X, MEMORY), 3),
        pytest.param(
            attention.Encoder(heads=4, dropout=0.1), 4, (BATCH_FIRST,), 3, marks=pytest.mark.slow,
        ),
        pytest.param(
            attention.Encoder(heads=4, norm_first=True, activation="gelu"), 4, (BATCH_FIRST, PADDING), 4,
            marks=pytest.mark.slow,
        ),
        pytest.param(attention.Decoder(heads=5), 5, (X, MEMORY), 2, marks=pytest.mark.slow),
    ],
    ids=["itself", "memory", "encoder", "padded encoder", "decoder"],
)  # fmt: skip
def test_exact_with_gradients_and_in_inference(model, heads, inputs, tp):
    plan = attention.plan(heads)
    if not isinstance(model, attention.Attention):
        plan |= FFN
    model = attention.randomised(model).double().eval()
    inputs = tuple(x.double() if x is not None and x.is_floating_point() else x for x in inputs)
    analysis = autotp.analyze(model, plan, tp=tp, inputs=inputs)
    result = verified(model, analysis, inputs=inputs)
    assert result.ok and result.tolerance == 1e-9, str(result)
    with torch.no_grad():  # torch's own model takes its fused kernel, where it may
        wanted = model(*inputs)

    def rank(group):
        part = apply(copy.deepcopy(model), analysis, group)
        with torch.no_grad():
            return part(*inputs)

    for found in simulate(tp, rank):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_the_fused_kernel_is_kept_from_cut_layers_alone():
    for plan, count in ((FFN, 2), (attention.plan(5), 4)):  # an attention that is whole goes on as it is
        analysis = autotp.analyze(attention.Encoder(heads=5), plan, tp=2, inputs=(BATCH_FIRST,))
        slow = [line for line in analysis.edits.splitlines() if "slow(" in line]
        assert analysis.ok and len(slow) == count
    analysis = autotp.analyze(
        attention.Encoder(heads=5), {"head": {"style": "column", "gather_output": True}}, tp=2
    )
    assert not analysis.code


def test_a_layer_with_its_own_forward_around_the_kernel_is_refused():
    model = attention.Encoder(heads=4, layer=attention.Counting)
    found = autotp.analyze(model.eval(), FFN, tp=2, inputs=(BATCH_FIRST,)).diagnostics
    assert {d.code for d in found if d.severity == "error"} == {"AT312"}


@pytest.mark.parametrize(("option", "tp"), [("add_bias_kv", 2), ("add_zero_attn", 3)])
def test_extra_keys_for_every_head_are_exact(option, tp):
    model = attention.randomised(attention.Attention(heads=5, **{option: True}))
    result = autotp.verify(model, attention.plan(5), tp=tp, inputs=(X,))
    assert result.ok and result.tolerance == 1e-9, str(result)


def test_keys_and_values_of_other_widths():
    """torch checks the three matrices one after the other, before its next op."""
    model = attention.randomised(attention.Attention(heads=5, kdim=7, vdim=7))
    each = {f"{name}_proj_weight": {"style": "column", "dim": 0, "heads": 5} for name in "qkv"}
    plan = {n: rule for n, rule in attention.plan(5).items() if not n.endswith("in_proj_weight")} | each
    result = autotp.verify(model, plan, tp=2, inputs=(X, torch.randn(7, 6, 7)))
    assert result.ok and result.tolerance == 1e-9, str(result)
