"""pytorch_model.bin: plain tensors are read, code is never run, and what comes out is safetensors."""

import json
import os
import pickle
import random

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from autotp.checkpoint import convert, merge
from autotp.checkpoint.load import from_pretrained
from autotp.checkpoint.pickled import Pickled, in_memory, load_tensors
from autotp.comm import simulate
from autotp.diagnostic import CheckpointError
from tests.checkpoints import tree

TENSORS = {
    "up.weight": torch.randn(7, 5),
    "down.weight": torch.randn(7, 5).to(torch.bfloat16).t(),  # not contiguous
    "ids": torch.arange(4),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.zeros(0, 3),
    "mask": torch.tensor([True, False]),
}
PLAN = {"up": "column", "down": "row"}


def same(folder, tensors):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("nest", [None, "state_dict", "module"])
def test_one_file_there_and_back(tmp_path, zipped, nest):
    source = tmp_path / "in"
    source.mkdir()
    content = TENSORS if nest is None else {nest: TENSORS, "epoch": 3}
    torch.save(content, source / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    (source / "config.json").write_text("{}")
    convert(source, tmp_path / "out", plan=PLAN, tp=2, check="shapes")
    halves = [load_file(tmp_path / "out" / f"rank-{rank}-of-2" / "model.safetensors") for rank in range(2)]
    assert torch.equal(torch.cat([half["up.weight"] for half in halves]), TENSORS["up.weight"])
    assert torch.equal(torch.cat([half["down.weight"] for half in halves], 1), TENSORS["down.weight"])
    merge(tmp_path / "out", tmp_path / "back")
    assert sorted(os.listdir(tmp_path / "back")) == ["config.json", "model.safetensors"]
    same(tmp_path / "back", TENSORS)
    convert(source / "pytorch_model.bin", tmp_path / "single", plan=PLAN, tp=2, check="shapes")
    shards = {name: data for name, data in tree(tmp_path / "out").items() if name.endswith(".safetensors")}
    assert shards.items() <= tree(tmp_path / "single").items()


def indexed(folder):
    folder.mkdir()
    weight_map = {}
    for number in (1, 2):
        file = f"pytorch_model-{number:05}-of-00002.bin"
        share = dict(list(TENSORS.items())[number - 1 :: 2])
        torch.save(share, folder / file)
        weight_map |= dict.fromkeys(share, file)
    (folder / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


def test_an_index_becomes_one_of_safetensors(tmp_path):
    convert(indexed(tmp_path / "in"), tmp_path / "out", plan=PLAN, tp=2, check="shapes")
    merge(tmp_path / "out", tmp_path / "back")
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    same(tmp_path / "back", TENSORS)


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def refusal(path):
    with pytest.raises(CheckpointError) as raised:
        load_tensors(path)
    return str(raised.value)


@pytest.mark.parametrize("how", ["torch", "legacy", "pickle"])
def test_code_is_never_run(tmp_path, how):
    evil, path = {"a": torch.zeros(2), "b": Touch(str(tmp_path / "ran"))}, tmp_path / "in/pytorch_model.bin"
    path.parent.mkdir()
    if how == "pickle":
        path.write_bytes(pickle.dumps(evil))
    else:
        torch.save(evil, path, _use_new_zipfile_serialization=how == "torch")
    for call in (
        lambda: load_tensors(path),
        lambda: convert(tmp_path / "in", tmp_path / "out", plan=PLAN, tp=2, check="shapes"),
    ):
        with pytest.raises(CheckpointError) as raised:
            call()
        assert str(raised.value).startswith(
            f"{path}: is not a file of plain tensors, and nothing else in it is run ("
        )
        assert "weights_only=False" in str(raised.value)
    assert os.listdir(tmp_path) == ["in"] and os.listdir(path.parent) == [path.name]


def test_what_is_no_plain_tensor_is_named(tmp_path):
    path = tmp_path / "x.bin"
    for content, fault in (
        ([1, 2], "holds a list, not a state_dict of tensors"),
        ({}, "holds a dict, not a state_dict of tensors"),
        ({"a": torch.zeros(1), "b": 3}, "'b' is int, not a plain tensor under a name"),
        ({1: torch.zeros(1)}, "1 is torch.float32, not a plain tensor under a name"),
        ({"a": torch.eye(3).to_sparse()}, "'a' is torch.float32, not a plain tensor under a name"),
        ({"a": torch.empty(2, 3, device="meta")}, "'a' of shape [2, 3] has no data (device meta)"),
        ({"a": torch.zeros(1).expand(1 << 40)}, "'a' of shape [1099511627776] is larger than its data"),
    ):
        torch.save(content, path)
        assert refusal(path) == f"{path}: {fault}"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert refusal(path) == (
        f"{path}: is a pointer of Git LFS, 43 bytes, and not the file\n  = help: git lfs pull"
    )
    path.write_bytes(b"some text")
    said = refusal(path)
    assert said.startswith(f"{path}: is not a file of plain tensors") and "help" not in said


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("evil", [True, False])
def test_of_a_damaged_file_it_is_never_said_to_run_it(tmp_path, zipped, evil):
    """Cut off anywhere, or a byte of what is unpickled is another: it is damaged, and nothing else."""
    path, state = tmp_path / "x.pt", {"a": torch.randn(30), **({"b": Touch(str(tmp_path))} if evil else {})}
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    whole = path.read_bytes()
    help = "\n  = help: it is damaged or not all there: fetch or copy it again, and compare sizes"
    cut = range(0, len(whole), 97 if zipped else 31) if not evil else (0, 60)
    for size in cut:
        path.write_bytes(whole[:size])
        told = refusal(path)
        assert told.endswith(help), told
        if zipped and size > 4:
            says = "is cut off: the table of contents that ends it is missing"
            assert told == f"{path}: {says}; it has {size} bytes{help}"
    if zipped:  # the older format has no checksums
        at, size = whole.index(b"open" if evil else b"torch._utils"), len(whole)
        path.write_bytes(whole[:at] + b"x" + whole[at + 1 :])
        says = f"the names in it are damaged: their checksum is another; it has {size} bytes{help}"
        assert refusal(path) == f"{path}: {says}"


@pytest.mark.parametrize(
    ("beside", "lost"),
    [
        ({"head.weight": torch.ones(1, 2)}, "head.weight"),
        ({"logit_scale": torch.tensor(1.0)}, "logit_scale"),
        ({"head": {"weight": torch.ones(1, 2)}}, "head.weight"),
        ({"module": {"b": torch.ones(2)}}, "module.b"),
        (
            {"optimizer": {"state": {0: torch.ones(2)}}, "rng_state": torch.ones(2), "step": torch.tensor(1)},
            "",
        ),
        ({"ema": {"a": torch.ones(3)}, "callbacks": {"best": torch.tensor(1.0)}, "epoch": 3}, ""),
    ],
)
def test_no_tensor_beside_the_weights_is_lost(tmp_path, beside, lost):
    path = tmp_path / "x.bin"
    torch.save({"model": {"a": torch.zeros(3)}, **beside}, path)
    if lost:
        assert refusal(path) == (
            f"{path}: tensor {lost!r} stands beside the weights under 'model', and would be lost; save the "
            "weights alone, in one dict"
        )
    else:
        assert list(load_tensors(path)) == ["a"]


def test_views_that_are_conjugated_or_negated_when_read(tmp_path):
    path, value = tmp_path / "x.bin", torch.tensor([1 + 2j, 3 - 4j])
    for view in (value.conj(), value.conj().imag):
        torch.save({"a": view}, path)
        found = load_tensors(path)["a"]
        assert torch.equal(found, view.clone())
        assert bytes(in_memory(found).data) == view.resolve_conj().resolve_neg().numpy().tobytes()


def test_an_index_is_checked_as_that_of_safetensors(tmp_path):
    folder = indexed(tmp_path / "in")
    index = folder / "pytorch_model.bin.index.json"
    table = json.loads(index.read_text())
    for change, fault in (
        (
            {"ids": "../x.bin"},
            f"{index}: 'ids' is said to be in '../x.bin', which is not a plain .bin file name",
        ),
        ({"ghost": "pytorch_model-00001-of-00002.bin"}, f"{index}: tensors that no file holds: 'ghost' "),
    ):
        index.write_text(json.dumps({"weight_map": table["weight_map"] | change}))
        with pytest.raises(CheckpointError) as raised:
            convert(folder, tmp_path / "out", plan=PLAN, tp=2, check="shapes")
        assert str(raised.value).startswith(fault)
    (tmp_path / "outside.bin").write_bytes((folder / "pytorch_model-00001-of-00002.bin").read_bytes())
    (folder / "pytorch_model-00001-of-00002.bin").unlink()
    (folder / "pytorch_model-00001-of-00002.bin").symlink_to(tmp_path / "outside.bin")
    with pytest.raises(CheckpointError, match=r"a link to .*outside the folder"):
        convert(folder, tmp_path / "out", plan=PLAN, tp=2, check="shapes")


def test_files_that_would_become_one(tmp_path):
    names = {"a": "pytorch_model-1.bin", "b": "model-1.bin"}
    for name, file in names.items():
        torch.save({name: torch.ones(2)}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(CheckpointError) as raised:
        Pickled(tmp_path)
    assert str(raised.value) == (
        f"{tmp_path}: model-1.bin and pytorch_model-1.bin would both become model-1.safetensors; rename one, "
        "in pytorch_model.bin.index.json too"
    )


@pytest.mark.parametrize("state", ["embedding", "head", "both", "different"])
def test_a_model_with_tied_names_in_four_states(tmp_path, state):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=33, hidden_size=24, intermediate_size=37, num_hidden_layers=1, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double().eval()
    model.save_pretrained(tmp_path / "in")
    os.unlink(tmp_path / "in" / "model.safetensors")
    tensors = dict(model.state_dict())
    if state == "embedding":
        del tensors["lm_head.weight"]
    if state == "head":
        del tensors["model.embed_tokens.weight"]
    if state == "different":
        tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    torch.save(tensors, tmp_path / "in" / "pytorch_model.bin")
    load = lambda group: from_pretrained(tmp_path / "in", mesh=group, check="shapes")  # noqa: E731
    if state == "different":
        with pytest.raises(
            CheckpointError, match=r"the model ties 'lm_head.weight' to 'model.embed_tokens.weight'"
        ):
            simulate(2, load)
        with pytest.raises(
            CheckpointError, match=r"config.json ties 'lm_head.weight' to 'model.embed_tokens.weight'"
        ):
            convert(tmp_path / "in", tmp_path / "out", tp=2, check="shapes")
        return
    ids = torch.arange(8)[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        for sharded in simulate(2, lambda group: (load(group), load(group)(input_ids=ids).logits)):
            assert sharded[0].lm_head.weight is sharded[0].model.embed_tokens.weight
            torch.testing.assert_close(sharded[1], expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("zipped", [True, False])
def test_mutants_end_in_tensors_or_one_named_error(tmp_path, zipped):
    path = tmp_path / "pytorch_model.bin"
    torch.save(TENSORS, path, _use_new_zipfile_serialization=zipped)
    original, ended = path.read_bytes(), {"read": 0, "refused": 0}
    for number in range(300):
        rng, content = random.Random(number), bytearray(original)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(content))
            if rng.random() < 0.7:
                content[at] ^= 1 << rng.randrange(8)
            else:
                del content[at : at + rng.choice([1, 8, 64])]
        path.write_bytes(content)
        try:
            load_tensors(path)
            ended["read"] += 1
        except CheckpointError as error:
            assert str(error).startswith(f"{path}: ")
            ended["refused"] += 1
    assert min(ended.values()) > 10
    assert os.listdir(tmp_path) == ["pytorch_model.bin"]
