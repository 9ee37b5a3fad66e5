"""What a rank's load takes: time beside transformers' own tensor-parallel load, memory, bytes from the disk.

- Two gloo ranks load a Llama of 1 GB from the disk, all bytes touched: medians, beside transformers.
- The memory that a rank needs beyond its own part.
- Eight ranks' slices of the column-cut tensors, each read from a cold cache: bytes from the disk, in sizes of
  the slices. The disk may read ahead.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.checkpoint import size_of, write_source

GIGABYTES = 1.0
TP, RUNS = 2, 5
MEMORY = 16 << 20  # bytes above the imports and the rank's own part
READ = 1.7  # bytes from the disk, in sizes of a column-cut slice
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 16384,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}

# One rank in this process.
RANK = """
import json, resource, sys, time, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist, transformers
from transformers import LlamaForCausalLM
import autotp.checkpoint.load, autotp.api, autotp.decide, autotp.hf
who, folder = sys.argv[1:]
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
dist.init_process_group("gloo")
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) << 10
if who == "autotp":
    autotp.hf.build(folder)
dist.barrier()
before, started, worked = peak(), time.perf_counter(), time.process_time()
if who == "autotp":
    model = autotp.checkpoint.load.from_pretrained(folder, plan="llama", check="shapes")
else:
    model = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto", dtype="auto")
held, total = 0, 0
for tensor in model.parameters():
    local = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
    held += local.nbytes
    total += int(local.reshape(-1).view(torch.uint8)[::4096].sum())
seconds = time.perf_counter() - started
print("result", json.dumps([seconds, time.process_time() - worked, peak() - before - held]))
dist.barrier()
dist.destroy_process_group()
"""

# One rank's slices of what the plan cuts by columns.
SLICES = """
import sys
from pathlib import Path
from autotp.checkpoint.folder import open_folder
from autotp.checkpoint.read import read_rank
from autotp.placement import Shard, deal
folder, rank, tp = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
tensors = open_folder(folder).tensors()
layouts = {name: Shard(0, deal(tp, tp)) for name, (_, entry) in tensors.items() if len(entry.shape) == 2}
def told():
    return int(next(line for line in open("/proc/self/io") if line.startswith("read_bytes")).split()[1])
before, local = told(), 0
for entry, array in read_rank(folder, layouts, rank):
    local += array.nbytes
print(told() - before, local)
"""


class Load(NamedTuple):
    """What a load took at most on any rank: seconds by the clock and of the processor, bytes of memory beyond
    the rank's own part."""

    seconds: float
    processor: float
    beyond: int


def forget(folder: Path) -> None:
    """Drop the files from the system's cache, so that they are read from the disk."""
    os.sync()
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load(who: str, folder: Path) -> Load:
    """All ranks load at once, from the disk."""
    forget(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(TP)}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, who, str(folder)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(TP)
    ]
    said = [rank.communicate()[0] for rank in ranks]
    found = [
        json.loads(line.removeprefix("result"))
        for text in said
        for line in text.splitlines()
        if line.startswith("result")
    ]
    if len(found) != TP:
        raise SystemExit(f"{who} failed to load")
    return Load(*(max(column) for column in zip(*found, strict=True)))


def columns(folder: Path, tp: int) -> float:
    """Bytes from the disk, in sizes of the slices, for one rank of `tp`."""
    forget(folder)
    done = subprocess.run(
        [sys.executable, "-c", SLICES, str(folder), str(tp // 2), str(tp)],
        capture_output=True,
        text=True,
        check=True,
    )
    read, local = map(int, done.stdout.split())
    return read / local


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="autotp-bench-") as base:
        folder = write_source(Path(base, "llama"), GIGABYTES)
        layers = len(list(folder.glob("*.safetensors"))) - 1
        (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
        os.sync()
        runs: dict[str, list[Load]] = {"autotp": []}
        if importlib.util.find_spec("accelerate"):  # transformers' tensor-parallel load needs it
            runs["transformers"] = []
        for _ in range(RUNS):
            for who, found in runs.items():
                found.append(load(who, folder))
        read = columns(folder, 8)
        size = size_of(folder)
    clock = {who: statistics.median(one.seconds for one in found) for who, found in runs.items()}
    beyond = max(one.beyond for one in runs["autotp"])
    print(f"load of {size / 1e9:.2f} GB on {TP} ranks from the disk, all bytes touched, medians of {RUNS}:")
    for who, found in runs.items():
        worked = statistics.median(one.processor for one in found)
        print(f"  {who} {clock[who]:.2f} s, {worked:.2f} s of the processor a rank")
    if "transformers" not in runs:
        print("  transformers' own load is not compared: it needs accelerate")
    print(f"  {beyond / (1 << 20):.1f} MiB beyond a rank's own part (at most {MEMORY >> 20})")
    print(f"  column-cut slices over 8 ranks: {read:.2f} of their size from the disk (at most {READ})")
    slower = clock["autotp"] >= clock.get("transformers", math.inf)
    return 1 if slower or beyond > MEMORY or read > READ else 0


if __name__ == "__main__":
    sys.exit(main())
