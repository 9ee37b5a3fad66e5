"""Calls measured in turn on every rank, so that what else the machine does meets them all alike."""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

__all__ = ["mean_of", "measure", "on_ranks"]

WARM_UP = 3


def measure(
    calls: dict[str, Callable[[], object]], runs: int, base: str | None = None
) -> dict[str, dict[str, float]]:
    """The median seconds of each call, run in turn: of the processor (all threads of a rank), of the wall.

    A barrier stands before every call, and the order of a round is drawn, alike on all ranks. With a `base`
    the seconds of the others are its median times the median of their ratios to it, each of one round: what
    slows a whole round down is in both.
    """
    found: dict[str, dict[str, list[float]]] = {name: {"cpu": [], "wall": []} for name in calls}
    for run in range(runs + WARM_UP):
        for name in random.Random(run).sample(list(calls), len(calls)):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            calls[name]()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            if run >= WARM_UP:
                found[name]["cpu"].append(cpu)
                found[name]["wall"].append(wall)
    return {
        name: {clock: _seconds(times, found[base or name][clock]) for clock, times in clocks.items()}
        for name, clocks in found.items()
    }


def _seconds(times: list[float], base: list[float]) -> float:
    ratios = [time / other for time, other in zip(times, base, strict=True)]
    return statistics.median(base) * statistics.median(ratios)


def _rank(rank: int, work: Callable[..., Any], tp: int, folder: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=tp)
    torch.manual_seed(0)
    Path(folder, f"{rank}.json").write_text(json.dumps(work(tp, *arguments)))
    dist.destroy_process_group()


def on_ranks(work: Callable[..., Any], tp: int, *arguments: Any) -> list[Any]:
    """What `work(tp, *arguments)` gives on each of `tp` gloo ranks of this machine, one thread each."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="autotp-bench-") as folder:
        torch.multiprocessing.spawn(_rank, (work, tp, folder, arguments), nprocs=tp)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(tp)]


def mean_of(ranks: list[Any], *keys: str) -> float:
    """The mean over the ranks of a figure that is found by `keys`."""
    values = []
    for found in ranks:
        for key in keys:
            found = found[key]
        values.append(found)
    return statistics.mean(values)
