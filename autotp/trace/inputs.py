"""Sample inputs for a trace: given by the caller, made from a transformers config, or found by trying.

Only shapes and dtypes matter to a trace; `verify` also runs on the values. Batch and sequence are primes
that equal no size of the model, so that a size in the recorded graph says where it comes from.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autotp.diagnostic import UsageError
from autotp.trace.recorder import TraceError, record

__all__ = ["Samples", "make", "primes"]


@dataclass(frozen=True)
class Samples:
    """The arguments of one forward. `origin` is "given", "config" or "found"."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    origin: str

    @classmethod
    def given(cls, inputs: Any) -> Samples:
        """From a tensor, a tuple of arguments, or a dict of keyword arguments.

        >>> Samples.given(torch.zeros(2, 3)).args[0].shape
        torch.Size([2, 3])
        """
        if isinstance(inputs, torch.Tensor):
            return cls((inputs,), {}, "given")
        if isinstance(inputs, Mapping):
            if not all(isinstance(key, str) for key in inputs):
                raise UsageError("inputs: a dict of samples is keyed by the names of forward's arguments")
            return cls((), dict(inputs), "given")
        if isinstance(inputs, (tuple, list)):
            return cls(tuple(inputs), {}, "given")
        raise UsageError(
            f"inputs is a tensor, a tuple of arguments or a dict of keyword arguments, not {type(inputs).__name__}"
        )


def make(module: nn.Module, inputs: Any = None) -> Samples:
    """The samples to trace `module` with: the given ones, else made from its config, else found.

    Raises UsageError when none can be found; it says what to pass.
    """
    if inputs is not None:
        return Samples.given(inputs)
    made = _from_config(module)
    return made if made is not None else _found(module)


def primes(above: int, avoid: frozenset[int] = frozenset()) -> Iterator[int]:
    """Primes larger than `above` that are not in `avoid`.

    >>> from itertools import islice
    >>> list(islice(primes(10, frozenset({13})), 2))
    [11, 17]
    """
    number = max(above, 1) + 1
    while True:
        if number not in avoid and all(number % d for d in range(2, int(number**0.5) + 1)):
            yield number
        number += 1


def _sizes(module: nn.Module) -> frozenset[int]:
    found = {n for t in (*module.parameters(), *module.buffers()) for n in t.shape}
    config = getattr(module, "config", None)
    values = vars(config).values() if config is not None and hasattr(config, "__dict__") else ()
    return frozenset(found | {v for v in values if isinstance(v, int)})


def _from_config(module: nn.Module) -> Samples | None:
    config = getattr(module, "config", None)
    main = getattr(module, "main_input_name", None)
    if config is None or not isinstance(main, str) or not callable(getattr(config, "to_dict", None)):
        return None
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_attention_heads", None) or 1
    heads = max(heads) if isinstance(heads, (list, tuple)) else int(heads)
    limit = getattr(text, "max_position_embeddings", None) or 1 << 20
    avoid = _sizes(module)
    device = next((t.device for t in module.parameters()), torch.device("cpu"))
    device = torch.device("cpu") if device.type == "meta" else device
    names = inspect.signature(module.forward).parameters
    sequence = next((p for p in primes(heads, avoid) if p > 4), 11)
    if sequence > limit - 2:
        sequence = max(2, limit - 2)
    batch = next(primes(sequence, avoid))
    generator = torch.Generator().manual_seed(0)

    def ids(length: int) -> torch.Tensor:
        size = getattr(text, "vocab_size", None) or 2
        return torch.randint(0, size, (batch, length), generator=generator).to(device)

    if main == "input_ids":
        kwargs: dict[str, Any] = {"input_ids": ids(sequence)}
        if "attention_mask" in names:
            mask = torch.ones(batch, sequence, dtype=torch.long)
            mask[0, : sequence // 3] = 0
            kwargs["attention_mask"] = mask.to(device)
        if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
            kwargs["decoder_input_ids"] = ids(next(primes(batch, avoid)))
        return Samples((), kwargs, "config")
    if main == "pixel_values":
        size = getattr(config, "image_size", None)
        channels = getattr(config, "num_channels", 3)
        if size is not None:
            high, wide = (size, size) if isinstance(size, int) else tuple(size)
            pixels = torch.randn(batch, channels, high, wide, generator=generator).to(device)
            return Samples((), {"pixel_values": pixels}, "config")
    return None


def _found(module: nn.Module) -> Samples:
    """Try, for a forward of one argument, the inputs that its layers could meet first."""
    required = [
        p
        for p in inspect.signature(module.forward).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    name = type(module).__name__
    if len(required) == 1:
        for sample in _candidates(module):
            try:
                record(module, (sample,), {}, grad=False)
            except TraceError:
                continue
            return Samples((sample,), {}, "found")
    wanted = ", ".join(p.name for p in required) or "none"
    raise UsageError(
        f"{name}: autotp cannot tell what forward({wanted}) takes. Pass sample inputs: "
        f"inputs=x, inputs=(x, y) or inputs={{'{required[0].name if required else 'x'}': x}}"
    )


def _candidates(module: nn.Module) -> Iterator[torch.Tensor]:
    """Ids for embeddings, features for linear layers and norms, images and signals for convolutions."""
    avoid = _sizes(module)
    sizes = primes(4, avoid)
    batch, sequence = next(sizes), next(sizes)
    floats = next((p for p in module.parameters() if p.is_floating_point()), None)
    dtype = floats.dtype if floats is not None else torch.get_default_dtype()
    device = floats.device if floats is not None and floats.device.type != "meta" else torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    seen: set[tuple[Any, ...]] = set()

    def features(*shape: int) -> Iterator[torch.Tensor]:
        if shape not in seen:
            seen.add(shape)
            yield torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    for layer in module.modules():
        if isinstance(layer, nn.Embedding) and ("ids", layer.num_embeddings) not in seen:
            seen.add(("ids", layer.num_embeddings))
            yield torch.randint(0, layer.num_embeddings, (batch, sequence), generator=generator).to(device)
        elif isinstance(layer, nn.Linear):
            yield from features(batch, layer.in_features)
            yield from features(batch, sequence, layer.in_features)
        elif isinstance(layer, (nn.LayerNorm, nn.RMSNorm)) and len(layer.normalized_shape) == 1:
            yield from features(batch, layer.normalized_shape[0])
            yield from features(batch, sequence, layer.normalized_shape[0])
        elif isinstance(layer, nn.Conv2d):
            yield from features(batch, layer.in_channels, 32, 32)
            yield from features(batch, layer.in_channels, 224, 224)
        elif isinstance(layer, nn.Conv1d):
            yield from features(batch, layer.in_channels, 64)
        elif getattr(layer, "nx", None) is not None and hasattr(layer, "nf"):
            yield from features(batch, sequence, layer.nx)
    for tensor in module.parameters():
        if tensor.dim() >= 2:
            yield from features(batch, tensor.shape[-1])
            yield from features(batch, tensor.shape[0])
