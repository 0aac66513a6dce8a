"""A configuration of transformers for each family, with everything as small as its classes allow."""

from __future__ import annotations

from typing import Any

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "head_dim": 4,  # that of the rotated part
    "v_head_dim": 8,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
QWEN3_VISION = {**QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
WHISPER = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "num_mel_bins": 16,
    "max_source_positions": 100,
}
CODE_PREDICTOR = {**TEXT, "num_code_groups": 3}

TINY: dict[str, dict[str, Any]] = {
    "qwen2_5_omni": {
        "thinker_config": {
            "text_config": TEXT,
            "vision_config": QWEN_VISION,
            "audio_config": {**WHISPER, "output_dim": 32},
        },
        "talker_config": {**TEXT, "embedding_size": 32},
        "token2wav_config": {
            "dit_config": {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "head_dim": 16},
            "bigvgan_config": {"upsample_initial_channel": 128},
        },
    },
    "qwen3_omni_moe": {
        "thinker_config": {
            "text_config": {**TEXT, **MOE},
            "vision_config": QWEN3_VISION,
            "audio_config": {**WHISPER, "output_dim": 32, "downsample_hidden_size": 16},
        },
        "talker_config": {
            "text_config": {**TEXT, **MOE, "shared_expert_intermediate_size": 16},
            "code_predictor_config": CODE_PREDICTOR,
            "thinker_hidden_size": 32,
            "num_code_groups": 3,
            "spatial_merge_size": 2,
        },
        "code2wav_config": {**TEXT, "decoder_dim": 96, "codebook_size": 16, "num_quantizers": 3},
    },
    "minicpmv4_6": {
        "text_config": {**TEXT, "model_type": "qwen3_5_text", "linear_num_value_heads": 4, "linear_num_key_heads": 2},
        "vision_config": VISION,
        "insert_layer_id": 1,
    },
    "qwen2_vl": {
        "text_config": TEXT,
        "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2, "num_heads": 2},
    },
    "qwen2_5_vl": {"text_config": TEXT, "vision_config": {**QWEN_VISION, "fullatt_block_indexes": [1]}},
    "qwen3_vl": {"text_config": TEXT, "vision_config": QWEN3_VISION},
    "qwen2_audio": {"text_config": {**TEXT, "model_type": "qwen2"}, "audio_config": WHISPER},
    "voxtral": {
        "text_config": {**TEXT, "model_type": "llama"},
        # Four frames of a tower's make a token, as wide as its inner layers.
        "audio_config": {**WHISPER, "encoder_ffn_dim": 128, "max_source_positions": 1500},
    },
    "internvl": {
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": {**VISION, "image_size": [28, 28], "patch_size": [14, 14]},
    },
    "llava": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**VISION, "model_type": "clip_vision_model"},
    },
    "gemma3": {
        "text_config": {**TEXT, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": {**VISION, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
    },
    "qwen3": TEXT,
    "qwen3_moe": {**TEXT, **MOE},
    "llama": TEXT,
    "mistral": TEXT,
    "glm": TEXT,
    "glm4": TEXT,
    "glm4_moe": {**TEXT, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "deepseek_v2": {**TEXT, **DEEPSEEK},
    "deepseek_v3": {**TEXT, **DEEPSEEK},
}
