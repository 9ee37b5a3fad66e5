"""Sample inputs for any module: for each argument of its forward, what it first meets.

A forward that is given something of the wrong shape stops at the first op that cannot take it. So the
arguments are chosen one after the other, each as the candidate with which the forward gets furthest; the
candidates come from the layers: an embedding takes ids, a linear layer its features, a convolution images.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autotp.diagnostic import UsageError
from autotp.trace.graph import TraceError
from autotp.trace.inputs import Samples
from autotp.trace.recorder import record
from autotp.trace.sizes import Sizes

__all__ = ["found"]

_ROUNDS = 3
_TRIES = 400
_SECONDS = 20.0  # of the processor
_OPTIONAL = 3  # arguments with a default of None that are given all the same
_DONE = 1 << 30


@dataclass(frozen=True)
class _Candidate:
    shape: tuple[int, ...]
    kind: str  # "float", "mask", or "ids"
    below: int = 2


def found(module: nn.Module) -> Samples:
    """Samples with which the forward of `module` runs.

    Raises UsageError, with the call that got furthest, when there are none.
    """
    name = type(module).__name__
    parameters = [p for p in inspect.signature(module.forward).parameters.values() if p.kind not in _VARIADIC]
    required = [p for p in parameters if p.default is p.empty]
    # Arguments that may be left out often may not: forward(x=None).
    optional = [p for p in parameters if p.default is None]
    sizes, others = Sizes.of(module), Sizes.of(module, pair=1)
    search = _Search(module, list(_candidates(module, sizes)))
    best: tuple[int, Samples, TraceError | None] = (-1, Samples((), {}, "found"), None)
    for extra in range(min(len(optional), _OPTIONAL) + 1):
        result = search.run([*required, *optional[:extra]])
        if result[2] is None:
            return replace(result[1], also=search.longer(sizes.sequence), pair=search.other(sizes, others))
        best = max(best, result, key=lambda r: r[0])
        if search.ended:
            break
    wanted = ", ".join(p.name for p in required or optional[:_OPTIONAL]) or "none"
    first = next(iter(required or optional), None)
    raise UsageError(
        f"{name}: autotp cannot tell what forward({wanted}) takes. Pass sample inputs: "
        f"inputs=x, inputs=(x, y) or inputs={{'{first.name if first is not None else 'x'}': x}}\n"
        f"  = note: the nearest try was {_call(best[1])}: {best[2]}"
        + (f" ({best[2].source})" if best[2] is not None and best[2].source is not None else "")
        + "\n  = help: on the command line a factory gives them: it returns (model, inputs)"
    )


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class _Search:
    def __init__(self, module: nn.Module, candidates: list[_Candidate]) -> None:
        self.module, self.candidates, self.tries = module, candidates, 0
        floats = next((p for p in module.parameters() if p.is_floating_point()), None)
        self.dtype = floats.dtype if floats is not None else torch.get_default_dtype()
        on_meta = floats is None or floats.is_meta
        self.device = torch.device("cpu") if on_meta or floats is None else floats.device
        self.begun = time.process_time()
        self.parameters: list[inspect.Parameter] = []
        self.chosen: dict[str, _Candidate] = {}

    @property
    def ended(self) -> bool:
        """The search takes no longer than this."""
        return self.tries > _TRIES or time.process_time() - self.begun > _SECONDS

    def run(self, parameters: list[inspect.Parameter]) -> tuple[int, Samples, TraceError | None]:
        """How far the forward gets with the best choice, that choice, and what stops it."""
        names = [p.name for p in parameters]
        chosen = dict.fromkeys(names, self.candidates[0]) if self.candidates else {}
        best, error = self._far(parameters, chosen)
        for _ in range(_ROUNDS if self.candidates else 0):
            before = best
            for name in names:
                for candidate in self.candidates:
                    if best == _DONE or self.ended:
                        break
                    tried = {**chosen, name: candidate}
                    far, failed = self._far(parameters, tried)
                    if far > best:
                        best, chosen, error = far, tried, failed
            if best == before:
                break
        self.parameters, self.chosen = parameters, chosen
        return best, self._samples(parameters, chosen), error

    def longer(self, sequence: int) -> tuple[Samples, ...]:
        """What was found as [batch, features], as [batch, sequence, features], if that runs too."""
        flat = [n for n, c in self.chosen.items() if c.kind == "float" and len(c.shape) == 2]
        if not flat:
            return ()
        shapes = {n: self.chosen[n].shape for n in flat}
        chosen = self.chosen | {n: _Candidate((s[0], sequence, s[1]), "float") for n, s in shapes.items()}
        far, _ = self._far(self.parameters, chosen)
        return (self._samples(self.parameters, chosen),) if far == _DONE else ()

    def other(self, sizes: Sizes, others: Sizes) -> Samples | None:
        """What was found, with other sizes; None where it does not run with them."""
        sizes_of = {sizes.batch: others.batch, sizes.sequence: others.sequence}
        chosen = {
            n: replace(c, shape=tuple(sizes_of.get(size, size) for size in c.shape))
            for n, c in self.chosen.items()
        }
        if not self.chosen or self._far(self.parameters, chosen)[0] != _DONE:
            return None
        return self._samples(self.parameters, chosen)

    def _far(
        self, parameters: list[inspect.Parameter], chosen: dict[str, _Candidate]
    ) -> tuple[int, TraceError | None]:
        self.tries += 1
        samples = self._samples(parameters, chosen)
        try:
            trace = record(self.module, samples.args, samples.kwargs, grad=False)
        except TraceError as error:
            # What branches on values got past every shape.
            return (_DONE, None) if error.dynamic else (error.ops, error)
        nothing = not trace.outputs and not trace.ops()
        return (0, TraceError("the forward computes nothing", "", None)) if nothing else (_DONE, None)

    def _samples(self, parameters: list[inspect.Parameter], chosen: dict[str, _Candidate]) -> Samples:
        generator = torch.Generator().manual_seed(0)
        made = {n: self._tensor(c, generator) for n, c in chosen.items()}
        by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name in made]
        # After an argument that is left out, the rest goes by name.
        args = [made[p.name] for p in parameters if p.name in made and p.name not in by_name]
        return Samples(tuple(args), {n: made[n] for n in by_name}, "found")

    def _tensor(self, candidate: _Candidate, generator: torch.Generator) -> torch.Tensor:
        if candidate.kind == "ids":
            made = torch.randint(0, candidate.below, candidate.shape, generator=generator)
        elif candidate.kind == "mask":
            made = torch.ones(candidate.shape, dtype=torch.bool)
        else:
            made = torch.randn(candidate.shape, generator=generator, dtype=torch.float64).to(self.dtype)
        return made.to(self.device)


def _candidates(module: nn.Module, sizes: Sizes) -> Iterator[_Candidate]:
    """What the layers take, in the order of the layers; then what any tensor of the module could meet."""
    seen: set[_Candidate] = set()
    batch, sequence = sizes.batch, sizes.sequence

    def every() -> Iterator[_Candidate]:
        for layer in module.modules():
            for kinds, of in _LAYERS:
                if isinstance(layer, kinds):
                    yield from of(layer, batch, sequence)
            if getattr(layer, "nx", None) is not None and hasattr(layer, "nf"):
                yield from _features(int(layer.nx), batch, sequence)  # type: ignore[arg-type]
        for tensor in module.parameters():
            for size in dict.fromkeys(
                (tensor.shape[-1], tensor.shape[0]) if tensor.dim() >= 2 else tensor.shape
            ):
                yield from _features(size, batch, sequence)
        yield _Candidate((batch, sequence), "mask")
        yield _Candidate((sequence, sequence), "mask")
        yield _Candidate((batch,), "ids")
        yield _Candidate((batch,), "float")
        yield _Candidate((batch, sequence), "float")

    for candidate in every():
        if candidate not in seen:
            seen.add(candidate)
            yield candidate


def _features(size: int, batch: int, sequence: int) -> Iterator[_Candidate]:
    yield _Candidate((batch, size), "float")
    yield _Candidate((batch, sequence, size), "float")


def _images(channels: int, batch: int) -> Iterator[_Candidate]:
    # Two primes, which a fully convolutional module takes; then the sizes of the data sets.
    for high, wide in ((37, 41), (28, 28), (32, 32), (64, 64), (224, 224)):
        yield _Candidate((batch, channels, high, wide), "float")


def _ids(layer: Any, batch: int, sequence: int) -> Iterator[_Candidate]:
    yield _Candidate((batch, sequence), "ids", layer.num_embeddings)
    yield _Candidate((batch,), "ids", layer.num_embeddings)


def _floats(*shapes: tuple[int, ...]) -> Iterator[_Candidate]:
    return (_Candidate(shape, "float") for shape in shapes)


Of = Callable[[Any, int, int], Iterator[_Candidate]]
_LAYERS: list[tuple[tuple[type[nn.Module], ...], Of]] = [
    ((nn.Embedding, nn.EmbeddingBag), _ids),
    ((nn.Linear,), lambda m, b, s: _features(m.in_features, b, s)),
    ((nn.Bilinear,), lambda m, b, s: _floats((b, m.in1_features), (b, m.in2_features))),
    ((nn.LayerNorm, nn.RMSNorm), lambda m, b, s: _features(m.normalized_shape[-1], b, s)),
    ((nn.MultiheadAttention,), lambda m, b, s: _floats((b, s, m.embed_dim))),
    ((nn.RNNBase,), lambda m, b, s: _floats((b, s, m.input_size))),
    ((nn.Conv1d,), lambda m, b, s: _floats((b, m.in_channels, 67), (b, m.in_channels, 128))),
    ((nn.Conv2d,), lambda m, b, s: _images(m.in_channels, b)),
    ((nn.Conv3d,), lambda m, b, s: _floats((b, m.in_channels, 17, 19, 23))),
    ((nn.BatchNorm1d,), lambda m, b, s: _floats((b, m.num_features))),
    ((nn.BatchNorm2d,), lambda m, b, s: _images(m.num_features, b)),
]


def _call(samples: Samples) -> str:
    def one(value: torch.Tensor) -> str:
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"

    parts = [one(a) for a in samples.args] + [f"{k}={one(v)}" for k, v in samples.kwargs.items()]
    return f"forward({', '.join(parts)})"
