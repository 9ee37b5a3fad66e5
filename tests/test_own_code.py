"""The models of examples/own_code: exact on whole heads, even and uneven, and trained with `"auto"`.

The example itself has 3 ranks.
"""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import pytest
import torch

import autotp
from autotp.comm import simulate
from autotp.rewrite.apply import sharded
from tests.models import randomised

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


def losses(model, inputs):
    """Those of five steps of AdamW."""
    optimizer, told = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(5):
        out = model(*inputs)
        wanted = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        loss = (out - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        told.append(loss.item())
    return told


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_five_steps_with_auto(name):
    """The plan that is found cuts all that the one by hand does; the losses are those of one process."""
    own = family(name)
    model, inputs = own.example(4)
    model = randomised(model).eval()  # the encoder's dropout draws by rank
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    by_hand = autotp.analyze(model, own.plan(4), tp=2, inputs=inputs).layouts
    copies = [copy.deepcopy(model) for _ in range(2)]

    def rank(group):
        mine = autotp.shard(copies[group.rank], "auto", group, inputs=inputs)
        return losses(mine, inputs), set(sharded(mine).layouts)

    found, wanted = simulate(2, rank), losses(model, inputs)
    assert wanted[0] > 1.01 * wanted[-1]
    for told, cut in found:
        assert told == pytest.approx(wanted, abs=1e-10)
        assert {n for n in by_hand if n.endswith("weight") or "w_" in n} <= cut


def test_the_five():
    assert FAMILIES == ["encoder", "experts", "nanogpt", "vit", "whisper"]
