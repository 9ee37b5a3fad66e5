"""Layouts that the headers tell and layouts that are proven on the model: the same, or an error."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ViTConfig,
    ViTModel,
)

import autotp.decide
from autotp.checkpoint import convert, reshard
from autotp.checkpoint.folder import open_folder
from autotp.checkpoint.inventory import describe_tensors
from autotp.checkpoint.layouts import decide_layouts
from autotp.checkpoint.load import from_pretrained
from autotp.checkpoint.manifest import load_manifest
from autotp.cli.target import analyze_target
from autotp.comm import simulate
from autotp.diagnostic import CheckpointError, PlanError
from autotp.match import match
from autotp.placement import Shard, deal
from autotp.plan import plan_for
from tests.checkpoints import llama, random_tensor, write_checkpoint

SIZES = {
    "vocab_size": 33,
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 1,
    "max_position_embeddings": 32,
}
MODELS = {
    "bert": lambda: BertModel(BertConfig(**SIZES, num_attention_heads=3)),
    "bert mlm": lambda: BertForMaskedLM(BertConfig(**SIZES, num_attention_heads=6)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=6, num_key_value_heads=3)),
    "llama tied": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, num_attention_heads=3, num_key_value_heads=3, tie_word_embeddings=True)
    ),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(
            **SIZES | {"intermediate_size": 48},
            num_attention_heads=6,
            num_key_value_heads=3,
            num_local_experts=2,
            pad_token_id=0,
        )
    ),
    "vit": lambda: ViTModel(
        ViTConfig(
            hidden_size=24,
            intermediate_size=37,
            num_hidden_layers=1,
            num_attention_heads=3,
            image_size=16,
            patch_size=8,
        )
    ),
}


def saved(name, folder):
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5)
    model.save_pretrained(folder)
    return model, open_folder(folder)


def entries_of(folder):
    return [entry for _, entry in folder.tensors().values()]


SLOWER = [("bert", 2), ("bert", 3), ("bert mlm", 2), ("llama tied", 2)]


@pytest.mark.parametrize(
    ("name", "tp"),
    [("llama", 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOWER)],
)
def test_headers_and_proof_agree_for_every_shipped_plan(tmp_path, name, tp):
    _, folder = saved(name, tmp_path)
    plan = plan_for(name.split()[0])
    headers = match(plan, describe_tensors(entries_of(folder), folder.config), tp)
    assert headers.diagnostics == () or all(found.severity != "error" for found in headers.diagnostics)
    proven = decide_layouts(tmp_path, entries_of(folder), folder.config, plan, tp, "layouts")
    there = folder.tensors()
    assert proven == {name: shard for name, shard in headers.layouts.items() if name in there}
    assert len(proven) > 5


@pytest.mark.slow
def test_a_row_rule_without_heads_takes_the_units_of_the_proof(tmp_path):
    """Three heads over two ranks: the headers alone would deal o_proj's 24 features as 12 + 12."""
    model, _ = saved("llama tied", tmp_path / "in")
    rules = {name: rule.to_data() for name, rule in plan_for("llama").rules.items()}
    rules["self_attn.o_proj"] = "row"
    plan = {"rules": rules, "optional": ["lm_head"]}
    name = "model.layers.0.self_attn.o_proj.weight"
    convert(tmp_path / "in", tmp_path / "out", plan=plan, tp=2)
    assert load_manifest(tmp_path / "out").layouts[name] == Shard(1, deal(3, 2))
    assert load_manifest(tmp_path / "out").proof == "layouts"
    ids = torch.arange(10)[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        for output in simulate(
            2, lambda group: from_pretrained(tmp_path / "out", mesh=group)(input_ids=ids).logits
        ):
            torch.testing.assert_close(output, expected, atol=1e-10, rtol=0)
    convert(tmp_path / "in", tmp_path / "unproven", plan=plan, tp=2, check="shapes")
    assert load_manifest(tmp_path / "unproven").layouts[name] == Shard(1, deal(24, 2))
    with pytest.raises(CheckpointError) as raised:
        simulate(2, lambda group: from_pretrained(tmp_path / "unproven", mesh=group))
    assert (
        f"  mismatched: {name} was cut as shard(dim 1: 2 equal parts), the model needs shard(dim 1: 2+1 of 3)"
        in str(raised.value)
    )


def test_a_plan_that_the_proof_refuses(tmp_path):
    saved("llama", tmp_path / "in")
    rules = {name: rule.to_data() for name, rule in plan_for("llama").rules.items() if name != "mlp.up_proj"}
    with pytest.raises(PlanError):
        convert(tmp_path / "in", tmp_path / "out", plan={"rules": rules}, tp=3)
    assert not (tmp_path / "out").exists()


def test_headers_and_proof_that_disagree(tmp_path, monkeypatch):
    _, folder = saved("bert", tmp_path)
    plan, real = plan_for("bert"), autotp.decide.decide
    name = "encoder.layer.0.intermediate.dense.weight"

    def altered(*args, **kwargs):
        analysis = real(*args, **kwargs)
        return replace(analysis, layouts={**analysis.layouts, name: Shard(1, deal(24, 2))})

    monkeypatch.setattr(autotp.decide, "decide", altered)
    with pytest.raises(CheckpointError) as raised:
        decide_layouts(tmp_path, entries_of(folder), folder.config, plan, 2, "layouts")
    assert str(raised.value) == (
        f"{tmp_path}: tensor {name!r} is shard(dim 0: 19+18 of 37) by the headers, "
        "and shard(dim 1: 2 equal parts) by the proof"
    )


@pytest.mark.slow
def test_config_and_weights_that_disagree(tmp_path):
    _, folder = saved("bert", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"vocab_size": 35}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as raised:
        decide_layouts(tmp_path, entries_of(folder), config, plan_for("bert"), 2, "layouts")
    assert str(raised.value) == (
        f"{tmp_path}: tensor 'embeddings.word_embeddings.weight' is [33, 24], and [35, 24] in BertModel, the "
        "model that the plan is proven on"
    )


def test_what_cannot_be_built_needs_shapes(tmp_path):
    source = write_checkpoint(tmp_path / "in", {"up.weight": random_tensor("F32", (4, 2))})
    with pytest.raises(CheckpointError, match=r'no config.json.*\n.*check="shapes"'):
        convert(source, tmp_path / "out", plan={"up": "column"}, tp=2)
    assert not (tmp_path / "out").exists()


def refusal(folder, out, **options):
    with pytest.raises(CheckpointError) as raised:
        convert(folder, out, tp=2, **options)
    assert not out.exists()
    return str(raised.value)


@pytest.mark.slow
def test_names_that_are_not_the_models_are_refused_before_anything_is_written(tmp_path):
    """transformers writes a ViT under the names of its older self, which it knows; others nobody does."""
    model, _ = saved("vit", tmp_path / "in")
    written = load_layouts(tmp_path / "in", tmp_path / "first")
    assert written["encoder.layer.0.intermediate.dense.weight"].dim == 0
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    tensors = {name.replace("encoder.", "tower."): tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    stored = sorted(name for name in tensors if name.startswith("tower."))
    own = [name for name in model.state_dict() if name.startswith("layers.")]
    assert len(stored) == len(own) == 16
    expected = [
        f"{tmp_path / 'in'}: lacks 16 tensors of ViTModel, the model that the plan is proven on",
        *(f"  missing: {name}" for name in own[:5]),
        "  missing: 11 more",
        *(f"  unexpected: {name}" for name in stored[:5]),
        "  unexpected: 11 more",
        "  = help: if the checkpoint is written under other names than ViTModel has, load it in transformers "
        "and save the model's state_dict() under its own names with safetensors, or give a plan for the "
        'stored names and check="shapes"; if it is of another class, name that in config.json\'s '
        "architectures",
    ]
    assert refusal(tmp_path / "in", tmp_path / "out").splitlines() == expected
    assert refusal(tmp_path / "in", tmp_path / "out", dry_run=True).splitlines() == expected
    save_file(model.state_dict(), tmp_path / "in" / "model.safetensors")  # the first remedy
    assert "layers.0.mlp.fc1.weight" in load_layouts(tmp_path / "in", tmp_path / "out")
    assert from_pretrained(tmp_path / "in", check="shapes") is not None


def load_layouts(folder, out):
    convert(folder, out, tp=2)
    return load_manifest(out).layouts


LACKING = [("llama", "lm_head.weight"), ("llama", "model.layers.0.mlp.up_proj.weight"), ("llama tied", "")]


@pytest.mark.parametrize(
    ("name", "lost"),
    [("llama", "model.norm.weight"), *(pytest.param(*case, marks=pytest.mark.slow) for case in LACKING)],
)
def test_any_tensor_that_the_model_needs_must_be_there(tmp_path, name, lost):
    """Also one that the plan leaves whole, and a tied one under neither of its names."""
    saved(name, tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    del tensors[lost or "model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    assert refusal(tmp_path / "in", tmp_path / "out") == (
        f"{tmp_path / 'in'}: lacks a tensor of LlamaForCausalLM, the model that the plan is proven on\n"
        f"  missing: {lost or 'model.embed_tokens.weight or lm_head.weight'}\n"
        "  = help: add what is missing, or name the class that was saved in config.json's architectures; "
        'check="shapes" cuts what is there, without a proof'
    )


def test_tensors_that_the_model_has_not_travel_whole(tmp_path):
    saved("llama tied", tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    tensors |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "more": torch.ones(3)}
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    layouts = load_layouts(tmp_path / "in", tmp_path / "out")
    assert "model.embed_tokens.weight" in layouts and "more" not in layouts
    assert "more" in load_file(tmp_path / "out" / "rank-1-of-2" / "model.safetensors")


def test_layers_that_the_model_has_not_are_not_called_proven(tmp_path):
    tensors, config = llama(hidden=16, inter=12, layers=2, heads=4, kv=2, vocab=20)
    write_checkpoint(tmp_path / "in", tensors, config=config | {"num_hidden_layers": 1})
    expected = [
        f"{tmp_path / 'in'}: holds 7 tensors that the plan cuts, and that LlamaForCausalLM (1 layers by "
        "config.json), the model that the plan is proven on, has not",
        *(f"  unexpected: model.layers.1.self_attn.{name}_proj.weight" for name in "qkvo"),
        "  unexpected: model.layers.1.mlp.gate_proj.weight",
        "  unexpected: 2 more",
        "  = help: correct config.json, or remove what does not belong to the model; "
        'check="shapes" cuts what is there, without a proof',
    ]
    assert refusal(tmp_path / "in", tmp_path / "out").splitlines() == expected


def test_a_config_of_millions_of_layers_is_refused_before_they_are_built(tmp_path):
    tensors, config = llama(layers=1)
    source = write_checkpoint(tmp_path / "in", tensors, config=config | {"num_hidden_layers": 3_000_000})
    message = (
        "config.json says num_hidden_layers 3000000, and the checkpoint holds 12 tensors: a model of more "
        "than 1120 layers is not built for them; correct config.json"
    )
    for plan in (None, "auto"):
        assert refusal(source, tmp_path / "out", plan=plan) == f"{source}: {message}"
    with pytest.raises(CheckpointError) as raised:
        from_pretrained(source)
    assert str(raised.value) == f"{source}: {message}"
    convert(source, tmp_path / "out", tp=2, check="shapes")
    with pytest.raises(CheckpointError) as raised:
        reshard(tmp_path / "out", tmp_path / "again", tp=3)
    assert str(raised.value) == f"{tmp_path / 'out' / 'rank-0-of-2'}: {message}"
    with pytest.raises(CheckpointError) as raised:
        analyze_target(str(source), plan=None, tp=2, prove=True)
    assert str(raised.value) == f"{source}: {message}"


class Tied(nn.Module):
    """It ties its head, and no config tells."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.down(self.up(self.embedding(ids)).relu()))


def test_what_the_model_ties_must_be_equal_though_no_config_says_so(tmp_path):
    model, options = Tied(), {"plan": {"up": "column", "down": "row"}, "inputs": torch.arange(6)[None]}
    (tmp_path / "in").mkdir()
    for form in ("model.safetensors", "pytorch_model.bin"):
        save = save_file if form.endswith("s") else torch.save
        there = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        save(there, tmp_path / "in" / form)
        convert(tmp_path / "in", tmp_path / f"out {form}", tp=2, model=model, **options)
        save(there | {"head.weight": torch.ones(8, 4)}, tmp_path / "in" / form)
        assert refusal(tmp_path / "in", tmp_path / "no", model=model, **options) == (
            f"{tmp_path / 'in'}: Tied ties 'head.weight' to 'embedding.weight', but their values differ; "
            'set "tie_word_embeddings": false, or remove the one that is wrong'
        )
        (tmp_path / "in" / form).unlink()


@pytest.mark.slow
def test_the_command_line_tells_what_a_proven_checkpoint_lacks(tmp_path, capsys):
    from typer.testing import CliRunner

    from autotp.cli import app

    saved("bert", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["strange"] = tensors.pop("encoder.layer.0.output.dense.bias")
    save_file(tensors, tmp_path / "model.safetensors")
    done = CliRunner().invoke(app, ["plan", str(tmp_path), "--tp", "2", "--prove"], prog_name="autotp")
    assert done.exit_code == 2
    assert done.stderr.splitlines()[:3] == [
        f"error: {tmp_path}: lacks a tensor of BertModel, the model that the plan is proven on",
        "  missing: encoder.layer.0.output.dense.bias",
        "  unexpected: strange",
    ]
