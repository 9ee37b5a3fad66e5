"""The inventory that headers give: modules, order, kinds, ties; and no torch, no numpy."""

import json
import subprocess
import sys

import pytest

from autotp.checkpoint import inventory
from autotp.diagnostic import CheckpointError
from tests.checkpoints import llama, minilm_folder, random_tensor, write_checkpoint


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
        f"layers.{'9' * 5000}.weight": random_tensor("F32", (2,)),
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
