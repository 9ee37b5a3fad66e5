"""Tiny models of transformers' architectures, by name, each with the inputs of one forward."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
}
_WIDE: dict[str, Any] = {**_SIZES, "intermediate_size": 40}
_GROUPED: dict[str, Any] = {**_WIDE, "num_key_value_heads": 3}
_EXPERTS: dict[str, Any] = {**_GROUPED, "num_experts_per_tok": 2}
_LATENT: dict[str, Any] = {
    **_WIDE, "num_key_value_heads": 6, "num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "q_lora_rank": 20, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
}  # fmt: skip
_PAIR: dict[str, Any] = {
    "vocab_size": 97, "d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 3,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
}  # fmt: skip

# name: (config class, model class, config)
KNOWN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _GROUPED),
    "mistral": ("MistralConfig", "MistralForCausalLM", _GROUPED),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _GROUPED),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _GROUPED),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_GROUPED, "head_dim": 4}),
    "phi": ("PhiConfig", "PhiForCausalLM", _GROUPED),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _WIDE),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"vocab_size": 97, "n_embd": 24, "n_layer": 2, "n_head": 3}),
    "opt": ("OPTConfig", "OPTForCausalLM", {**_SIZES, "ffn_dim": 40, "word_embed_proj_dim": 24}),
    "bloom": (
        "BloomConfig", "BloomForCausalLM", {"vocab_size": 97, "hidden_size": 24, "n_layer": 2, "n_head": 3},
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**_EXPERTS, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 16},
    ),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", _LATENT),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {**_LATENT, "n_group": 2, "topk_group": 1}),
    "bert": ("BertConfig", "BertForMaskedLM", _WIDE),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", _WIDE),
    "distilbert": (
        "DistilBertConfig", "DistilBertForMaskedLM",
        {"vocab_size": 97, "dim": 24, "n_layers": 2, "n_heads": 6, "hidden_dim": 40},
    ),
    "albert": ("AlbertConfig", "AlbertForMaskedLM", {**_WIDE, "embedding_size": 16}),
    "t5": (
        "T5Config", "T5ForConditionalGeneration",
        {"vocab_size": 97, "d_model": 24, "d_kv": 4, "d_ff": 40, "num_layers": 2, "num_heads": 6},
    ),
    "bart": ("BartConfig", "BartForConditionalGeneration", _PAIR),
    "whisper": (
        "WhisperConfig", "WhisperForConditionalGeneration",
        {
            **_PAIR, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 32,
            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
        },
    ),
    "vit": ("ViTConfig", "ViTModel", {**_WIDE, "image_size": 16, "patch_size": 8}),
    "mamba": (
        "MambaConfig", "MambaForCausalLM",
        {"vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 1, "state_size": 4},
    ),
    "dbrx": (
        "DbrxConfig", "DbrxForCausalLM",
        {
            "vocab_size": 97, "d_model": 24, "n_heads": 6, "n_layers": 2, "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 3, "clip_qkv": 8, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
}  # fmt: skip


def build(name: str, device: str = "cpu", **changes: Any) -> nn.Module:
    """The tiny model of an architecture, in eval mode, its weights random."""
    transformers.logging.set_verbosity_error()
    config, model, sizes = KNOWN[name]
    torch.manual_seed(0)
    with torch.device(device):
        built = getattr(transformers, model)(getattr(transformers, config)(**(sizes | changes)))
    return built.eval()


def inputs(model: nn.Module, batch: int = 2, sequence: int = 7) -> dict[str, torch.Tensor]:
    """What one forward takes: shapes matter, values do not."""
    generator = torch.Generator().manual_seed(1)

    def ids(length: int) -> torch.Tensor:
        return torch.randint(4, 90, (batch, length), generator=generator)

    config = model.config
    main = model.main_input_name
    if main == "pixel_values":
        return {
            "pixel_values": torch.randn(batch, 3, config.image_size, config.image_size, generator=generator)
        }
    if main == "input_features":
        features = torch.randn(
            batch, config.num_mel_bins, 2 * config.max_source_positions, generator=generator
        )
        return {"input_features": features, "decoder_input_ids": ids(5)}
    given = {"input_ids": ids(sequence)}
    return {**given, "decoder_input_ids": ids(5)} if config.is_encoder_decoder else given
