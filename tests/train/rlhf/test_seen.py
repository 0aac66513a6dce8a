"""Answers of Mllama, whose tokens are told which pictures they see, and of processors that take no text alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from models.tiny_folders import SQUARE, TEXTS
from shardproof.data.media import Limits
from shardproof.data.media_encode import MediaEncoder
from shardproof.models.tiny_media import image_processor, media_processor, media_tokenizer

pytest.importorskip("trl")
from shardproof.train.pictured_batches import _pairs
from shardproof.train.prompted import Prompted

PICTURE = Image.fromarray(np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3))


@pytest.fixture
def encoder() -> MediaEncoder:
    tokenizer = media_tokenizer(TEXTS, {"image_token": "<|image|>"}, {"image": "<|image|>"})
    tokenizer.bos_token = "<|im_start|>"
    images = image_processor("MllamaImageProcessor", size=SQUARE, max_image_tiles=2)
    return MediaEncoder(media_processor("MllamaProcessor", tokenizer, images), Limits())


def pair(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": "two and seven", "rejected": "no", "images": [PICTURE]}


def test_answers_of_pairs_see_what_is_seen_before_them(encoder: MediaEncoder) -> None:
    """They had no mask, and a run by DPO ended; and the processor put another beginning before each answer."""
    files = [{"image": [PICTURE], "audio": [], "video": []}] * 2
    prompts = ["<|im_start|>which digit?<|image|> or none", "<|im_start|><|image|>what is it?"]
    made = _pairs(encoder, files, None, [pair(prompt) for prompt in prompts])
    begins = (made["input_ids"] == encoder.processor.tokenizer.bos_token_id).sum(dim=1)
    assert begins.tolist() == [1, 1, 1, 1]
    seen, said = made["cross_attention_mask"], made["completion_mask"] == 1
    assert seen.shape[:2] == made["input_ids"].shape
    assert (seen[said].sum(dim=(1, 2)) > 0).all()
    assert (seen[0, :2] == 0).all()  # before the picture


def test_generated_answers_see_what_is_seen_before_them() -> None:
    """They are generated with it, and were learnt from without."""
    prompted = Prompted.__new__(Prompted)
    ids, seen = torch.ones(1, 3, dtype=torch.long), torch.tensor([0, 1, 1]).view(1, 3, 1, 1)
    prompted._made = {(0,): {"input_ids": ids, "attention_mask": ids, "cross_attention_mask": seen}}
    given = prompted.given([0], before=4, behind=2, device=torch.device("cpu"))
    assert given["cross_attention_mask"].flatten().tolist() == [0, 0, 1, 1, 1, 1]
