"""Merge: byte for byte, and every fault of a shard named with tensor, file and rank."""

import os
import shutil

import numpy as np
import pytest

from autotp.checkpoint import convert, merge
from autotp.checkpoint.carry import carry
from autotp.checkpoint.folder import open_folder
from autotp.checkpoint.manifest import PUT_BACK, Manifest
from autotp.checkpoint.output import rank_folder, rank_outputs
from autotp.checkpoint.ranks import AGAIN
from autotp.checkpoint.supply import Whole
from autotp.diagnostic import CheckpointError
from autotp.header import read_header
from autotp.placement import Deal, Shard, deal
from autotp.plan import Plan
from tests.checkpoints import random_tensor, safetensors_bytes, tree, write_checkpoint

TENSORS = {
    "up.weight": random_tensor("F32", (7, 5)),
    "down.weight": random_tensor("BF16", (5, 7)),
    "norm.weight": ("F32", (5,), np.arange(5, dtype=np.float32).tobytes()),
    "half.weight": ("BF16", (4,), np.array([0x3F80, 0x4000, 0x4040, 0x4080], np.uint16).tobytes()),
    "eighth": random_tensor("F8_E5M2", (3,)),
}
PLAN = {"up": "column", "down": "row"}


@pytest.fixture
def shards(tmp_path):
    source = write_checkpoint(tmp_path / "in", TENSORS, config={"a": 1}, files=2)
    convert(source, tmp_path / "out", plan=PLAN, tp=2, check="shapes")
    return tmp_path / "out"


def refusal(shards):
    before = tree(shards)
    with pytest.raises(CheckpointError) as raised:
        merge(shards, shards.parent / "back")
    assert tree(shards) == before
    assert sorted(os.listdir(shards.parent)) == ["in", "out"]  # nothing half-written
    return str(raised.value)


def file_of(shards, rank, tensor):
    for path in sorted((shards / f"rank-{rank}-of-2").glob("*.safetensors")):
        if tensor in read_header(path).tensors:
            return path
    raise AssertionError(tensor)


def overwrite(path, tensor, data):
    entry = read_header(path).tensors[tensor]
    with open(path, "r+b") as file:
        file.seek(entry.start)
        file.write(data)


@pytest.mark.parametrize("tensor", ["up.weight", "down.weight"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_flipped_bit_in_a_cut_tensor(shards, tensor, rank):
    path = file_of(shards, rank, tensor)
    entry = read_header(path).tensors[tensor]
    overwrite(path, tensor, bytes([path.read_bytes()[entry.start] ^ 1]))
    assert refusal(shards) == (
        f"{path}: tensor {tensor!r} of rank {rank} is damaged: its bytes have not the digest that "
        "autotp.json tells; copy this rank's folder again, or convert again"
    )


@pytest.mark.parametrize(
    ("tensor", "data", "apart"),
    [
        ("norm.weight", np.array([0, 1.5], np.float32).tobytes(), "0.5"),
        ("half.weight", np.array([0x3F80, 0x4080], np.uint16).tobytes(), "2"),
        ("eighth", b"\x7f\x7e", "in 2 bytes"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_copies_that_differ(shards, tensor, data, apart, rank):
    overwrite(file_of(shards, rank, tensor), tensor, data)
    assert refusal(shards) == (
        f"{file_of(shards, 1, tensor)}: rank 1's copy of tensor {tensor!r} differs from the first holder's: "
        f"largest difference {apart} (not what was written: rank {rank}); copy that folder again"
    )


def test_every_copy_damaged_alike(shards):
    for rank in range(2):
        overwrite(file_of(shards, rank, "norm.weight"), "norm.weight", b"\x01")
    assert refusal(shards) == (
        f"{file_of(shards, 0, 'norm.weight')}: tensor 'norm.weight' of rank 0 is damaged: its bytes have not "
        "the digest that autotp.json tells; copy this rank's folder again, or convert again"
    )


def test_without_digests_copies_are_still_compared(tmp_path):
    source = write_checkpoint(tmp_path / "in", TENSORS)
    convert(source, tmp_path / "out", plan=PLAN, tp=2, check="shapes", digest="none")
    merge(tmp_path / "out", tmp_path / "back")
    assert tree(tmp_path / "back") == tree(source)
    shutil.rmtree(tmp_path / "back")
    path = file_of(tmp_path / "out", 1, "norm.weight")
    overwrite(path, "norm.weight", np.array([2], np.float32).tobytes())
    expected = (
        f"{path}: rank 1's copy of tensor 'norm.weight' differs from the first holder's: largest difference "
        "2; nothing tells which is right: convert again"
    )
    assert refusal(tmp_path / "out") == expected


def test_rank_folders_too_few_and_too_many(shards):
    (shards / "rank-1-of-2").rename(shards / "rank-2-of-2")
    assert refusal(shards) == f"{shards}: 1 of 2 rank folders are missing: rank-1-of-2; copy them here"
    shutil.copytree(shards / "rank-2-of-2", shards / "rank-1-of-2")
    assert refusal(shards) == f"{shards}: is for tp=2, and holds other rank folders too: rank-2-of-2"


def test_a_shard_that_is_not_what_was_written(shards):
    path = file_of(shards, 1, "up.weight")
    good = path.read_bytes()
    part = dict.fromkeys(read_header(path).tensors, None)
    part = {
        name: (entry.dtype, entry.shape, good[entry.start : entry.stop])
        for name, entry in read_header(path).tensors.items()
    }
    up = part["up.weight"]
    for tensors, fault in (
        ({n: t for n, t in part.items() if n != "up.weight"}, "tensor 'up.weight' is missing"),
        (part | {"new": up}, "tensor 'new' is not in autotp.json"),
        (
            part | {"up.weight": (up[0], (5, 3), up[2])},
            "tensor 'up.weight' is F32 [5, 3]; autotp.json gives this rank F32 [3, 5]",
        ),
        (
            part | {"up.weight": ("I32", *up[1:])},
            "tensor 'up.weight' is I32 [3, 5]; autotp.json gives this rank F32 [3, 5]",
        ),
    ):
        path.write_bytes(safetensors_bytes(tensors))
        assert refusal(shards) == f"{path}: {fault}; {AGAIN}"
    path.write_bytes(safetensors_bytes(part, pad=8))
    assert refusal(shards) == f"{path}: its header is not the one that was written; {AGAIN}"
    path.write_bytes(good[:-3])
    assert refusal(shards) == (
        f"{path}: is truncated: {len(good) - 3} bytes, and its header accounts for {len(good)}"
    )
    path.unlink()
    assert refusal(shards) == f"{path}: cannot be read: No such file or directory"


def test_a_companion_that_changed_or_is_gone(shards):
    path = shards / "rank-0-of-2" / "config.json"
    path.write_text("{}")
    assert (
        refusal(shards)
        == f"{path}: is not what was written (its digest differs from autotp.json's); {PUT_BACK}"
    )
    path.unlink()
    assert refusal(shards) == f"{path}: cannot be read: No such file or directory"


def test_twelve_ranks_are_counted_as_numbers(tmp_path):
    tensors = {"up.weight": random_tensor("U8", (25, 3)), "down.weight": random_tensor("U8", (3, 25))}
    source = write_checkpoint(tmp_path / "in", tensors)
    convert(source, tmp_path / "out", plan=PLAN, tp=12, check="shapes")
    merge(tmp_path / "out", tmp_path / "back")
    assert tree(tmp_path / "back") == tree(source)
    (tmp_path / "out" / "rank-10-of-12").rename(tmp_path / "out" / "rank-12-of-12")
    with pytest.raises(
        CheckpointError, match=r"out: 1 of 12 rank folders are missing: rank-10-of-12; copy them here$"
    ):
        merge(tmp_path / "out", tmp_path / "again")


def test_many_missing_ranks_are_counted_and_some_named(tmp_path):
    source = write_checkpoint(tmp_path / "in", {"up.weight": random_tensor("U8", (25, 3))})
    convert(source, tmp_path / "out", plan={"up": "column"}, tp=12, check="shapes", ranks=[3])
    with pytest.raises(CheckpointError) as raised:
        merge(tmp_path / "out", tmp_path / "back")
    named = ", ".join(f"rank-{rank}-of-12" for rank in (0, 1, 2, 4, 5, 6, 7, 8))
    assert str(raised.value) == (
        f"{tmp_path / 'out'}: 11 of 12 rank folders are missing: {named} and 3 more; copy them here"
    )


def test_shared_kv_heads_and_whole_sections(tmp_path):
    """Layouts that no rule of a plan file asks for yet: written by hand, through the same pass."""
    shared = Deal(2, ((0, 1), (0, 1), (1, 2), (1, 2)), declared=2)
    layouts = {
        "k.weight": Shard(0, shared),
        "kt.weight": Shard(1, shared),
        "qkv.weight": Shard(0, sections=((8, deal(4, 4)), (2, shared), (3, None))),
        "qkvt.weight": Shard(1, sections=((3, None), (8, deal(4, 4)), (2, shared))),
    }
    tensors = {
        "k.weight": random_tensor("F32", (4, 3)),
        "kt.weight": random_tensor("F32", (3, 4)),
        "qkv.weight": random_tensor("F32", (13, 2)),
        "qkvt.weight": random_tensor("F32", (2, 13)),
    }
    source = write_checkpoint(tmp_path / "in", tensors)
    folder = open_folder(source)
    plan = Plan(rules={"k": "column"})
    manifest = Manifest(tp=4, plan=plan, proof="none", digest="xxh3", files=folder.files, layouts=layouts)
    outputs = rank_outputs(layouts, 4, None)
    carry(Whole(folder, {}), manifest, outputs, tmp_path / "out", job="convert")

    def part(rank, name):
        path = rank_folder(tmp_path / "out", rank, 4) / "model.safetensors"
        entry = read_header(path).tensors[name]
        return np.frombuffer(path.read_bytes()[entry.start : entry.stop], np.float32).reshape(entry.shape)

    def whole(name):
        return np.frombuffer(tensors[name][2], np.float32).reshape(tensors[name][1])

    rows = [[0, 1, 8, 10, 11, 12], [2, 3, 8, 10, 11, 12], [4, 5, 9, 10, 11, 12], [6, 7, 9, 10, 11, 12]]
    columns = [[0, 1, 2, 3, 4, 11], [0, 1, 2, 5, 6, 11], [0, 1, 2, 7, 8, 12], [0, 1, 2, 9, 10, 12]]
    for rank in range(4):
        heads = [0, 1] if rank < 2 else [2, 3]
        assert part(rank, "k.weight").tobytes() == whole("k.weight")[heads].tobytes()
        assert part(rank, "kt.weight").tobytes() == whole("kt.weight")[:, heads].tobytes()
        assert part(rank, "qkv.weight").tobytes() == whole("qkv.weight")[rows[rank]].tobytes()
        assert part(rank, "qkvt.weight").tobytes() == whole("qkvt.weight")[:, columns[rank]].tobytes()
    merge(tmp_path / "out", tmp_path / "back")
    assert tree(tmp_path / "back") == tree(source)
    shutil.rmtree(tmp_path / "back")
    path = rank_folder(tmp_path / "out", 3, 4) / "model.safetensors"
    overwrite(path, "kt.weight", b"\x00\x00\x00\x00")
    with pytest.raises(CheckpointError) as raised:
        merge(tmp_path / "out", tmp_path / "back")
    assert str(raised.value).startswith(f"{path}: rank 3's copy of tensor 'kt.weight' differs from the first")
    assert str(raised.value).endswith("(not what was written: rank 3); copy that folder again")


@pytest.mark.parametrize("digest", ["xxh3", "none"])
def test_every_ranks_copy_of_a_small_file_is_checked(tmp_path, digest):
    source = write_checkpoint(tmp_path / "in", {"up.weight": random_tensor("F32", (4, 2))}, config={"a": 1})
    convert(source, tmp_path / "out", plan={"up": "column"}, tp=2, check="shapes", digest=digest)
    (tmp_path / "out" / "rank-1-of-2" / "config.json").write_text('{"a": 2}')
    with pytest.raises(CheckpointError) as raised:
        merge(tmp_path / "out", tmp_path / "back")
    why = (
        "is not what was written (its digest differs from autotp.json's)"
        if digest == "xxh3"
        else "is not the one that rank 0 has"
    )
    assert str(raised.value) == f"{tmp_path / 'out'}/rank-1-of-2/config.json: {why}; {PUT_BACK}"
    assert not (tmp_path / "back").exists()
