"""The known families: one record each. `shardproof models` lists them.

A model without a record works as well: transformers' Auto classes give its class, the engine finds its units, and the
names of its modules tell its parts. A record adds which modules only some rows use (so that ranks need not find out),
which are never trained, and which module's forward is trained.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardproof.models.families.family import Family, Grounding

_THOUSANDTHS = Grounding("<|object_ref_start|>{}<|object_ref_end|>", "<|box_start|>{points}<|box_end|>")
_PIXELS = replace(_THOUSANDTHS, pixels=True)


def _text(name: str, class_prefix: str, *model_types: str) -> Family:
    """A family of language models: a list of layers and a head."""
    return Family(
        name=name,
        model_types=model_types,
        model_class=f"{class_prefix}ForCausalLM",
        parts={"llm": ("model", "lm_head")},
        blocks=("model.layers",),
    )


def _one_tower(
    name: str,
    class_prefix: str,
    model_type: str,
    tower: str,
    layers: str,
    *aligner: str,
    media: tuple[str, ...],
    unused: tuple[str, ...] = (),
    grounding: Grounding | None = None,
) -> Family:
    """A family of language models with one tower for files, and an aligner after it or in it.

    Args:
        tower: its path in the model; `layers`: the path of its list of layers; the following are paths, too.
    """
    tower, layers, *aligner_ = (f"model.{path}" for path in (tower, f"{tower}.{layers}", *aligner))
    return Family(
        name=name,
        model_types=(model_type,),
        model_class=f"{class_prefix}ForConditionalGeneration",
        processor=f"{class_prefix}Processor",
        media=media,
        parts={
            "llm": ("model.language_model", "lm_head"),
            "audio" if media == ("audio",) else "vision": (tower,),
            "aligner": tuple(aligner_),
        },
        blocks=("model.language_model.layers", layers),
        dynamic=(tower, *(path for path in aligner_ if not path.startswith(f"{tower}."))),
        unused=tuple(f"model.{path}" for path in unused),
        grounding=grounding,
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
    # The marks around audio are part of the text by then.
    unused=("token2wav", "thinker.model.audio_tower.audio_bos_eos_token"),
    speech=("talker", "token2wav"),
    files=("spk_dict.pt",),
    codes="one",
    grounding=_PIXELS,
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
    codes="groups",
    grounding=_THOUSANDTHS,
)

# MiniCPM-V 2.x, whose code is in its folder.
MINICPM_V_OWN = Family(
    name="MiniCPM-V 2.6",
    model_types=("minicpmv",),
    model_class="MiniCPMV",
    processor="MiniCPMVProcessor",
    media=("image",),
    parts={"llm": ("llm",), "vision": ("vpm",), "aligner": ("resampler",)},
    blocks=("llm.model.layers", "vpm.encoder.layers"),
    dynamic=("vpm", "resampler"),
    own_code=True,
    marks={"image": "(<image>./</image>)"},
    takes_data=True,
)

_PROJECTOR = "multi_modal_projector"
_SEES = ("image", "video")

FAMILIES = (
    QWEN25_OMNI,
    QWEN3_OMNI,
    _one_tower("MiniCPM-V 4.6", "MiniCPMV4_6", "minicpmv4_6", "vision_tower", "encoder.layers", "merger", media=_SEES),
    MINICPM_V_OWN,
    _one_tower(
        "Qwen2-VL",
        "Qwen2VL",
        "qwen2_vl",
        "visual",
        "blocks",
        "visual.merger",
        media=_SEES,
        grounding=_THOUSANDTHS,
    ),
    _one_tower(
        "Qwen2.5-VL",
        "Qwen2_5_VL",
        "qwen2_5_vl",
        "visual",
        "blocks",
        "visual.merger",
        media=_SEES,
        grounding=_PIXELS,
    ),
    _one_tower(
        "Qwen3-VL",
        "Qwen3VL",
        "qwen3_vl",
        "visual",
        "blocks",
        "visual.merger",
        "visual.deepstack_merger_list",
        media=_SEES,
        grounding=_THOUSANDTHS,
    ),
    _one_tower("Qwen2-Audio", "Qwen2Audio", "qwen2_audio", "audio_tower", "layers", _PROJECTOR, media=("audio",)),
    _one_tower("Voxtral", "Voxtral", "voxtral", "audio_tower", "layers", _PROJECTOR, media=("audio",)),
    _one_tower(
        "InternVL",
        "InternVL",
        "internvl",
        "vision_tower",
        "encoder.layer",
        _PROJECTOR,
        media=_SEES,
        grounding=Grounding("<ref>{}</ref>", "<box>[{list}]</box>"),
    ),
    _one_tower(
        "LLaVA",
        "Llava",
        "llava",
        "vision_tower",
        "encoder.layers",
        _PROJECTOR,
        media=("image",),
        unused=("vision_tower.post_layernorm",),  # features come from an earlier layer
    ),
    _one_tower(
        "Gemma 3",
        "Gemma3",
        "gemma3",
        "vision_tower",
        "encoder.layers",
        _PROJECTOR,
        media=("image",),
        unused=("vision_tower.head",),  # SigLIP's pooled output
    ),
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
    """The record for a transformers config (or the dict in a config.json), or None."""
    kind = config.get("model_type") if isinstance(config, dict) else getattr(config, "model_type", None)
    return next((family for family in FAMILIES if kind in family.model_types), None)


def grounding_of(processor: Any) -> Grounding | None:
    """How models with this processor write objects and their locations. Models that share a processor (Qwen3-VL and
    Qwen3.5) share this, too."""
    name = type(processor).__name__
    return next((family.grounding for family in FAMILIES if family.processor == name), None)
