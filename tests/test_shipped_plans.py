"""Every shipped plan: proven on a tiny model of its type, exact on its ranks, and the same from headers.

The sizes are odd where they may be: 6 query heads on 3 kv heads over 2 ranks are 4 + 2, 67 features 34 + 33.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import autotp
from autotp.plan import Plan, shipped_plans
from tests.generation import generates_the_same
from tests.models import randomised, verified

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 67, "num_hidden_layers": 1,
    "num_attention_heads": 3, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SIZES, "num_attention_heads": 6, "num_key_value_heads": 3}
HEAD_DIM = {**GROUPED, "head_dim": 8}
# Widths of experts: grouped products want rows of whole 16 bytes on every rank.
EXPERTS = {**HEAD_DIM, "num_experts_per_tok": 2, "intermediate_size": 48, "moe_intermediate_size": 48}
IMAGES = {**SIZES, "image_size": 16, "patch_size": 8}
TWO = {"num_hidden_layers": 2}
LOCAL_AND_GLOBAL = {**TWO, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}

# plan -> class of the model, its config
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("AlbertForMaskedLM", {**SIZES, **TWO, "embedding_size": 16}),
    "apertus": ("ApertusForCausalLM", HEAD_DIM),
    "arcee": ("ArceeForCausalLM", HEAD_DIM),
    "bart": (
        "BartForConditionalGeneration",
        {
            "vocab_size": 97, "d_model": 48, "encoder_layers": 1, "decoder_layers": 1,
            "encoder_attention_heads": 3, "decoder_attention_heads": 3, "encoder_ffn_dim": 67,
            "decoder_ffn_dim": 67, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
            "eos_token_id": 2, "decoder_start_token_id": 1,
        },
    ),
    "bert": ("BertForMaskedLM", SIZES),
    "biogpt": ("BioGptForCausalLM", SIZES),
    "camembert": ("CamembertForMaskedLM", SIZES),
    "clip_text_model": ("CLIPTextModel", SIZES),
    "clip_vision_model": ("CLIPVisionModel", IMAGES),
    "cohere": ("CohereForCausalLM", GROUPED),
    "cohere2": ("Cohere2ForCausalLM", {**HEAD_DIM, **LOCAL_AND_GLOBAL}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **SIZES, **TWO, "moe_intermediate_size": 48, "num_experts_per_tok": 2,
            "num_key_value_heads": 3, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4, "v_head_dim": 8,
        },
    ),
    "deit": ("DeiTModel", IMAGES),
    "dinov2": ("Dinov2Model", IMAGES),
    "distilbert": (
        "DistilBertForMaskedLM",
        {
            "vocab_size": 97, "dim": 48, "n_layers": 1, "n_heads": 3, "hidden_dim": 67,
            "max_position_embeddings": 64,
        },
    ),
    "electra": ("ElectraForMaskedLM", {**SIZES, "embedding_size": 16}),
    "ernie4_5": ("Ernie4_5ForCausalLM", HEAD_DIM),
    "eurobert": ("EuroBertForMaskedLM", HEAD_DIM),
    "exaone4": ("Exaone4ForCausalLM", {**HEAD_DIM, **LOCAL_AND_GLOBAL}),
    "falcon": (
        "FalconForCausalLM",
        {
            **SIZES, **TWO, "num_attention_heads": 6, "num_kv_heads": 3, "ffn_hidden_size": 67,
            "new_decoder_architecture": True,
        },
    ),
    "gemma": ("GemmaForCausalLM", HEAD_DIM),
    "gemma2": ("Gemma2ForCausalLM", {**HEAD_DIM, **LOCAL_AND_GLOBAL}),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {**HEAD_DIM, **LOCAL_AND_GLOBAL}, "vision_config": IMAGES,
            "mm_tokens_per_image": 4, "image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92,
        },
    ),
    "gemma3_text": ("Gemma3ForCausalLM", {**HEAD_DIM, **LOCAL_AND_GLOBAL}),
    "glm": ("GlmForCausalLM", HEAD_DIM),
    "glm4": ("Glm4ForCausalLM", HEAD_DIM),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        {**EXPERTS, **TWO, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", SIZES),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            **HEAD_DIM, **LOCAL_AND_GLOBAL, "intermediate_size": 64, "num_local_experts": 4,
            "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "granite": ("GraniteForCausalLM", HEAD_DIM),
    "granitemoe": ("GraniteMoeForCausalLM", {**EXPERTS, "num_local_experts": 4}),
    "helium": ("HeliumForCausalLM", HEAD_DIM),
    "jais2": ("Jais2ForCausalLM", HEAD_DIM),
    "llama": ("LlamaForCausalLM", GROUPED),
    "ministral": ("MinistralForCausalLM", {**HEAD_DIM, **LOCAL_AND_GLOBAL}),
    "mistral": ("MistralForCausalLM", {**HEAD_DIM, "sliding_window": 5}),
    "mixtral": ("MixtralForCausalLM", {**EXPERTS, "num_local_experts": 4}),
    "modernbert": ("ModernBertForMaskedLM", {**SIZES, **TWO, "cls_token_id": 1, "sep_token_id": 2}),
    "nanochat": ("NanoChatForCausalLM", HEAD_DIM),
    "nemotron": ("NemotronForCausalLM", HEAD_DIM),
    "olmo": ("OlmoForCausalLM", {**GROUPED, "clip_qkv": 0.5}),
    "olmo2": ("Olmo2ForCausalLM", GROUPED),
    "phi": ("PhiForCausalLM", GROUPED),
    "phimoe": ("PhimoeForCausalLM", {**EXPERTS, "num_local_experts": 4}),
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {**EXPERTS, **TWO, "num_experts": 4, "shared_expert_intermediate_size": 67, "mlp_only_layers": [0]},
    ),
    "qwen3": ("Qwen3ForCausalLM", HEAD_DIM),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**EXPERTS, **TWO, "num_experts": 4, "mlp_only_layers": [0]}),
    "roberta": ("RobertaForMaskedLM", SIZES),
    "siglip_text_model": ("SiglipTextModel", SIZES),
    "smollm3": ("SmolLM3ForCausalLM", {**HEAD_DIM, **TWO, "no_rope_layers": [0, 1]}),
    "starcoder2": ("Starcoder2ForCausalLM", GROUPED),
    "vit": ("ViTModel", IMAGES),
    "xlm-roberta": ("XLMRobertaForMaskedLM", SIZES),
    "opt": (
        "OPTForCausalLM",
        {
            "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3,
            "ffn_dim": 67, "word_embed_proj_dim": 48, "max_position_embeddings": 64,
        },
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 97, "n_embd": 48, "n_inner": 67, "n_layer": 1, "n_head": 3, "n_positions": 64},
    ),
    "gptj": (
        "GPTJForCausalLM",
        {
            "vocab_size": 97, "n_embd": 48, "n_inner": 67, "n_layer": 1, "n_head": 3, "n_positions": 64,
            "rotary_dim": 4,
        },
    ),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {
            "vocab_size": 97, "hidden_size": 48, "intermediate_size": 67, "num_layers": 2, "num_heads": 3,
            "max_position_embeddings": 64, "attention_types": [[["global", "local"], 1]], "window_size": 5,
        },
    ),
    "bloom": (
        "BloomForCausalLM",
        {"vocab_size": 97, "hidden_size": 48, "n_layer": 1, "n_head": 3},
    ),
    "codegen": (
        "CodeGenForCausalLM",
        {
            "vocab_size": 97, "n_embd": 64, "n_inner": 67, "n_layer": 1, "n_head": 4, "n_positions": 64,
            "rotary_dim": 4,
        },
    ),
    "xglm": (
        "XGLMForCausalLM",
        {
            "vocab_size": 97, "d_model": 48, "ffn_dim": 67, "num_layers": 1, "attention_heads": 3,
            "max_position_embeddings": 64,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": 97, "d_model": 48, "d_kv": 8, "d_ff": 67, "num_layers": 2, "num_heads": 3,
            "decoder_start_token_id": 0,
        },
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            "vocab_size": 97, "d_model": 48, "encoder_layers": 1, "decoder_layers": 1,
            "encoder_attention_heads": 3, "decoder_attention_heads": 6, "encoder_ffn_dim": 67,
            "decoder_ffn_dim": 67, "num_mel_bins": 8, "max_source_positions": 10,
            "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
    ),
    "persimmon": ("PersimmonForCausalLM", SIZES),
    "stablelm": ("StableLmForCausalLM", GROUPED),
    "mpt": (
        "MptForCausalLM",
        {
            "vocab_size": 97, "d_model": 48, "n_heads": 3, "n_layers": 2, "max_seq_len": 64,
            "expansion_ratio": 2,
        },
    ),
    "phi3": ("Phi3ForCausalLM", {**SIZES, "num_key_value_heads": 3}),
    "deberta-v2": (
        "DebertaV2ForMaskedLM",
        {
            **SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
            "share_att_key": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm",
        },
    ),
}  # fmt: skip

# One of each build, for the fast set: the others are like one of these.
FAST = ("distilbert", "glm", "gpt_neox", "mixtral", "qwen3", "vit")
SOME = [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in MODELS]


def build(name: str, **changes: Any) -> nn.Module:
    """The tiny model of a plan, in eval mode."""
    transformers.logging.set_verbosity_error()
    model, sizes = MODELS[name]
    with warnings.catch_warnings():  # DeBERTa is scripted on import, which torch deprecates
        warnings.simplefilter("ignore", DeprecationWarning)
        cls = getattr(transformers, model)
    torch.manual_seed(0)
    built = cls(cls.config_class(**{**sizes, **changes})).eval()
    assert isinstance(built, nn.Module)
    return built


def save(model: nn.Module, folder: Path) -> None:
    """A checkpoint with the model's own names. Tied tensors stand once, under their first name."""
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config))
    tied = model.all_tied_weights_keys
    tensors = {n: t.clone() for n, t in model.state_dict().items() if n not in tied}
    save_file(tensors, folder / "model.safetensors")


HEADS = (
    "num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_heads", "attention_heads",
    "encoder_attention_heads", "decoder_attention_heads", "num_kv_heads",
)  # fmt: skip


def doubled(name: str) -> dict[str, Any]:
    """Twice the heads: over 4 ranks 6 (kv) heads are 2 + 2 + 1 + 1."""
    sizes = MODELS[name][1]
    return {key: 2 * sizes[key] for key in HEADS if key in sizes} | (
        {"head_dim": 4} if "head_dim" in sizes else {}
    )


def three(name: str) -> dict[str, Any]:
    """Three heads, each with its own keys and values: over 2 ranks 2 + 1."""
    sizes = MODELS[name][1]
    return {key: 3 for key in HEADS if key in sizes} | ({"head_dim": 16} if "head_dim" in sizes else {})


def four(name: str) -> dict[str, Any]:
    """Four heads, each with its own keys and values: over 3 ranks 2 + 1 + 1."""
    return {key: 4 for key in HEADS if key in MODELS[name][1]}


# Families with their sizes in modules, at other numbers of heads and ranks, too.
PLAIN = (
    "albert", "bart", "bert", "biogpt", "camembert", "clip_text_model", "clip_vision_model", "cohere", "deit",
    "dinov2", "distilbert", "electra", "ernie4_5", "eurobert", "gemma2", "gpt_neox", "jais2", "llama",
    "mistral", "mixtral", "olmo", "olmo2", "phi", "qwen2", "qwen3", "qwen3_moe", "roberta",
    "siglip_text_model", "starcoder2", "vit", "xlm-roberta",
)  # fmt: skip
# Decoders whose code is edited.
EDITED = (
    "bloom", "codegen", "deepseek_v3", "falcon", "gpt2", "gpt_neo", "gptj", "mpt", "opt", "persimmon", "phi3",
    "stablelm", "t5", "whisper", "xglm",
)  # fmt: skip
BESIDE = [(name, three, 2) for name in PLAIN if "num_key_value_heads" in MODELS[name][1]]
BESIDE += [(name, doubled, 4) for name in (*PLAIN, *EDITED, "deberta-v2", "modernbert")]
BESIDE += [(name, four, 3) for name in ("bloom", "codegen", "deepseek_v3", "phi3")]


def said(analysis: autotp.Analysis) -> str:
    return "\n".join(str(found) for found in analysis.diagnostics)


def test_every_shipped_plan_has_its_model():
    assert sorted(MODELS) == sorted(shipped_plans())
    for name in shipped_plans():
        assert Plan.load(name).model_type == name


@pytest.mark.parametrize("name", SOME)
def test_proven_and_the_same_from_headers(tmp_path, name):
    """Proven and exact over 2 ranks, 6 heads on 3 kv heads or 3 heads; an edited decoder gives the same
    tokens; headers give the same cuts."""
    model = build(name)
    if name in EDITED and name != "deepseek_v3":
        model = randomised(model, dtype=torch.float32 if name == "xglm" else torch.float64)
    assert model.config.model_type == name
    proven = autotp.analyze(model, tp=2)
    assert proven.ok and proven.certainty == "layouts", said(proven)
    assert {"eval", "train"} <= set(proven.modes)
    result = verified(model, proven)
    assert result.ok and result.state_dict_equal, str(result)
    if name in EDITED:
        assert proven.edits
        generates_the_same(model, proven)
    save(model, tmp_path)
    headers = autotp.analyze(tmp_path, tp=2, check="shapes")
    assert headers.ok, said(headers)
    stored = headers.inventory.tensors()
    assert {n: cut for n, cut in proven.layouts.items() if n in stored} == dict(headers.layouts)
    assert len(headers.layouts) >= 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes", "tp"), BESIDE, ids=lambda value: getattr(value, "__name__", None)
)
def test_exact_on_even_and_uneven_heads(name, changes, tp):
    """3 heads over 2 ranks where it was 6 on 3 above, 6 (on 6, or 12 on 6) over 4, of some 4 over 3. Families
    whose attention and MLP are those of another one here: once, above."""
    result = autotp.verify(build(name, **changes(name)), name, tp=tp)
    assert result.ok and result.state_dict_equal, str(result)


@pytest.mark.slow
def test_the_gated_mlp_of_dinov2():
    model = build("dinov2", use_swiglu_ffn=True)
    assert autotp.analyze(model, "dinov2", tp=2, check="shapes").sharded_fraction > 0.6
    assert autotp.verify(model, "dinov2", tp=2).ok


@pytest.mark.parametrize("name", shipped_plans())
def test_what_stays_whole_is_small_or_known(name):
    """Of the linear layers only heads, poolers, routers and projections between two widths are whole, and a
    tower that forwards of tokens alone do not run."""
    with torch.device("meta"):
        model = build(name)
    analysis = autotp.analyze(model, name, tp=2, check="shapes")
    assert analysis.ok, said(analysis)
    modules = analysis.inventory.modules.items()
    linear = [p for p, m in modules if m.kind == "linear" and not p.startswith("model.vision_tower.")]
    whole = {p.rpartition(".")[2] for p in linear if f"{p}.weight" not in analysis.layouts}
    known = {"pooler", "dense", "transform", "vocab_transform", "embeddings_project", "head", "gate"}
    known |= {"embedding_hidden_mapping_in", "shared_expert_gate", "q_a_proj", "kv_a_proj_with_mqa"}
    assert whole <= known, whole
