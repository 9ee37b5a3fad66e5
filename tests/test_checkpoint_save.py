"""save_pretrained: what plain transformers loads, bit for bit what the unsharded model would save."""

import copy
import json
import os
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import autotp
from autotp.checkpoint import save
from autotp.checkpoint.folder import open_folder
from autotp.checkpoint.load import from_pretrained
from autotp.checkpoint.save import save_pretrained
from autotp.comm import simulate
from autotp.diagnostic import AutotpError, CheckpointError, UsageError

SIZES = {
    "vocab_size": 33, "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 1,
    "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 64,
}  # fmt: skip


def llama(folder, tied=False, dtype=torch.float32):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)).to(dtype).eval()
    model.save_pretrained(folder)
    return model


def fused():
    """gate|up fused, an embedding, a buffer, a tied pair and a bias: no transformers model."""
    torch.manual_seed(0)
    model = nn.Module()
    model.emb, model.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
    model.head.weight = model.emb.weight
    model.up, model.down = nn.Linear(4, 6), nn.Linear(6, 4)
    model.register_buffer("steps", torch.arange(3))
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    return model


@pytest.mark.parametrize(("tied", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_the_original_comes_back(tmp_path, tied, dtype):
    original = llama(tmp_path / "in", tied, dtype)

    def run(group):
        save_pretrained(from_pretrained(tmp_path / "in", mesh=group, check="shapes"), tmp_path / "out")

    simulate(2, run)
    back = load_file(tmp_path / "out" / "model.safetensors")
    there = load_file(tmp_path / "in" / "model.safetensors")
    assert back.keys() == there.keys()
    assert all(back[name].dtype == dtype and torch.equal(back[name], there[name]) for name in back)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, original(input_ids=ids).logits)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as library:
        tie = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
        assert library.metadata() == {"format": "pt", **tie}
    assert sorted(os.listdir(tmp_path / "out")) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float64])
def test_config_says_what_the_weights_are(tmp_path, dtype):
    llama(tmp_path / "in")
    save_pretrained(from_pretrained(tmp_path / "in", check="shapes", dtype=dtype), tmp_path / "out")
    back = load_file(tmp_path / "out" / "model.safetensors")
    said = json.loads((tmp_path / "out" / "config.json").read_text())["dtype"]
    assert {str(tensor.dtype) for tensor in back.values()} == {f"torch.{said}"}
    assert said == str(dtype).removeprefix("torch.")


def test_split_over_files_with_an_index(tmp_path):
    llama(tmp_path / "in")

    def run(group):
        model = from_pretrained(tmp_path / "in", mesh=group, check="shapes")
        save_pretrained(model, tmp_path / "out", largest_file=8000)

    simulate(3, run)
    folder = open_folder(tmp_path / "out")
    assert len(folder.files) > 2 and all(file.size - len(file.raw) <= 8000 for file in folder.files)
    index = json.loads(folder.index)
    assert index["metadata"]["total_size"] == sum(entry.nbytes for _, entry in folder.tensors().values())
    there = load_file(tmp_path / "in" / "model.safetensors")
    back = {name: t for file in folder.files for name, t in load_file(file.path).items()}
    assert back.keys() == there.keys() and all(torch.equal(back[name], there[name]) for name in back)


def test_a_model_that_is_not_sharded_and_not_of_transformers(tmp_path):
    model = fused()
    save_pretrained(model, tmp_path / "out")
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(back) == ["down.bias", "down.weight", "emb.weight", "steps", "up.bias", "up.weight"]
    assert all(torch.equal(back[name], tensor) for name, tensor in model.state_dict().items() if name in back)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as library:
        assert library.metadata() == {"format": "pt", "head.weight": "emb.weight"}


def refusal(error, call):
    with pytest.raises(error) as raised:
        call()
    return str(raised.value)


def test_refused_before_anything_is_written(tmp_path):
    model = fused()
    (tmp_path / "file").touch()
    message = refusal(CheckpointError, lambda: save_pretrained(model, tmp_path))
    assert message == f"{tmp_path}: is not empty (1 entry, 'file'); name a new folder"
    message = refusal(UsageError, lambda: save_pretrained(model, tmp_path / "out", largest_file=0))
    assert message == "largest_file is a number of bytes, not 0"
    message = refusal(UsageError, lambda: save_pretrained(model.state_dict(), tmp_path / "out"))
    assert message == "a model is an nn.Module, not OrderedDict"
    message = refusal(
        CheckpointError, lambda: save_pretrained(nn.Linear(2, 2, device="meta"), tmp_path / "out")
    )
    assert message == f"{tmp_path / 'out'}: tensor 'weight' is torch.float32 on meta"
    assert os.listdir(tmp_path) == ["file"]


def test_a_disk_that_fills_up_is_told_on_all_ranks(tmp_path, monkeypatch):
    llama(tmp_path / "in")

    def full(fd, data, at):
        raise OSError(28, "No space left on device")

    def run(group):
        model = from_pretrained(tmp_path / "in", mesh=group, check="shapes")
        monkeypatch.setattr(os, "pwrite", full)
        save_pretrained(model, tmp_path / "out")

    assert refusal(CheckpointError, lambda: simulate(2, run)).endswith(
        "model.safetensors: cannot be written: No space left on device"
    )
    assert os.listdir(tmp_path) == ["in"]


def test_ranks_that_have_drifted_apart(tmp_path):
    llama(tmp_path / "in")

    def run(group):
        model = from_pretrained(tmp_path / "in", mesh=group, check="shapes")
        with torch.no_grad():
            model.model.norm.weight += group.rank
        save_pretrained(model, tmp_path / "out")

    message = refusal(CheckpointError, lambda: simulate(2, run))
    assert message == (
        f"{tmp_path / 'out'}: tensor 'model.norm.weight' is not the same on ranks 0 and 1: they have "
        "drifted apart"
    )
    assert os.listdir(tmp_path) == ["in"]


def test_shared_copies_that_have_drifted_apart(tmp_path):
    """One kv head that two ranks share is one tensor: a save does not choose between its copies."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES | {"num_attention_heads": 6, "num_key_value_heads": 1})
    LlamaForCausalLM(config).save_pretrained(tmp_path / "in")

    def run(group, drift):
        model = from_pretrained(tmp_path / "in", mesh=group, check="shapes")
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight[1, 2] += drift * group.rank
        save_pretrained(model, tmp_path / "out")

    message = refusal(CheckpointError, lambda: simulate(2, lambda group: run(group, 0.5)))
    assert message.startswith(
        "tensor 'model.layers.0.self_attn.k_proj.weight': rank 1's copy of what several ranks hold differs "
        "from the first holder's: largest difference 0.5"
    )
    assert os.listdir(tmp_path) == ["in"]
    simulate(2, lambda group: run(group, 0.0))
    there, back = (load_file(tmp_path / at / "model.safetensors") for at in ("in", "out"))
    assert all(torch.equal(back[name], there[name]) for name in there)


def save_on_first_rank_only(rank, size, folder):
    model = autotp.shard(fused(), {"up": "column", "down": "row"}, check="shapes")
    if rank:
        time.sleep(4)  # it comes too late
    started = time.monotonic()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(save, "ALL_CALL", 2.0)
            save_pretrained(model, folder)
    except AutotpError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "saved"


def save_on_both(rank, size, folder):
    model = autotp.shard(fused(), {"up": "column", "down": "row"}, check="shapes")
    save_pretrained(model, folder)
    return os.path.exists(folder)


@pytest.mark.slow
def test_on_real_ranks_and_on_one_of_them_alone(ranks, tmp_path):
    for kind, message, seconds in ranks(2)(save_on_first_rank_only, str(tmp_path / "out")):
        assert kind == "UsageError" and "every rank of the group must make the same call" in message
        assert seconds < 15
    assert os.listdir(tmp_path) == []


def fail_then_save(rank, size, folder):
    """Whatever failed on one rank, the next call finds all ranks at the same place."""
    said = []
    model = autotp.shard(fused(), {"up": "column", "down": "row"}, check="shapes")
    for broken in ("write", "finish", "drift", None):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0 and broken in ("write", "finish"):
                patch.setattr(save._Writer, broken, refuse_to_write)
            before = model.down.bias.data.clone()
            model.down.bias.data += rank if broken == "drift" else 0
            try:
                save_pretrained(model, folder)
                said.append("saved")
            except AutotpError as error:
                said.append(type(error).__name__)
            model.down.bias.data.copy_(before)
    return said


def refuse_to_write(*args):
    raise CheckpointError("cannot be written")


@pytest.mark.slow
def test_after_a_failure_the_ranks_are_still_together(ranks, tmp_path):
    first, second = ranks(2)(fail_then_save, str(tmp_path / "out"))
    assert first == ["CheckpointError", "CheckpointError", "CheckpointError", "saved"]
    assert second == ["UsageError", "UsageError", "CheckpointError", "saved"]


@pytest.mark.slow
def test_on_real_ranks(ranks, tmp_path):
    assert ranks(2)(save_on_both, str(tmp_path / "out")) == [True, True]
    back, model = load_file(tmp_path / "out" / "model.safetensors"), fused()
    assert all(torch.equal(back[name], tensor) for name, tensor in model.state_dict().items() if name in back)


def state_dict_on_first_rank_only(rank, size):
    model = autotp.shard(fused(), {"up": "column", "down": "row"}, check="shapes")
    started = time.monotonic()
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} if rank == 0 else {}
    return shapes, time.monotonic() - started


@pytest.mark.slow
def test_a_state_dict_on_one_rank_waits_for_nobody(ranks):
    """C1: it is this rank's own part."""
    (shapes, seconds), _ = ranks(2)(state_dict_on_first_rank_only)
    assert seconds < 2 and shapes["up.weight"] == (3, 4) and shapes["down.weight"] == (4, 3)


def test_a_part_is_stored_without_the_rest(tmp_path):
    """D4: a cut tensor owns its memory, so that no file holds the whole."""
    from safetensors.torch import save_file

    model = nn.Sequential()
    model.up, model.down = nn.Linear(256, 512), nn.Linear(512, 256)

    def run(group):
        sharded = autotp.shard(copy.deepcopy(model), {"up": "column", "down": "row"}, group, check="shapes")
        state = sharded.state_dict()
        for tensor in state.values():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous()
        torch.save(state, tmp_path / f"{group.rank}.pt")
        save_file(state, tmp_path / f"{group.rank}.safetensors")
        return sum(tensor.nbytes for tensor in state.values())

    for rank, held in enumerate(simulate(2, run)):
        assert held < 0.51 * sum(tensor.nbytes for tensor in model.state_dict().values())
        for kind in ("pt", "safetensors"):
            assert held <= (tmp_path / f"{rank}.{kind}").stat().st_size < held + 4000


def test_a_block_that_stands_twice_is_written_once(tmp_path):
    """E10: the file tells its other names, and a model that shares it gets it back shared."""

    def shared():
        model = nn.Sequential()
        model.first = nn.Sequential()
        model.first.up, model.first.down = nn.Linear(4, 6), nn.Linear(6, 4)
        model.second = model.first
        model.double()
        return model

    model = shared()
    plan = {"up": "column", "down": "row"}
    simulate(2, lambda group: save_pretrained(
        autotp.shard(copy.deepcopy(model), plan, group, check="shapes"), tmp_path / "out"
    ))  # fmt: skip
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as library:
        assert sorted(library.keys()) == [
            f"first.{n}" for n in ("down.bias", "down.weight", "up.bias", "up.weight")
        ]
        assert library.metadata()["second.up.weight"] == "first.up.weight"

    def load(group):
        with torch.device("meta"):
            empty = shared()
        found = from_pretrained(tmp_path / "out", plan=plan, mesh=group, model=empty, check="shapes")
        assert found.second.up.weight is found.first.up.weight
        return found.first(torch.ones(2, 4, dtype=torch.float64))

    for output in simulate(2, load):
        torch.testing.assert_close(
            output, model.first(torch.ones(2, 4, dtype=torch.float64)), atol=1e-10, rtol=0
        )


def test_a_tied_parameter_named_as_the_metadatas_format(tmp_path):
    model = nn.Module()
    model.a = model.format = nn.Parameter(torch.ones(2))
    save_pretrained(model, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_parameter_that_is_conjugated_when_it_is_read(tmp_path):
    model, value = nn.Module(), torch.tensor([1 + 2j, 3 - 4j])
    model.p = nn.Parameter(value.conj())
    save_pretrained(model, tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")["p"].tolist() == [1 - 2j, 3 + 4j]
