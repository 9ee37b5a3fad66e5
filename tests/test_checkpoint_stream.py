"""Blocks of a tensor from file to files and back, for every cut and every block size."""

import math
import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotp.checkpoint import read
from autotp.checkpoint.digest import DIGESTS, digest_of, new_digest
from autotp.checkpoint.folder import open_folder
from autotp.checkpoint.read import Differs, Part, Source, read_local, read_rank, spans
from autotp.checkpoint.write import Buffers, create, stream
from autotp.diagnostic import CheckpointError, UsageError
from autotp.placement import Shard, deal
from autotp.slicing import rows, take
from tests.checkpoints import random_tensor, write_checkpoint
from tests.test_slicing import cuts


@pytest.fixture
def chunk(monkeypatch):
    return lambda size: monkeypatch.setattr(read, "CHUNK", size)


@settings(deadline=None)
@given(st.integers(0, 300), st.lists(st.integers(1, 6), max_size=3), st.integers(1, 40))
def test_spans_cover_everything_once_and_respect_rows(count, factors, size):
    lengths = [1]
    for factor in factors:
        lengths.append(lengths[-1] * factor)
    nbytes = lengths[-1] * count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "CHUNK", size)
        found = list(spans(nbytes, lengths))
    assert [start for start, _ in found] == [0, *(stop for _, stop in found)][: len(found)]
    assert (found[-1][1] if found else 0) == nbytes
    for start, stop in found:
        assert 0 < stop - start <= size
        for length in lengths:
            whole_rows = start % length == 0 and stop % length == 0
            assert whole_rows or start // length == (stop - 1) // length


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cuts(), cuts(), st.sampled_from([1, 2, 4]), st.integers(1, 60))
def test_every_cut_in_blocks_of_every_size(tmp_path_factory, case, other, itemsize, size):
    """Whole → ranks → whole, whole → one rank's memory, and ranks → other ranks."""
    shape, shard = case
    folder = tmp_path_factory.mktemp("stream")
    size = max(size, itemsize)
    whole = np.random.default_rng(0).integers(0, 256, (*shape, itemsize)).astype(np.uint8)
    nbytes = whole.nbytes
    (folder / "whole").write_bytes(b"header" + whole.tobytes())

    def parts(stack, prefix, cut):
        found = []
        for rank in range(cut.tp):
            part = rows(shape, itemsize, cut, rank)
            fd = create(folder / f"{prefix}{rank}", b"abc", 3 + part.nbytes)
            stack.callback(os.close, fd)
            found.append(Part(fd, folder / f"{prefix}{rank}", 3, part))
        return found

    def carry(source, sinks):
        digests = [new_digest("xxh3") for _ in sinks]
        full, told = new_digest("xxh3"), []
        stream(source, sinks, nbytes, buffers=Buffers(), whole=full, parts=digests, progress=told.append)
        assert sum(told) == nbytes and full.hexdigest() == digest_of(whole.tobytes(), "xxh3")
        return [digest.hexdigest() for digest in digests]

    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(read, "CHUNK", size)
        fd = os.open(folder / "whole", os.O_RDONLY)
        stack.callback(os.close, fd)
        origin = Part(fd, Path("whole"), 6, rows(shape, itemsize, None, 0))
        shards = parts(stack, "a", shard)
        digests = carry(Source([origin]), shards)
        for rank in range(shard.tp):
            expected = take(whole, shard, rank).tobytes()
            assert (folder / f"a{rank}").read_bytes() == b"abc" + expected
            assert digests[rank] == digest_of(expected, "xxh3")
            wanted = rows(shape, itemsize, shard, rank)
            memory = np.empty(wanted.nbytes, np.uint8)
            read_local(origin, wanted, memory, np.empty(size, np.uint8))
            assert memory.tobytes() == expected
        again = create(folder / "again", b"", nbytes)
        stack.callback(os.close, again)
        carry(Source(shards), [Part(again, Path("again"), 0, rows(shape, itemsize, None, 0))])
        assert (folder / "again").read_bytes() == whole.tobytes()
        elsewhere = other[1].at(min(other[1].dim, len(shape) - 1))
        if elsewhere.fits(shape[elsewhere.dim]):
            carry(Source(shards), parts(stack, "b", elsewhere))
            for rank in range(elsewhere.tp):
                assert (folder / f"b{rank}").read_bytes() == b"abc" + take(whole, elsewhere, rank).tobytes()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cuts(), st.integers(1, 40), st.data())
def test_one_changed_byte_of_a_copy_is_found(tmp_path_factory, case, size, data):
    shape, shard = case
    held = [(rank, at) for rank in range(shard.tp) for at in range(rows(shape, 1, shard, rank).nbytes)]
    if not held:
        return
    rank, at = data.draw(st.sampled_from(held))
    whole = np.arange(math.prod(shape), dtype=np.uint16).astype(np.uint8).reshape(shape)
    holders = np.zeros(shape, int)
    for r in range(shard.tp):
        for start, stop in shard.ranges(shape[shard.dim], r):
            holders[(slice(None),) * shard.dim + (slice(start, stop),)] += 1
    folder = tmp_path_factory.mktemp("copies")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(read, "CHUNK", size)
        found = []
        for r in range(shard.tp):
            content = bytearray(take(whole, shard, r).tobytes())
            if r == rank:
                content[at] ^= 1
            (folder / str(r)).write_bytes(content)
            fd = os.open(folder / str(r), os.O_RDONLY)
            stack.callback(os.close, fd)
            found.append(Part(fd, folder / str(r), 0, rows(shape, 1, shard, r)))
        source, buffers = Source(found), Buffers()

        def gather():
            for start, stop in spans(whole.nbytes, [source.length]):
                source.gather(buffers.block[: stop - start], start, buffers.scratch)

        if take(holders, shard, rank).reshape(-1)[at] > 1:
            with pytest.raises(Differs):
                gather()
        else:
            gather()


def test_a_file_that_ends_early_is_named(tmp_path):
    (tmp_path / "short").write_bytes(b"12345")
    fd = os.open(tmp_path / "short", os.O_RDONLY)
    part = Part(fd, tmp_path / "short", 2, rows((8,), 1, None, 0))
    with pytest.raises(CheckpointError) as raised:
        Source([part]).gather(np.empty(8, np.uint8), 0, np.empty(8, np.uint8))
    os.close(fd)
    assert str(raised.value) == (
        f"{tmp_path / 'short'}: ended at byte 5 while it was read; it was longer before"
    )


def test_a_rank_reads_its_slices_of_a_whole_checkpoint(tmp_path):
    tensors = {
        "a": random_tensor("BF16", (5, 4)),
        "b": random_tensor("F32", (4, 6)),
        "c": random_tensor("BOOL", (3,)),
        "d": random_tensor("F8_E4M3", (2,)),
        "e": random_tensor("I16", ()),
        "f": random_tensor("F4", (3, 2)),
        "g": random_tensor("C64", (2, 0)),
    }
    layouts = {"a": Shard(0, deal(5, 2)), "b": Shard(1, deal(3, 2))}
    folder = write_checkpoint(tmp_path, tensors, files=2)
    assert open_folder(folder).nbytes > 0
    for rank in range(2):
        found = {entry.name: array for entry, array in read_rank(folder, layouts, rank)}
        expected = {
            "a": np.frombuffer(tensors["a"][2], "u2").reshape(5, 4)[:3]
            if rank == 0
            else np.frombuffer(tensors["a"][2], "u2").reshape(5, 4)[3:],
            "b": np.frombuffer(tensors["b"][2], "f4").reshape(4, 6)[
                :, slice(0, 4) if rank == 0 else slice(4, 6)
            ],
            "c": np.frombuffer(tensors["c"][2], "?"),
            "d": np.frombuffer(tensors["d"][2], "u1"),
            "e": np.frombuffer(tensors["e"][2], "i2").reshape(()),
            "f": np.frombuffer(tensors["f"][2], "u1"),
            "g": np.empty((2, 0), "c8"),
        }
        assert found.keys() == expected.keys()
        for name, array in found.items():
            assert (array.dtype, array.shape) == (expected[name].dtype, expected[name].shape)
            assert array.tobytes() == expected[name].tobytes()


def test_digests(tmp_path):
    assert digest_of(b"", "sha256") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert digest_of(b"x", "none") == "" and set(DIGESTS) == {"xxh3", "sha256", "none"}
    with pytest.raises(UsageError, match=r"^there is no digest 'crc'; there are xxh3, sha256, none$"):
        new_digest("crc")
