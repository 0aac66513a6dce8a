"""What processors do to a row is followed to the token, or refused once: classes of transformers, and strange ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.utils import is_torchaudio_available, is_torchvision_available

from models.tiny_folders import SQUARE, TEXTS
from shardproof.data.media.batches import MediaCollator, together
from shardproof.data.media.encode import MediaEncoder
from shardproof.data.media.limits import Limits
from shardproof.data.media.reading import Frames, read_video
from shardproof.data.media.rows import encode_media_rows
from shardproof.data.rows import Row, Rows, read_rows
from shardproof.errors import ConfigError, DataError
from shardproof.models.loading import processors
from shardproof.models.loading.processors import load_processor, prepared
from shardproof.models.tiny_media import image_processor, media_processor, media_tokenizer

SEEING = {"query": "<image>which?", "response": "two", "images": ["a.png"]}
WORDS = {"query": "only text", "response": "yes indeed"}
MOVING = {"query": "<video>?", "response": "moving", "videos": ["a.gif"]}


@pytest.fixture
def rows(files: Path):
    def read(*records: dict[str, Any]) -> Rows:
        (files / "processors.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return read_rows([files / "processors.jsonl"])

    return read


def rewriting(processor: Any, rewrite: Any) -> Any:
    """A processor of a class that changes texts before it puts files into them."""
    cls = type(processor)

    def prepare_inputs_layout(self: Any, **inputs: Any) -> Any:
        images, text, *more = cls.prepare_inputs_layout(self, **inputs)
        return images, [rewrite(one) for one in text], *more

    processor.__class__ = type("StrangeProcessor", (cls,), {"prepare_inputs_layout": prepare_inputs_layout})
    return processor


@pytest.fixture
def paligemma() -> Any:
    tokenizer = media_tokenizer(TEXTS, {"image_token": "<image>"}, {"image": "<image>"})
    tokenizer.bos_token = "<|im_start|>"
    images = image_processor("SiglipImageProcessor", size=SQUARE)
    images.image_seq_length = 4
    return media_processor("PaliGemmaProcessor", tokenizer, images)


@pytest.mark.parametrize(
    ("rewrite", "workers"),
    [
        (lambda text: "x " + text, 0),  # before what is replaced: its places are others
        (lambda text: text + "\n", 0),
        (lambda text: text.replace("<image>", "<image>x"), 0),  # between it and the answer
        (lambda text: text.replace("two", "too"), 2),
    ],
)
def test_a_processor_that_rewrites_texts_is_refused_once(tiny_models, rows, rewrite: Any, workers: int) -> None:
    """Places of answers in our text are none in its own: other tokens would be learnt."""
    encoder = MediaEncoder(rewriting(load_processor(str(tiny_models("llava"))), rewrite), Limits())
    for bad_rows in ("stop", "skip"):
        with pytest.raises(ConfigError) as error:
            encode_media_rows(rows(*[SEEING] * 4), encoder, max_length=None, bad_rows=bad_rows, workers=workers)
        assert str(error.value) == (
            "StrangeProcessor adds more than files to a text, so answers cannot be located among the tokens."
            " Models with this processor cannot be trained here."
        )


@pytest.mark.slow
def test_the_text_that_paligemma_makes_is_not_followed(paligemma: Any, rows) -> None:
    """A token in the middle and a line at the end: it is refused even if somebody hands it over made."""
    with pytest.raises(ConfigError, match="PaliGemmaProcessor adds more than files to a text"):
        encode_media_rows(rows(SEEING), MediaEncoder(paligemma, Limits()), max_length=None)


def test_paligemma_is_refused_by_every_command(paligemma: Any, tmp_path: Path) -> None:
    """Its model looks in both directions at all that is no suffix: rows would show it later tokens of their answers."""
    paligemma.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "paligemma"}')
    with pytest.raises(ConfigError, match=r"PaliGemmaProcessor cannot be trained here: .* in both directions"):
        load_processor(str(tmp_path))


def test_rows_with_pictures_are_no_pages_of_one(rows) -> None:
    """GOT-OCR2's processor refuses pictures that stand together row by row: all rows were bad."""
    tokenizer = media_tokenizer(TEXTS, {}, {"image": "<img><imgpad></img>"})
    marks = ["<img>", "</img>", "<imgpad>"]
    tokenizer.add_special_tokens({"extra_special_tokens": marks}, replace_extra_special_tokens=False)
    encoder = MediaEncoder(
        media_processor("GotOcr2Processor", tokenizer, image_processor("GotOcr2ImageProcessor", size=SQUARE)), Limits()
    )
    two = {"query": "<image> or <image>?", "response": "both", "images": ["a.png", "b.png"]}
    encoded = encode_media_rows(rows(SEEING, two), encoder, max_length=None)
    batch = MediaCollator(encoder, on_lost="stop")([encoded[0], encoded[1]])
    seen = (batch["input_ids"] == tokenizer.convert_tokens_to_ids("<imgpad>")).sum(dim=1)
    assert seen.tolist() == [256, 512]
    assert len(batch["pixel_values"]) == 3
    answers = [tokenizer.decode(labels[labels != -100]) for labels in batch["labels"]]
    assert answers == ["two<|im_end|>", "both<|im_end|>"]


def test_a_processor_that_asks_for_sounds_takes_rows_of_text(rows) -> None:
    """Qwen3-ASR's has to be given sounds, or nothing in their place."""
    tokens = {f"audio{name}_token": f"<|audio{name}|>" for name in ("", "_bos", "_eos")}
    tokenizer = media_tokenizer(TEXTS, tokens, {"audio": "<|audio_bos|><|audio|><|audio_eos|>"})
    extractor = transformers.Qwen3ASRFeatureExtractor(feature_size=16)
    encoder = MediaEncoder(media_processor("Qwen3ASRProcessor", tokenizer, feature_extractor=extractor), Limits())
    heard = {"query": "<audio>what?", "response": "noise", "audios": ["a.wav"]}
    encoded = encode_media_rows(rows(heard, WORDS), encoder, max_length=None)
    batch = MediaCollator(encoder, on_lost="stop")([encoded[0], encoded[1]])
    answers = [tokenizer.decode(labels[labels != -100]) for labels in batch["labels"]]
    assert answers == ["noise<|im_end|>", "yes indeed<|im_end|>"]
    assert len(batch["input_features"]) == 1


@pytest.mark.parametrize("mark", ["", "<|AUDIO_DURATION|> seconds: "])
def test_a_processor_that_makes_no_lists_takes_rows(rows, mark: str) -> None:
    """VibeVoice-ASR's makes tensors only: each row was called bad. Where its template says how long a sound is, as the
    published one does, it is this that is said of it."""
    tokenizer = media_tokenizer(TEXTS, {"audio_token": "<|audio|>"}, {"audio": f"{mark}<|audio|>"})
    marks = {f"audio_{name}_token": f"<|{name}|>" for name in ("bos", "eos")}
    extractor = transformers.VibeVoiceAcousticTokenizerFeatureExtractor()
    processor = transformers.VibeVoiceAsrProcessor(extractor, tokenizer, audio_token="<|audio|>", **marks)
    encoder = MediaEncoder(prepared(processor), Limits(sampling_rate=24000))
    heard = rows({"query": "<audio>what?", "response": "noise", "audios": ["a.wav"]}, WORDS)
    if mark:
        with pytest.raises(ConfigError, match="VibeVoiceAsrProcessor adds more than files to a text"):
            encode_media_rows(heard, encoder, max_length=None)
        return
    encoded = encode_media_rows(heard, encoder, max_length=None)
    batch = MediaCollator(encoder, on_lost="stop")([encoded[0], encoded[1]])
    answers = [tokenizer.decode(labels[labels != -100]) for labels in batch["labels"]]
    assert answers == ["noise<|im_end|>", "yes indeed<|im_end|>"]


def test_sounds_of_rows_that_are_made_alone_get_one_length() -> None:
    """Beside a row of text Qwen3-ASR's processor takes each row by itself: the run ended where their sounds differ."""
    rows = [{"input_ids": torch.ones(1, n, dtype=torch.long), "input_features": torch.ones(1, 2, n)} for n in (3, 5)]
    masked = [row | {"input_features_mask": torch.ones(1, row["input_features"].shape[2])} for row in rows]
    joined = together(masked, pad=0)
    assert joined["input_features"].shape == (2, 2, 5)
    assert joined["input_features_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert joined["input_features"][0].sum() == 6
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):  # nobody could tell what is padding
        together(rows, pad=0)


def test_a_mark_may_be_another_than_what_a_picture_becomes(rows) -> None:
    """Qianfan-OCR's template writes `<image>`: rows had what the processor makes of it, and were refused."""
    tokens = {f"{name}_image_token": f"<{name}_img>" for name in ("start", "end", "context")}
    tokenizer = media_tokenizer(TEXTS, tokens, {"image": "<image>"})
    images = image_processor("GotOcr2ImageProcessor", size=SQUARE)
    encoder = MediaEncoder(media_processor("QianfanOCRProcessor", tokenizer, images, image_seq_length=4), Limits())
    encoded = encode_media_rows(rows(SEEING, WORDS), encoder, max_length=None)
    batch = MediaCollator(encoder, on_lost="stop")([encoded[0], encoded[1]])
    assert (batch["input_ids"][0] == tokenizer.convert_tokens_to_ids("<context_img>")).sum() > 0
    answers = [tokenizer.decode(labels[labels != -100]) for labels in batch["labels"]]
    assert answers == ["two<|im_end|>", "yes indeed<|im_end|>"]


def test_a_processor_that_puts_a_separator_behind_texts_need_not(rows) -> None:
    """Chameleon's takes an option for it: it was refused, as one that writes more than its files."""
    tokens = {"image_token": "<image>", "boi_token": "<racm3:break>", "eoi_token": "<eoss>"}
    tokenizer = media_tokenizer(TEXTS, tokens, {"image": "<image>"})
    tokenizer.sep_token = "<racm3:break>"
    images = image_processor(
        "ChameleonImageProcessor", size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    encoder = MediaEncoder(prepared(transformers.ChameleonProcessor(images, tokenizer, image_seq_length=4)), Limits())
    encoded = encode_media_rows(rows(SEEING, WORDS), encoder, max_length=None)
    batch = MediaCollator(encoder, on_lost="stop")([encoded[0], encoded[1]])
    answers = [tokenizer.decode(labels[labels != -100]) for labels in batch["labels"]]
    assert answers == ["two<|im_end|>", "yes indeed<|im_end|>"]
    assert (batch["input_ids"] == tokenizer.image_token_id).sum(1).tolist() == [4, 0]


def test_a_processor_without_a_mark_for_files_is_named(rows) -> None:
    """As Kosmos-2's, of whose model it was said that it takes no pictures."""
    tokenizer = media_tokenizer(TEXTS, {}, {"image": "<image>"})
    images = image_processor("CLIPImageProcessor", size=SQUARE, crop_size=SQUARE)
    encoder = MediaEncoder(media_processor("CLIPProcessor", tokenizer, images), Limits())
    with pytest.raises(DataError, match="of type image, but CLIPProcessor has no token for one in a text"):
        encode_media_rows(rows(SEEING), encoder, max_length=None)


def saved(processor: Any, kind: str, folder: Path) -> str:
    processor.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return str(folder)


def test_a_processor_that_puts_pictures_before_texts_is_refused(tmp_path: Path) -> None:
    """BLIP-2's, with or without a mark in the text: rows had a token more than their picture, and training ended."""
    tokenizer = media_tokenizer(TEXTS, {}, {"image": "<image>"})
    images = image_processor("BlipImageProcessor", size=SQUARE)
    source = saved(media_processor("Blip2Processor", tokenizer, images, num_query_tokens=4), "blip-2", tmp_path)
    with pytest.raises(ConfigError, match="Blip2Processor puts an image before the text"):
        load_processor(source)


def test_a_processor_that_takes_texts_only_is_refused() -> None:
    """One with sounds in conversations of its own: each row was called bad, and was to be repaired."""

    class Spoken:
        def __call__(self, text: Any = None, **options: Any) -> None: ...

    with pytest.raises(ConfigError, match="Spoken takes text alone"):
        processors._check_takes_files(Spoken)


def test_a_processor_that_takes_no_text_is_refused() -> None:
    """As that of Voxtral's realtime kind, of which one without chat template was told."""

    class Heard:
        def __call__(self, audio: Any = None, **options: Any) -> None: ...

    with pytest.raises(ConfigError, match="Heard takes files without text"):
        processors._check_takes_files(Heard)


@pytest.mark.skipif(is_torchaudio_available(), reason="it is there")
def test_a_processor_that_wants_torchaudio_says_so(tmp_path: Path) -> None:
    """As for torchvision: the first line of what transformers says ends in the middle."""
    media_tokenizer(TEXTS, {"audio_token": "<|audio|>"}, {"audio": "<|audio|>"}).save_pretrained(tmp_path)
    parts = {"audio_processor": {"feature_extractor_type": "GraniteSpeechFeatureExtractor"}}
    said = {"processor_class": "GraniteSpeechProcessor", **parts}
    (tmp_path / "processor_config.json").write_text(json.dumps(said))
    (tmp_path / "config.json").write_text('{"model_type": "granite_speech"}')
    with pytest.raises(
        ConfigError, match=r"with torchaudio only: pip install the torchaudio that goes with your torch$"
    ):
        load_processor(str(tmp_path))


def test_tokens_that_only_a_tensor_can_count_are_counted(rows) -> None:
    """Ovis2's processor fails at lists."""
    tokenizer = media_tokenizer(TEXTS, {"image_token": "<image>"}, {"image": "<image>"})
    marks = [f"<IMG_{name}>" for name in ("ATOM", "START", "GRID", "COL", "ROW", "END")]
    tokenizer.add_special_tokens({"extra_special_tokens": marks}, replace_extra_special_tokens=False)
    images = image_processor("Ovis2ImageProcessor", size=SQUARE, max_patches=2)
    encoder = MediaEncoder(media_processor("Ovis2Processor", tokenizer, images, image_seq_length=4), Limits())
    encoded = encode_media_rows(rows(SEEING, WORDS), encoder, max_length=None)
    batch = MediaCollator(encoder, on_lost="stop")([encoded[0], encoded[1]])
    assert (batch["input_ids"][0] == tokenizer.convert_tokens_to_ids("<IMG_ATOM>")).sum() % 4 == 0
    answers = [tokenizer.decode(labels[labels != -100]) for labels in batch["labels"]]
    assert answers == ["two<|im_end|>", "yes indeed<|im_end|>"]
    row = encoded[0]["row"]  # as `rlhf` measures a row
    assert encoder.length(row, row.messages, encoder.files(row), prompt=False) >= len(encoded[0]["input_ids"])


def test_a_video_processor_is_told_which_frames_were_taken(tiny_models, rows, monkeypatch) -> None:
    """With torchvision it would take some of them once more, or refuse those of which it knows no times."""
    from transformers.models.minicpmv4_6.video_processing_minicpmv4_6 import MiniCPMV4_6VideoProcessorKwargs

    encoder, told = MediaEncoder(load_processor(str(tiny_models("minicpmv4_6"))), Limits(max_frames=3)), []
    cls = type(encoder.processor.video_processor)

    def call(self: Any, videos: Any, **given: Any) -> Any:
        told.append(given)
        return prepare(self, videos, **given)

    prepare = cls.__call__
    monkeypatch.setattr(cls, "__call__", call)
    monkeypatch.setattr(cls, "valid_kwargs", MiniCPMV4_6VideoProcessorKwargs)
    encoded = encode_media_rows(rows(MOVING), encoder, max_length=None)
    MediaCollator(encoder, on_lost="stop")([encoded[0]])
    assert len(told) == 2
    for given in told:
        assert (given["do_sample_frames"], given["stack_frames"]) == (False, 1)
        (one,) = given["video_metadata"]
        assert (one["frames_indices"], one["total_num_frames"]) == ([0, 2, 3], 4)
        assert (one["fps"], one["duration"]) == (pytest.approx(10), pytest.approx(0.4))
        assert (one["width"], one["height"]) == (24, 16)


def test_a_video_processor_that_takes_no_such_thing_gets_none(tiny_models, rows, monkeypatch) -> None:
    """As one of a model's own code; here ours, which stands where torchvision is not installed."""
    monkeypatch.setattr(processors, "_has", lambda package: package != "torchvision")
    encoder = MediaEncoder(load_processor(str(tiny_models("minicpmv4_6"))), Limits())
    cls = type(encoder.processor.video_processor)
    prepare = cls.__call__
    monkeypatch.setattr(cls, "valid_kwargs", None)
    monkeypatch.setattr(
        cls, "__call__", lambda self, videos, return_tensors=None: prepare(self, videos, return_tensors)
    )
    assert len(encode_media_rows(rows(MOVING), encoder, max_length=None)) == 1


def test_a_video_of_one_picture_fills_a_patch(tiny_models, rows, files: Path) -> None:
    """Two pictures make a patch of Qwen3-VL's, and its rule for sizes refuses less."""
    encoder = MediaEncoder(load_processor(str(tiny_models("qwen3_vl"))), Limits())
    encoded = encode_media_rows(rows({**MOVING, "videos": [["a.png"]]}), encoder, max_length=None)
    batch = MediaCollator(encoder, on_lost="stop")([encoded[0]])
    assert batch["video_grid_thw"].tolist() == [[1, 2, 4]]
    still = read_video(["a.png"], Row([], str(files / "processors.jsonl"), 1), Limits())
    assert isinstance(still.of_at_least(2), Frames)
    assert still.of_at_least(2).numbers == [0, 0]


@pytest.mark.skipif(is_torchvision_available(), reason="transformers has its own part for videos")
@pytest.mark.parametrize("font", ["Roboto-Regular.ttf", None])
def test_the_font_of_ernie_is_saved_again(tmp_path: Path, font: str | None) -> None:
    """It was left out, and transformers loads no processor that lacks it; without any a run ended when it saved."""
    kinds = ("image", "video")
    tokens = {f"{kind}{part}_token": f"<{kind}{part}>" for kind in kinds for part in ("", "_start", "_end")}
    tokenizer = media_tokenizer(TEXTS, tokens, {kind: f"<{kind}>" for kind in kinds})
    images = image_processor("Ernie4_5_VLMoeImageProcessor")
    made = media_processor("Ernie4_5_VLMoeProcessor", tokenizer, images, videos="Ernie4_5_VLMoeVideoProcessor")
    made.video_processor._config |= {"font": font} if font else {}
    source = saved(made, "ernie4_5_vl_moe", tmp_path / "model")
    if font:
        (tmp_path / "model" / font).write_bytes(b"letters")
    load_processor(source).save_pretrained(tmp_path / "again")
    said = json.loads((tmp_path / "again" / "processor_config.json").read_text())["video_processor"]
    assert said.get("font") == font
    assert not font or (tmp_path / "again" / font).read_bytes() == b"letters"


@pytest.mark.slow
def test_pictures_without_pillow_name_the_extra(tiny_models) -> None:
    folder = tiny_models("qwen2_5_omni")
    code = (
        "import sys; sys.modules['PIL'] = None\n"
        "from shardproof.models.loading.processors import load_processor\n"
        f"load_processor({str(folder)!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "images need Pillow: pip install 'shardproof[media]'" in done.stderr
