"""Sizes of the tiny models of the families table, by the names that configurations give them."""

from __future__ import annotations

from typing import Any

VOCAB = 128
LAYERS = 4
WINDOW = 8
CONTEXT = 512
THRESHOLD = 128
"""Tokens after which attention may depend on positions: beyond the checks' prompts."""
TOKENS_FROM = 100
"""First id for image tokens and the like."""

_NAMES: dict[int, str] = {
    VOCAB: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    LAYERS: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
    "num_encoder_layers num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads "
    "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads "
    "num_experts n_routed_experts num_local_experts moe_num_experts linear_num_heads linear_num_value_heads "
    "index_block_size index_topk split_ngram_parts patch_size make_ngram_vocab_size_divisible_by",
    CONTEXT: "n_positions n_ctx max_seq_len max_position_embeddings context_length",
    WINDOW: "sliding_window sliding_window_size local_attention attention_window_size attention_chunk_size "
    "qk_rope_head_dim rotary_dim laurel_rank window_size keep_window_size floor_scale log_scaling_n_floor "
    "zero_expert_num hc_lowrank mamba_d_state",
    64: "hidden_size n_embd d_model emb_dim embedding_size ngram_vocab_size_base adapter_in_dim "
    "adapter_input_size adapter_out_dim hidden_size_global",
    96: "intermediate_size dense_intermediate_size intermediate_size_mlp n_inner ffn_hidden_size ffn_dim "
    "expert_ffn_hidden_size feed_forward_size decoder_ffn_dim encoder_ffn_dim dff dim_ff",
    32: "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size "
    "shared_intermediate_size moe_shared_expert_intermediate_size router_hidden_size",
    24: "kv_lora_rank q_lora_rank o_lora_rank",
    16: "head_dim swa_head_dim attention_head_size kv_channels v_head_dim swa_v_head_dim qk_nope_head_dim "
    "index_head_dim index_n_heads query_pre_attn_scalar hidden_size_per_layer_input linear_head_dim "
    "linear_key_head_dim linear_value_head_dim adapter_rank image_size",
    2: "num_key_value_heads swa_num_key_value_heads num_experts_per_tok num_experts_per_token moe_k moe_topk "
    "top_k_experts linear_num_key_heads index_topk_blocks eos_token_id",
    1: "n_group topk_group bos_token_id",
    0: "pad_token_id",
}
SIZES: dict[str, Any] = {name: size for size, line in _NAMES.items() for name in line.split()}
SIZES["is_decoder"] = True  # makes causal LMs with a cache of BERT and its like

_THETA = 10000.0
_DEFAULT = {"rope_type": "default", "rope_theta": _THETA}

SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 8},
    "blt": {"encoder_hash_byte_group_vocab": VOCAB, "num_hidden_layers": 4},
    "cohere_compass_text": {"rope_parameters": {"sliding_attention": _DEFAULT, "full_attention": _DEFAULT}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": _THETA, "clip_qkv": 3.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 4}},
    "gemma4_unified_assistant": {"text_config": {"num_kv_shared_layers": 4}},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, "mamba_n_heads": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "llama4_text": {"attention_chunk_size": THRESHOLD, "floor_scale": THRESHOLD + 1},
    # Its queries are scaled by their position from the threshold on.
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": _THETA,
            "factor": 16.0,
            "original_max_position_embeddings": THRESHOLD,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "moshi": {"sliding_window": CONTEXT},  # only its cache has a window, as long as its context
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "hash_seed": 0},
    "xlstm": {"hidden_size": 128},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
"""What single families need beside them."""

_LATENT = (
    "axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 dots3_note dots3_note_text glm4_moe_lite "
    "glm_moe_dsa hy_v4 kimi_linear longcat_flash minicpm3 youtu"
)
for _name in _LATENT.split():
    SPECIAL.setdefault(_name, {})["num_key_value_heads"] = 4
SPECIAL["longcat_flash"]["head_dim"] = 8


def _rope(kind: str, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": _THETA, **options}}, {}


_LONG = {
    "factor": 8.0,
    "long_factor": [1.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 64,
}
_LONG_SIZES = {"original_max_position_embeddings": 64}

VARIANTS: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "llama": {
        "linear": _rope("linear", factor=4.0),
        "dynamic": _rope("dynamic", factor=4.0),
        "llama3": _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
        "yarn": _rope("yarn", factor=4.0, original_max_position_embeddings=128),
    },
    "phi3": {
        "longrope": (
            {**_rope("longrope", short_factor=[1.0] * 8, **_LONG)[0], **_LONG_SIZES},
            {**_rope("longrope", short_factor=_LONG["long_factor"], **_LONG)[0], **_LONG_SIZES},
        )
    },
    "minimax_m3_vl_text": {
        "sparse attention": (
            {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_n_heads": 2},
            {},
        )
    },
    "granitemoehybrid": {"attention only": ({"layer_types": ["attention"] * LAYERS}, {})},
    "gemma4_text": {"shared KV": ({"num_kv_shared_layers": 2}, {})},
}
"""More configurations of a family: what differs, and what differs in the oracle beside that."""

_DRAFTER = "drafts for another model, whose keys and values it attends to"
_AUDIO = "generates several audio codes per step, not text"
NOT_BUILT_BECAUSE = {
    "gemma3n": "its vision tower needs timm; gemma3n_text is checked",
    "gemma4_assistant": _DRAFTER,
    "gemma4_unified_assistant": _DRAFTER,
    "musicgen": _AUDIO,
    "musicgen_melody": _AUDIO,
}
"""Why some families have no tiny model that generates by itself."""
