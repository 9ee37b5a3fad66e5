"""Every causal language model of transformers can be traced, or it is said why not: a sample of them.

`python -m tests.capture_all results.json` tries all: 168 of the 171 that run are traced (transformers 5.18).
"""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from autotp.trace.inputs import Samples
from tests import capture_all

SAMPLE = ("gpt_neo", "deepseek_v3", "jamba", "rwkv", "gemma3n_text", "xlnet", "dbrx", "recurrent_gemma")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SAMPLE)
def test_a_sample_is_traced(architecture):
    found = capture_all.outcome(architecture)
    assert (found["is"], found["route"], found["opaque"]) == ("traced", "recorder", []), found


def test_what_is_not_traced_is_said(tmp_path, capsys, monkeypatch):
    def built(architecture):
        if architecture == "musicgen":
            raise ValueError("no text encoder")
        return Unknown()

    monkeypatch.setattr(capture_all, "build", built)
    monkeypatch.setattr(capture_all, "make", lambda model: Samples.given(torch.zeros(2, 8).long()))
    target = tmp_path / "found.json"
    capture_all.main(target, ["xlm", "musicgen"])
    told = capsys.readouterr().out
    assert "0 of 1 that run are traced; 1 cannot be built" in told
    assert "musicgen: ValueError: no text encoder" in told
    assert "xlm: TraceError: " in told and "test_capture_all.py:" in told
    assert json.loads(target.read_text())["musicgen"]["is"] == "not built"
    capture_all.main(target, ["xlm"])  # done already
    assert capsys.readouterr().out.startswith("0 of 1 that run")


class Unknown(nn.Module):
    """Takes a way by the values of its input."""

    def forward(self, input_ids):
        rows = input_ids.double() @ torch.ones(8, 3, dtype=torch.float64)
        return rows.new_ones(int(input_ids.sum())) * (2 if rows.sum() > 7 else 3)
