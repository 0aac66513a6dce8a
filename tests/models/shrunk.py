"""Every decoder of transformers, as small as a few rules make it: the defaults of its configuration, with other sizes.

`SIZES` gives the sizes by the names that configurations use, `OTHERWISE` what a kind needs beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

VOCABULARY = 64
LAYERS = 4

_SIZES = """
64 vocab_size vocab_size_per_layer_input
32 hidden_size d_model n_embd embed_dim dim emb_dim embedding_size embedding_dim word_embed_proj_dim lru_width
48 intermediate_size ffn_hidden_size n_inner d_ff ffn_dim decoder_ffn_dim encoder_ffn_dim shared_intermediate_size
4 num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers num_blocks
4 num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads
4 swa_num_attention_heads linear_num_value_heads num_experts n_routed_experts num_local_experts moe_num_experts
4 qk_nope_head_dim qk_rope_head_dim time_step_rank mamba_dt_rank linear_num_heads rotary_dim hc_lowrank
2 num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok num_experts_per_token moe_topk
2 top_k_experts moe_k n_group num_expert_group linear_num_key_heads index_n_heads indexer_n_heads heads_per_ngram
2 num_kv_shared_layers split_ngram_parts laurel_rank
1 topk_group first_k_dense_replace mamba_n_groups mamba_ngroups n_groups n_shared_experts indexer_kv_heads
8 head_dim d_head swa_head_dim global_head_dim attention_head_dim v_head_dim swa_v_head_dim kv_lora_rank
8 q_lora_rank o_lora_rank mamba_n_heads mamba_num_heads n_mamba_heads ssm_num_heads mamba_d_head mamba_head_dim
8 mamba_headdim mamba_d_state ssm_state_size state_size linear_key_head_dim linear_value_head_dim linear_head_dim
8 index_head_dim indexer_head_dim hidden_size_per_layer_input ple_embed_dim
16 moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size mamba_chunk_size chunk_size
16 moe_shared_expert_intermediate_size max_window_layers indexer_budget
64 index_topk mamba_d_ssm attention_hidden_size ngram_vocab_size_base pronunciation_vocab_size shape_vocab_size
512 max_position_embeddings n_positions max_sequence_length original_max_position_embeddings
"""
SIZES = {name: int(size) for size, *names in map(str.split, _SIZES.split("\n")[1:-1]) for name in names}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LISTS = ("layer_types", "mlp_layer_types", "layers_block_type")  # of each layer its kind: one after the other
DROPPED = ("model_type", "transformers_version", "architectures", "id2label", "label2id", "dtype", "per_layer_config")

_MAMBAS = dict.fromkeys(("layers_block_type", "layer_types", "mlp_layer_types"))
_HYBRID = {"layers_block_type": ["mamba", "hybrid"] * 2, "attention_head_dim": 16}
_AS_MANY = {"num_key_value_heads": 4, "head_dim": 4}
_ROPES = {name: {"rope_type": "default", "rope_theta": 1e4} for name in ("full_attention", "sliding_attention")}
_QWEN_4 = {"indexer_compress_ratio": 2, "output_gate_type": "silu"}
OTHERWISE: dict[str, dict[str, Any]] = {  # None: as its class has it
    **dict.fromkeys(("axk2", "bailing_hybrid", "deepseek_v32", "glm_moe_dsa"), _AS_MANY),
    **{kind: {"head_dim": 4} for kind in ("axk1", "deepseek_v2", "deepseek_v3", "youtu")},
    "bamba": {"attn_layer_indices": [1, 3], **_MAMBAS},
    "cohere_compass_text": {"rope_parameters": _ROPES},
    "gemma3n_text": {"intermediate_size": 48, "activation_sparsity_pattern": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "attention_layers": None},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, **_MAMBAS},
    "laguna": {"num_attention_heads_per_layer": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {**_AS_MANY, "qk_head_dim": 8},
    "mamba2": {"num_heads": 8},
    "marian": {"decoder_vocab_size": VOCABULARY},
    "qwen4_exp": {"text_config": _QWEN_4},
    "qwen4_exp_text": _QWEN_4,
    "zamba": {**_HYBRID, "n_mamba_heads": 2},
    "zamba2": {**_HYBRID, "hybrid_layer_ids": [1, 3]},
    "zaya": {"num_experts_per_tok": 1},
}
# Those that no few sizes make small, that are called with more than tokens, or that transformers 5.24 itself cannot
# build from its defaults, or call.
LEFT_OUT = frozenset(
    "blt dbrx dory dots3_note dots3_note_text gemma3n gemma4_assistant gemma4_unified_assistant git musicgen "
    "musicgen_melody reformer xlstm xmod".split()
)


def kinds() -> Iterator[str]:
    """What `AutoModelForCausalLM` knows, by `model_type`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return (kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in LEFT_OUT)


def build(kind: str) -> nn.Module:
    """One with random weights."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[kind]
    made = _changed(_smaller(config().to_dict()), OTHERWISE.get(kind, {}))
    return AutoModelForCausalLM.from_config(config(**made)).float()


def _changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    config = {name: value for name, value in config.items() if changes.get(name, "") is not None}
    return config | {
        name: _changed(config.get(name) or {}, value) if isinstance(value, dict) else value
        for name, value in changes.items()
        if value is not None
    }


def _smaller(config: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in config.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        if name in DROPPED:
            continue
        if isinstance(value, dict):
            value = _smaller(value)
        elif name in LISTS and isinstance(value, list):
            value = (list(dict.fromkeys(value)) * LAYERS)[:LAYERS]
        elif "drop" in name and isinstance(value, float):
            value = 0.0
        elif name in IDS:
            value = IDS[name]
        elif name.endswith("token_id") and whole:
            value = min(value, VOCABULARY - 1)
        elif name in SIZES and (whole or value is None):
            value = SIZES[name]
        elif name == "is_decoder":
            value = True
        made[name] = value
    return made
