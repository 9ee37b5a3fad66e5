"""The models of examples/own_code: exact on whole heads, even and uneven. The example itself has 3 ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import autotp

FOLDER = Path(__file__).parent.parent / "examples" / "own_code"
FAMILIES = sorted(path.stem for path in FOLDER.glob("*.py"))


def family(name):
    spec = importlib.util.spec_from_file_location(f"own_code_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "tp"), [(4, 2), (5, 4)])
@pytest.mark.parametrize("name", FAMILIES)
def test_exact_on_whole_heads(name, heads, tp):
    torch.manual_seed(0)
    own = family(name)
    model, inputs = own.example(heads)
    result = autotp.verify(model, own.plan(heads), tp=tp, inputs=inputs)
    assert result.ok and result.tolerance == 1e-9, str(result)


def test_the_five():
    assert FAMILIES == ["encoder", "experts", "nanogpt", "vit", "whisper"]
