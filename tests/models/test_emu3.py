"""Emu3's rows are what the library's processor makes of them, and its pictures have the same codes in training as when
they are asked about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from models.tiny_configs import TEXT
from shardproof.data.media.batches import MediaCollator
from shardproof.data.media.encode import MediaEncoder
from shardproof.data.media.limits import Limits
from shardproof.data.media.rows import encode_media_rows
from shardproof.data.rows import read_rows
from shardproof.models.loading.classes import load_pretrained
from shardproof.models.loading.processors import load_processor
from shardproof.models.tiny_media import media_tokenizer, save_random

MARKS = ("image", "boi", "eoi", "image_wrapper", "eof", "eol")
ROWS = [
    {"query": "<image>which digit?", "response": "this", "images": ["a.png"]},
    {"query": "is <image> or <image>?", "response": "that", "images": ["b.png", "a.png"]},
    {"query": "what?", "response": "no digit"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, two pictures and rows."""
    made, chance = tmp_path_factory.mktemp("emu3"), np.random.default_rng(0)
    tokenizer = media_tokenizer(
        ["0123456789*?"], {f"{name}_token": f"<{name}>" for name in MARKS}, {"image": "<image>"}
    )
    codes = [f"<|visual token {number:06d}|>" for number in range(16)]
    more = {"bos_token": "<|begin|>", "extra_special_tokens": [*codes, "<|extra_200|>"]}
    tokenizer.add_special_tokens(more, replace_extra_special_tokens=False)
    images = transformers.Emu3ImageProcessor(min_pixels=32 * 32, max_pixels=64 * 64)
    processor = transformers.Emu3Processor(images, tokenizer, chat_template=tokenizer.chat_template)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    sizes = {"embed_dim": 4, "latent_channels": 4, "base_channels": 32, "channel_multiplier": [1, 1, 1, 1]}
    config = transformers.Emu3Config(
        text_config={**TEXT, **ids, "vocab_size": len(tokenizer), "attention_dropout": 0.0},
        vq_config={**sizes, "codebook_size": 16, "num_res_blocks": 1, "attn_resolutions": [], "hidden_size": 32},
        vocabulary_map=tokenizer.get_vocab(),
        image_token_id=tokenizer.image_token_id,
    )
    save_random("Emu3ForConditionalGeneration", config, tokenizer, 0, made)
    processor.save_pretrained(made)
    for name, size in {"a": (40, 56, 3), "b": (64, 64, 3)}.items():
        Image.fromarray(chance.integers(0, 255, size, dtype=np.uint8)).save(made / f"{name}.png")
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return made


def encoded(folder: Path) -> tuple[Any, Any]:
    encoder = MediaEncoder(load_processor(str(folder)), Limits())
    rows = encode_media_rows(read_rows([folder / "rows.jsonl"]), encoder, max_length=None)
    return rows, MediaCollator(encoder, on_lost="stop")


def test_rows_have_the_tokens_and_losses_that_the_library_gives_them(folder: Path) -> None:
    """Its processor puts a token before each text, and says places without it: rows with pictures were refused."""
    plain = transformers.AutoProcessor.from_pretrained(folder)
    theirs = transformers.Emu3ForConditionalGeneration.from_pretrained(folder)
    ours, (rows, collator) = load_pretrained(str(folder)).train(), encoded(folder)
    for number, row in enumerate(ROWS):
        text = f"<|im_start|>user\n{row['query']}<|im_end|>\n<|im_start|>assistant\n{row['response']}<|im_end|>\n"
        pictures = [[Image.open(folder / name) for name in row.get("images", [])]] if "images" in row else None
        wanted = dict(plain(text=[text], images=pictures, return_tensors="pt"))
        assert list(rows[number]["input_ids"]) == wanted["input_ids"][0].tolist(), row
        answer = plain.tokenizer(f"{row['response']}<|im_end|>")["input_ids"]
        learnt = [token for token in rows[number]["labels"] if token != -100]
        assert learnt == answer, row
        loss = theirs(**wanted, labels=torch.tensor([rows[number]["labels"]])).loss.item()
        assert ours(**collator([rows[number]])).loss.item() == pytest.approx(loss, abs=1e-6), row


def test_what_makes_codes_of_pictures_keeps_its_statistics(folder: Path) -> None:
    """A trainer's `train()` undid the `eval()` of transformers: codes depended on the batch, and BatchNorms moved."""
    model, (rows, collator) = load_pretrained(str(folder)), encoded(folder)
    before = {name: value.clone() for name, value in model.named_buffers() if "running" in name}
    model.train()
    model(**collator([rows[0]]))
    assert before
    assert all(torch.equal(value, dict(model.named_buffers())[name]) for name, value in before.items())
    assert model.model.text_model.training
    assert not any(module.training for module in model.model.vqmodel.modules())
