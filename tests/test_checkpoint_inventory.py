"""The inventory that headers give: modules, order, kinds, ties; and no torch, no numpy."""

import json
import subprocess
import sys

import pytest

import autotp
from autotp.checkpoint import convert, inventory, merge
from autotp.checkpoint.manifest import load_manifest
from autotp.diagnostic import CheckpointError
from tests.checkpoints import llama, minilm_folder, random_tensor, tree, write_checkpoint


def test_modules_in_natural_order_with_shapes_and_kinds(tmp_path):
    tensors = {
        "layers.10.fc.weight": random_tensor("BF16", (4, 2)),
        "layers.2.fc.weight": random_tensor("BF16", (4, 2)),
        "layers.2.fc.bias": random_tensor("F32", (4,)),
        "layers.2.norm.weight": random_tensor("F32", (4,)),
        "layers.2.norm.bias": random_tensor("F32", (4,)),
        "packed": random_tensor("F4", (3, 2)),
    }
    found = inventory(write_checkpoint(tmp_path / "net", tensors, config={"a": 1}))
    assert list(found.modules) == ["layers.2.fc", "layers.2.norm", "layers.10.fc", ""]
    assert [m.kind for m in found.modules.values()] == ["unknown", "norm", "unknown", "unknown"]
    assert found.paths == ("layers", "layers.2", "layers.2.fc", "layers.2.norm", "layers.10", "layers.10.fc")
    weight = found.modules["layers.2.fc"].tensors["weight"]
    assert (weight.name, weight.shape, weight.dtype, weight.nbytes) == (
        "layers.2.fc.weight",
        (4, 2),
        "BF16",
        16,
    )
    assert found.tensors()["packed"].nbytes == 3
    assert (found.config, found.name) == ({"a": 1}, "net")


@pytest.mark.parametrize(
    ("says", "aliases"), [(True, {"lm_head.weight": "model.embed_tokens.weight"}), (False, {}), (None, {})]
)
def test_tied_names_are_one_tensor_only_where_the_config_says_so(tmp_path, says, aliases):
    tensors, config = llama()
    config["tie_word_embeddings"] = says
    assert inventory(write_checkpoint(tmp_path, tensors, config=config)).aliases == aliases
    nested = {"text_config": {"tie_word_embeddings": says}}
    assert inventory(write_checkpoint(tmp_path, tensors, config=nested)).aliases == aliases


def test_one_name_alone_is_not_tied_to_anything(tmp_path):
    tensors, config = llama(tied=True)
    assert inventory(write_checkpoint(tmp_path, tensors, config=config)).aliases == {}


def biased_head(head, *, says, words=33, width=8, bias=33, weight=False):
    """What is stored of an embedding and of a head with a bias of its own."""
    tensors = {
        "bert.embeddings.word_embeddings.weight": random_tensor("F16", (words, width)),
        "bert.embeddings.position_embeddings.weight": random_tensor("F16", (33, width)),
        f"{head}.bias": random_tensor("F16", (bias,)),
    }
    if weight:
        tensors[f"{head}.weight"] = random_tensor("F16", (words, width))
    return tensors, {} if says is None else {"tie_word_embeddings": says}


HEADS = ["vocab_projector", "generator_lm_head", "decoder", "cls.predictions.decoder", "lm_head"]


@pytest.mark.parametrize("says", [True, None])
@pytest.mark.parametrize("head", HEADS)
def test_a_tied_head_may_have_a_bias_of_its_own_and_no_weight(tmp_path, head, says):
    tensors, config = biased_head(head, says=says)
    write_checkpoint(tmp_path / "in", tensors, config=config)
    found = inventory(tmp_path / "in")
    first = "bert.embeddings.word_embeddings.weight"
    assert found.aliases == {f"{head}.weight": first}
    weight, bias = found.modules[head].tensors.values()
    assert (weight.name, weight.shape, weight.dtype) == (f"{head}.weight", (33, 8), "F16")
    assert (bias.name, bias.shape) == (f"{head}.bias", (33,))
    plan = {"word_embeddings": "vocab", head: {"style": "column", "gather_output": True}}
    analysis = autotp.analyze(tmp_path / "in", plan, tp=2, check="shapes")
    assert analysis.ok and sum(analysis.rank_bytes) == (33 * 8 + 2 * 33 * 8 + 33) * 2
    for digest in ("xxh3", "none"):
        convert(tmp_path / "in", tmp_path / digest, plan=plan, tp=2, check="shapes", digest=digest)
        assert set(load_manifest(tmp_path / digest).layouts) == {first, f"{head}.bias"}
        assert inventory(tmp_path / digest).aliases == found.aliases
        merge(tmp_path / digest, tmp_path / f"{digest} back")
        assert tree(tmp_path / f"{digest} back") == tree(tmp_path / "in")


@pytest.mark.parametrize(
    "case",
    [{"says": False}, {"says": True, "bias": 34}, {"says": None, "bias": 8}, {"says": None, "weight": True}],
)
def test_a_bias_alone_is_no_tied_head(tmp_path, case):
    """Where the config unties it, where it is of another length, and where it has a weight beside it."""
    tensors, config = biased_head("decoder", **case)
    found = inventory(write_checkpoint(tmp_path, tensors, config=config))
    assert found.aliases == {} and set(found.tensors()) == set(tensors)


def test_a_head_with_layers_inside_is_no_linear_layer(tmp_path):
    """RoBERTa's lm_head owns the bias, and its decoder the weight."""
    tensors, config = biased_head("lm_head", says=True)
    tensors["lm_head.dense.weight"] = random_tensor("F16", (8, 8))
    assert inventory(write_checkpoint(tmp_path, tensors, config=config)).aliases == {}


def test_a_config_alone_says_what_is_needed(tmp_path):
    write_checkpoint(tmp_path, {}, config={})
    with pytest.raises(CheckpointError) as raised:
        inventory(tmp_path / "config.json")
    assert str(raised.value) == (
        f"{tmp_path / 'config.json'}: a configuration alone has no tensors; give the folder with its "
        "weights, or a factory as package.module:function"
    )


def test_a_hostile_name_is_only_a_name(tmp_path):
    tensors = {
        f"layers.{'9' * 900}.weight": random_tensor("F32", (2,)),
        "日本.weight": random_tensor("F32", (2,)),
    }
    assert len(inventory(write_checkpoint(tmp_path, tensors)).modules) == 2


def test_headers_need_neither_torch_nor_numpy(tmp_path):
    code = (
        "import sys, json; from autotp.checkpoint import inventory; found = inventory(sys.argv[1]); "
        "print(json.dumps([len(found.tensors()), 'torch' in sys.modules, 'numpy' in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(minilm_folder())], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [104, False, False]
