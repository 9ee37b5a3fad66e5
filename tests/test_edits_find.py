"""Every way to write a size of the whole model is found, edited, and exact on uneven heads."""

from __future__ import annotations

import pytest
import torch

import autotp
from tests import edited

PLAN = {"fc1": {"style": "column", "heads": 3}, "fc2": {"style": "row", "heads": 3}}


@pytest.mark.parametrize("name", edited.WAYS)
def test_it_is_found_and_exact(name):
    torch.manual_seed(0)
    result = autotp.verify(edited.WAYS[name](), PLAN, tp=2, inputs=torch.randn(5, 8))
    assert result.ok, str(result)
