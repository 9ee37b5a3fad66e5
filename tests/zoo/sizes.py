"""The sizes of tiny models, by the names that transformers' configurations give them."""

from __future__ import annotations

from typing import Any

__all__ = ["BY_CONFIG", "SIZES", "VOCABULARY"]

VOCABULARY = 96

_NAMES: dict[int, str] = {
    1: """n_group topk_group num_expert_group first_k_dense_replace moe_layer_start_index n_shared_experts
        num_shared_experts moe_num_shared_experts num_dense_layers num_kv_shared_layers
        num_nextn_predict_layers mamba_n_groups n_groups mamba_ngroups""",
    2: """num_key_value_heads n_head_kv num_kv_heads n_kv_heads encoder_num_key_value_heads
        decoder_num_key_value_heads swa_num_key_value_heads num_global_key_value_heads attention_num_kv_heads
        num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers
        num_decoder_layers depth encoder_num_hidden_layers decoder_num_hidden_layers
        num_experts_per_tok moe_k moe_top_k num_experts_per_token moe_topk top_k_experts experts_per_token""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
        num_query_heads attention_heads encoder_num_attention_heads decoder_num_attention_heads num_attn_heads
        num_self_attention_heads num_cross_attention_heads linear_num_key_heads linear_num_value_heads
        index_n_heads swa_num_attention_heads linear_num_heads num_linear_heads
        num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts""",
    8: """mamba_n_heads mamba_num_heads qk_rope_head_dim rotary_dim index_topk relative_attention_num_buckets
        patch_size""",
    16: """kv_lora_rank head_dim attention_head_dim d_head kv_channels d_kv v_head_dim qk_nope_head_dim
        global_head_dim linear_key_head_dim linear_value_head_dim attention_head_size index_head_dim
        swa_head_dim kq_head_dim swa_v_head_dim linear_head_dim mamba_d_head mamba_head_dim indexer_head_dim
        d_proj state_size mamba_d_state ssm_state_size o_lora_rank chunk_size mamba_chunk_size
        attention_chunk_size sliding_window attention_window_size sliding_window_size""",
    24: "qk_head_dim",
    32: "q_lora_rank moe_latent_size dt_rank image_size img_size input_size",
    64: """hidden_size d_model n_embd dim embed_dim embedding_size model_dim emb_dim
        projection_dim embedding_dim d_embed hidden_dim projection_size decoder_hidden_size
        out_hidden_size output_dim text_hidden_size encoder_hidden_size input_dim
        output_hidden_size proj_dim hidden_size_per_layer_input d_embedding lru_width
        word_embed_proj_dim latent_size width embed_size dim_model moe_intermediate_size
        expert_intermediate_size moe_ffn_hidden_size expert_ffn_hidden_size moe_dim""",
    VOCABULARY: """vocab_size text_vocab_size vocab_size_per_layer_input decoder_vocab_size
        encoder_vocab_size""",
    128: """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner mlp_dim ffn_hidden_size
        dim_feedforward inner_dim dim_ff decoder_intermediate_size encoder_intermediate_size
        shared_intermediate_size shared_expert_intermediate_size intermediate_size_mlp ffn_intermediate_size
        moe_shared_expert_intermediate_size dense_intermediate_size prefix_dense_intermediate_size
        feedforward_size ffn_size shared_expert_size mamba_d_ssm mamba_intermediate_size
        max_position_embeddings n_positions max_target_positions n_ctx max_seq_len max_sequence_length
        max_seq_length""",
}
SIZES: dict[str, int] = {name: size for size, names in _NAMES.items() for name in names.split()}

_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}  # one layer of each kind

# What a configuration needs beside the sizes, or in their place, by its class.
BY_CONFIG: dict[str, dict[str, Any]] = {
    "BltConfig": {
        "hidden_size_global": 64, "encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4],
    },
    "BltGlobalTransformerConfig": {"hidden_size": 64, "intermediate_size": 128},
    "BltLocalDecoderConfig": {"hidden_size_global": 64, "intermediate_size": 128},
    "BltLocalEncoderConfig": {"hidden_size_global": 64, "intermediate_size": 128},
    "CohereCompassTextConfig": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "DbrxAttentionConfig": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
    "DbrxFFNConfig": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2},
    "DeepseekV2Config": {"num_experts_per_tok": 2, "topk_group": 1, "n_group": 1, "n_routed_experts": 4},
    "Dots1Config": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "HunYuanDenseV1Config": {"head_dim": 16, "num_key_value_heads": 2},
    "HunYuanMoEV1Config": {"head_dim": 16, "num_key_value_heads": 2, "num_experts": 4, "moe_topk": 2},
    "KimiLinearConfig": _HYBRID,
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "LlamaConfig": {"num_key_value_heads": 2},
    "LongcatFlashConfig": {
        "head_dim": 8, "num_layers": 2, "zero_expert_num": 2, "moe_topk": 2, "n_routed_experts": 4,
    },
    "Mamba2Config": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "expand": 2},
    "MinistralConfig": {"head_dim": 16},
    "MistralConfig": {"num_key_value_heads": 2},
    "NemotronConfig": {"num_key_value_heads": 2, "head_dim": 16},
    "Qwen3NextConfig": _HYBRID,
    "Qwen3_5MoeTextConfig": _HYBRID,
    "Qwen3_5TextConfig": _HYBRID,
    "ReformerConfig": {
        "is_decoder": True, "axial_pos_embds_dim": (16, 48), "axial_pos_shape": (8, 16),
        "attn_layers": ["local", "lsh"], "max_position_embeddings": 128, "num_buckets": 2,
        "lsh_attn_chunk_length": 4, "local_attn_chunk_length": 4,
    },
    "RemBertConfig": {"is_decoder": True},
    "RoFormerConfig": {"is_decoder": True},
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {
        "num_hidden_layers": 3, "attention_head_dim": 32,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid"],
    },
    "Zamba2Config": {
        "num_hidden_layers": 2, "layers_block_type": ["linear_attention", "hybrid"], "n_mamba_heads": 8,
    },
}  # fmt: skip
