"""The families we know: one record each. `shardproof models` lists them.

A model without a record works all the same: its class is that of transformers' Auto classes, its units are found by the
engine, its parts by the names of its modules. A record says it better: which modules only some rows use (so that ranks
need not find out), which no training reaches, and whose forward is trained.
"""

from __future__ import annotations

from typing import Any

from shardproof.models.family import Family


def _text(name: str, class_prefix: str, *model_types: str) -> Family:
    """A family of language models: a list of layers and a head."""
    return Family(
        name=name,
        model_types=model_types,
        model_class=f"{class_prefix}ForCausalLM",
        parts={"llm": ("model", "lm_head")},
        blocks=("model.layers",),
    )


QWEN25_OMNI = Family(
    name="Qwen2.5-Omni",
    model_types=("qwen2_5_omni",),
    model_class="Qwen2_5OmniForConditionalGeneration",
    processor="Qwen2_5OmniProcessor",
    media=("image", "audio", "video"),
    trains="thinker",
    parts={
        "llm": ("thinker.model.language_model", "thinker.lm_head"),
        "vision": ("thinker.model.visual",),
        "audio": ("thinker.model.audio_tower",),
        "aligner": ("thinker.model.visual.merger", "thinker.model.audio_tower.proj"),
        "talker": ("talker",),
    },
    blocks=(
        "thinker.model.language_model.layers",
        "thinker.model.visual.blocks",
        "thinker.model.audio_tower.layers",
        "talker.model.layers",
    ),
    dynamic=("thinker.model.visual", "thinker.model.audio_tower", "talker", "token2wav"),
    # The marks around a sound are tokens of the text by now.
    unused=("token2wav", "thinker.model.audio_tower.audio_bos_eos_token"),
    speech=("talker", "token2wav"),
    files=("spk_dict.pt",),
    codes=True,
)

QWEN3_OMNI = Family(
    name="Qwen3-Omni",
    model_types=("qwen3_omni_moe",),
    model_class="Qwen3OmniMoeForConditionalGeneration",
    processor="Qwen3OmniMoeProcessor",
    media=("image", "audio", "video"),
    trains="thinker",
    parts={
        "llm": ("thinker.model.language_model", "thinker.lm_head"),
        "vision": ("thinker.model.visual",),
        "audio": ("thinker.model.audio_tower",),
        "aligner": (
            "thinker.model.visual.merger",
            "thinker.model.visual.merger_list",
            "thinker.model.audio_tower.proj1",
            "thinker.model.audio_tower.proj2",
        ),
        "talker": ("talker",),
    },
    blocks=(
        "thinker.model.language_model.layers",
        "thinker.model.visual.blocks",
        "thinker.model.audio_tower.layers",
        "talker.model.layers",
        "talker.code_predictor.model.layers",
    ),
    dynamic=("thinker.model.visual", "thinker.model.audio_tower", "talker", "code2wav"),
    unused=("code2wav",),
    speech=("talker", "code2wav"),
)

MINICPM_V = Family(
    name="MiniCPM-V 4.6",
    model_types=("minicpmv4_6",),
    model_class="MiniCPMV4_6ForConditionalGeneration",
    processor="MiniCPMV4_6Processor",
    media=("image", "video"),
    parts={
        "llm": ("model.language_model", "lm_head"),
        "vision": ("model.vision_tower",),
        "aligner": ("model.merger",),
    },
    blocks=("model.language_model.layers", "model.vision_tower.encoder.layers"),
    dynamic=("model.vision_tower", "model.merger"),
)

QWEN25_VL = Family(
    name="Qwen2.5-VL",
    model_types=("qwen2_5_vl",),
    model_class="Qwen2_5_VLForConditionalGeneration",
    processor="Qwen2_5_VLProcessor",
    media=("image", "video"),
    parts={
        "llm": ("model.language_model", "lm_head"),
        "vision": ("model.visual",),
        "aligner": ("model.visual.merger",),
    },
    blocks=("model.language_model.layers", "model.visual.blocks"),
    dynamic=("model.visual",),
)

QWEN3_VL = Family(
    name="Qwen3-VL",
    model_types=("qwen3_vl",),
    model_class="Qwen3VLForConditionalGeneration",
    processor="Qwen3VLProcessor",
    media=("image", "video"),
    parts={
        "llm": ("model.language_model", "lm_head"),
        "vision": ("model.visual",),
        "aligner": ("model.visual.merger", "model.visual.deepstack_merger_list"),
    },
    blocks=("model.language_model.layers", "model.visual.blocks"),
    dynamic=("model.visual",),
)

QWEN2_AUDIO = Family(
    name="Qwen2-Audio",
    model_types=("qwen2_audio",),
    model_class="Qwen2AudioForConditionalGeneration",
    processor="Qwen2AudioProcessor",
    media=("audio",),
    parts={
        "llm": ("model.language_model", "lm_head"),
        "audio": ("model.audio_tower",),
        "aligner": ("model.multi_modal_projector",),
    },
    blocks=("model.language_model.layers", "model.audio_tower.layers"),
    dynamic=("model.audio_tower", "model.multi_modal_projector"),
)

INTERNVL = Family(
    name="InternVL",
    model_types=("internvl",),
    model_class="InternVLForConditionalGeneration",
    processor="InternVLProcessor",
    media=("image", "video"),
    parts={
        "llm": ("model.language_model", "lm_head"),
        "vision": ("model.vision_tower",),
        "aligner": ("model.multi_modal_projector",),
    },
    blocks=("model.language_model.layers", "model.vision_tower.encoder.layer"),
    dynamic=("model.vision_tower", "model.multi_modal_projector"),
)

LLAVA = Family(
    name="LLaVA",
    model_types=("llava",),
    model_class="LlavaForConditionalGeneration",
    processor="LlavaProcessor",
    media=("image",),
    parts={
        "llm": ("model.language_model", "lm_head"),
        "vision": ("model.vision_tower",),
        "aligner": ("model.multi_modal_projector",),
    },
    blocks=("model.language_model.layers", "model.vision_tower.encoder.layers"),
    dynamic=("model.vision_tower", "model.multi_modal_projector"),
    unused=("model.vision_tower.post_layernorm",),  # features are those of a layer before
)

GEMMA3 = Family(
    name="Gemma 3",
    model_types=("gemma3",),
    model_class="Gemma3ForConditionalGeneration",
    processor="Gemma3Processor",
    media=("image",),
    parts={
        "llm": ("model.language_model", "lm_head"),
        "vision": ("model.vision_tower",),
        "aligner": ("model.multi_modal_projector",),
    },
    blocks=("model.language_model.layers", "model.vision_tower.encoder.layers"),
    dynamic=("model.vision_tower", "model.multi_modal_projector"),
    unused=("model.vision_tower.head",),  # SigLIP's pooled output
)

FAMILIES = (
    QWEN25_OMNI,
    QWEN3_OMNI,
    MINICPM_V,
    QWEN25_VL,
    QWEN3_VL,
    QWEN2_AUDIO,
    INTERNVL,
    LLAVA,
    GEMMA3,
    _text("Qwen3", "Qwen3", "qwen3"),
    _text("Qwen3-MoE", "Qwen3Moe", "qwen3_moe"),
    _text("Llama", "Llama", "llama"),
    _text("Mistral", "Mistral", "mistral"),
    _text("GLM", "Glm", "glm"),
    _text("GLM-4", "Glm4", "glm4"),
    _text("GLM-4.5", "Glm4Moe", "glm4_moe"),
    _text("DeepSeek-V2", "DeepseekV2", "deepseek_v2"),
    _text("DeepSeek-V3", "DeepseekV3", "deepseek_v3"),
)


def family_of(config: Any) -> Family | None:
    """The record for a configuration of transformers (or the dict in a config.json); None where there is none."""
    kind = config.get("model_type") if isinstance(config, dict) else getattr(config, "model_type", None)
    return next((family for family in FAMILIES if kind in family.model_types), None)
