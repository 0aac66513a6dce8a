"""Models whose processors need torchvision or torchaudio: rows become what these processors make of them, and have in a
batch the losses that they have alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image, ImageSequence

from models.torchvision_folders import KINDS, build
from shardproof.data.media.batches import MediaCollator, check_together
from shardproof.data.media.encode import MediaEncoder
from shardproof.data.media.limits import Limits
from shardproof.data.media.rows import encode_media_rows
from shardproof.data.rows import read_rows
from shardproof.errors import DataError
from shardproof.models.loading.classes import load_pretrained
from shardproof.models.loading.processors import load_processor
from shardproof.train.answers.chat import Chat
from shardproof.train.answers.sampling import Sampling

pytest.importorskip("torchvision", reason="these processors need it")

WORDS = [{"query": "what do you hear?", "response": "this"}]
SEEN = [
    {"query": "<image>which digit?", "response": "this digit", "images": ["a.png"]},
    {"query": "<image> or <image>?", "response": "hear", "images": ["b.png", "a.png"]},
    {"query": "is it <image>", "response": "what", "images": ["c.png"]},  # a token of Mistral 3's
]
MOVING = [{"query": "<video>what?", "response": "this", "videos": [f"{name}.gif"]} for name in "ab"]
BOTH = [{"query": "<image>is it<video>?", "response": "this", "images": ["a.png"], "videos": ["a.gif"]}]
HEARD = [
    {"query": "<audio>what?", "response": "this", "audios": ["a.wav"]},
    {"query": "<audio> or <audio>?", "response": "digit", "audios": ["a.wav", "a.wav"]},
]
MOVE = ("llava_onevision", "molmo2", "minimax_m3_vl", "smolvlm", "muse_glimmer")
RATE = 16000


def rows_of(kind: str) -> list[dict[str, Any]]:
    if kind == "granite_speech":
        pytest.importorskip("torchaudio")
        return [*WORDS, *HEARD]
    if kind == "smolvlm":
        pytest.importorskip("num2words")
        return [*WORDS, *SEEN, *MOVING]
    return [*WORDS, *SEEN, *(MOVING + BOTH if kind in MOVE else [])]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import soundfile

    folder, chance = tmp_path_factory.mktemp("files"), np.random.default_rng(0)

    def picture(width: int, height: int) -> Any:
        return Image.fromarray(chance.integers(0, 255, (height, width, 3), dtype=np.uint8))

    for name, size in {"a": (56, 30), "b": (40, 64), "c": (28, 28)}.items():
        picture(*size).save(folder / f"{name}.png")
    for name, count in {"a": 8, "b": 5}.items():
        first, *more = (picture(48, 32) for _ in range(count))
        first.save(folder / f"{name}.gif", save_all=True, append_images=more, duration=250)
    for name, length in {"a": RATE, "b": 11000}.items():
        soundfile.write(folder / f"{name}.wav", chance.normal(scale=0.1, size=length), RATE)
    return folder


def opened(files: Path, row: dict[str, Any]) -> dict[str, Any]:
    """What the library's processor is given, all frames with their times."""
    import soundfile

    given: dict[str, Any] = {}
    if names := row.get("images"):
        given["images"] = [[Image.open(files / name).convert("RGB") for name in names]]
    if names := row.get("audios"):
        given["audio"] = [soundfile.read(files / name, dtype="float32")[0] for name in names]
    if names := row.get("videos"):
        given["videos"] = [
            [frame.convert("RGB") for frame in ImageSequence.Iterator(Image.open(files / name))] for name in names
        ]
        known = [
            {"total_num_frames": n, "fps": 4.0, "duration": n / 4, "frames_indices": list(range(n))}
            for n in map(len, given["videos"])
        ]
        given["videos_kwargs"] = {"do_sample_frames": False, "do_resize": True, "video_metadata": known}
        given["videos_kwargs"]["return_metadata"] = True  # some write its times
    return given


def by_the_library(processor: Any, files: Path, row: dict[str, Any]) -> dict[str, Any]:
    """Inputs of a row alone, the labels of its answer found by hand; in fp32."""
    pieces = [piece for piece in re.split("(<image>|<video>|<audio>)", row["query"]) if piece]
    parts = [{"type": piece.strip("<>")} if piece[0] == "<" else {"type": "text", "text": piece} for piece in pieces]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": row["response"]}]
    tokenizer = processor.tokenizer
    text = tokenizer.apply_chat_template(turns, tokenize=False, chat_template=processor.chat_template)
    made = dict(processor(text=[text], return_tensors="pt", add_special_tokens=False, **opened(files, row)))
    answer = tokenizer(f"{row['response']}<|im_end|>", add_special_tokens=False)["input_ids"]
    ids = made["input_ids"][0].tolist()
    at = max(i for i in range(len(ids)) if ids[i : i + len(answer)] == answer)
    labels = torch.full_like(made["input_ids"], -100)
    labels[0, at : at + len(answer)] = torch.tensor(answer)
    return {n: v.float() if getattr(v, "dtype", None) == torch.bfloat16 else v for n, v in made.items()} | {
        "labels": labels
    }


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_losses_that_the_library_gives_them(tmp_path: Path, files: Path, kind: str) -> None:
    rows = rows_of(kind)
    source = str(build(kind, tmp_path / kind))
    (files / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoder = MediaEncoder(load_processor(source), Limits(sampling_rate=RATE))
    encoded = encode_media_rows(read_rows([files / f"{kind}.jsonl"]), encoder, max_length=None)
    collator, model = MediaCollator(encoder, on_lost="stop"), load_pretrained(source).eval()
    plain = transformers.AutoProcessor.from_pretrained(source)
    total, learnt = 0.0, 0
    for row, one in zip(rows, (encoded[i] for i in range(len(rows))), strict=True):
        wanted = by_the_library(plain, files, row)
        assert list(one["input_ids"]) == wanted["input_ids"][0].tolist(), row
        assert list(one["labels"]) == wanted["labels"][0].tolist(), row
        loss = model(**wanted).loss.item()
        assert model(**collator([one])).loss.item() == pytest.approx(loss, abs=1e-6), row
        count = int((wanted["labels"] != -100).sum())
        total, learnt = total + count * loss, learnt + count
    if kind == "llava_onevision":
        with pytest.raises(DataError, match="does not go into one batch") as told:
            check_together(encoded, collator)
        assert str(told.value).endswith("Train with --per-device-batch-size 1.")
        return
    check_together(encoded, collator)
    batch = collator([encoded[i] for i in range(len(rows))])
    assert model(**batch).loss.item() == pytest.approx(total / learnt, abs=2e-6)


def test_a_row_with_pictures_and_videos_that_become_the_same_is_bad(tmp_path: Path, files: Path) -> None:
    """Those of SmolVLM: what the pictures had become was lost, and the run ended in the step in which the row came."""
    pytest.importorskip("num2words")
    (files / "both.jsonl").write_text(json.dumps(BOTH[0]))
    encoder = MediaEncoder(load_processor(str(build("smolvlm", tmp_path))), Limits())
    with pytest.raises(DataError, match="SmolVLMProcessor does not take images and videos in one row"):
        encode_media_rows(read_rows([files / "both.jsonl"]), encoder, max_length=None)


def test_a_model_that_is_given_lists_beside_pictures_answers(tmp_path: Path, files: Path) -> None:
    """Unlimited-OCR reads how its pictures were cut, in lists: `infer` left them out, and ended."""
    source = build("unlimited_ocr", tmp_path)
    asked = [{"role": "user", "content": [{"type": "image", "image": str(files / "a.png")}]}]
    chat = Chat(source)
    chat.answer(asked, Sampling(max_new_tokens=2, temperature=0))
