"""Tiny random models of transformers' architectures: each configuration, shrunk by the names of its sizes."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.zoo.sizes import BY_CONFIG, SIZES, VOCABULARY

__all__ = ["architectures", "build", "described"]

LARGEST = 60_000_000  # parameters: a configuration that does not shrink is no tiny model
_TOKENS = {
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 3,
    "unk_token_id": 4, "mask_token_id": 5, "cls_token_id": 1,
}  # fmt: skip
_KV = ("num_key_value_heads", "n_head_kv", "num_kv_heads", "n_kv_heads")
_QUERY = ("num_attention_heads", "n_head", "num_heads", "n_heads")


def architectures() -> list[str]:
    """The model types for which transformers has a causal language model."""
    return list(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build(kind: str, *, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny model of an architecture, in eval mode.

    Raises whatever transformers raises for a configuration that it cannot build.
    """
    factory, config = _chosen(kind)
    with torch.device("meta"):
        size = sum(p.numel() for p in factory._from_config(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"{kind} still has {size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model: Any = factory._from_config(config).eval().to(dtype)
    if dtype is torch.float64:
        model.set_experts_implementation("eager")  # the grouped product has no float64
    return model


def described(kind: str) -> str:
    """The class and the configuration of an architecture's tiny model: some architectures have the same."""
    try:
        factory, config = _chosen(kind)
        return f"{factory.__name__} {config.to_json_string(use_diff=False)}"
    except Exception:  # none is built
        return kind


def _chosen(kind: str) -> tuple[Any, Any]:
    """The class of an architecture's tiny model, and its configuration."""
    transformers.logging.set_verbosity_error()
    config = _shrunk(CONFIG_MAPPING[kind], [])
    factory = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    factory = factory[0] if isinstance(factory, (tuple, list)) else factory
    wanted = getattr(factory, "config_class", None)
    if wanted is not None and not isinstance(config, wanted):  # of a model with images, the part for text
        parts = (getattr(config, name, None) for name in type(config).sub_configs)
        config = next(part for part in parts if isinstance(part, wanted))
    return factory, config


def _shrunk(config: Any, tokens: list[str]) -> Any:
    """A configuration of a class, with small sizes."""
    return config(**_settings(config, tokens))


def _settings(config: Any, tokens: list[str]) -> dict[str, Any]:
    known = {own: name for name, own in (getattr(config, "attribute_map", None) or {}).items()}
    parts = getattr(config, "sub_configs", None) or {}
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        name, value = field.name, _value_of(field)
        if name in parts:
            part = _part(config, name, parts[name], tokens)
            if part is not None:
                found[name] = part
        elif re.search(r"_token_(id|index|idx)$", name):
            token = _token(name, value, tokens)
            if token is not None:
                found[name] = token
        elif isinstance(value, bool):
            if name == "use_cache":
                found[name] = False
        elif isinstance(value, int):
            size = SIZES.get(name, SIZES.get(known.get(name, "")))
            if size is not None and value > 0:
                found[name] = _size(config, name, known.get(name, name), value, size)
            elif "vocab" in name and value > VOCABULARY:
                found[name] = VOCABULARY
        elif isinstance(value, float) and value > 0 and re.search("drop|jitter", name):
            found[name] = 0.0
    return found | BY_CONFIG.get(config.__name__, {})


def _value_of(field: Any) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    try:
        return field.default_factory()
    except Exception:  # no default: the class fills it in
        return None


def _part(config: Any, name: str, part: Any, tokens: list[str]) -> Any:
    """A configuration inside of another one."""
    if part.__name__ == "AutoConfig":  # which one is chosen as it is made
        part = type(getattr(config(), name))
    if not dataclasses.is_dataclass(part):
        return None
    small = _settings(part, tokens)
    return small if part.__module__.endswith("dbrx") else part(**small)


def _size(config: Any, name: str, usual: str, value: int, size: int) -> int:
    if name in _KV or usual in _KV:
        heads = next((v for n in _QUERY if isinstance(v := getattr(config, n, None), int)), None)
        size = SIZES["num_attention_heads"] if value == heads else min(value, size)
    return size if value > size or usual == "hidden_size" else value


def _token(name: str, value: Any, tokens: list[str]) -> Any:
    """A token's number within the small vocabulary, another one for each name."""
    if isinstance(value, (list, tuple)) and value and max(value) >= VOCABULARY:
        return [2] * len(value) if name == "eos_token_id" else [1 + i for i in range(len(value))]
    if isinstance(value, bool) or not isinstance(value, int) or value < VOCABULARY - 20:
        return None
    if name in _TOKENS:
        return _TOKENS[name]
    tokens.append(name)
    return VOCABULARY - len(tokens)
