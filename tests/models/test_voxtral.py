"""Voxtral's rows are what mistral-common makes of conversations, where it is installed, and have the same losses on two
processes as on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from models.tekken import AUDIO, BEGIN_AUDIO, write_tekken
from models.tiny_folders import build
from shardproof.data.media.encode import MediaEncoder
from shardproof.data.media.limits import Limits
from shardproof.data.media.rows import encode_media_rows
from shardproof.data.rows import read_rows
from shardproof.models.loading.processors import load_processor, write_processing

RATE = 16000
SECONDS = {"a": 1.25, "b": 31.0, "c": 30.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and sounds of some lengths."""
    import soundfile

    made, chance = build("voxtral", tmp_path_factory.mktemp("voxtral")), np.random.default_rng(0)
    for name, seconds in SECONDS.items():
        sound = chance.normal(scale=0.1, size=int(RATE * seconds)).astype(np.float32)
        soundfile.write(made / f"{name}.wav", sound, RATE)
    return made


def heard(folder: Path, name: str) -> Any:
    import soundfile

    return soundfile.read(folder / f"{name}.wav", dtype="float32")[0]


def test_a_sound_becomes_what_its_model_takes(folder: Path) -> None:
    """A token that begins it, and 375 for each 30 seconds begun."""
    row = {"query": "<audio>or<audio>?", "response": "no", "audios": ["b.wav", "a.wav"]}
    (folder / "rows.jsonl").write_text(json.dumps(row))
    processor = load_processor(str(folder))
    encoder = MediaEncoder(processor, Limits(sampling_rate=RATE))
    one = encode_media_rows(read_rows([folder / "rows.jsonl"]), encoder, max_length=None)[0]
    of = {name: processor.tokenizer(name, add_special_tokens=False)["input_ids"] for name in ("or", "?", "no")}
    asked = [1, 3, BEGIN_AUDIO, *750 * [AUDIO], *of["or"], BEGIN_AUDIO, *375 * [AUDIO], *of["?"], 4]
    answer = [*of["no"], 2]
    assert list(one["input_ids"]) == [*asked, *answer]
    assert list(one["labels"]) == [*len(asked) * [-100], *answer]
    windows = encoder.batch([one["row"]], [encoder.heard(one["row"])])["input_features"]
    extract = transformers.WhisperFeatureExtractor(16)
    for window, sound in zip(windows[1:], (heard(folder, "b")[30 * RATE :], heard(folder, "a")), strict=True):
        alone = extract(sound, sampling_rate=RATE, return_tensors="pt")["input_features"][0]
        # The loudest moment of all windows of a sound is the measure of each.
        assert torch.allclose(window, alone, atol=0.2)
    assert windows.shape == (3, 16, 3000)


def test_a_conversation_is_text_where_text_is_asked_for(folder: Path) -> None:
    """TRL does so, and cuts answers off behind questions: it was given tensors, so that dpo and others ended."""
    turns = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "no"}]
    made = load_processor(str(folder)).apply_chat_template(turns, tokenize=False)
    assert made == "<s>[INST]what?[/INST]no</s>"


def test_its_own_form_is_kept_unless_tokens_were_added(folder: Path, tmp_path: Path) -> None:
    """The processor's own calls read no other."""
    write_tekken(folder)
    try:
        processor = load_processor(str(folder))
        write_processing(processor, tmp_path / "same")
        processor.tokenizer.add_tokens(["<new>"])
        write_processing(processor, tmp_path / "more")
    finally:
        (folder / "tekken.json").unlink()
    assert (tmp_path / "same" / "tekken.json").is_file()
    assert not (tmp_path / "more" / "tekken.json").exists()
    assert type(load_processor(str(tmp_path / "same"))).__name__ == "VoxtralProcessor"


@pytest.mark.parametrize("names", [["a"], ["b"], ["c"], ["a", "b"]], ids="".join)
def test_ids_and_sounds_are_those_of_a_conversation(folder: Path, names: list[str]) -> None:
    pytest.importorskip("mistral_common", reason="it writes them")
    write_tekken(folder)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, mistral_format=True)
        plain = transformers.VoxtralProcessor(transformers.WhisperFeatureExtractor(16), tokenizer)
        files = [{"type": "audio", "path": str(folder / f"{name}.wav")} for name in names]
        turn = {"role": "user", "content": [*files, {"type": "text", "text": "what?"}]}
        wanted = plain.apply_chat_template([turn])
    finally:
        (folder / "tekken.json").unlink()
    encoder = MediaEncoder(load_processor(str(folder)), Limits(sampling_rate=RATE))
    asked = [{**turn, "content": [*({"type": "audio", "audio": part["path"]} for part in files), turn["content"][-1]]}]
    made = encoder.question(asked, str(folder))
    for name in ("input_ids", "input_features"):
        assert torch.equal(made[name], wanted[name]), name
