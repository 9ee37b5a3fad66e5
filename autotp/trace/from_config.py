"""Sample inputs of a transformers model, from its config and the names of its forward's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autotp.trace.graph import TraceError
from autotp.trace.inputs import Samples
from autotp.trace.recorder import record
from autotp.trace.sizes import Sizes

__all__ = ["from_config"]

# The position limits of configs, by the names that they go under.
_POSITIONS = (
    "max_position_embeddings", "n_positions", "max_target_positions", "n_ctx", "max_seq_len",
    "max_sequence_length", "max_seq_length", "context_length",
)  # fmt: skip
_OFFSET = 4  # learned position tables start at 0, 1, 2 or after the padding id
_MEDIA = ("pixel_values", "input_features", "input_values")


def from_config(module: nn.Module) -> Samples | None:
    """Samples for a transformers model; None for any other module, or where they do not run."""
    config = getattr(module, "config", None)
    main = getattr(module, "main_input_name", None)
    if config is None or not isinstance(main, str) or not callable(getattr(config, "to_dict", None)):
        return None
    made, other = _Inputs(module, config, pair=0), _Inputs(module, config, pair=1)
    tries = list(_tries(made, main))
    for kwargs in tries:
        # A model of one modality takes its main input; only one of several has to be asked.
        if len(tries) == 1 or _runs(module, kwargs):
            again = {name: other.tensor(name) for name in kwargs}
            pair = Samples((), again, "config", other.labels(again))
            crossed = _crossed(made, kwargs)
            return Samples((), kwargs, "config", made.labels(kwargs), pair=pair, crossed=crossed)
    return None


def _crossed(made: _Inputs, kwargs: Mapping[str, Any]) -> Samples | None:
    """The same arguments and an encoder's states, of another length."""
    width = getattr(made.text, "hidden_size", None)
    if "decoder_input_ids" in made.parameters or "input_ids" not in kwargs or not isinstance(width, int):
        return None
    for name in ("encoder_hidden_states", "encoder_outputs"):
        if name in made.parameters:
            states = made._floats(made.sizes.batch, made.sizes.decoder, width).to(made.device)
            return Samples((), {**kwargs, name: states if "states" in name else (states,)}, "config")
    return None


def _tries(made: _Inputs, main: str) -> Iterator[dict[str, Any]]:
    """The sets of arguments that a forward may ask for, the smallest first."""
    names = made.parameters
    required = [n for n, p in names.items() if p.default is p.empty and p.kind not in _VARIADIC]
    base = list(dict.fromkeys([main, *required]))
    if made.encoder_decoder and "decoder_input_ids" in names:
        base.append("decoder_input_ids")
    base += [n for n in ("attention_mask",) if n in names and main == "input_ids"]
    several = [n for n in _MEDIA if n in names and n not in base and made.several]
    if "input_ids" in names and "input_ids" not in base and made.several:
        several.append("input_ids")
    for extra in dict.fromkeys(((), *((n,) for n in several), tuple(several))):
        wanted = dict.fromkeys([*base, *extra])
        found = {name: made.tensor(name) for name in wanted}
        if all(value is not None for value in found.values()):
            yield found


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _runs(module: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    try:
        record(module, (), kwargs, grad=False)
    except TraceError as error:
        return error.dynamic
    return True


class _Inputs:
    """Makes the tensor of an argument, by its name."""

    def __init__(self, module: nn.Module, config: Any, *, pair: int) -> None:
        self.module, self.config = module, config
        text = getattr(config, "get_text_config", None)
        self.text = text() if callable(text) else config
        self.several = bool(getattr(type(config), "sub_configs", None))
        self.encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
        self.parameters = dict(inspect.signature(module.forward).parameters)
        limits = [getattr(c, n, None) for c in (config, self.text) for n in _POSITIONS]
        limit = min((n for n in limits if isinstance(n, int) and n > 0), default=None)
        self.sizes = Sizes.of(module, limit=None if limit is None else max(1, limit - _OFFSET), pair=pair)
        self.generator = torch.Generator().manual_seed(pair)
        held = next((t.device for t in module.parameters()), torch.device("cpu"))
        self.device = torch.device("cpu") if held.type == "meta" else held
        floats = (t.dtype for t in module.parameters() if t.is_floating_point())
        self.dtype = next(floats, torch.get_default_dtype())

    def tensor(self, name: str) -> torch.Tensor | None:
        """The tensor of an argument; None for a name that says nothing."""
        maker = _MAKERS.get(name)
        made = maker(self) if maker is not None else None
        return None if made is None else made.to(self.device)

    def labels(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Labels for the loss, as a model of this kind takes them; none where that is not known."""
        if "labels" not in self.parameters:
            return {}
        kind = type(self.module).__name__
        ids = kwargs.get("decoder_input_ids", kwargs.get("input_ids"))
        if kind.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")):
            return {} if ids is None else {"labels": self._numbers(tuple(ids.shape), self._vocab())}
        classes = getattr(self.config, "num_labels", None) or 2
        if kind.endswith(("ForSequenceClassification", "ForImageClassification")):
            return {"labels": self._numbers((self.sizes.batch,), classes)}
        if kind.endswith("ForTokenClassification") and ids is not None:
            return {"labels": self._numbers(tuple(ids.shape), classes)}
        return {}

    def _numbers(self, shape: tuple[int, ...], below: int) -> torch.Tensor:
        return torch.randint(0, below, shape, generator=self.generator).to(self.device)

    def _floats(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def _vocab(self) -> int:
        found = getattr(self.text, "vocab_size", None) or getattr(self.config, "vocab_size", None)
        return found if isinstance(found, int) else 2

    def _part(self, *names: str) -> Any:
        """The config of a modality, or the config itself."""
        return next((p for n in names if (p := getattr(self.config, n, None)) is not None), self.config)

    def ids(self, length: int) -> torch.Tensor:
        """Ids that are no padding: a model may read its positions from them."""
        padding = getattr(self.text, "pad_token_id", None)
        made = self._numbers((self.sizes.batch, length), self._vocab())
        return torch.where(made == padding, (made + 1) % self._vocab(), made) if padding is not None else made

    def mask(self) -> torch.Tensor:
        """A real padding mask: the first row ends early."""
        mask = torch.ones(self.sizes.batch, self.sizes.sequence, dtype=torch.long)
        mask[0, -max(1, self.sizes.sequence // 3) :] = 0
        return mask

    def pixels(self) -> torch.Tensor | None:
        vision = self._part("vision_config", "image_config")
        size = getattr(vision, "image_size", None) or getattr(vision, "img_size", None) or 224
        if isinstance(size, Mapping):
            size = (size.get("height", 224), size.get("width", 224))
        high, wide = (size, size) if isinstance(size, int) else (size[0], size[-1])
        channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
        frames = getattr(vision, "num_frames", None)
        leading = (self.sizes.batch,) if frames is None else (self.sizes.batch, frames)
        return self._floats(*leading, channels, high, wide)

    def features(self) -> torch.Tensor | None:
        audio = self._part("audio_config", "encoder_config")
        bins = getattr(audio, "num_mel_bins", None)
        frames = getattr(audio, "max_source_positions", None)
        if isinstance(bins, int) and isinstance(frames, int):
            return self._floats(self.sizes.batch, bins, 2 * frames)
        width = (
            bins
            or getattr(audio, "input_feat_per_channel", None)
            or getattr(audio, "feature_projection_input_dim", None)
        )
        return self._floats(self.sizes.batch, 8 * self.sizes.sequence, width) if width else None

    def sound(self) -> torch.Tensor:
        """A wave, or a spectrogram where the config has its bins."""
        bins, frames = (getattr(self.config, n, None) for n in ("num_mel_bins", "max_length"))
        if isinstance(bins, int) and isinstance(frames, int):
            return self._floats(self.sizes.batch, frames, bins)
        return self._floats(self.sizes.batch, 1601)

    def embeddings(self) -> torch.Tensor | None:
        width = getattr(self.text, "hidden_size", None)
        return self._floats(self.sizes.batch, self.sizes.sequence, width) if width else None


_MAKERS: dict[str, Callable[[_Inputs], torch.Tensor | None]] = {
    "input_ids": lambda made: made.ids(made.sizes.sequence),
    "decoder_input_ids": lambda made: made.ids(made.sizes.decoder),
    "attention_mask": _Inputs.mask,
    "pixel_values": _Inputs.pixels,
    "input_features": _Inputs.features,
    "input_values": _Inputs.sound,
    "inputs_embeds": _Inputs.embeddings,
}
