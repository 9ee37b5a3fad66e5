"""Which files are a checkpoint, and what is refused before any of them is used."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autotp.checkpoint import convert
from autotp.checkpoint.folder import open_folder, regular_file
from autotp.cli import app
from autotp.diagnostic import CheckpointError
from tests.checkpoints import random_tensor, safetensors_bytes, write_checkpoint

OTHERS = "pytorch_model.bin, consolidated.00.pth, mp_rank_00"
TENSORS = {f"layers.{i}.weight": random_tensor("F32", (2, 2), i) for i in range(5)}
INDEX = "model.safetensors.index.json"


def refusal(path):
    with pytest.raises(CheckpointError) as raised:
        open_folder(path)
    return str(raised.value)


def set_index(folder, **changes):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= changes.pop("weight_map", {})
    (folder / INDEX).write_text(json.dumps(index | changes))


def test_one_file(tmp_path):
    folder = open_folder(write_checkpoint(tmp_path, TENSORS, config={"model_type": "bert"}))
    assert list(folder.tensors()) == list(TENSORS) and folder.config == {"model_type": "bert"}
    assert folder.index is None and folder.companions == ("config.json",)
    alone = open_folder(tmp_path / "model.safetensors")
    assert alone.files == folder.files and alone.companions == ("config.json",)


def test_an_index_decides_and_stale_shards_are_left_alone(tmp_path):
    write_checkpoint(tmp_path, TENSORS, files=3)
    for stale in ("model-00004-of-00005.safetensors", "model.safetensors"):
        (tmp_path / stale).write_bytes(safetensors_bytes({"stale": random_tensor("F32", (2,))}))
    folder = open_folder(tmp_path)
    assert [file.path.name for file in folder.files] == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    assert set(folder.tensors()) == set(TENSORS)


def test_any_single_file_is_taken_but_two_are_not(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(safetensors_bytes(TENSORS))
    assert set(open_folder(tmp_path).tensors()) == set(TENSORS)
    (tmp_path / "b.safetensors").write_bytes(safetensors_bytes(TENSORS))
    assert refusal(tmp_path) == (
        f"{tmp_path}: holds no checkpoint: looked for {INDEX}, model.safetensors, one *.safetensors, "
        f"{OTHERS}; found a.safetensors, b.safetensors"
    )


def test_an_empty_folder_names_what_was_looked_for(tmp_path):
    tried = f"looked for {INDEX}, model.safetensors, one *.safetensors, {OTHERS}"
    assert refusal(tmp_path) == f"{tmp_path}: holds no checkpoint: {tried}; found none"
    (tmp_path / "weights.bin").touch()
    assert refusal(tmp_path) == f"{tmp_path}: holds no checkpoint: {tried}; found weights.bin"
    assert refusal(tmp_path / "x") == f"{tmp_path / 'x'}: there is no such folder or file"


@pytest.mark.parametrize(
    "value",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "a/../../x.safetensors",
        "a\\x.safetensors",
        "a\0.safetensors",
        "x.bin",
        "",
        5,
        None,
        ["x.safetensors"],
    ],
)
def test_an_index_names_plain_files_only(tmp_path, value):
    write_checkpoint(tmp_path / "in", TENSORS, files=3)
    (tmp_path / "x.safetensors").write_bytes(safetensors_bytes(TENSORS))
    set_index(tmp_path / "in", weight_map={"layers.1.weight": value})
    assert refusal(tmp_path / "in") == (
        f"{tmp_path / 'in' / INDEX}: 'layers.1.weight' is said to be in {value!r}, "
        "which is not a plain .safetensors file name"
    )


def test_links_out_of_the_folder_are_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "in", TENSORS, files=3)
    name, outside = "model-00002-of-00003.safetensors", tmp_path / "outside.safetensors"
    os.rename(folder / name, outside)
    (folder / name).symlink_to(outside)
    assert refusal(folder) == (
        f"{folder / INDEX}: 'layers.1.weight' is said to be in {name!r}, a link to {outside}, "
        "outside the folder"
    )
    single = write_checkpoint(tmp_path / "single", TENSORS)
    os.rename(single / "model.safetensors", tmp_path / "there.safetensors")
    (single / "model.safetensors").symlink_to("../there.safetensors")
    expected = (
        f"{single}: 'model.safetensors' is a link to {tmp_path / 'there.safetensors'}, outside the folder"
    )
    assert refusal(single) == expected
    assert open_folder(tmp_path / "there.safetensors").tensors()  # named by the user, it is read


def test_links_inside_the_folder_and_into_the_hub_cache_are_followed(tmp_path):
    home = tmp_path / "models--a--b"
    snapshot = write_checkpoint(home / "snapshots" / "0123", TENSORS, config={})
    (home / "blobs").mkdir()
    for name in ("model.safetensors", "config.json"):
        os.rename(snapshot / name, home / "blobs" / name[:3])
        (snapshot / name).symlink_to(f"../../blobs/{name[:3]}")
    assert set(open_folder(snapshot).tensors()) == set(TENSORS)
    (snapshot / "other.json").symlink_to("model.safetensors")
    assert open_folder(snapshot).companions == ("config.json", "other.json")
    (tmp_path / "link").symlink_to(snapshot)
    assert set(open_folder(tmp_path / "link").tensors()) == set(TENSORS)


def test_a_companion_that_leads_out_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "in", TENSORS)
    (folder / "tokenizer.json").symlink_to("/etc/hostname")
    assert refusal(folder) == (f"{folder}: 'tokenizer.json' is a link to /etc/hostname, outside the folder")
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "fifo")
    assert refusal(folder) == f"{folder / 'fifo'}: is not a regular file"


@pytest.mark.parametrize("config", ["", "{", "[]"])
def test_a_folder_that_is_no_checkpoint_is_refused_for_that(tmp_path, monkeypatch, config):
    """And not for what lies in it, nor after a walk through all of it: /tmp holds links and pipes."""
    (tmp_path / "link").symlink_to("/etc/hostname")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "config.json").write_text(config)
    monkeypatch.setattr(os, "walk", lambda *args: pytest.fail("walked through the folder"))
    tried = f"looked for {INDEX}, model.safetensors, one *.safetensors, {OTHERS}"
    assert refusal(tmp_path) == f"{tmp_path}: holds no checkpoint: {tried}; found none"
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "x.safetensors"}}')
    assert refusal(tmp_path) == f"{tmp_path / INDEX}: 1 of its 1 files are missing: x.safetensors"
    (tmp_path / INDEX).unlink()
    (tmp_path / "model.safetensors").write_bytes(b"short")
    assert refusal(tmp_path).startswith(f"{tmp_path / 'model.safetensors'}: ")


def test_what_travels_along(tmp_path):
    folder = write_checkpoint(tmp_path, TENSORS, config={})
    (folder / "1_Pooling").mkdir()
    (folder / ".git").mkdir()
    for name in (
        "1_Pooling/config.json",
        "tokenizer.json",
        ".gitattributes",
        ".git/x",
        ".autotp-journal.jsonl",
        "autotp.json",
        "pytorch_model.bin",
        "x.onnx",
    ):
        (folder / name).write_text("{}")
    with open(folder / "huge.txt", "wb") as file:
        file.truncate((64 << 20) + 1)
    assert open_folder(folder).companions == (
        ".gitattributes", "1_Pooling/config.json", "config.json", "tokenizer.json",
    )  # fmt: skip


def test_what_is_left_out_is_told(tmp_path):
    folder = write_checkpoint(tmp_path / "in", TENSORS, config={}, files=2)
    (folder / "2_Dense").mkdir()
    (folder / "link").symlink_to(folder / "2_Dense")
    names = ["2_Dense/model.safetensors", "link", "pytorch_model.bin", "x.gguf", "x.onnx"]
    for name in (name for name in names if name != "link"):
        (folder / name).write_text("{}")
    options = {"plan": {"layers.*": "column"}, "tp": 1, "check": "shapes"}
    assert convert(folder, tmp_path / "out", **options).left_out == tuple(names)
    (tmp_path / "plan.yaml").write_text("rules: {layers.*: column}")
    done = ["convert", str(folder), str(tmp_path / "again"), "--plan", str(tmp_path / "plan.yaml")]
    told = CliRunner().invoke(app, [*done, "--tp", "1", "--check", "shapes"]).stdout.splitlines()
    assert told[-1] == "left out: 2_Dense/model.safetensors, link, pytorch_model.bin, x.gguf and 1 more"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[]", "its content is not a JSON object"),
        (b"{}", "has no weight_map of tensor names to file names"),
        (b'{"weight_map": []}', "has no weight_map of tensor names to file names"),
        (
            b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
            "its content is not sound JSON: 'a' appears twice",
        ),
        (
            b'{"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}',
            "2 of its 2 files are missing: x.safetensors, y.safetensors",
        ),
        (
            json.dumps({"weight_map": {str(i): f"{i}.safetensors" for i in range(7)}}).encode(),
            "7 of its 7 files are missing: 0.safetensors, 1.safetensors, 2.safetensors, 3.safetensors, "
            "4.safetensors and 2 more",
        ),
        # a message is for people: what is hostile and long is not told in whole
        (
            json.dumps({"weight_map": {"k" * 5000: "x.safetensors"}}).encode(),
            f"the tensor name '{'k' * 59}… is 5000 characters long, and at most 1000 are taken",
        ),
        (
            json.dumps({"weight_map": {"a": "x" * 5000 + ".safetensors"}}).encode(),
            f"'a' is said to be in '{'x' * 59}…, which is not a plain .safetensors file name",
        ),
        (
            b'{"weight_map": {"%s": 1, "%s": 1}}' % (b"k" * 5000, b"k" * 5000),
            f"its content is not sound JSON: '{'k' * 59}… appears twice",
        ),
        (
            b"\xff",
            "its content is not sound JSON: 'utf-8' codec can't decode byte 0xff in position 0: "
            "invalid start byte",
        ),
    ],
)
def test_an_unsound_index(tmp_path, text, message):
    (tmp_path / INDEX).write_bytes(text)
    assert refusal(tmp_path) == f"{tmp_path / INDEX}: {message}"


def test_tensors_in_no_file_in_another_file_and_in_no_line(tmp_path):
    write_checkpoint(tmp_path, TENSORS, files=3)
    first, second = (tmp_path / f"model-0000{i}-of-00003.safetensors" for i in (1, 2))
    set_index(tmp_path, weight_map={f"ghost.{i}": first.name for i in range(5)})
    assert refusal(tmp_path) == (
        f"{tmp_path / INDEX}: tensors that no file holds: 'ghost.0' (said to be in {first.name}), "
        f"'ghost.1' (said to be in {first.name}), 'ghost.2' (said to be in {first.name}) and 2 more"
    )
    write_checkpoint(tmp_path, TENSORS, files=3)
    set_index(tmp_path, weight_map={"layers.0.weight": second.name})
    assert (
        refusal(tmp_path)
        == f"{first}: holds 'layers.0.weight', but {INDEX} says that it is in {second.name!r}"
    )
    write_checkpoint(tmp_path, TENSORS, files=3)
    first.write_bytes(safetensors_bytes({name: TENSORS[name] for name in list(TENSORS)[::2]}))
    assert refusal(tmp_path) == f"{first}: holds 'layers.2.weight', but {INDEX} says that it is in " + repr(
        "model-00003-of-00003.safetensors"
    )
    write_checkpoint(tmp_path, TENSORS, files=3)
    extra = {
        "layers.0.weight": TENSORS["layers.0.weight"],
        "layers.3.weight": TENSORS["layers.3.weight"],
        "new": TENSORS["layers.0.weight"],
    }
    first.write_bytes(safetensors_bytes(extra))
    assert refusal(tmp_path) == f"{first}: holds 'new', but {INDEX} does not list it"


def test_a_wrong_total_size_is_of_no_consequence(tmp_path):
    write_checkpoint(tmp_path, TENSORS, files=3)
    set_index(tmp_path, metadata={"total_size": "many"})
    assert set(open_folder(tmp_path).tensors()) == set(TENSORS)


def test_a_regular_file_is_asked_for(tmp_path):
    with pytest.raises(CheckpointError, match="x: cannot be read: No such file or directory"):
        regular_file(tmp_path, "x")


@pytest.mark.parametrize("name", ["a\nb.txt", "a\\b.txt", "d\x7f.txt", "d/\x9b.txt", b"\xff.txt"])
def test_a_name_that_no_manifest_could_hold_is_refused_before_anything_is_written(tmp_path, name):
    source = write_checkpoint(tmp_path / "in", TENSORS, config={})
    (source / "d").mkdir()
    path = os.fsencode(source) + b"/" + os.fsencode(name)
    with open(path, "w") as file:
        file.write("x")
    with pytest.raises(CheckpointError) as raised:
        convert(source, tmp_path / "out", plan={"*": "replicate"}, tp=2, check="shapes")
    assert str(raised.value) == (
        f"{source}: the name {os.fsdecode(name)!r} cannot travel along: it has a backslash, a control "
        "character or bytes that are no UTF-8; rename it"
    )
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("name", ["a\nb.safetensors", b"\xff.safetensors"])
def test_weights_under_such_a_name(tmp_path, name):
    source = write_checkpoint(tmp_path / "in", TENSORS)
    odd = Path(os.fsdecode(os.fsencode(source) + b"/" + os.fsencode(name)))
    (source / "model.safetensors").rename(odd)
    for place in (source, odd):
        with pytest.raises(CheckpointError, match="cannot be kept: it has a backslash, a control character"):
            open_folder(place)


def test_a_configuration_in_place_of_a_folder(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{}")
    with pytest.raises(CheckpointError) as raised:
        open_folder(path)
    assert str(raised.value) == f"{path}: holds no weights; give the folder {tmp_path}"
