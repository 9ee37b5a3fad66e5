"""Run every rank of a plan in one process, and compare with the unsharded model.

The proof shows that a rank's run is its part of the whole run; this shows the numbers: outputs on every
rank, the gradient of every parameter and input, and the state_dict merged from all ranks.

    max|Δoutput| <= tol · max(1, max|output|)
    max|Δg|      <= tol · max(max|g|, 1e-3 · the largest gradient of the model)      for every parameter

The floor is there because some true gradients are zero (a key's bias before a softmax). Where
all are, a typical output stands for the largest gradient.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autotp.analysis import Analysis
from autotp.comm import Group, simulate
from autotp.comm.baton import read_globals, write_globals
from autotp.diagnostic import UsageError
from autotp.placement import Shard
from autotp.precision import Compared, compared_in
from autotp.rewrite.apply import apply
from autotp.slicing import merge, split
from autotp.trace.graph import tensors_in
from autotp.trace.inputs import make

__all__ = ["Verification", "compare"]

FLOOR = 1e-3


@dataclass(frozen=True)
class Verification:
    """How far the sharded model is from the unsharded one.

    - `max_output_diff`   the largest |difference| of an output element, over all ranks
    - `max_grad_diff`     the largest |difference| of a gradient, relative as above, over all parameters
    - `worst_parameter`   the parameter or input with that gradient
    - `dtype`             what the model was compared in
    - `tolerance`         what both are held to: by the least precise dtype that the forward computes in
    - `zero_gradients`    parameters whose true gradient is zero, so that only the floor compares them
    - `state_dict_equal`  whether the ranks' parts merge to the original, bit for bit
    - `collectives`       per rank, {"forward": {name: count}, "backward": {name: count}}
    """

    ok: bool
    max_output_diff: float
    max_grad_diff: float
    worst_parameter: str
    dtype: torch.dtype | None
    tolerance: float
    state_dict_equal: bool
    modes: tuple[str, ...]
    zero_gradients: tuple[str, ...] = ()
    collectives: tuple[Mapping[str, Mapping[str, int]], ...] = ()

    def __str__(self) -> str:
        state = "equal" if self.state_dict_equal else "DIFFERENT"
        worst = f" ({self.worst_parameter})" if self.worst_parameter else ""
        return (
            f"{'ok' if self.ok else 'WRONG'}: outputs differ by {self.max_output_diff:.1e}, gradients by "
            f"{self.max_grad_diff:.1e}{worst}, tolerance {self.tolerance:.0e}; merged state_dict {state}; "
            f"modes {', '.join(self.modes)}"
        )


@dataclass
class _Run:
    """One forward and backward of one rank, or of the unsharded model."""

    outputs: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    collectives: dict[str, Counter[str]] = field(default_factory=dict)


def compare(
    model: nn.Module, analysis: Analysis, *, inputs: Any, weights: str, dtype: torch.dtype | None
) -> Verification:
    """Verify an analysis that is ok; `autotp.verify` has the arguments."""
    if weights not in ("random", "own"):
        raise UsageError(f'weights is "random" or "own", not {weights!r}')
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise UsageError("verify computes, so it needs a model with weights; this one is on the meta device")
    base = _prepared(model, weights)
    compared = compared_in(base, make(base, inputs), dtype)
    base = compared.model
    computed = next((p.dtype for p in base.parameters() if p.is_floating_point()), None)
    tolerance = compared.tolerance()
    if analysis.random_in_eval:
        raise UsageError(
            f"{analysis.random_in_eval[0] or type(model).__name__} draws random numbers on shards in eval "
            "mode, where ranks differ from the unsharded model, so their numbers cannot be compared"
        )
    modes = ["eval"] + ["train"] * ("train" in analysis.modes and not analysis.random)
    output = gradient = 0.0
    worst, equal, zero = "", True, []
    collectives: tuple[Mapping[str, Mapping[str, int]], ...] = ()
    for mode in modes:
        base.train(mode == "train")
        alone, *copies = (copy.deepcopy(base) for _ in range(analysis.tp + 1))

        start = read_globals()  # what is drawn for whole values is the same everywhere
        with _no_other(model, base):
            reference = _run(alone, compared)
            write_globals(start)
            runs = simulate(analysis.tp, partial(_rank, copies, analysis, compared))
        output = max([output, *(_difference(reference.outputs, run.outputs) for run in runs)])
        for name, (diff, is_zero) in _gradients(reference, runs, analysis.layouts).items():
            if diff > gradient or not worst:
                gradient, worst = max(diff, gradient), name
            if is_zero and name not in zero:
                zero.append(name)
        equal = equal and _merged_equal(base, runs, analysis.layouts)
        collectives = tuple(run.collectives for run in runs)
    scale = max([1.0, *(float(o.abs().max()) for o in reference.outputs if o.numel())])
    ok = output <= tolerance * scale and gradient <= tolerance and equal
    return Verification(
        ok, output, gradient, worst, computed, tolerance, equal, tuple(modes), tuple(zero), collectives
    )


def _rank(copies: Sequence[nn.Module], analysis: Analysis, compared: Compared, group: Group) -> _Run:
    counted = _Counting(group)
    apply(copies[group.rank], analysis, counted, guarded=False)  # as in the traces, but in float64
    return _run(copies[group.rank], compared, counted)


def _prepared(model: nn.Module, weights: str) -> nn.Module:
    """A copy to compute with: with weights that hide nothing, every parameter trainable."""
    try:
        base = copy.deepcopy(model)
    except Exception as error:
        raise UsageError(
            f"{type(model).__name__} cannot be deep-copied, so ranks cannot be simulated: {error}"
        ) from error
    if weights == "random":
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in base.parameters():
                if not parameter.is_floating_point():
                    continue
                parameter.requires_grad_()
                drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
                normal = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1
                around_one = parameter.dim() == 1 and bool((parameter == 1).all())  # a norm's weight
                parameter.copy_((0.5 + drawn) if around_one else normal)
    return base


def _run(model: nn.Module, compared: Compared, counted: _Counting | None = None) -> _Run:
    """One forward and backward; the loss weighs every output element with a fixed random number."""
    leaves: dict[str, Tensor] = {}

    def leaf(path: Any, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            value = value.detach().clone().requires_grad_()
            leaves[f"input {pytree.keystr(path)}"] = value
        return value

    samples = compared.samples
    args, kwargs = pytree.tree_map_with_path(leaf, (tuple(samples.args), dict(samples.kwargs)))
    run = _Run()
    if counted is not None:
        counted.phase("forward")
    with compared.running():
        out = model(*args, **kwargs)
    outputs = [t for _, t, cached in tensors_in(out) if not cached]
    generator = torch.Generator().manual_seed(1)
    loss: Tensor | None = None
    for tensor in outputs:
        run.outputs.append(tensor.detach().clone())
        if tensor.requires_grad and tensor.is_floating_point():
            weight = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)
            term = (tensor * weight).sum()
            loss = term if loss is None else loss + term
    if counted is not None:
        counted.phase("backward")
    if loss is not None:
        with compared.running():  # a checkpoint runs its forward again
            loss.backward()  # type: ignore[no-untyped-call]
    for name, tensor in (*model.named_parameters(), *leaves.items()):
        if tensor.grad is not None:
            run.gradients[name] = tensor.grad.detach().clone()
    run.state = {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())}
    run.collectives = counted.counts if counted is not None else {}
    return run


def _difference(wanted: Sequence[Tensor], got: Sequence[Tensor]) -> float:
    if [t.shape for t in wanted] != [t.shape for t in got]:
        return float("inf")
    return max((_distance(a, b) for a, b in zip(wanted, got, strict=True)), default=0.0)


def _distance(wanted: Tensor, got: Tensor) -> float:
    """The largest |difference|; a NaN on one side only is infinitely far."""
    if not wanted.numel():
        return 0.0
    a, b = wanted.to(torch.float64), got.to(torch.float64)
    same = (a == b) | (a.isnan() & b.isnan())
    far = torch.where(same, torch.zeros_like(a), (a - b).abs())
    return float(torch.nan_to_num(far, nan=float("inf")).max())


def _gradients(
    reference: _Run, runs: Sequence[_Run], layouts: Mapping[str, Shard]
) -> dict[str, tuple[float, bool]]:
    """name -> (relative difference over all ranks, whether the true gradient is zero)."""
    largest = max(map(_size, reference.gradients.values()), default=0.0)
    typical = _typical(reference.outputs)
    largest = largest if largest > 1e-6 * typical else typical  # else all that there is is rounding
    found: dict[str, tuple[float, bool]] = {}
    names = dict.fromkeys([*reference.gradients, *(n for run in runs for n in run.gradients)])
    for name in names:
        wanted = reference.gradients.get(name)
        parts = [run.gradients.get(name) for run in runs]
        if wanted is None or any(p is None for p in parts):
            found[name] = (float("inf"), False)
            continue
        own = _size(wanted)
        scale = max(own, FLOOR * largest) or 1.0
        pairs = zip(_parts(wanted, layouts.get(name), len(runs)), parts, strict=True)
        difference = max(
            _distance(a, b) if b is not None and a.shape == b.shape else float("inf") for a, b in pairs
        )
        found[name] = (difference / scale, own <= 1e-12 * largest)
    return found


def _typical(outputs: Sequence[Tensor]) -> float:
    """The median size of an output element, which no masked score moves."""
    sizes = [t.abs().flatten().to(torch.float64) for t in outputs if t.is_floating_point()]
    finite = torch.cat(sizes) if sizes else torch.zeros(0)
    finite = finite[finite.isfinite()]
    return float(finite.median()) if finite.numel() else 0.0


def _size(gradient: Tensor) -> float:
    """The largest |element|; a NaN, which the ranks must have in the same places, has none."""
    return float(torch.nan_to_num(gradient.abs(), nan=0.0).max()) if gradient.numel() else 0.0


def _merged_equal(base: nn.Module, runs: Sequence[_Run], layouts: Mapping[str, Shard]) -> bool:
    """Whether the ranks' parts give back every parameter (buffers may change in a train forward)."""
    for name, tensor in base.named_parameters():
        shard = layouts.get(name)
        parts = [run.state[name] for run in runs]
        wanted = _parts(tensor.detach(), shard, len(runs))
        if not all(torch.equal(a, b) for a, b in zip(wanted, parts, strict=True)):
            return False
        if shard is not None and not torch.equal(merge(parts, shard), tensor.detach()):
            return False
    return True


def _parts(whole: Tensor, shard: Shard | None, tp: int) -> list[Tensor]:
    """What each rank is to have of a tensor; what several hold, every one of them."""
    return [whole] * tp if shard is None else split(whole, shard)


@contextlib.contextmanager
def _no_other(*models: nn.Module) -> Iterator[None]:
    """Raises UsageError when a module of the originals runs while only their copies should."""
    ran: list[str] = []

    def watching(path: str) -> Callable[..., None]:
        return lambda *_: ran.append(path)

    handles = [
        module.register_forward_pre_hook(watching(path))
        for model in models
        for path, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if ran:
            raise UsageError(
                f"{type(models[0]).__name__}: its {ran[0]} runs when a copy of the model does: the model "
                "holds a reference to a part of itself that deepcopy does not follow, so ranks cannot be "
                "simulated"
            )


class _Counting:
    """A group that counts its collectives by phase."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.counts: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
        self._phase = "forward"

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size

    def phase(self, name: str) -> None:
        self._phase = name

    def all_reduce(self, x: Tensor) -> Tensor:
        self.counts[self._phase]["all-reduce"] += 1
        return self._group.all_reduce(x)

    def all_reduce_later(self, x: Tensor) -> Callable[[], Tensor]:
        self.counts[self._phase]["all-reduce"] += 1
        return self._group.all_reduce_later(x)

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        self.counts[self._phase]["all-gather"] += 1
        return self._group.all_gather(x, dim, sizes)

    def reduce_scatter(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        self.counts[self._phase]["reduce-scatter"] += 1
        return self._group.reduce_scatter(x, dim, sizes)

    def exchange(self, obj: Any, *, timeout: float = 60.0) -> list[Any]:
        return self._group.exchange(obj, timeout=timeout)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Counting:
        return self
