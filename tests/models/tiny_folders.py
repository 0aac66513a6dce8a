"""Model folders, with processors where there are any, for the families that the package builds no tiny model of.

Everything is as small as the classes allow: the configurations are those of `tiny_configs.py`, tokenizers are trained
on the spot. A picture is seen at 28 x 28 pixels and more, a sound lasts no more than two seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.tekken import AUDIO, tekken_tokenizer
from models.tiny_configs import TINY
from shardproof.models.families.known import FAMILIES
from shardproof.models.loading.processors import prepared
from shardproof.models.tiny import train_tokenizer
from shardproof.models.tiny_media import image_processor, media_processor, media_tokenizer, save_random

TEXTS = ["which digit is this? what do you hear?"]
SQUARE = {"height": 28, "width": 28}

SEEN = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
HEARD = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
QWEN_MARKS = {kind: f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")}
HEARD_MARK = {"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"}


def build(kind: str, folder: Path) -> Path:
    """Write a model of this `model_type` with random weights, its processor and tokenizer. Returns `folder`."""
    import transformers

    tokenizer, processor, config = _MAKERS[kind]() if kind in _MAKERS else _words(kind)
    name = next(family.model_class for family in FAMILIES if kind in family.model_types)
    save_random(name, transformers.AutoConfig.for_model(kind, **config), tokenizer, 0, folder)
    if kind == "qwen3_omni_moe":
        _fill_experts(folder)
    processor.save_pretrained(folder)
    return folder


def _fill_experts(folder: Path) -> None:
    """Give the talker's experts values: transformers 5.23 leaves them as the memory was."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    chance = torch.Generator().manual_seed(0)
    for name, value in weights.items():
        if name.startswith("talker.") and ".experts." in name:
            value.copy_(0.02 * torch.randn(value.shape, generator=chance))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _words(kind: str) -> tuple[Any, Any, dict[str, Any]]:
    tokenizer = train_tokenizer(TEXTS)
    return tokenizer, tokenizer, _text(TINY[kind], tokenizer)


def _qwen2_vl() -> tuple[Any, Any, dict[str, Any]]:
    tokens = {**SEEN, "vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
    tokenizer = media_tokenizer(TEXTS, tokens, QWEN_MARKS)
    processor = media_processor("Qwen2VLProcessor", tokenizer, _qwen_images())
    config = {
        **TINY["qwen2_vl"],
        "text_config": _text(
            TINY["qwen2_vl"]["text_config"], tokenizer, rope_parameters={**_ROPE, "mrope_interleaved": False}
        ),
        **_ids(tokenizer, "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    }
    return tokenizer, processor, config


def _qwen3_vl() -> tuple[Any, Any, dict[str, Any]]:
    tokens = {**SEEN, "vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
    tokenizer = media_tokenizer(TEXTS, tokens, QWEN_MARKS)
    processor = media_processor("Qwen3VLProcessor", tokenizer, _qwen_images(), videos="Qwen3VLVideoProcessor")
    config = {
        "text_config": _text(TINY["qwen3_vl"]["text_config"], tokenizer, rope_parameters=_ROPE),
        "vision_config": {**TINY["qwen3_vl"]["vision_config"], "patch_size": 14},
        **_ids(tokenizer, "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    }
    return tokenizer, processor, config


def _qwen2_audio() -> tuple[Any, Any, dict[str, Any]]:
    tokenizer = media_tokenizer(TEXTS, HEARD, HEARD_MARK)
    processor = media_processor("Qwen2AudioProcessor", tokenizer, feature_extractor=_whisper())
    config = {
        **TINY["qwen2_audio"],
        "text_config": _text(TINY["qwen2_audio"]["text_config"], tokenizer),
        "audio_token_index": tokenizer.audio_token_id,
    }
    return tokenizer, processor, config


def _voxtral() -> tuple[Any, Any, dict[str, Any]]:
    import transformers

    tokenizer = tekken_tokenizer()
    processor = prepared(transformers.VoxtralProcessor(transformers.WhisperFeatureExtractor(16), tokenizer))
    text = _text(TINY["voxtral"]["text_config"], tokenizer)
    return tokenizer, processor, {**TINY["voxtral"], "text_config": text, "audio_token_id": AUDIO}


def _internvl() -> tuple[Any, Any, dict[str, Any]]:
    tokens = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = media_tokenizer(TEXTS, tokens, {"image": "<IMG_CONTEXT>", "video": "<video>"})
    images = image_processor("GotOcr2ImageProcessor", size=SQUARE, max_patches=2)
    processor = media_processor(
        "InternVLProcessor", tokenizer, images, videos="InternVLVideoProcessor", image_seq_length=4
    )
    config = {
        "text_config": _text(TINY["internvl"]["text_config"], tokenizer),
        "vision_config": {**TINY["internvl"]["vision_config"], "patch_size": [7, 7]},
        "image_token_id": tokenizer.context_image_token_id,
        "image_seq_length": 4,
    }
    return tokenizer, processor, config


def _llava() -> tuple[Any, Any, dict[str, Any]]:
    tokenizer = media_tokenizer(TEXTS, {"image_token": "<image>"}, {"image": "<image>"})
    images = image_processor("LlavaImageProcessor", size={"shortest_edge": 28}, crop_size=SQUARE)
    options = {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    processor = media_processor("LlavaProcessor", tokenizer, images, **options)
    config = {
        **TINY["llava"],
        "text_config": _text(TINY["llava"]["text_config"], tokenizer),
        "image_token_index": tokenizer.image_token_id,
    }
    return tokenizer, processor, config


def _gemma3() -> tuple[Any, Any, dict[str, Any]]:
    tokens = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image_soft_token>"}
    tokenizer = media_tokenizer(TEXTS, tokens, {"image": "<boi>"})
    images = image_processor("Gemma3ImageProcessor", size=SQUARE)
    processor = media_processor("Gemma3Processor", tokenizer, images, image_seq_length=4)
    config = {
        **TINY["gemma3"],
        "text_config": _text(TINY["gemma3"]["text_config"], tokenizer),
        "boi_token_index": tokenizer.boi_token_id,
        "eoi_token_index": tokenizer.eoi_token_id,
        "image_token_index": tokenizer.image_token_id,
    }
    return tokenizer, processor, config


def _qwen3_omni() -> tuple[Any, Any, dict[str, Any]]:
    tts = {f"tts_{name}_token": f"<tts_{name}>" for name in ("pad", "bos", "eos")}
    tokens = {**SEEN, **HEARD, **tts, "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"}
    tokenizer = media_tokenizer(TEXTS, tokens, {**QWEN_MARKS, **HEARD_MARK})
    processor = media_processor("Qwen3OmniMoeProcessor", tokenizer, _qwen_images(), feature_extractor=_whisper())
    tiny = TINY["qwen3_omni_moe"]
    media = _ids(tokenizer, "image_token_id", "audio_token_id", "video_token_id")
    media |= {"vision_start_token_id": tokenizer.vision_bos_token_id}
    media |= {"audio_start_token_id": tokenizer.audio_bos_token_id}
    user, assistant, system = tokenizer.convert_tokens_to_ids(["user", "assistant", "system"])
    thinker = {
        **tiny["thinker_config"],
        **media,
        "text_config": _text(tiny["thinker_config"]["text_config"], tokenizer, rope_parameters=_ROPE),
        "vision_config": {**tiny["thinker_config"]["vision_config"], "patch_size": 14},
        "user_token_id": user,
    }
    codec = ("eos_token", "nothink", "think_bos", "think_eos", "pad", "bos")
    talker = {
        **tiny["talker_config"],
        **media,
        # `generate` keeps the last 1,024 codes for marks.
        "text_config": {**tiny["talker_config"]["text_config"], "rope_parameters": _ROPE, "vocab_size": 64 + 1024},
        "accept_hidden_layer": 1,
        "speaker_id": {"ethan": 64 + 6},
        **{f"codec_{name}_id": 64 + i for i, name in enumerate(codec)},
    }
    config = {
        "thinker_config": thinker,
        "talker_config": talker,
        "code2wav_config": {**tiny["code2wav_config"], "codebook_size": 64},
        "im_start_token_id": tokenizer.convert_tokens_to_ids("<|im_start|>"),
        "im_end_token_id": tokenizer.eos_token_id,
        "user_token_id": user,
        "assistant_token_id": assistant,
        "system_token_id": system,
        **_ids(tokenizer, "tts_pad_token_id", "tts_bos_token_id", "tts_eos_token_id"),
    }
    return tokenizer, processor, config


_MAKERS = {
    "qwen2_vl": _qwen2_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen2_audio": _qwen2_audio,
    "voxtral": _voxtral,
    "internvl": _internvl,
    "llava": _llava,
    "gemma3": _gemma3,
    "qwen3_omni_moe": _qwen3_omni,
}

_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}


def _text(config: dict[str, Any], tokenizer: Any, **more: Any) -> dict[str, Any]:
    ids = _ids(tokenizer, "eos_token_id", "pad_token_id")
    return {**config, **ids, "bos_token_id": None, "vocab_size": len(tokenizer), **more}


def _ids(tokenizer: Any, *names: str) -> dict[str, int]:
    return {name: getattr(tokenizer, name) for name in names}


def _qwen_images() -> Any:
    size = {"shortest_edge": 28 * 28, "longest_edge": 64 * 28 * 28}
    return image_processor("Qwen2VLImageProcessor", patch_size=14, size=size)


def _whisper() -> Any:
    import transformers

    return transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=2)
