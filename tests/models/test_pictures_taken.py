"""Models of transformers that end at pictures, or rows, that others take: see `models/media/pictures.py`."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from models.tiny_configs import TEXT, VISION
from shardproof.models.media.pictures import pictures_taken


def mistral3() -> Any:
    vision = {**VISION, "model_type": "pixtral", "image_size": 56, "head_dim": 16}
    config = transformers.Mistral3Config(text_config={**TEXT, "model_type": "mistral"}, vision_config=vision)
    torch.manual_seed(0)
    return transformers.Mistral3ForConditionalGeneration(config)


def test_a_lone_picture_of_one_token_has_the_features_it_has_beside_another() -> None:
    """Mistral 3 took the dimension of the tokens away, and a run ended at a picture of 28 x 28 pixels."""
    model = mistral3()
    pictures_taken(model)
    pixels = torch.randn(2, 3, 56, 28)
    sizes = torch.tensor([[28, 28], [56, 28]])
    small, _ = model.model.get_image_features(pixels, sizes, return_dict=True).pooler_output
    (alone,) = model.model.get_image_features(pixels[:1, :, :28], sizes[:1], return_dict=True).pooler_output
    torch.testing.assert_close(alone, small, atol=1e-6, rtol=1e-5)
    assert alone.shape == (1, 32)
    (large,) = model.model.get_image_features(pixels[1:], sizes[1:], return_dict=True).pooler_output
    assert large.shape == (2, 32)


def test_llama_4_gives_the_logits_of_its_language_model() -> None:
    """It looked for outputs of pictures in what its language model gives, which has none: each forward ended."""
    text = {**TEXT, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 64}
    vision = {**VISION, "intermediate_size": 128, "vision_output_dim": 32, "projector_input_dim": 32}
    config = transformers.Llama4Config(text_config=text, vision_config={**vision, "projector_output_dim": 32})
    torch.manual_seed(0)
    model = transformers.Llama4ForConditionalGeneration(config).eval()
    pictures_taken(model)
    ids = torch.tensor([[3, 4, 5, 6]])
    outputs = model(input_ids=ids, labels=ids)
    torch.testing.assert_close(outputs.logits, model.language_model(input_ids=ids).logits)
    assert outputs.loss > 0
