"""Edits of the model's own code, from the trace to the numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

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


class OtherName(nn.Module):
    """Its methods call the module something else than `self`."""

    def __init__(this):
        super().__init__()
        this.heads, this.qkv, this.out = 6, nn.Linear(24, 24), nn.Linear(24, 24)

    def apart(module, self):
        return self.view(*self.shape[:2], module.heads, 4)

    def forward(this, x):
        return this.out(this.apart(this.qkv(x)).softmax(-1).flatten(2))


@pytest.mark.parametrize("tp", [2, 3])
def test_a_module_may_be_called_otherwise_than_self(tp):
    model, x = OtherName(), torch.randn(2, 5, 24)
    analysis = autotp.analyze(model, {"qkv": "column", "out": "row"}, tp=tp, inputs=x)
    assert "return self.view(*self.shape[:2], local(module.heads), 4)" in analysis.edits
    result = autotp.verify(model, analysis.plan, tp=tp, inputs=x)
    assert result.ok and result.max_grad_diff < 1e-9, str(result)


def test_one_expression_with_two_needs_is_refused():
    analysis = autotp.analyze(edited.TwoNeeds(), {"fc1": "column", "fc2": "row"}, tp=2)
    (found,) = [d for d in analysis.diagnostics if d.severity == "error"]
    assert found.code == "AT327"
    assert found.message == (
        "one expression of TwoNeeds.forward in the model would have to be two things on a rank: 4 would have "
        "to be 2, 2 on the ranks, and 4, 4"
    )
    assert analysis.edits == "" and not analysis.code


UNPLACED = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.n, self.qkv, self.out = 6, nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x):
        f = [lambda a: a.view(*a.shape[:2], self.n, 4), lambda a: a + self.n][0]
        return self.out(f(self.qkv(x)).softmax(-1).view(*x.shape[:2], 4 * self.n))
"""
ANALYSED = """
import autotp
import torch
from net import Net

assert not any(place[3] for place in Net.forward.__code__.co_positions())
plan, x = {"qkv": "column", "out": "row"}, torch.randn(2, 5, 24)
analysis = autotp.analyze(Net(), plan, tp=3, inputs=x)
print(analysis)
if analysis.ok:
    print("ok:", autotp.verify(Net(), plan, tp=3, inputs=x).ok)
"""


@pytest.mark.slow
def test_code_that_was_compiled_without_columns(tmp_path):
    """`-X no_debug_ranges` leaves them out. What was compiled so is compiled once more; a Python that was
    started so has none at all, and says it."""
    (tmp_path / "net.py").write_text(UNPLACED)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}

    def python(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=100
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    python("-X", "no_debug_ranges", "-m", "py_compile", "net.py")
    assert "ok: True" in python("-c", ANALYSED)
    refused = python("-X", "no_debug_ranges", "-c", ANALYSED)
    assert "started with -X no_debug_ranges (or PYTHONNODEBUGRANGES): start it without" in refused
