"""Answers of Mllama, whose tokens are told which pictures they see, and of processors that take no text alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from models.tiny_folders import SQUARE, TEXTS
from shardproof.data.media.encode import MediaEncoder
from shardproof.data.media.limits import Limits
from shardproof.models.tiny_media import image_processor, media_processor, media_tokenizer

pytest.importorskip("trl")
from shardproof.train.rlhf.pictured_batches import ASKED, BESIDE, _judged, _pairs, _taught, _unknown, answered
from shardproof.train.rlhf.pictures import OTHER
from shardproof.train.rlhf.prompted import Prompted

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


FILES = [{"image": [PICTURE], "audio": [], "video": []}] * 2
PROMPTS = ["<|im_start|>which digit?<|image|> or none", "<|im_start|><|image|>what is it?"]


def test_judged_answers_and_those_compared_with_see_what_is_seen_before_them(encoder: MediaEncoder) -> None:
    """KTO's had the mask of their prompts, and a run ended."""
    others = ["no", "two and seven and nine"]
    rows = [
        {"prompt": prompt, "completion": "two", "images": [PICTURE], "label": True, OTHER: other}
        for prompt, other in zip(PROMPTS, others, strict=True)
    ]
    made = _judged(encoder, FILES, None, rows)
    seen = made["cross_attention_mask"]
    for name in ("", "KL_"):
        assert seen.shape[:2] == made[f"{name}input_ids"].shape == made[f"{name}attention_mask"].shape
        assert (seen[made[f"{name}completion_mask"] == 1].sum(dim=(1, 2)) > 0).all()
    assert (seen[0, :2] == 0).all()  # before the picture
    said = [made["KL_input_ids"][i][made["KL_completion_mask"][i] == 1] for i in range(2)]
    assert [encoder.processor.tokenizer.decode(one) for one in said] == others


def test_taught_answers_see_what_is_seen_before_them(encoder: MediaEncoder) -> None:
    """GKD's had the mask of their prompts, and those that are generated none."""
    question = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "which digit?"}]}]
    rows = [{"messages": [*question, {"role": "assistant", "content": "two"}]} for _ in FILES]
    made = _taught(encoder, FILES, None, rows)
    seen, asked = made[BESIDE]["cross_attention_mask"], made[ASKED]["cross_attention_mask"]
    assert seen.shape[:2] == made["labels"].shape
    assert (seen[made["labels"] != -100].sum(dim=(1, 2)) > 0).all()
    assert asked.shape[:2] == made["prompts"].shape
    assert answered("cross_attention_mask", asked, 2)[:, -2:].equal(asked[:, -1:].expand(-1, 2, -1, -1))


def test_what_trl_does_not_know_of_tokens_is_as_long_as_they_are() -> None:
    """ERNIE's kinds of tokens, by which it chooses experts, had the length of the prompts."""
    prompts = {
        "input_ids": torch.ones(2, 3, dtype=torch.long),
        "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        "mm_token_type_ids": torch.ones(2, 3),
        "moe_mm_token_type_ids": torch.tensor([[0, 1, 0], [1, 1, 0]]),
    }
    assert {name: value.tolist() for name, value in _unknown(prompts, 4).items()} == {
        "moe_mm_token_type_ids": [[1, 0, 0, 0], [1, 1, 0, 0]]
    }
