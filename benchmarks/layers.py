"""What the parallel layers cost beside a hand-written pair, FairScale and torch, on two gloo ranks.

MLP 1024 -> 4096 -> 1024 without biases, 256 tokens, float32, one thread a rank. Medians of interleaved
runs; CPU time of a rank (all threads of its process) over the unsharded MLP's. The floor is half of the
MLP with no communication at all. Where weights lie in memory moves a model's time by a percent, more than
the models differ, so all models of half the width compute with the same weights. Then cross entropy over a
sharded vocabulary beside gathering it.

    python -m benchmarks.layers [runs]

FairScale is measured where it is installed (`pip install --no-deps fairscale==0.4.13`).
"""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autotp import mappings
from autotp.comm import group_of
from autotp.nn import ColumnParallelLinear, RowParallelLinear
from autotp.nn.functional import vocab_parallel_cross_entropy
from benchmarks.by_hand import Copy, Reduce
from benchmarks.interleaved import mean_of, measure, on_ranks

WIDTH, HIDDEN, TOKENS, RUNS, LIMIT = 1024, 4096, 256, 200, 1.02
VOCABULARY = 32768
PEERS = ("fairscale", "parallelize_module")


class HandWritten(nn.Module):
    """The pair as one writes it for this one model, reducing in place."""

    def __init__(self, tp: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN // tp, bias=False)
        self.down = nn.Linear(HIDDEN // tp, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return Reduce.apply(self.down(F.gelu(self.up(Copy.apply(x)))))


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

    if not theirs.initialize.model_parallel_is_initialized():
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
    weights = list(found["hand-written"].parameters())
    for name, model in found.items():
        if name != "unsharded":
            compute_with(model, weights)
    return found


def compute_with(model: nn.Module, weights: list[nn.Parameter]) -> None:
    """Let the layers of `model` have these weights, in the memory where they lie."""
    layers = [module for module in model.modules() if hasattr(module, "weight")]
    for layer, weight in zip(layers, weights, strict=True):
        own = layer.weight
        if isinstance(own, DTensor):
            there = DTensor.from_local(weight.detach(), own.device_mesh, own.placements)
            layer.weight = nn.Parameter(there)
        else:
            layer.weight = weight


def mlp(tp: int, runs: int) -> dict[str, Any]:
    models = contenders(tp)
    x = torch.randn(TOKENS, WIDTH)

    def forward(model: nn.Module) -> None:
        with torch.no_grad():
            model(x)[0, 0].item()  # a sum that is still under way is waited for

    def both(model: nn.Module) -> None:
        leaf = x.detach().requires_grad_()
        model(leaf).sum().backward()
        leaf.grad[0, 0].item()
        model.zero_grad()

    return {
        kind: measure({name: partial(call, model) for name, model in models.items()}, runs)
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


def cross_entropy(tp: int, runs: int) -> dict[str, Any]:
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


def both(tp: int, runs: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    return {"mlp": mlp(tp, runs), "cross entropy": cross_entropy(tp, runs)}


def main(runs: int = RUNS, tp: int = 2) -> int:
    ranks = on_ranks(both, tp, runs)
    late = []
    print(f"MLP {WIDTH} -> {HIDDEN} -> {WIDTH}, {TOKENS} tokens, tp={tp}: time a rank, median of {runs}")
    for kind in ranks[0]["mlp"]:
        whole, pair = (mean_of(ranks, "mlp", kind, name, "cpu") for name in ("unsharded", "hand-written"))
        for name in ranks[0]["mlp"][kind]:
            cpu, wall = (mean_of(ranks, "mlp", kind, name, clock) for clock in ("cpu", "wall"))
            print(
                f"  {kind:<20} {name:<24} cpu {cpu * 1e3:7.2f} ms  {cpu / whole:.3f} of unsharded"
                f"  {cpu / pair:.3f} of hand-written  wall {wall * 1e3:7.2f} ms"
            )
        ours = mean_of(ranks, "mlp", kind, "autotp", "cpu")
        if ours > LIMIT * pair:
            late.append(f"{kind}: over {LIMIT} × hand-written")
        late += [
            f"{kind}: not below {peer}"
            for peer in PEERS
            if peer in ranks[0]["mlp"][kind] and ours >= mean_of(ranks, "mlp", kind, peer, "cpu")
        ]
    print(f"cross entropy, {TOKENS} tokens, vocabulary {VOCABULARY}, forward + backward")
    for name in ranks[0]["cross entropy"]["seconds"]:
        cpu, wall = (mean_of(ranks, "cross entropy", "seconds", name, clock) for clock in ("cpu", "wall"))
        peak = mean_of(ranks, "cross entropy", "peak / whole logits", name)
        print(
            f"  {name:<26} cpu {cpu * 1e3:7.2f} ms  wall {wall * 1e3:7.2f} ms  "
            f"peak {peak:.2f} of the whole logits"
        )
    print("\n".join(late) or f"below its peers, and within {LIMIT} × hand-written")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:2])))
