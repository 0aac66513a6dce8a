"""Models, as small as their classes allow, whose processors need torchvision (Granite Speech's torchaudio)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.tiny_configs import TEXT, VISION
from models.tiny_folders import SQUARE, TEXTS
from shardproof.models.loading.processors import prepared
from shardproof.models.tiny_media import media_tokenizer, save_random

LARGE = {"height": 56, "width": 56}
PIXELS = {"shortest_edge": 28 * 28, "longest_edge": 64 * 28 * 28}
MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}
Made = tuple[str, Any, Any, dict[str, Any]]  # class of the model, tokenizer, processor, config without its text


def build(kind: str, folder: Path) -> Path:
    """Write a model of this `model_type` with random weights, its processor and tokenizer. Returns `folder`."""
    import transformers

    cls, tokenizer, processor, config = KINDS[kind]()
    ids = {"vocab_size": len(tokenizer), "bos_token_id": None}
    ids |= {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id")}
    config["text_config"] = {**TEXT, **ids, **config["text_config"]}
    save_random(cls, transformers.AutoConfig.for_model(kind, **config), tokenizer, 0, folder)
    processor.save_pretrained(folder)
    return folder


def _tokenizer(marks: dict[str, str], *tokens: str, **named: str) -> Any:
    tokenizer = media_tokenizer(TEXTS, named, marks)
    tokenizer.add_special_tokens({"extra_special_tokens": list(tokens)}, replace_extra_special_tokens=False)
    return tokenizer


def _processor(name: str, tokenizer: Any, **parts: Any) -> Any:
    """`parts`: options, and of parts the class and its own options."""
    import transformers

    made = {
        key: getattr(transformers, part[0])(**part[1]) if isinstance(part, tuple) else part
        for key, part in parts.items()
    }
    return prepared(getattr(transformers, name)(tokenizer=tokenizer, chat_template=tokenizer.chat_template, **made))


def _mistral3() -> Made:
    tokenizer = _tokenizer({"image": "[IMG]"}, "[IMG]", "[IMG_BREAK]", "[IMG_END]")
    images = ("PixtralImageProcessor", {"size": {"longest_edge": 56}, "patch_size": 14})
    processor = _processor("PixtralProcessor", tokenizer, image_processor=images, patch_size=14, spatial_merge_size=2)
    config = {
        "text_config": {"model_type": "mistral"},
        "vision_config": {**VISION, "model_type": "pixtral", "image_size": 56, "head_dim": 16},
        "image_token_index": tokenizer.convert_tokens_to_ids("[IMG]"),
    }
    return "Mistral3ForConditionalGeneration", tokenizer, processor, config


def _cohere2_vision() -> Made:
    named = {"image_token": "<|IMG_PATCH|>", "boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>"}
    tokenizer = _tokenizer({"image": "<|IMG_PATCH|>"}, img_line_break_token="<|IMG_LINE_BREAK|>", **named)
    images = ("Cohere2VisionImageProcessor", {"size": LARGE, "patch_size": 2, "max_patches": 3})
    processor = _processor("Cohere2VisionProcessor", tokenizer, image_processor=images)
    config = {
        "text_config": {"model_type": "cohere2", "sliding_window": 16},
        "vision_config": {**VISION, "model_type": "siglip_vision_model", "image_size": 56},
        "image_token_id": tokenizer.image_token_id,
        "alignment_intermediate_size": 48,
    }
    return "Cohere2VisionForConditionalGeneration", tokenizer, processor, config


def _lfm2_vl() -> Made:
    named = {f"image_{name}_token": f"<|{name}|>" for name in ("start", "end", "thumbnail")}
    rows = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)]
    tokenizer = _tokenizer({"image": "<image>"}, *rows, image_token="<image>", **named)
    tiles = {"tile_size": 32, "min_tiles": 2, "max_tiles": 4, "max_pixels_tolerance": 1.0, "max_num_patches": 64}
    images = {**tiles, "encoder_patch_size": 8, "min_image_tokens": 1, "max_image_tokens": 4}
    processor = _processor("Lfm2VlProcessor", tokenizer, image_processor=("Lfm2VlImageProcessor", images))
    config = {
        "text_config": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        "vision_config": {**VISION, "model_type": "siglip2_vision_model", "patch_size": 8, "num_patches": 16},
        "image_token_id": tokenizer.image_token_id,
        "projector_hidden_size": 48,
    }
    return "Lfm2VlForConditionalGeneration", tokenizer, processor, config


def _llama4() -> Made:
    marks = ["image", "image_start", "image_end", "patch", "tile_x_separator", "tile_y_separator"]
    tokenizer = _tokenizer({"image": "<|image|>"}, *[f"<|{mark}|>" for mark in marks])
    images = ("Llama4ImageProcessor", {"size": SQUARE, "max_patches": 3})
    processor = _processor("Llama4Processor", tokenizer, image_processor=images, patch_size=7)
    sizes = {"patch_size": 7, "intermediate_size": 128}
    sizes |= {f"{name}_dim": 48 for name in ("vision_output", "projector_input", "projector_output")}
    config = {
        "text_config": {"intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 64},
        "vision_config": {**VISION, **sizes},
        "image_token_index": tokenizer.convert_tokens_to_ids("<|patch|>"),
    }
    return "Llama4ForConditionalGeneration", tokenizer, processor, config


def _molmo2() -> Made:
    marks = ["im_patch", "im_col", "im_start", "low_res_im_start", "frame_start", "im_end", "frame_end", "im_low"]
    tokenizer = _tokenizer(
        {"image": "<|image|>", "video": "<|video|>"}, *[f"<{mark}>" for mark in marks], "<|image|>", "<|video|>"
    )
    sizes = {"size": LARGE, "patch_size": 14, "pooling_size": [2, 2]}
    processor = _processor(
        "Molmo2Processor",
        tokenizer,
        image_processor=("Molmo2ImageProcessor", {**sizes, "max_crops": 2, "overlap_margins": [1, 1]}),
        video_processor=("Molmo2VideoProcessor", sizes),
    )
    heads = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    named = ("im_start", "low_res_im_start", "im_end", "frame_start", "frame_end")
    ids = {f"{name.replace('im_', 'image_')}_token_id": tokenizer.convert_tokens_to_ids(f"<{name}>") for name in named}
    config = {
        "text_config": {"additional_vocab_size": 8},
        "vision_config": {**VISION, **heads, "image_size": [56, 56], "num_position_embeddings": 16},
        "adapter_config": {**heads, "intermediate_size": 48, "text_hidden_size": 32, "vision_feature_layer": [-1, -2]},
        "image_patch_id": tokenizer.convert_tokens_to_ids("<im_patch>"),
        **ids,
    }
    return "Molmo2ForConditionalGeneration", tokenizer, processor, config


def _minimax_m3_vl() -> Made:
    image, video, *ends = (f"]<]{name}[>[" for name in ("image", "video", "start of image", "end of image"))
    tokenizer = _tokenizer({"image": image, "video": video}, image, video, *ends)
    sizes = {"patch_size": 14, "size": PIXELS}
    processor = _processor(
        "MiniMaxM3VLProcessor",
        tokenizer,
        image_processor=("MiniMaxM3VLImageProcessor", sizes),
        video_processor=("MiniMaxM3VLVideoProcessor", sizes),
    )
    text = {"dense_intermediate_size": 48, "shared_intermediate_size": 16, "rotary_dim": 8, "num_local_experts": 4}
    index = {"index_n_heads": 2, "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 64}
    config = {
        "text_config": {**text, **index, "num_experts_per_tok": 2},
        "vision_config": dict(VISION),
        "image_token_index": tokenizer.convert_tokens_to_ids(image),
        "video_token_index": tokenizer.convert_tokens_to_ids(video),
        "projector_hidden_size": 32,
    }
    return "MiniMaxM3SparseForConditionalGeneration", tokenizer, processor, config


def _llava_onevision() -> Made:
    marks = {"image": "<image>", "video": "<video>"}
    tokenizer = _tokenizer(marks, image_token="<image>", video_token="<video>")
    grid = {"image_grid_pinpoints": [[28, 28], [28, 56], [56, 28]]}
    processor = _processor(
        "LlavaOnevisionProcessor",
        tokenizer,
        image_processor=("LlavaOnevisionImageProcessor", {"size": SQUARE, **grid}),
        video_processor=("LlavaOnevisionVideoProcessor", {"size": SQUARE}),
        num_image_tokens=4,
        vision_feature_select_strategy="full",
        patch_size=14,
    )
    config = {
        "text_config": {"model_type": "qwen2"},
        "vision_config": {**VISION, "model_type": "siglip_vision_model"},
        "image_token_index": tokenizer.image_token_id,
        "video_token_index": tokenizer.video_token_id,
        **grid,
    }
    return "LlavaOnevisionForConditionalGeneration", tokenizer, processor, config


def _smolvlm() -> Made:
    named = {"image_token": "<image>", "video_token": "<video>", "global_image_token": "<global-img>"}
    tiles = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    tokenizer = _tokenizer({"image": "<image>", "video": "<video>"}, *tiles, "<fake_token_around_image>", **named)
    sizes = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}
    processor = _processor(
        "SmolVLMProcessor",
        tokenizer,
        image_processor=("SmolVLMImageProcessor", sizes),
        video_processor=("SmolVLMVideoProcessor", sizes),
        image_seq_len=1,
    )
    config = {
        "text_config": {"model_type": "llama"},
        "vision_config": dict(VISION),
        "image_token_id": tokenizer.image_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "scale_factor": 2,
    }
    return "SmolVLMForConditionalGeneration", tokenizer, processor, config


def _muse_glimmer() -> Made:
    marks = ["patch", "image_start", "image_end", "video", "vid_frame_separator", "vid_start", "vid_end"]
    tokenizer = _tokenizer({"image": "<|patch|>", "video": "<|video|>"}, *[f"<|{mark}|>" for mark in marks])
    processor = _processor(
        "MuseGlimmerProcessor",
        tokenizer,
        image_processor=("MuseGlimmerImageProcessor", {"max_image_tokens": 16}),
        video_processor=("MuseGlimmerVideoProcessor", {"max_video_frame_tokens": 4}),
    )
    sizes = {"patch_size": 14, "pos_emb_height": 8, "pos_emb_width": 8, "max_position_embeddings": 64}
    config = {
        "text_config": {"layer_types": ["sliding_attention", "full_attention"], "layer_rope_theta": [10000.0, 0]},
        "vision_config": {**VISION, **sizes},
        "image_token_id": tokenizer.convert_tokens_to_ids("<|patch|>"),
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video|>"),
        "out_hidden_size": 128,
        "projector_hidden_size": 48,
    }
    return "MuseGlimmerForConditionalGeneration", tokenizer, processor, config


def _unlimited_ocr() -> Made:
    tokenizer = _tokenizer({"image": "<image>"}, image_token="<image>")
    images = {"size": {"height": 128, "width": 128}, "tile_size": 64, "max_patches": 4}
    processor = _processor("UnlimitedOcrProcessor", tokenizer, image_processor=("UnlimitedOcrImageProcessor", images))
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sam = {**small, "output_channels": 16, "image_size": 128, "downsample_channels": [24, 32], "mlp_dim": 48}
    config = {
        "text_config": {**MOE, "mlp_layer_types": ["dense", "sparse"], "sliding_window": 16},
        "vision_config": {
            "sam_config": {**sam, "global_attn_indexes": [1], "initializer_range": 0.02},
            "encoder_config": {**VISION},
        },
        "image_token_id": tokenizer.image_token_id,
    }
    return "UnlimitedOcrForConditionalGeneration", tokenizer, processor, config


def _granite_speech() -> Made:
    tokenizer = _tokenizer({"audio": "<|audio|>"}, audio_token="<|audio|>")
    processor = _processor("GraniteSpeechProcessor", tokenizer, audio_processor=("GraniteSpeechFeatureExtractor", {}))
    encoder = {"hidden_dim": 32, "num_layers": 2, "num_heads": 2, "dim_head": 16, "output_dim": 8, "dropout": 0.0}
    projector = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    projector |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "encoder_hidden_size": 32}
    config = {
        "text_config": {"model_type": "granite"},
        "encoder_config": {**encoder, "context_size": 20, "max_pos_emb": 64, "conv_kernel_size": 3},
        "projector_config": {**projector, "model_type": "blip_2_qformer", "cross_attention_frequency": 1},
        "audio_token_index": tokenizer.audio_token_id,
        "has_lora_adapter": False,
    }
    return "GraniteSpeechForConditionalGeneration", tokenizer, processor, config


KINDS = {
    "mistral3": _mistral3,
    "cohere2_vision": _cohere2_vision,
    "lfm2_vl": _lfm2_vl,
    "llama4": _llama4,
    "llava_onevision": _llava_onevision,
    "molmo2": _molmo2,
    "minimax_m3_vl": _minimax_m3_vl,
    "granite_speech": _granite_speech,
    "smolvlm": _smolvlm,
    "muse_glimmer": _muse_glimmer,
    "unlimited_ocr": _unlimited_ocr,
}
