"""A checkpoint folder with the names and shapes of Llama 3.1 8B and no weights: sparse files of full size.

The headers are real safetensors headers; the data after them is a hole in the file, so that 16 GB take a few
kilobytes of disk. Shapes: https://huggingface.co/meta-llama/Llama-3.1-8B (config.json).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
FILES = 4


HIDDEN, INNER, KV = 4096, 14336, 1024


def layer(index: int) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer."""
    found: dict[str, tuple[int, ...]] = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KV, HIDDEN),
        "self_attn.v_proj": (KV, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    return {f"model.layers.{index}.{name}.weight": shape for name, shape in found.items()}


def shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the model, in the order of its layers: 291 tensors, 8.03 G parameters."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (128256, HIDDEN)}
    for index in range(32):
        found |= layer(index)
    return found | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (128256, HIDDEN)}


def write(folder: Path) -> Path:
    """Write config, index and the sparse weight files into `folder`, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    tensors = shapes()
    names = list(tensors)
    weight_map = {}
    for number in range(FILES):
        file = f"model-{number + 1:05}-of-{FILES:05}.safetensors"
        part = names[len(names) * number // FILES : len(names) * (number + 1) // FILES]
        write_sparse(folder / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    total = sum(2 * math.prod(shape) for shape in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return folder


def write_sparse(path: Path, tensors: Mapping[str, tuple[int, ...]]) -> None:
    """Write the header of a safetensors file of bfloat16 tensors, then a hole as long as their data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
