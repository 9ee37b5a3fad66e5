"""What a conversion and a load may cost: bytes read, files opened, memory, whatever the model's size."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from autotp.checkpoint import convert, merge
from autotp.checkpoint.read import read_rank
from autotp.header import encode_header
from autotp.placement import Shard, deal
from tests.checkpoints import minilm_folder, random_tensor, write_checkpoint

TENSORS = {f"layers.{i}.up.weight": random_tensor("F16", (512, 1024), i) for i in range(4)}
TENSORS |= {f"layers.{i}.down.weight": random_tensor("F16", (1024, 512), i) for i in range(4)}
PLAN = {"up": "column", "down": "row"}


@pytest.fixture
def counted(monkeypatch):
    """What is read by preadv, and how often each file is opened to read."""
    seen = Counter()
    preadv, opened = os.preadv, os.open

    def counting_preadv(fd, buffers, offset):
        got = preadv(fd, buffers, offset)
        seen["bytes"] += got
        return got

    def counting_open(path, flags, *rest, **options):
        if not flags & (os.O_WRONLY | os.O_RDWR | os.O_NONBLOCK):
            seen[os.path.basename(path)] += 1
        return opened(path, flags, *rest, **options)

    monkeypatch.setattr(os, "preadv", counting_preadv)
    monkeypatch.setattr(os, "open", counting_open)
    return seen


def test_each_byte_is_read_once_and_each_file_opened_once(tmp_path, counted):
    source = write_checkpoint(tmp_path / "in", TENSORS, files=4)
    size = sum(path.stat().st_size for path in source.iterdir())
    convert(source, tmp_path / "out", plan=PLAN, tp=8, check="shapes")
    assert counted["bytes"] <= size
    assert {name: n for name, n in counted.items() if name.endswith(".safetensors")} == dict.fromkeys(
        (f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)), 1
    )
    counted.clear()
    merge(tmp_path / "out", tmp_path / "back")
    assert counted["bytes"] <= size


def test_a_rank_reads_its_rows_alone(tmp_path, counted):
    source = write_checkpoint(tmp_path, {name: t for name, t in TENSORS.items() if "up" in name})
    layouts = {name: Shard(0, deal(512, 8)) for name in TENSORS}
    local = sum(array.nbytes for _, array in read_rank(source, layouts, 3))
    assert local == 4 * 512 * 1024 * 2 // 8 and counted["bytes"] == local


def sparse_checkpoint(folder, *, layers, rows, columns):
    """A checkpoint of holes: of full size to read, of none on the disk."""
    folder.mkdir()
    shapes = {}
    for i in range(layers):
        shapes |= {f"layers.{i}.up.weight": (rows, columns), f"layers.{i}.down.weight": (columns, rows)}
    raw, _ = encode_header({n: ("F16", s, 2 * s[0] * s[1]) for n, s in shapes.items()}, {})
    with open(folder / "model.safetensors", "wb") as file:
        file.write(raw)
        file.truncate(len(raw) + sum(2 * a * b for a, b in shapes.values()))
    return folder


LIMITED = """
import resource, sys, json
from autotp.checkpoint import convert, merge
import autotp.checkpoint.carry, autotp.checkpoint.ranks
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1])
before = peak()
resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))
convert(sys.argv[1], sys.argv[2], plan=json.loads(sys.argv[3]), tp=8, check="shapes")
middle = peak()
merge(sys.argv[2], sys.argv[2] + "-back")
print(json.dumps([middle - before, peak() - before]))
"""


@pytest.mark.slow
def test_a_gigabyte_within_400_megabytes_of_address_space(tmp_path):
    """D3: no model class, no process group, and a peak that does not know the size of the checkpoint."""
    peaks = []
    for layers in (1, 16):
        source = sparse_checkpoint(tmp_path / f"in{layers}", layers=layers, rows=8192, columns=2048)
        command = [
            sys.executable,
            "-c",
            LIMITED,
            str(source),
            str(tmp_path / f"out{layers}"),
            json.dumps(PLAN),
        ]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        )
        peaks.append(json.loads(done.stdout))
    assert max(max(pair) for pair in peaks) < 16 << 10  # KiB above the interpreter with its imports
    assert abs(peaks[1][1] - peaks[0][1]) < 4 << 10


LOADED = """
import sys, torch
from autotp.checkpoint.load import from_pretrained
from autotp import hf
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1])
hf.build(sys.argv[1])
before = peak()
model = from_pretrained(sys.argv[1], check="shapes")
local = sum(p.nbytes for p in model.parameters())
print(peak() - before, local >> 10)
"""


@pytest.mark.slow
def test_a_load_holds_its_local_bytes_and_little_else():
    command = [sys.executable, "-c", LOADED, str(minilm_folder())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, local = map(int, done.stdout.split()[-2:])
    assert grown <= local + (16 << 10)  # KiB; with the layers that are swapped in
