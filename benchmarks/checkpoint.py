"""How fast convert and merge are beside `cp -r` of the same bytes, and what memory and reads they take.

A checkpoint of 2 GB is converted (without digests, with the default ones, with sha256) and merged, each run
beside a `cp -r` in turn: ratios of neighbours say more than seconds, on a machine that others use too. Before
each run what was written is waited for, and as much memory is touched and freed as the run will need: a
virtual machine may have to get it first.

The limits are those of docs/design.md; sha256 is told without one.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from autotp.header import encode_header
from benchmarks.dry_run import processor_time
from benchmarks.llama_headers import HIDDEN, layer

TP = 4
RUNS = 5
# Least speed as a share of cp's: convert without digests, with the default ones, merge.
LIMITS = {"none": 0.90, "xxh3": 0.85, "merge": 0.70}
MEMORY = 64 << 20  # bytes above the interpreter with its imports
READ = 1.01  # bytes read, in sizes of the source
CONFIG = {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}

# One run in this process: what it took, the memory it added, and the bytes it read. A dry run comes first, so
# that all is imported.
RUN = """
import json, sys, time
from autotp.checkpoint import convert, merge
def told(file, key):
    return int(next(line for line in open(file) if line.startswith(key)).split()[1])
job, source, target, tp = sys.argv[1:]
def work(dry_run):
    if job == "merge":
        merge(source, target, dry_run=dry_run)
    else:
        plan = {"plan": "llama", "tp": int(tp), "check": "shapes", "digest": job}
        convert(source, target, dry_run=dry_run, **plan)
import autotp.checkpoint.carry
work(True)
memory, read = told("/proc/self/status", "VmHWM"), told("/proc/self/io", "rchar")
started, worked = time.perf_counter(), time.process_time()
work(False)
seconds, worked = time.perf_counter() - started, time.process_time() - worked
memory, read = told("/proc/self/status", "VmHWM") - memory, told("/proc/self/io", "rchar") - read
print(json.dumps([seconds, worked, memory * 1024, read]))
"""


class Cost(NamedTuple):
    """Seconds by the clock and of the processor, bytes of memory above the imports, and bytes read."""

    seconds: float
    processor: float
    memory: int
    read: int


def write_source(folder: Path, gigabytes: float) -> Path:
    """A checkpoint with the shapes of an 8B Llama, with a small vocabulary and as many layers as it takes."""
    folder.mkdir()
    files = [{"model.embed_tokens.weight": (16384, HIDDEN), "model.norm.weight": (HIDDEN,)}]
    files[0]["lm_head.weight"] = (16384, HIDDEN)
    size = nbytes(files[0])
    while size < gigabytes * 1e9:
        files.append(layer(len(files) - 1))
        size += nbytes(files[-1])
    noise = os.urandom(16 << 20)
    weight_map = {}
    for number, shapes in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        weight_map |= dict.fromkeys(shapes, name)
        raw, _ = encode_header({n: ("BF16", s, 2 * math.prod(s)) for n, s in shapes.items()}, {})
        with open(folder / name, "wb") as file:
            file.write(raw)
            for start in range(0, nbytes(shapes), len(noise)):
                file.write(noise[: nbytes(shapes) - start])
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def nbytes(shapes: dict[str, tuple[int, ...]]) -> int:
    """Bytes of all tensors, in bfloat16."""
    return sum(2 * math.prod(shape) for shape in shapes.values())


def size_of(folder: Path) -> int:
    """Bytes of all files under a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def settle(size: int) -> None:
    """Let the disk have all that was written, and use as much memory for a moment, so that it is there."""
    os.sync()
    with mmap.mmap(-1, size) as memory:
        for place in range(0, size, 4096):
            memory[place] = 1


def copy(source: Path, target: Path) -> tuple[float, float]:
    """Seconds of `cp -r` by the clock, and of the processor."""
    settle(int(size_of(source) * 1.1))
    started, worked = time.perf_counter(), processor_time()
    subprocess.run(["cp", "-r", source, target], check=True)
    spent = time.perf_counter() - started, processor_time() - worked
    shutil.rmtree(target)
    return spent


def run(job: str, source: Path, target: Path) -> Cost:
    """One conversion or merge in a fresh process."""
    settle(int(size_of(source) * 1.1))
    command = [sys.executable, "-c", RUN, job, str(source), str(target), str(TP)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return Cost(*json.loads(done.stdout))


def measure(folder: Path, gigabytes: float, runs: int) -> list[str]:
    """Print all figures; returns the limits that are not kept."""
    source, out = write_source(folder / "in", gigabytes), folder / "out"
    size = size_of(source)
    os.sync()
    print(f"{size / 1e9:.2f} GB over tp={TP}, beside `cp -r` right before, medians of {runs}:", flush=True)
    beside: dict[str, list[tuple[float, float]]] = {job: [] for job in ("none", "xxh3", "sha256", "merge")}
    costs: dict[str, list[Cost]] = {job: [] for job in beside}
    for _ in range(runs):
        for job in beside:
            if job == "merge":
                run("xxh3", source, out)
            beside[job].append(copy(source, folder / "copy"))
            costs[job].append(run(job, out, folder / "back") if job == "merge" else run(job, source, out))
            shutil.rmtree(out)
            shutil.rmtree(folder / "back", ignore_errors=True)
    return [job for job in beside if not told(job, beside[job], costs[job], size)]


def told(job: str, beside: Sequence[tuple[float, float]], costs: Sequence[Cost], size: int) -> bool:
    """Print one line; whether its limits are kept."""
    ratios = [clock / cost.seconds for (clock, _), cost in zip(beside, costs, strict=True)]
    worked = [processor / cost.processor for (_, processor), cost in zip(beside, costs, strict=True)]
    ratio, memory = statistics.median(ratios), max(cost.memory for cost in costs)
    seconds, read = statistics.median(cost.seconds for cost in costs), max(cost.read for cost in costs) / size
    name = job if job == "merge" else f"convert --digest {job}"
    print(
        f"  {name:24} {ratio:.2f} of cp's speed ({min(ratios):.2f} to {max(ratios):.2f}; "
        f"{statistics.median(worked):.2f} by processor time), {seconds:.2f} s, "
        f"{memory >> 20} MiB above the imports, {read:.3f} of the source read",
        flush=True,
    )
    return ratio >= LIMITS.get(job, 0) and memory <= MEMORY and read <= READ


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.1)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--folder", help="where to work; the files take three times the gigabytes")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="autotp-bench-", dir=options.folder) as folder:
        missed = measure(Path(folder), options.gigabytes, options.runs)
    print(f"limits not kept: {', '.join(missed)}" if missed else "all limits are kept")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
