"""What the parallel layers cost beside a hand-written pair, FairScale and torch, on two gloo ranks.

MLP 1024 -> 4096 -> 1024 without biases, 256 tokens, float32, one thread a rank. Medians of interleaved
runs; CPU time of a rank (all threads of its process) over the unsharded MLP's. The floor is half of the
MLP with no communication at all. Then cross entropy over a sharded vocabulary beside gathering it.

    python -m benchmarks.layers [runs]

FairScale is measured where it is installed (`pip install --no-deps fairscale==0.4.13`).
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autotp import mappings
from autotp.comm import group_of
from autotp.nn import ColumnParallelLinear, RowParallelLinear
from autotp.nn.functional import vocab_parallel_cross_entropy

WIDTH, HIDDEN, TOKENS, RUNS, LIMIT = 1024, 4096, 256, 41, 1.02
VOCABULARY = 32768


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: object, dy: Tensor) -> Tensor:
        dy = dy.contiguous()
        dist.all_reduce(dy)
        return dy


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: object, dy: Tensor) -> Tensor:
        return dy


class HandWritten(nn.Module):
    """The pair as one writes it for this one model, reducing in place."""

    def __init__(self, tp: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN // tp, bias=False)
        self.down = nn.Linear(HIDDEN // tp, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return _Reduce.apply(self.down(F.gelu(self.up(_Copy.apply(x)))))


def plain(hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, hidden, bias=False), nn.GELU(), nn.Linear(hidden, WIDTH, bias=False)
    )


def ours() -> nn.Module:
    return nn.Sequential(
        ColumnParallelLinear(WIDTH, HIDDEN, bias=False, gather_output=False),
        nn.GELU(),
        RowParallelLinear(HIDDEN, WIDTH, bias=False, input_is_parallel=True),
    )


def fairscale(tp: int) -> nn.Module:
    import fairscale.nn.model_parallel as theirs

    theirs.initialize.initialize_model_parallel(tp)
    return nn.Sequential(
        theirs.ColumnParallelLinear(WIDTH, HIDDEN, bias=False, gather_output=False),
        nn.GELU(),
        theirs.RowParallelLinear(HIDDEN, WIDTH, bias=False, input_is_parallel=True),
    )


def parallelize_module(tp: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.parallel import parallelize_module as parallelize

    return parallelize(
        plain(HIDDEN), init_device_mesh("cpu", (tp,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )


def contenders(tp: int) -> dict[str, nn.Module]:
    found = {
        "unsharded": plain(HIDDEN),
        "half, no communication": plain(HIDDEN // tp),
        "hand-written": HandWritten(tp),
        "autotp": ours(),
        "parallelize_module": parallelize_module(tp),
    }
    with contextlib.suppress(ImportError):
        found["fairscale"] = fairscale(tp)
    return found


def cpu_seconds(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def measure(calls: dict[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """The median CPU seconds of each call, run in turn."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for run in range(runs + 3):
        names = list(calls)
        turn = run % len(names)  # every call stands at every place of the round
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            seconds = cpu_seconds(calls[name])
            if run >= 3:
                found[name].append(seconds)
    return {name: statistics.median(times) for name, times in found.items()}


def mlp(tp: int, runs: int) -> dict[str, dict[str, float]]:
    models = contenders(tp)
    x = torch.randn(TOKENS, WIDTH)

    def forward(model: nn.Module) -> None:
        with torch.no_grad():
            model(x)

    def both(model: nn.Module) -> None:
        leaf = x.detach().requires_grad_()
        model(leaf).sum().backward()
        model.zero_grad()

    return {
        kind: measure({name: lambda m=model, c=call: c(m) for name, model in models.items()}, runs)
        for kind, call in (("forward", forward), ("forward + backward", both))
    }


class _Peak(TorchDispatchMode):
    """The largest sum of the bytes of new tensors that lived at one time, beside the inputs."""

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self.live = {x.untyped_storage().data_ptr(): 0 for x in inputs}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                if storage.data_ptr() not in self.live:
                    self.live[storage.data_ptr()] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, storage.data_ptr(), None)
        self.peak = max(self.peak, sum(self.live.values()))
        return result


def peak_bytes(call: Callable[[], object], *inputs: Tensor) -> int:
    """The bytes that a call allocates at most at one time."""
    with _Peak(*inputs) as mode:
        call()
    return mode.peak


def cross_entropy(tp: int, runs: int) -> dict[str, dict[str, float]]:
    logits = torch.randn(TOKENS, VOCABULARY // tp)
    target = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(0))
    group = group_of(None)

    def sharded() -> None:
        leaf = logits.detach().requires_grad_()
        vocab_parallel_cross_entropy(leaf, target, group=group, vocab_size=VOCABULARY).backward()

    def gathered() -> None:
        leaf = logits.detach().requires_grad_()
        F.cross_entropy(mappings.gather(leaf, group), target).backward()

    calls = {"autotp": sharded, "gather + F.cross_entropy": gathered}
    whole = TOKENS * VOCABULARY * 4
    return {
        "seconds": measure(calls, runs),
        "peak / whole logits": {name: peak_bytes(call, logits) / whole for name, call in calls.items()},
    }


def rank_main(rank: int, tp: int, folder: str, runs: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=tp)
    torch.manual_seed(0)
    found = {"mlp": mlp(tp, runs), "cross entropy": cross_entropy(tp, runs)}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main(runs: int = RUNS, tp: int = 2) -> int:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="autotp-bench-") as folder:
        torch.multiprocessing.spawn(rank_main, (tp, folder, runs), nprocs=tp)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(tp)]

    def mean(*keys: str) -> float:
        values = []
        for found in ranks:
            for key in keys:
                found = found[key]
            values.append(found)
        return statistics.mean(values)

    late = []
    print(f"MLP {WIDTH} -> {HIDDEN} -> {WIDTH}, {TOKENS} tokens, tp={tp}: CPU time a rank, median of {runs}")
    for kind in ranks[0]["mlp"]:
        whole, pair = mean("mlp", kind, "unsharded"), mean("mlp", kind, "hand-written")
        for name in ranks[0]["mlp"][kind]:
            seconds = mean("mlp", kind, name)
            print(
                f"  {kind:<20} {name:<24} {seconds * 1e3:7.2f} ms  {seconds / whole:.3f} of unsharded"
                f"  {seconds / pair:.3f} of hand-written"
            )
        if mean("mlp", kind, "autotp") > LIMIT * pair:
            late.append(kind)
    print(f"cross entropy, {TOKENS} tokens, vocabulary {VOCABULARY}, forward + backward")
    for name in ranks[0]["cross entropy"]["seconds"]:
        seconds, peak = (mean("cross entropy", k, name) for k in ("seconds", "peak / whole logits"))
        print(f"  {name:<26} {seconds * 1e3:7.2f} ms  peak {peak:.2f} of the whole logits")
    print(f"over {LIMIT} × hand-written: {', '.join(late) or 'none'}")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:2])))
