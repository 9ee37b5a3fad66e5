"""Weights that are handed to a function which does nothing with them in the traces, and might later."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotp
from autotp.comm.simulated import simulate
from autotp.rewrite.apply import apply
from autotp.rewrite.withheld import withheld
from autotp.trace.capture import capture
from autotp.trace.handed import handed
from tests import architectures

PLAN = {"up": "column", "out": "row"}
SAID = (
    "layers.0.up.weight is cut, and linear is computed with it outside of its layer, where no traced "
    "forward did: a kernel that takes whole weights would give other numbers on each rank; have it "
    "installed when the model is sharded, or switch it off"
)
X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


def missing(x: Tensor, up: Tensor, out: Tensor, bias: Tensor) -> Tensor | None:
    """A kernel that is not installed."""
    return None


def installed(x: Tensor, up: Tensor, out: Tensor, bias: Tensor) -> Tensor | None:
    """The whole block at once."""
    return F.linear(F.gelu(F.linear(x, up)), out, bias)


class Mixer(nn.Module):
    """In train mode the kernel gives the finished output, where there is one."""

    kernel = staticmethod(missing)

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(8, 12, bias=False), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.up.weight.dtype)
        if self.training:
            out = type(self).kernel(x, self.up.weight, self.out.weight, self.out.bias)
            if out is not None:
                return out
        return self.out(F.gelu(self.up(x)))


class Two(nn.Module):
    """Two mixers, of which the second is recorded as the first one's like."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mixer(), Mixer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_a_kernel_that_is_installed_later_raises(monkeypatch):
    torch.manual_seed(0)
    model = Two()
    want = model(X).detach()
    analysis = autotp.analyze(copy.deepcopy(model), PLAN, tp=2, inputs=X)
    assert set(analysis.handed) == {f"layers.{n}.{w}.weight" for n in (0, 1) for w in ("up", "out")}

    def rank(group):
        mine = apply(copy.deepcopy(model), analysis, group)
        twin = copy.deepcopy(mine).train()
        got = [twin(X), twin.eval()(X), mine.train()(X)]
        monkeypatch.setattr(Mixer, "kernel", staticmethod(installed))
        said = []
        for each in (mine, copy.deepcopy(twin).train()):
            with pytest.raises(autotp.UnprovenPath, match=r"Mixer\.kernel=.* since it was sharded"):
                each(X)
            each.forward.within.inside = True  # past the guard of calls
            with pytest.raises(autotp.UnprovenPath) as caught:
                each.forward.__wrapped__(X)
            said.append(str(caught.value))
        monkeypatch.setattr(Mixer, "kernel", staticmethod(missing))
        weight = mine.layers[1].out.weight
        return got, said, type(weight), type(pickle.loads(pickle.dumps(mine.layers[1].out)).weight)

    for got, said, kept, loaded in simulate(2, rank):
        assert all((each - want).abs().max() < 1e-6 for each in got)
        assert said == [SAID] * 2
        assert kept is loaded is nn.Parameter


def test_what_is_read_and_used_is_no_such_weight():
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2, self.norm = nn.Linear(8, 12), nn.Linear(12, 8), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            x = F.layer_norm(x, (8,), self.norm.weight).to(self.fc2.weight.device)
            return self.fc2(self.fc1(x).relu()).view(-1, self.fc1.weight.size(1))

    analysis = autotp.analyze(Functional(), {"fc1": "column", "fc2": "row"}, tp=2, inputs=X)
    assert analysis.ok and analysis.handed == {}


def test_a_stand_in_tells_what_the_weight_is_like():
    weight = nn.Parameter(torch.ones(2, 3, dtype=torch.float64))
    held = withheld(weight, "fc.weight")
    assert (held.shape, held.dtype, held.size(1), held.numel()) == ((2, 3), torch.float64, 3, 6)
    for use in (lambda: held + 1, lambda: held.t(), lambda: F.linear(torch.ones(3), held), held.data_ptr):
        with pytest.raises(autotp.UnprovenPath, match=r"^fc\.weight is cut, and "):
            use()


@pytest.mark.slow
def test_mixers_of_transformers_hand_out_their_weights():
    model = architectures.build("mamba").train()
    trace = capture(model, (), architectures.inputs(model))
    names = [name for name, _ in model.named_parameters()]
    assert "backbone.layers.0.mixer.out_proj.weight" in handed([trace], names, {})
