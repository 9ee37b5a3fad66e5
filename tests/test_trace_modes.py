"""The modes of a model, and which of them differ."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from autotp.trace.inputs import Samples, make
from autotp.trace.modes import capture_modes, modes, signature, training
from autotp.trace.recorder import record
from tests import architectures, models
from tests.zoo.build import build

X = torch.randn(3, 4)


def captured(name):
    model = architectures.build(name)
    return capture_modes(model, make(model))


def traces(found):
    return {mode.name: trace for mode, trace in found.traces}


def grouped(trace):
    """The attention ops that are asked to repeat the kv heads themselves."""
    return [n for n in trace.ops() if n.kwargs.get("enable_gqa")]


def test_a_plain_module():
    found = capture_modes(nn.Linear(4, 4), Samples.given(X))
    assert list(traces(found)) == ["eval"]
    others = ("train", "train at run time", "run time", "inference", "inference at run time")
    assert found.covered == dict.fromkeys(others, "eval") and not found.failed


def test_dropout_makes_train_its_own_mode():
    found = capture_modes(models.Dropped(), make(models.Dropped()))
    assert {"eval", "train"} <= set(traces(found))
    assert all(m.training == m.name.startswith("train") for m, _ in found.traces)


def test_both_ranks_of_found_inputs():
    found = capture_modes(models.MLP(), make(models.MLP()))
    assert [(m.name, t.ops()[0].meta["val"].shape) for m, t in found.traces] == [
        ("eval", (7, 33)),
        ("run time", (19, 33)),  # the second pair of sizes
        ("eval on inputs of 3 dims", (7, 5, 33)),
    ]
    assert found.covered["inference at run time"] == "run time"


def test_two_pairs_of_sizes_are_traced():
    """Also where nothing runs but what is being exported."""

    class Exported(models.MLP):
        def forward(self, x):
            if not torch.compiler.is_exporting():
                raise ValueError("only exported")
            return super().forward(x)

    found = capture_modes(Exported(), make(Exported()))
    assert [m.name for m, _ in found.traces] == ["eval", "eval with other sizes", "eval on inputs of 3 dims"]
    model = architectures.build("llama", device="meta")
    shapes = {m.name: m.kwargs["input_ids"].shape for m in modes(model, make(model))}
    assert len(set(shapes["eval"]) | set(shapes["run time"])) == 4


def test_llama():
    found = captured("llama")
    assert list(traces(found)) == ["eval", "run time", "train with labels", "decode"]
    assert found.covered == {"train": "eval", "inference at run time": "run time"} and not found.failed
    by_name = traces(found)
    assert not grouped(by_name["eval"]) and len(grouped(by_name["run time"])) == 2
    assert by_name["train with labels"].outputs[0].name == "loss"


def test_a_decode_step_reads_the_cache_of_the_first_forward():
    decode = traces(captured("llama"))["decode"]
    attention = [n for n in decode.ops() if "scaled_dot_product" in str(n.target)]
    queries = [n.args[0].meta["val"].shape[2] for n in attention]
    keys = [n.args[1].meta["val"].shape[2] for n in attention]
    assert queries == [7, 7, 1, 1] and keys == [7, 7, 8, 8]
    inputs = [n.meta["name"] for n in decode.graph.nodes if n.op == "placeholder"]
    assert len(inputs) == len(set(inputs)) == 4 and sum(n.startswith("step ") for n in inputs) == 2
    assert not any(n.meta["origin"] == "unknown" for n in decode.graph.nodes if n.op == "get_attr")
    assert decode.calls["lm_head"] == 1


class Renamed(transformers.LlamaForCausalLM):
    """transformers 5.24 calls the cache `cache`."""

    def forward(self, input_ids=None, attention_mask=None, cache=None, use_cache=None, labels=None):
        out = super().forward(
            input_ids, attention_mask, past_key_values=cache, use_cache=use_cache, labels=labels
        )
        return SimpleNamespace(loss=out.loss, logits=out.logits, cache=out.past_key_values)


def test_a_cache_of_another_name():
    model = Renamed(architectures.build("llama").config)
    found = capture_modes(model, make(model))
    assert "decode" in traces(found) and not found.failed


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bert", {"eval", "train", "train with labels", "run time"}),
        ("t5", {"eval", "train", "train with labels", "run time", "decode", "inference at run time"}),
        ("whisper", {"eval", "train", "train with labels", "run time", "decode"}),
        ("opt", {"eval", "train", "train with labels", "run time", "decode"}),
        ("mixtral", {"eval", "train with labels", "run time", "decode"}),
        ("mamba", {"eval", "train", "train with labels", "run time", "decode"}),
        ("vit", {"eval", "train", "run time", "train at run time"}),
    ],
)
@pytest.mark.slow
def test_architectures(name, expected):
    found = captured(name)
    assert set(traces(found)) == expected and not found.failed


def test_a_mode_that_fails_is_told_and_a_guess_is_not():
    class NoTraining(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            if self.training:
                raise ValueError("not for training")
            return self.fc(x)

    found = capture_modes(NoTraining(), Samples.given(X))
    assert [(m.name, str(e)) for m, e in found.failed] == [("train", "ValueError: not for training")]

    class Fussy(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            if not torch.compiler.is_compiling():
                raise ValueError("only compiled")
            return self.fc(x)

    found = capture_modes(Fussy(), Samples.given(X))
    assert not found.failed and found.covered["run time"] == "eval"


def test_what_only_runs_untraced_is_a_mode_of_its_own():
    class Sly(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            h = self.fc(x)
            return h if torch.compiler.is_compiling() else F.softmax(h, -1)

    found = capture_modes(Sly(), Samples.given(X))
    assert list(traces(found)) == ["eval", "run time"]


def test_a_branch_on_grad_mode_is_a_mode_of_its_own():
    class Sly(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            h = self.fc(x)
            return h if torch.is_grad_enabled() else F.softmax(h, -1)

    assert list(traces(capture_modes(Sly(), Samples.given(X)))) == ["eval", "inference"]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (lambda h: h * 2, lambda h: h * 2, True),
        (lambda h: h * 2, lambda h: h * 3, False),
        (lambda h: h * 2, lambda h: h + 2, False),
        (lambda h: h.reshape(3, 4), lambda h: h.reshape(4, 3), False),
        (lambda h: h * 2, lambda h: h.detach() * 2, False),
        (lambda h: h - h.exp(), lambda h: h.exp() - h, False),
        (lambda h: (h, h.exp()), lambda h: (h.exp(), h), False),
        (lambda h: h.sum(0), lambda h: h.sum(0, dtype=torch.float64), False),
    ],
)
def test_signatures(one, other, same):
    first, second = (signature(record(models.MLP(4, 5, f), (X,), {})) for f in (hidden(one), hidden(other)))
    assert (first == second) == same


def hidden(function):
    """A function of the hidden layer that leaves its shape."""

    def run(h):
        out = function(h.view(5, 3)[:4].T.reshape(3, 4))
        parts = out if isinstance(out, tuple) else (out,)
        return h + sum((i + 1) * p.sum() for i, p in enumerate(parts))

    return run


def test_every_module_gets_its_own_flag_back():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    model[1].eval()
    with training(model, False):
        assert not model.training
    assert model.training and model[0].training and not model[1].training
    with pytest.raises(KeyError), training(model, True):
        raise KeyError
    assert not model[1].training


def test_modes_take_the_way_of_an_earlier_trace():
    (mode, trace), *_ = capture_modes(models.MLP(), make(models.MLP())).traces
    shapes = {"fc1.weight": (11, 16), "fc1.bias": (11,), "fc2.weight": (16, 11)}
    local = mode.capture(models.MLP(), shapes=shapes, like=trace)
    assert local.ops()[0].meta["val"].shape == (7, 11) and len(local.ops()) == len(trace.ops())


def test_the_list_of_modes():
    model = architectures.build("bert")
    assert [m.name for m in modes(model, make(model))] == [
        "eval", "train", "run time", "train with labels", "inference", "inference at run time",
        "eval with an encoder's states",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_decoder_is_also_given_the_states_of_an_encoder():
    """Where matrices are read in no other mode; BERT takes them, too, but has no cross attention."""
    names = {}
    for kind, model in (("bart", build("bart")), ("bert", architectures.build("bert"))):
        names[kind] = [mode.name for mode, _ in capture_modes(model, make(model)).traces]
    assert names["bart"][-1] == "eval with an encoder's states"
    assert "eval with an encoder's states" not in names["bert"]
