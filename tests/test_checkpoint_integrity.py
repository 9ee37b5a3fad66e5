"""Integrity: every finding with its file, all of them together."""

import shutil

import numpy as np
import pytest
import torch

from autotp.checkpoint import check_shards, convert, inventory
from autotp.diagnostic import CheckpointError
from autotp.header import read_header
from tests.checkpoints import random_tensor, write_checkpoint

TENSORS = {
    "up.weight": random_tensor("F32", (7, 5)),
    "down.weight": random_tensor("BF16", (5, 7)),
    "norm.weight": ("F32", (5,), np.arange(5, dtype=np.float32).tobytes()),
}
PLAN = {"up": "column", "down": "row"}


@pytest.fixture(params=["xxh3", "none"])
def digest(request):
    return request.param


@pytest.fixture
def shards(tmp_path, digest):
    source = write_checkpoint(tmp_path / "in", TENSORS, config={"a": 1}, files=2)
    convert(source, tmp_path / "out", plan=PLAN, tp=2, check="shapes", digest=digest)
    return tmp_path / "out"


def overwrite(folder, tensor, data):
    for path in sorted(folder.glob("*.safetensors")):
        header = read_header(path)
        if tensor in header.tensors:
            with open(path, "r+b") as file:
                file.seek(header.tensors[tensor].start)
                file.write(data)
            return path
    raise AssertionError(tensor)


def test_what_was_just_written_is_whole(shards):
    told = []
    found = check_shards(shards, source=shards.parent / "in", progress=lambda *at: told.append(at))
    assert found.ok and found.findings == () and found.manifest.tp == 2
    assert found.nbytes == sum(path.stat().st_size for path in shards.rglob("*.safetensors"))
    assert told[-1] == (found.nbytes, found.nbytes, "model-00002-of-00002.safetensors")


def test_everything_that_is_damaged_comes_together(shards, digest):
    first = overwrite(shards / "rank-0-of-2", "up.weight", b"\x01\x02")
    second = overwrite(shards / "rank-1-of-2", "norm.weight", np.array([4], np.float32).tobytes())
    config = shards / "rank-1-of-2" / "config.json"
    config.unlink()
    damaged = "is damaged: its bytes have not the digest that autotp.json tells; copy this rank's folder "
    damaged += "again, or convert again"
    differs = f"{second}: rank 1's copy of tensor 'norm.weight' differs from the first holder's"
    differs += ": largest difference 4"
    unknown = f"{differs}; nothing tells which is right: convert again"
    gone = f"{config}: cannot be read: No such file or directory"
    assert (
        check_shards(shards).findings
        == {
            "xxh3": (
                f"{first}: tensor 'up.weight' of rank 0 {damaged}",
                f"{second}: tensor 'norm.weight' of rank 1 {damaged}",
                f"{differs} (not what was written: rank 1); copy that folder again",
                gone,
            ),
            "none": (unknown, gone),
        }[digest]
    )


def test_what_was_put_into_a_rank_folder_afterwards(shards):
    home = shards / "rank-1-of-2"
    (home / "sub").mkdir()
    (home / "sub" / "extra.safetensors").touch()
    (home / "elsewhere").symlink_to(shards.parent)
    index = home / "model.safetensors.index.json"
    index.write_text(index.read_text() + " ")
    there = "was not written there: autotp.json does not list it; remove it"
    assert check_shards(shards).findings == (
        f"{home}: 'elsewhere' {there}",
        f"{home}: 'sub/extra.safetensors' {there}",
        f"{index}: is not what was written",
    )


def test_against_a_source_that_changed(shards):
    source = shards.parent / "in"
    path = overwrite(source, "down.weight", b"\x05\x06\x07")
    found = check_shards(shards, source=source)
    assert found.findings == (f"{path}: tensor 'down.weight' is not what was converted",)
    shutil.rmtree(source)
    write_checkpoint(source, TENSORS, config={"a": 2})
    findings = check_shards(shards, source=source).findings
    assert findings[:3] == (
        f"{source / 'model.safetensors'}: is not among the files that were converted",
        f"{source}: 'model-00001-of-00002.safetensors' was converted, and is not there",
        f"{source}: 'model-00002-of-00002.safetensors' was converted, and is not there",
    )
    assert findings[3] == f"{source / 'model.safetensors.index.json'}: is not the one that was converted"
    assert check_shards(shards, source=source / "x").findings == (
        f"{source / 'x'}: there is no such folder or file",
    )


def test_rank_folders_that_are_missing(shards):
    shutil.rmtree(shards / "rank-1-of-2")
    assert check_shards(shards).findings == (
        f"{shards}: 1 of 2 rank folders are missing: rank-1-of-2; copy them here",
    )
    (shards / "autotp.json").unlink()
    with pytest.raises(CheckpointError, match=r"out: holds no autotp\.json"):
        check_shards(shards)


def ranks(folder, values):
    """Two ranks' files of a column and a row layer, whose bias is a sum of parts."""
    folder.mkdir()
    for rank, value in enumerate(values):
        tensors = {"up.weight": torch.full((3, 2), value), "down.weight": torch.full((2, 3), value)}
        torch.save(tensors | {"down.bias": torch.full((2,), value)}, folder / f"rank_{rank}.pt")


@pytest.mark.parametrize("kind", ["xxh3", "none"])
def test_against_a_source_that_is_no_safetensors(tmp_path, kind):
    options = {"plan": PLAN, "tp": 2, "check": "shapes", "digest": kind}
    source = tmp_path / "in"
    source.mkdir()
    (source / "LICENSE").write_text("free")
    tensors = {"up.weight": torch.ones(4, 3), "down.weight": torch.ones(3, 4)}
    torch.save(tensors, source / "pytorch_model.bin")
    convert(source, tmp_path / "out", **options)
    assert check_shards(tmp_path / "out", source=source).findings == ()
    torch.save(tensors | {"up.weight": torch.zeros(4, 3)}, source / "pytorch_model.bin")
    (source / "LICENSE").write_text("not free")
    assert check_shards(tmp_path / "out", source=source).findings == (
        f"{source / 'model.safetensors'}: tensor 'up.weight' is not what was converted",
        *([f"{source / 'LICENSE'}: is not what was converted"] if kind == "xxh3" else []),
    )
    ranks(tmp_path / "ranks", (1.0, 2.0))
    convert(tmp_path / "ranks", tmp_path / "of ranks", **options, biases="summed")
    assert check_shards(tmp_path / "of ranks", source=tmp_path / "ranks").findings == ()
    ranks(tmp_path / "others", (1.0, 4.0))
    assert check_shards(tmp_path / "of ranks", source=tmp_path / "others").findings == tuple(
        f"{tmp_path / 'others' / 'model.safetensors'}: tensor {name!r} is not what was converted"
        for name in ("up.weight", "down.weight", "down.bias")
    )
    assert inventory(source).tensors().keys() == tensors.keys()
    assert inventory(tmp_path / "ranks", plan=PLAN).tensors()["up.weight"].shape == (6, 2)
