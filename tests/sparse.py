"""Checkpoints that are headers only: files of the right size whose data is a hole, so 16 GB cost nothing."""

import json
from pathlib import Path

ITEMSIZE = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}


def llama_shapes(*, hidden, inter, layers, heads, kv, vocab, tied=False):
    """The names and shapes of a Llama."""
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
    return shapes if tied else shapes | {"lm_head.weight": (vocab, hidden)}


def llama_config(*, hidden, inter, layers, heads, kv, vocab, tied=False):
    """The config.json of a Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
    }


def bert_shapes(*, hidden, inter, layers, vocab, positions=512):
    """The names and shapes of a BertModel, as all-MiniLM-L6-v2 has them."""
    shapes = {
        "embeddings.word_embeddings.weight": (vocab, hidden),
        "embeddings.position_embeddings.weight": (positions, hidden),
        "embeddings.token_type_embeddings.weight": (2, hidden),
    }

    def linear(path, rows, columns):
        return {f"{path}.weight": (rows, columns), f"{path}.bias": (rows,)}

    def norm(path):
        return {f"{path}.weight": (hidden,), f"{path}.bias": (hidden,)}

    shapes |= norm("embeddings.LayerNorm")
    for layer in range(layers):
        at = f"encoder.layer.{layer}."
        for name in ("query", "key", "value"):
            shapes |= linear(f"{at}attention.self.{name}", hidden, hidden)
        shapes |= linear(at + "attention.output.dense", hidden, hidden)
        shapes |= norm(at + "attention.output.LayerNorm")
        shapes |= linear(at + "intermediate.dense", inter, hidden)
        shapes |= linear(at + "output.dense", hidden, inter)
        shapes |= norm(at + "output.LayerNorm")
    return shapes | linear("pooler.dense", hidden, hidden)


def bert_config(*, hidden, inter, layers, heads, vocab, positions=512):
    """The config.json of a BertModel."""
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "type_vocab_size": 2,
    }


def write_file(path: Path, shapes, *, dtype="F32"):
    """One sparse safetensors file with these tensors."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = ITEMSIZE[dtype]
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + offset)
    return path


def write_checkpoint(folder: Path, shapes, config=None, *, dtype="F32"):
    """A checkpoint folder: model.safetensors, and a config.json where there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / "model.safetensors", shapes, dtype=dtype)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


LLAMA_8B = {
    "hidden": 4096,
    "inter": 14336,
    "layers": 32,
    "heads": 32,
    "kv": 8,
    "vocab": 128256,
}
MINILM = {"hidden": 384, "inter": 1536, "layers": 6, "heads": 12, "vocab": 30522}


def llama_checkpoint(folder: Path, *, dtype="BF16", **sizes):
    """A Llama checkpoint of these sizes."""
    return write_checkpoint(folder, llama_shapes(**sizes), llama_config(**sizes), dtype=dtype)


def bert_checkpoint(folder: Path, *, dtype="F32", **sizes):
    """A BertModel checkpoint of these sizes."""
    shapes = bert_shapes(**{name: size for name, size in sizes.items() if name != "heads"})
    return write_checkpoint(folder, shapes, bert_config(**sizes), dtype=dtype)
