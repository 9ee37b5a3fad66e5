"""What Meta's params.json and the tensors tell of a Llama, as transformers' config.json says it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from autotp.diagnostic import CheckpointError
from autotp.header import shown

__all__ = ["assumed", "check_params", "scaling", "told"]

SCALED_LENGTH = 131072  # positions of the models whose rotary frequencies are scaled
# Meta's name -> (transformers' name, its value where nothing tells it)
SETTINGS: dict[str, tuple[str, float]] = {
    "norm_eps": ("rms_norm_eps", 1e-5),
    "rope_theta": ("rope_theta", 10000.0),
    "max_seq_len": ("max_position_embeddings", 4096),
}


def assumed(params: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, float]:
    """The settings that neither params.json nor config.json, `known`, tells, with their usual values."""
    found = {new: value for new, value in SETTINGS.values() if new not in known}
    if params.get("use_scaled_rope") and "max_position_embeddings" in found:
        found["max_position_embeddings"] = SCALED_LENGTH
    if isinstance(known.get("rope_parameters"), Mapping):
        found.pop("rope_theta", None)  # it stands there
    return found


def told(params: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """What params.json and the shapes tell transformers."""
    layers = {int(found[1]) for name in shapes if (found := re.match(r"model\.layers\.(\d+)\.", name))}
    vocabulary, width = shapes["model.embed_tokens.weight"]
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": shapes["model.layers.0.mlp.gate_proj.weight"][0],
        "num_hidden_layers": len(layers),
        "vocab_size": vocabulary,
        "tie_word_embeddings": "lm_head.weight" not in shapes,
    }
    return config | {new: params[key] for key, (new, _) in SETTINGS.items() if key in params}


def scaling(params: Mapping[str, Any], given: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """How rotary frequencies are scaled: config.json may tell what params.json does not."""
    if not params.get("use_scaled_rope"):
        return {}
    for key in ("rope_parameters", "rope_scaling"):
        stated = given.get(key)
        if isinstance(stated, Mapping) and "factor" in stated:
            said = params.get("rope_scale_factor", stated["factor"])
            if stated["factor"] != said:
                _refuse(
                    path / "config.json",
                    f"{key} has the factor {shown(stated['factor'])}, and {shown(said)} by params.json",
                )
            return {}
    if "rope_scale_factor" not in params:
        raise CheckpointError(
            f"{path / 'params.json'}: use_scaled_rope is true, and no file tells by what factor\n"
            '  = help: add it: "rope_scale_factor": 8 for Llama 3.1 and 3.3, 32 for Llama 3.2 of 1B and 3B'
        )
    constants = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_scaling": {"rope_type": "llama3", "factor": params["rope_scale_factor"], **constants}}


def check_params(params: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Raise CheckpointError where params.json says what cannot be, or other than the tensors are."""
    where = path / "params.json"
    for key in (*SETTINGS, "rope_scale_factor"):
        value = params.get(key, 1)
        kinds = (int,) if key == "max_seq_len" else (int, float)
        if type(value) not in kinds or not 0 < value < math.inf:
            _refuse(where, f"{key} is a number above 0, not {shown(value)}")
    if type(params.get("use_scaled_rope", False)) is not bool:
        _refuse(where, f"use_scaled_rope is true or false, not {shown(params['use_scaled_rope'])}")
    layers = sorted({int(found[1]) for n in shapes if (found := re.match(r"model\.layers\.(\d+)\.", n))})
    count = params.get("n_layers", len(layers))
    if type(count) is not int or count != len(layers) or layers != list(range(count)):
        some = ", ".join(map(str, layers[:8])) + (f" and {len(layers) - 8} more" if len(layers) > 8 else "")
        _refuse(path, f"its files hold the layers {some}; params.json makes it {shown(count)} from 0 on")
    rows, width = shapes["model.embed_tokens.weight"]
    for key, here in (("vocab_size", rows), ("dim", width)):
        said = params.get(key, -1)
        if said not in (-1, here):  # Llama 2 leaves the size to the tokenizer
            _refuse(path, f"'tok_embeddings.weight' is {[rows, width]}; params.json says {key} {shown(said)}")


def _refuse(path: Path, fault: str) -> NoReturn:
    raise CheckpointError(f"{path}: {fault}")
