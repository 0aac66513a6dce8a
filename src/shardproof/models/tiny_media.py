"""Small multimodal models with processor and tokenizer, built on the spot: a Qwen2.5-Omni, a Qwen2.5-VL and a
MiniCPM-V."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardproof.models.chatml import TURN_END, TURN_START
from shardproof.models.tiny import CONTEXT, PAD, train_tokenizer

OMNI, QWEN_VL, MINICPM_V = "qwen2_5_omni", "qwen2_5_vl", "minicpmv4_6"

# ChatML whose turns are texts or lists of parts: {parts} writes the mark of each kind of file.
_TEMPLATE = """\
{{%- for message in messages %}}
    {{{{- '<|im_start|>' + message['role'] + '\\n' }}}}
    {{%- if message['content'] is string %}}
        {{{{- message['content'] }}}}
    {{%- else %}}
        {{%- for part in message['content'] %}}
            {{%- if part['type'] == 'text' %}}{{{{- part['text'] }}}}
            {parts}
            {{%- endif %}}
        {{%- endfor %}}
    {{%- endif %}}
    {{{{- '<|im_end|>\\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}
    {{{{- '<|im_start|>assistant\\n' }}}}
{{%- endif %}}
"""

_OMNI_TOKENS = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
_QWEN_VL_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}
_MINICPM_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}

_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "patch_size": 4,
    "window_size": 16,
    "fullatt_block_indexes": [1],
    "out_hidden_size": 128,
}


def build_tiny_omni(folder: Path, texts: Iterable[str], *, seed: int = 0, talker: bool = True) -> Path:
    """Write a small Qwen2.5-Omni with random weights, its processor, and a tokenizer trained on `texts`.

    It takes images of at least 16 x 16 pixels (a token for each 8 x 8), and audio of up to 4 seconds.

    Args:
        folder: where to write the model: an ordinary Hugging Face folder.
        talker: include the modules that speak.

    Returns: `folder`. The same texts and seed give the same files.
    """
    import transformers

    marks = {
        "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
        "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
        "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
    }
    tokenizer = media_tokenizer(texts, _OMNI_TOKENS, marks)
    processor = media_processor(
        "Qwen2_5OmniProcessor",
        tokenizer,
        images=image_processor(
            "Qwen2VLImageProcessor", patch_size=4, size={"shortest_edge": 256, "longest_edge": 4096}
        ),
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=40, chunk_length=4),
    )
    config = transformers.Qwen2_5OmniConfig(**_omni_config(tokenizer), enable_audio_output=talker)
    save_random("Qwen2_5OmniForConditionalGeneration", config, tokenizer, seed, folder)
    processor.save_pretrained(folder)
    _save_speakers(folder, tokenizer, seed)
    return folder


def build_tiny_qwen_vl(folder: Path, texts: Iterable[str], *, seed: int = 0) -> Path:
    """Write a small Qwen2.5-VL with random weights, its processor, and a tokenizer trained on `texts`.

    It takes images of at least 16 x 16 pixels (a token for each 8 x 8).

    Args:
        folder: where to write the model: an ordinary Hugging Face folder.

    Returns: `folder`. The same texts and seed give the same files.
    """
    import transformers

    marks = {kind: f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")}
    tokenizer = media_tokenizer(texts, _QWEN_VL_TOKENS, marks)
    images = image_processor("Qwen2VLImageProcessor", patch_size=4, size={"shortest_edge": 256, "longest_edge": 4096})
    processor = media_processor("Qwen2_5_VLProcessor", tokenizer, images=images)
    config = transformers.Qwen2_5_VLConfig(
        text_config={**_language(tokenizer), "rope_parameters": _ROPE},
        vision_config=_QWEN_VISION,
        image_token_id=tokenizer.image_token_id,
        video_token_id=tokenizer.video_token_id,
        vision_start_token_id=tokenizer.vision_bos_token_id,
        vision_end_token_id=tokenizer.vision_eos_token_id,
        tie_word_embeddings=False,
    )
    save_random("Qwen2_5_VLForConditionalGeneration", config, tokenizer, seed, folder)
    processor.save_pretrained(folder)
    return folder


def build_tiny_minicpm_v(folder: Path, texts: Iterable[str], *, seed: int = 0) -> Path:
    """Write a small MiniCPM-V 4.6 with random weights, its processor, and a tokenizer trained on `texts`.

    It resizes images to 32 x 32 pixels, which become four tokens.

    Args:
        folder: where to write the model: an ordinary Hugging Face folder.

    Returns: `folder`. The same texts and seed give the same files.
    """
    import transformers

    tokenizer = media_tokenizer(texts, _MINICPM_TOKENS, {"image": "<|image_pad|>", "video": "<|video_pad|>"})
    images = image_processor("MiniCPMV4_6ImageProcessor", patch_size=4, scale_resolution=32, slice_mode=False)
    processor = media_processor("MiniCPMV4_6Processor", tokenizer, images, videos="MiniCPMV4_6VideoProcessor")
    config = transformers.MiniCPMV4_6Config(
        text_config={
            **_language(tokenizer),
            "model_type": "qwen3_5_text",
            "layer_types": ["linear_attention", "full_attention", "full_attention"],
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 4,
        },
        insert_layer_id=0,
        image_size=32,
        image_token_id=tokenizer.image_token_id,
        video_token_id=tokenizer.video_token_id,
    )
    save_random("MiniCPMV4_6ForConditionalGeneration", config, tokenizer, seed, folder)
    processor.save_pretrained(folder)
    return folder


def media_tokenizer(texts: Iterable[str], tokens: dict[str, str], marks: dict[str, str]) -> Any:
    """The tokenizer of the tiny text model, with these special tokens (by attribute) and a template that writes the
    mark of each kind of file."""
    from transformers import PreTrainedTokenizerFast

    branches = [f"{{%- elif part['type'] == '{kind}' %}}{{{{- '{mark}' }}}}" for kind, mark in marks.items()]
    return PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(texts).backend_tokenizer,
        eos_token=TURN_END,
        pad_token=PAD,
        extra_special_tokens={"turn_start_token": TURN_START, **tokens},
        chat_template=_TEMPLATE.format(parts="\n            ".join(branches)),
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def image_processor(name: str, **options: Any) -> Any:
    """An image processor of transformers: the one for torchvision, or else the same model's for PIL."""
    import transformers
    from transformers.utils import is_torchvision_available

    return getattr(transformers, name if is_torchvision_available() else f"{name}Pil")(**options)


def media_processor(
    name: str, tokenizer: Any, images: Any = None, videos: str = "Qwen2VLVideoProcessor", **more: Any
) -> Any:
    """A processor of transformers with these parts, and with a video processor if its class takes one.

    Args:
        name: its class; `videos`: the class of its video processor.
        more: its other parts and options.
    """
    import transformers
    from transformers.utils import is_torchvision_available

    from shardproof.models.loading.processors import prepared, with_our_videos
    from shardproof.models.media.videos import FrameVideos

    cls = getattr(transformers, name)
    parts = {"tokenizer": tokenizer, **more}
    if images is not None:
        parts["image_processor"] = images
    if "video_processor" in cls.get_attributes():
        config = {key: value for key, value in images.to_dict().items() if key != "image_processor_type"}
        if is_torchvision_available():
            parts["video_processor"] = getattr(transformers, videos)(**config)
        else:
            cls = with_our_videos(cls)
            parts["video_processor"] = FrameVideos(images, {**config, "video_processor_type": videos})
    return prepared(cls(**parts, chat_template=tokenizer.chat_template))


def _language(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _omni_config(tokenizer: Any) -> dict[str, Any]:
    media = {
        "audio_token_index": tokenizer.audio_token_id,
        "image_token_index": tokenizer.image_token_id,
        "video_token_index": tokenizer.video_token_id,
        "audio_start_token_id": tokenizer.audio_bos_token_id,
        "audio_end_token_id": tokenizer.audio_eos_token_id,
        "vision_start_token_id": tokenizer.vision_bos_token_id,
        "vision_end_token_id": tokenizer.vision_eos_token_id,
    }
    thinker = {
        **media,
        "text_config": {**_language(tokenizer), "rope_parameters": _ROPE},
        "vision_config": _QWEN_VISION,
        "audio_config": {
            "num_mel_bins": 40,
            "d_model": 64,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "max_source_positions": 200,
            "output_dim": 128,
        },
        "user_token_id": tokenizer.convert_tokens_to_ids("user"),
    }
    talker = {
        **media,
        **{name: value for name, value in _language(tokenizer).items() if not name.endswith("_token_id")},
        "vocab_size": 64,  # audio codes, and five marks
        "embedding_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "rope_parameters": _ROPE,
        "tts_text_start_token_id": tokenizer.turn_start_token_id,
        "tts_text_end_token_id": tokenizer.eos_token_id,
        "tts_text_pad_token_id": tokenizer.pad_token_id,
        "tts_codec_mask_token_id": 59,
        "tts_codec_pad_token_id": 60,
        "tts_codec_start_token_id": 61,
        "tts_codec_end_token_id": 62,
    }
    token2wav = {
        "dit_config": {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "head_dim": 32,
            "emb_dim": 32,
            "num_embeds": 64,
            "enc_channels": [32, 32, 32, 32, 96],
            "look_ahead_layers": [1],
            "look_backward_layers": [0],
        },
        "bigvgan_config": {
            "upsample_initial_channel": 32,
            "upsample_rates": [4, 4],
            "upsample_kernel_sizes": [8, 8],
        },
    }
    return {"thinker_config": thinker, "talker_config": talker, "token2wav_config": token2wav}


def save_random(name: str, config: Any, tokenizer: Any, seed: int, folder: Path) -> None:
    """Save a model of this transformers class with random weights."""
    import torch
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, name)(config)
    model.generation_config.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)


def _save_speakers(folder: Path, tokenizer: Any, seed: int) -> None:
    """Write the voices of a Qwen2.5-Omni, without which transformers does not load it."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    voice = {
        "bos_token": tokenizer.turn_start_token_id,
        "cond": torch.randn(1, 192, generator=generator),
        "ref_mel": torch.randn(1, 30, 80, generator=generator),
    }
    torch.save({"Chelsie": voice}, Path(folder) / "spk_dict.pt")
