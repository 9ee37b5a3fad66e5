"""The modes of a model: a trace proves one path, so each way in which a model runs is traced.

| mode | what | gradients | module.training |
|---|---|---|---|
| eval | the forward, as it is exported | yes | no |
| train | the same, with dropout | yes | yes |
| run time | without padding mask and as it runs when nothing traces it | yes | no |
| train at run time | the same, with dropout; with labels: train with labels, and with the loss | yes | yes |
| eval with other sizes | with the second pair of sizes, where run time cannot be traced | yes | no |
| eval on inputs of 3 dims | [batch, sequence, features] where [batch, features] was found | yes | no |
| eval with an encoder's states | for a decoder with matrices that no other mode reads | yes | no |
| decode | a forward that fills a cache, then one step of one token on it | no | no |
| inference | the forward alone, for models without a cache | no | no |
| inference at run time | as it runs when nothing traces it, without gradients | no | no |

Two pairs of batch and sequence sizes: the modes that run as nothing traces them have the second one, so that
every layer is proven with both. Sizes that are given have no pair.

While a model is being exported, transformers builds every mask, and attention repeats its kv heads; at run
time, without a mask, it asks the kernel to (`enable_gqa`). Both are proven.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from autotp.trace.branches import Watched
from autotp.trace.calls import Boundary
from autotp.trace.capture import capture
from autotp.trace.graph import Trace, TraceError
from autotp.trace.inputs import Samples
from autotp.trace.layers import Layers
from autotp.trace.recorder import Given, Guide, Step
from autotp.trace.signature import Words

__all__ = ["Captured", "Mode", "capture_modes", "modes", "signature", "takes_cache", "training"]


SIZES = "eval with other sizes"
CROSSED = "eval with an encoder's states"


@dataclass(frozen=True)
class Mode:
    """One way in which a model runs.

    Of the inputs `as_given` only those require a gradient that do, else every floating one;
    `numbers` among them note what they are asked.
    `optional` modes are autotp's guess of what the model can do: one that cannot be traced is no finding,
    and `otherwise` is tried in its place.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    grad: bool
    training: bool = False
    exporting: bool = True
    compiling: bool | None = None
    then: Step | None = None
    optional: bool = False
    otherwise: Mode | None = None
    as_given: bool = False
    numbers: bool = False

    def capture(
        self,
        module: nn.Module,
        *,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        before: Boundary | None = None,
        after: Boundary | None = None,
        like: Trace | None = None,
        guide: Guide | None = None,
        layers: Layers | None = None,
    ) -> Trace:
        """The trace of `module` in this mode; the other arguments are those of `capture`.

        Raises TraceError when it cannot be traced.
        """
        # A model in use may have parts that rest: `model.encoder.eval()`.
        with contextlib.nullcontext() if self.as_given else training(module, self.training):
            return capture(
                module, self.args, self.kwargs,
                grad=self.grad, shapes=shapes, before=before, after=after,
                exporting=self.exporting, compiling=self.compiling, then=self.then, like=like, guide=guide,
                layers=layers, as_given=self.as_given, numbers=self.numbers,
            )  # fmt: skip


@dataclass
class Captured:
    """The traces of a model: those that differ, by mode; the modes that another one covers, with its name;
    the modes that cannot be traced, and of those the guesses (`dropped`), which are no findings; the lines
    of the model's code that ran in any of them; the layers that were recorded once where they repeat; how the
    model was called in each mode, covered ones too, with its trace."""

    traces: list[tuple[Mode, Trace]] = field(default_factory=list)
    covered: dict[str, str] = field(default_factory=dict)
    failed: list[tuple[Mode, TraceError]] = field(default_factory=list)
    dropped: list[tuple[Mode, TraceError]] = field(default_factory=list)
    watched: Watched = field(default_factory=Watched)
    layers: Layers = field(default_factory=Layers)
    given: list[tuple[Mode, list[Words], Trace]] = field(default_factory=list)


def modes(module: nn.Module, samples: Samples) -> list[Mode]:
    """The modes in which `module` is to be traced, the plainest first."""
    args, kwargs = samples.args, dict(samples.kwargs)
    found = [Mode("eval", args, kwargs, True), Mode("train", args, kwargs, True, training=True)]
    # The second pair of sizes costs no trace of its own: what coincides in eval differs at run time.
    pair = samples.pair or samples
    found += [_run_time(module, pair), _run_time(module, pair, training=True)]
    found += [
        Mode(f"eval on inputs of {_rank(other)} dims", other.args, other.kwargs, True, optional=True)
        for other in samples.also
    ]
    inference = Mode("inference", args, kwargs, False)
    found.append(_decode(module, samples, inference) or inference)
    # Last: it is what run time does, but where code asks whether there are gradients.
    found.append(replace(_run_time(module, pair), name="inference at run time", grad=False, otherwise=None))
    if samples.crossed is not None:
        found.append(Mode(CROSSED, (), samples.crossed.kwargs, True, optional=True))
    return found


def capture_modes(module: nn.Module, samples: Samples, layers: Layers | None = None) -> Captured:
    """Trace `module` in every mode. A mode that records the same ops on the same values as an earlier one,
    with no more gradients, is covered by it. `layers` are those of `record`."""
    layers = Layers() if layers is None else layers
    result = Captured(layers=layers)
    seen: dict[Any, str] = {}
    traces: dict[str, Trace] = {}
    for listed in modes(module, samples):
        mode: Mode | None = listed
        if listed.name == CROSSED and not _unread(module, [trace for _, trace in result.traces]):
            continue
        while mode is not None:
            try:
                with result.watched:
                    trace = mode.capture(module, layers=layers)
            except TraceError as error:
                (result.dropped if mode.optional else result.failed).append((mode, error))
                mode = mode.otherwise
                continue
            result.given.append((mode, trace.given.get("", [])[:], trace))
            # Proven with gradients, a forward is proven without.
            told = signature(trace, gradients=mode.grad)
            known = seen.get(told)
            if known is not None:
                result.covered[mode.name] = known
                for path, calls in trace.given.items():
                    traces[known].given.setdefault(path, []).extend(calls)
                new = [one for one in trace.compared if one not in traces[known].compared]
                traces[known].compared += new
                for path, words in trace.gives.items():
                    traces[known].gives.setdefault(path, set()).update(words)
                for path, names in trace.changed.items():
                    traces[known].changed.setdefault(path, set()).update(names)
                traces[known].guessed |= trace.guessed
                for name, readers in trace.handed.items():
                    traces[known].handed.setdefault(name, set()).update(readers)
            else:
                traces[mode.name] = trace
                result.traces.append((mode, trace))
                seen[told] = mode.name
                if mode.grad:
                    seen.setdefault(signature(trace, gradients=False), mode.name)
            break
    return result


def _unread(module: nn.Module, traces: list[Trace]) -> bool:
    """Whether there are matrices that no trace reads; a layer that repeats another has its like."""
    read = {n.meta["name"] for trace in traces for n in trace.graph.nodes if n.op == "get_attr" and n.users}
    left = tuple(f"{repeat.path}." for trace in traces for repeat in trace.repeats)
    unread = (name for name, p in module.named_parameters() if p.dim() > 1 and name not in read)
    return any(not name.startswith(left) for name in unread)


def signature(trace: Trace, *, gradients: bool = True) -> tuple[Any, ...]:
    """All that a proof reads of a trace, as a value to compare."""
    ids: dict[fx.Node, Any] = {}
    lines: list[Any] = []
    for node in trace.graph.nodes:
        if node.op == "output":
            continue
        ids[node] = len(ids)
        meta = node.meta
        val = meta["val"]
        kept = val if isinstance(val, list) else [val]
        vals = tuple(v and (v.shape, str(v.dtype), v.grad and gradients) for v in kept)
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: f"%{ids[n]}")
        grads = tuple(sorted(ids[n] for n in meta.get("grads", ()))) if gradients else ()
        place = (meta["module"], meta.get("call", 0), meta.get("custom"))
        lines.append((str(node.target), meta.get("name"), repr(arguments), vals, grads, place))
    outputs = tuple((o.name, ids[o.node], o.cached) for o in trace.outputs)
    repeats = tuple(
        (r.path, r.of, r.call, tuple((ids[a], ids[b]) for a, b in r.given)) for r in trace.repeats
    )
    return (tuple(lines), outputs, repeats, trace.opaque, trace.route)


@contextlib.contextmanager
def training(module: nn.Module, mode: bool) -> Iterator[None]:
    """Set train or eval mode, and put every module's own flag back."""
    flags = [(m, m.training) for m in module.modules()]
    module.train(mode)
    try:
        yield
    finally:
        for owner, flag in flags:
            if owner.training is not flag:
                owner.training = flag


def _rank(samples: Samples) -> int:
    return max(
        (a.dim() for a in (*samples.args, *samples.kwargs.values()) if isinstance(a, torch.Tensor)), default=0
    )


def takes_cache(module: nn.Module) -> str | None:
    """The name under which a transformers model takes its cache."""
    if not callable(getattr(getattr(module, "config", None), "to_dict", None)):
        return None
    names = inspect.signature(module.forward).parameters
    return next((n for n in ("past_key_values", "cache_params", "cache") if n in names), None)


def _run_time(module: nn.Module, samples: Samples, *, training: bool = False) -> Mode:
    """Nothing tells the model that it is traced. A cache stands for "these are no packed sequences", which a
    model would otherwise ask of values. Some ops of experts run only where they are compiled."""
    kwargs = {k: v for k, v in samples.kwargs.items() if k != "attention_mask"}
    if takes_cache(module) is not None and "use_cache" in inspect.signature(module.forward).parameters:
        kwargs["use_cache"] = True
    name = ("train with labels" if samples.labels else "train at run time") if training else "run time"
    labels = samples.labels if training else {}
    last = None
    if labels:  # autotp's own: a model may want others
        whole = {**samples.kwargs, **labels}
        last = Mode(name, samples.args, whole, True, training=True, optional=True)
    elif samples.origin != "given" and not training:  # so that the second pair of sizes is traced at all
        last = Mode(SIZES, samples.args, samples.kwargs, True, optional=True)
    runs = Mode(
        name, samples.args, {**kwargs, **labels}, True,
        training=training, exporting=False, compiling=True, optional=True, otherwise=last,
    )  # fmt: skip
    return replace(runs, compiling=None, otherwise=runs)


def _decode(module: nn.Module, samples: Samples, inference: Mode) -> Mode | None:
    cache = takes_cache(module)
    ids = samples.kwargs.get("decoder_input_ids", samples.kwargs.get("input_ids"))
    if cache is None or samples.args or not isinstance(ids, torch.Tensor):
        return None
    names = inspect.signature(module.forward).parameters
    generating = {"logits_to_keep": 1, "return_dict": True}  # as `generate` calls it
    more = {name: value for name, value in generating.items() if name in names or "kwargs" in names}
    kwargs = {**samples.kwargs, **more, "use_cache": True}
    step = _DecodeStep(cache, {**samples.kwargs, **more})
    return Mode("decode", (), kwargs, False, then=step, optional=True, otherwise=inference)


@dataclass(frozen=True)
class _DecodeStep:
    """One token more, on the cache that the first forward filled."""

    cache: str
    kwargs: Mapping[str, Any]

    def __call__(self, out: Any, before: Given) -> Given:
        filled = getattr(out, self.cache, None)
        if filled is None:
            raise ValueError("the forward returns no cache")
        given: dict[str, Any] = {self.cache: filled, "use_cache": True}
        given |= {
            name: self.kwargs[name] for name in ("logits_to_keep", "return_dict") if name in self.kwargs
        }
        mask = self.kwargs.get("attention_mask")
        decoder = self.kwargs.get("decoder_input_ids")
        if decoder is not None:
            given |= {"encoder_outputs": (out.encoder_last_hidden_state,)}
            if mask is not None:
                given["attention_mask"] = torch.ones(mask.shape, dtype=mask.dtype)
        elif mask is not None:
            given["attention_mask"] = torch.ones(mask.shape[0], mask.shape[1] + 1, dtype=mask.dtype)
        name = "decoder_input_ids" if decoder is not None else "input_ids"
        given[name] = torch.zeros(self.kwargs[name].shape[0], 1, dtype=torch.long)
        return (), given
