"""GLM-4V, whose videos are written with the tokens of pictures: a batch may have both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from models.tiny_folders import TEXTS
from shardproof.data.media.batches import MediaCollator
from shardproof.data.media.encode import MediaEncoder
from shardproof.data.media.limits import Limits
from shardproof.data.media.rows import encode_media_rows
from shardproof.data.rows import read_rows
from shardproof.models.loading.classes import load_pretrained
from shardproof.models.loading.processors import load_processor
from shardproof.models.tiny_media import image_processor, media_processor, media_tokenizer, save_random

PICTURE = {"query": "<image>which?", "response": "two", "images": ["a.png"]}
VIDEO = {"query": "<video>what do you hear?", "response": "this digit", "videos": ["a.gif"]}
BOTH = {"query": "<video>is it<image>?", "response": "two", "images": ["a.png"], "videos": ["a.gif"]}
BOTH_BEHIND = {"query": "<image>is it<video>?", "response": "two", "images": ["a.png"], "videos": ["a.gif"]}
MARKS = {kind: f"<|begin_of_{kind}|><|{kind}|><|end_of_{kind}|>" for kind in ("image", "video")}


@pytest.fixture(scope="module")
def glm4v(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    folder = tmp_path_factory.mktemp("glm4v")
    names = {f"{kind}_token": f"<|{kind}|>" for kind in MARKS}
    names |= {f"{kind}_{end}_token": f"<|{end}_of_{kind}|>" for kind in MARKS for end in ("begin", "end")}
    tokenizer = media_tokenizer(TEXTS, names, MARKS)
    images = image_processor(
        "Glm4vImageProcessor", patch_size=14, size={"shortest_edge": 2 * 28 * 28, "longest_edge": 16 * 28 * 28}
    )
    media_processor("Glm4vProcessor", tokenizer, images, videos="Glm4vVideoProcessor").save_pretrained(folder)
    vision = {"hidden_size": 32, "intermediate_size": 48, "patch_size": 14, "image_size": 56}
    vision |= {"depth": 1, "num_heads": 2, "out_hidden_size": 32}
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in MARKS}
    for kind in MARKS:
        ids[f"{kind}_start_token_id"] = getattr(tokenizer, f"{kind}_begin_token_id")
        ids[f"{kind}_end_token_id"] = getattr(tokenizer, f"{kind}_end_token_id")
    config = transformers.AutoConfig.for_model("glm4v", text_config=text, vision_config=vision, **ids)
    save_random("Glm4vForConditionalGeneration", config, tokenizer, 0, folder)
    frames = [Image.new("RGB", (56, 40), (40 * i, 90, 200 - 40 * i)) for i in range(4)]
    frames[0].save(folder / "a.gif", save_all=True, append_images=frames[1:], duration=500)
    Image.radial_gradient("L").resize((60, 90)).convert("RGB").save(folder / "a.png")
    return folder


def logits_of(folder: Path, *batches: list[dict[str, Any]]) -> list[list[torch.Tensor]]:
    """Of the rows of each batch, float32 of shape (tokens, vocabulary)."""
    model = load_pretrained(str(folder), dtype=torch.float32).eval()
    encoder = MediaEncoder(load_processor(str(folder)), Limits())
    found = []
    for records in batches:
        (folder / "rows.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        encoded = encode_media_rows(read_rows([folder / "rows.jsonl"]), encoder, max_length=None, workers=0)
        batch = MediaCollator(encoder, on_lost="stop")([encoded[i] for i in range(len(records))])
        with torch.no_grad():
            rows = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
        found.append([row[:n] for row, n in zip(rows, batch["attention_mask"].sum(1).tolist(), strict=True)])
    return found


def test_pictures_and_videos_of_a_batch_are_seen_as_each_alone(glm4v: Path) -> None:
    rows = [PICTURE, BOTH, VIDEO, BOTH_BEHIND]
    together, *alone = logits_of(glm4v, rows, *([row] for row in rows))
    for beside, (by_itself,) in zip(together, alone, strict=True):
        torch.testing.assert_close(beside, by_itself)


@pytest.mark.parametrize(("both", "first"), [(BOTH, VIDEO), (BOTH_BEHIND, PICTURE)])
def test_the_first_file_of_a_row_is_seen_as_without_the_second(glm4v: Path, both: Any, first: Any) -> None:
    short = {**first, "query": first["query"].partition(">")[0] + ">is it"}
    ((whole,), (part,)) = logits_of(glm4v, [both], [short])
    n = len(part) - 12  # what stands behind the question
    assert n > 8
    torch.testing.assert_close(whole[:n], part[:n])
