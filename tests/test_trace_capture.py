"""The ways to a trace: which is taken when."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autotp
from autotp.comm import simulate
from autotp.diagnostic import PlanError
from autotp.trace import recorder
from autotp.trace.capture import capture
from autotp.trace.graph import TraceError
from tests import architectures, models

X = torch.randn(3, 4)


def targets(trace):
    return [str(n.target) for n in trace.ops()]


def test_the_recorder_first():
    trace = capture(nn.Linear(4, 4), (X,), {})
    assert trace.route == "recorder" and trace.opaque == ()


def test_export_when_the_hook_is_missing(monkeypatch):
    ours = capture(models.MLP(), (torch.randn(2, 16),), {})
    monkeypatch.setattr(recorder, "MISSING", "gone")
    theirs = capture(models.MLP(), (torch.randn(2, 16),), {})
    assert theirs.route == "export" and targets(theirs) == targets(ours)


def test_a_missing_hook_does_not_break_the_import():
    """The file of the hooks is read with each private module absent, and then the recorder's."""
    import importlib.util
    import sys
    from unittest import mock

    import autotp.trace
    from autotp.trace import hooks

    def read(name, file):
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        with mock.patch.dict(sys.modules, {name: module}):
            spec.loader.exec_module(module)
        return module

    for name in ("torch._subclasses.schema_check_mode", "torch._dispatch.python"):
        with mock.patch.dict(sys.modules, {name: None}):
            without = read("hooks_without", hooks.__file__)
        assert name in without.MISSING
        with (
            mock.patch.dict(sys.modules, {"autotp.trace.hooks": without}),
            mock.patch.object(autotp.trace, "hooks", without),
        ):
            module = read("recorder_without", recorder.__file__)
        assert module.MISSING == without.MISSING
        with pytest.raises(module.TraceError, match="this torch lacks a hook"):
            module.record(nn.Linear(4, 4), (X,), {})


def test_export_when_the_recorder_fails(monkeypatch):
    def fails(*args, **kwargs):
        raise TraceError("the recorder's own fault", "", None)

    monkeypatch.setattr(recorder, "record", fails)
    trace = capture(nn.Linear(4, 4), (X,), {})
    assert trace.route == "export"
    assert capture(nn.Linear(4, 4), (X,), {}, like=trace).route == "export"
    with pytest.raises(TraceError, match="the recorder's own fault"):
        capture(nn.Linear(4, 5), (X[:, :2],), {})


def test_what_export_cannot_do_is_not_exported(monkeypatch):
    monkeypatch.setattr("autotp.trace.export.export", lambda *args, **kwargs: pytest.fail("exported"))
    for options in ({"exporting": False}, {"then": lambda out: ((X,), {})}):
        with pytest.raises(TraceError):
            capture(nn.Linear(5, 5), (X,), {}, **options)


class Picks(nn.Module):
    """Computes only where something is to do: a branch on values."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return x @ self.weight if x.sum() > 0 else x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.picks = nn.Linear(4, 4), Picks()

    def forward(self, x):
        return x + self.picks(self.fc(x))


def test_a_module_that_branches_on_values_becomes_opaque():
    model = nn.Sequential(Block(), Block())
    trace = capture(model, (X,), {})
    assert trace.route == "recorder" and trace.opaque == ("0.picks", "1.picks")
    assert targets(trace) == ["aten.linear.default", "opaque", "aten.add.Tensor"] * 2
    opaque = trace.ops()[1]
    assert (
        opaque.meta["module"] == "0.picks" and opaque.meta["val"].shape == (3, 4) and opaque.meta["val"].grad
    )
    assert [n.meta.get("name") for n in opaque.args] == [None, "0.picks.weight"]
    assert opaque.meta["grads"] == set(opaque.args)
    assert "forward" not in vars(model[0].picks)


def test_the_way_of_an_earlier_trace():
    model = nn.Sequential(Block(), nn.Linear(4, 4))
    whole = capture(model, (X,), {})
    again = capture(model, (X,), {}, like=whole)
    assert again.opaque == whole.opaque == ("0.picks",) and targets(again) == targets(whole)
    with pytest.raises(TraceError) as caught:
        capture(model, (X,), {}, like=capture(nn.Linear(4, 4), (X,), {}))
    assert caught.value.module == "0.picks"


def test_no_retry_where_nothing_would_be_left():
    with pytest.raises(TraceError) as caught:
        capture(Picks(), (X,), {})
    assert caught.value.module == "" and caught.value.dynamic

    class Spine(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x):
            return x if x.sum() > 0 else self.layers[0](x)

    with pytest.raises(TraceError) as caught:
        capture(nn.Sequential(nn.Linear(4, 4), Spine()), (X,), {})
    assert caught.value.module == "1"


IDS = {"input_ids": torch.arange(2 * 5).reshape(2, 5)}


def minilm():
    from transformers import AutoModel

    from tests.checkpoints import minilm_folder

    model = AutoModel.from_pretrained(minilm_folder())
    del model.encoder.layer[1:]  # the layers are alike, and each is exported by itself
    return model, None, IDS


@pytest.mark.parametrize(
    "build",
    [
        lambda: (models.MLP(), {"fc1": "column", "fc2": "row"}, torch.randn(5, 16)),
        pytest.param(
            lambda: (architectures.build("llama", num_hidden_layers=1), None, IDS), marks=pytest.mark.slow
        ),
        pytest.param(minilm, marks=pytest.mark.slow),
    ],
    ids=["mlp", "llama", "minilm"],
)
def test_proofs_on_the_route_of_export(build, monkeypatch):
    """All is proven as on the recorder's route, but what export cannot run: no cache, no run time."""
    monkeypatch.setattr(recorder, "MISSING", "gone")
    model, plan, inputs = build()
    analysis = autotp.analyze(model, plan, tp=2, inputs=inputs)
    assert analysis.ok and analysis.certainty == "layouts" and {"eval", "train"} <= set(analysis.modes)
    assert not any("run time" in mode or mode == "decode" for mode in analysis.modes)
    if plan is not None:
        assert not autotp.analyze(model, {"fc1": "column"}, tp=2, inputs=inputs).ok


def test_a_sharded_model_in_the_middle_of_a_traced_forward():
    """Held where the trace does not look, it would have to prove its own call meanwhile."""

    class Outer(models.MLP):
        def forward(self, x):
            return super().forward(x) + self.held[0](x)

    def here(group):
        model = Outer()
        model.held = [autotp.shard(models.MLP(), {"fc1": "column", "fc2": "row"}, group)]
        return autotp.shard(model, {"fc1": "column", "fc2": "row"}, group, inputs=torch.ones(3, 16))

    with pytest.raises(
        PlanError, match=r"AT320(?s:.*)another trace is under way: a sharded model is called in"
    ):
        simulate(2, here)
