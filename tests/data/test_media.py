"""Files become tensors, within limits, and what cannot be read says why."""

from __future__ import annotations

import base64
import gc
import json
import pickle
import re
import shutil
import struct
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardproof.data.forms.parts import Problem
from shardproof.data.media.batches import MediaCollator, together
from shardproof.data.media.encode import MediaEncoder
from shardproof.data.media.limits import Limits
from shardproof.data.media.reading import files_of, resampled, spread
from shardproof.data.media.rows import encode_media_rows
from shardproof.data.rows import Row, read_rows
from shardproof.errors import ConfigError, DataError


def row(folder: Path, kind: str, file) -> Row:
    turns = [{"role": "user", "content": [{"type": kind, kind: file}]}, {"role": "assistant", "content": "x"}]
    return Row(turns, str(folder / "rows.jsonl"), 1)


def read(folder: Path, kind: str, file, **limits):
    return files_of(row(folder, kind, file), Limits(**limits))[kind][0]


def test_pictures_come_from_paths_bytes_and_data_uris(files: Path) -> None:
    content = (files / "a.png").read_bytes()
    uri = "data:image/png;base64," + base64.b64encode(content).decode()
    for file in ("a.png", str(files / "a.png"), f"file://{files}/a.png", content, uri):
        picture = read(files, "image", file)
        assert (picture.mode, picture.size) == ("RGB", (24, 16))
    shutil.copy(files / "a.png", files / "a b.png")
    for name in ("a b.png", "a%20b.png"):
        assert read(files, "image", f"file://{files}/{name}").size == (24, 16)
    assert read(files, "image", "a.png", max_pixels=96).size == (12, 8)


def test_a_picture_of_any_depth_is_what_it_shows(tmp_path: Path) -> None:
    """16 bits are not cut off at 255, and what is transparent is white, whatever colour lies hidden there."""
    from PIL import Image

    slope = np.linspace(0, 1, 256).reshape(16, 16)
    eight = (slope * 255).astype(np.uint8)
    for name in ("deep.png", "deep.tif"):
        Image.fromarray((slope * 65535).astype(np.uint16)).save(tmp_path / name)
        assert np.abs(np.asarray(read(tmp_path, "image", name))[..., 0].astype(int) - eight).max() <= 1
    Image.fromarray(slope.astype(np.float32)).save(tmp_path / "float.tif")
    with pytest.raises(Problem, match="pixels have 32 bits"):
        read(tmp_path, "image", "float.tif")
    ink = np.zeros((16, 16, 4), dtype=np.uint8)  # black on transparent black
    ink[4:8, 4:8, 3] = 255
    written = np.full((16, 16, 3), 255, dtype=np.uint8)
    written[4:8, 4:8] = 0
    for mode in ("RGBA", "LA"):
        Image.fromarray(ink).convert(mode).save(tmp_path / "ink.png")
        assert (np.asarray(read(tmp_path, "image", "ink.png")) == written).all(), mode
        assert (np.asarray(read(tmp_path, "video", "ink.png")[0]) == written).all(), mode


def test_sounds_have_one_channel_at_the_rate_of_the_model(files: Path) -> None:
    sound = read(files, "audio", "a.wav", sampling_rate=16000)
    assert (sound.shape, sound.dtype) == ((8000,), np.float32)
    assert read(files, "audio", (files / "a.wav").read_bytes(), sampling_rate=8000).shape == (4000,)


def test_another_rate_is_the_same_sound() -> None:
    tone = np.sin(2 * np.pi * 440 * np.arange(8000) / 8000)
    up = resampled(tone, 8000, 16000)
    assert np.abs(up - np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)).max() < 1e-4
    assert np.abs(resampled(up, 16000, 8000) - tone).max() < 1e-4
    assert resampled(tone[:7], 8000, 11025).shape == (10,)


def chord(rate: int, seconds: float = 0.8) -> np.ndarray:
    """Tones that fit into the period, below what the lowest rate can hold."""
    t = np.arange(round(rate * seconds)) / rate
    return sum(0.1 * np.sin(2 * np.pi * tone * t + tone) for tone in (220.0, 440.0, 1760.0, 3500.0))


@pytest.mark.parametrize(("rate", "channels"), [(8000, 1), (44100, 1), (22050, 2), (48000, 2), (11025, 1), (16000, 2)])
def test_a_sound_of_any_rate_is_that_of_the_rate_of_the_model(tmp_path: Path, rate: int, channels: int) -> None:
    """Of one and of two channels, whose mean it is."""
    import soundfile

    one = chord(rate)
    sides = np.stack([one, np.zeros_like(one)], axis=1) * 2 if channels == 2 else one
    soundfile.write(tmp_path / "a.wav", sides, rate, subtype="FLOAT")
    sound, wanted = read(tmp_path, "audio", "a.wav", sampling_rate=16000), chord(16000)
    assert sound.shape == wanted.shape
    assert np.abs(sound - wanted).max() < 2e-3


def test_a_video_is_frames_evenly_spread(files: Path) -> None:
    assert [frame.size for frame in read(files, "video", "a.gif")] == [(24, 16)] * 4
    assert len(read(files, "video", "a.gif", max_frames=2)) == 2
    assert len(read(files, "video", ["a.png", "a.png", "a.png"])) == 3
    assert spread(10, 4) == [0, 3, 6, 9]
    with pytest.raises(Problem, match="differ in size"):
        read(files, "video", ["a.png", "b.png"])


def test_an_animation_has_its_length_in_seconds(tmp_path: Path) -> None:
    from PIL import Image

    pictures = [Image.new("RGB", (8, 8), (20 * i, 0, 0)) for i in range(6)]
    for name in ("a.gif", "a.webp", "a.png"):
        pictures[0].save(tmp_path / name, save_all=True, append_images=pictures[1:], duration=[100, 1900] * 3)
        assert read(tmp_path, "video", name).rate == pytest.approx(1)
        assert read(tmp_path, "video", name, max_frames=2).numbers == [0, 5]
        with pytest.raises(Problem, match=r"it lasts [4-6].\d s, --max-seconds is 3"):
            read(tmp_path, "video", name, max_seconds=3)
        for fps, numbers in ((0.5, [0, 2, 5]), (2, [0, 1, 2, 3, 4, 5]), (0.01, [0])):  # of six seconds
            some = read(tmp_path, "video", name, fps=fps)
            assert (some.numbers, some.rate) == (numbers, pytest.approx(1))
            assert [int(np.asarray(frame)[0, 0, 0]) for frame in some] == pytest.approx(
                [20 * n for n in numbers], abs=2
            )
        assert len(read(tmp_path, "video", name, fps=2, max_frames=4)) == 4


def test_frames_of_a_video_have_a_size_of_their_own(files: Path) -> None:
    limits = {"max_pixels": 24 * 16, "max_frame_pixels": 96}
    assert {frame.size for frame in read(files, "video", "a.gif", **limits)} == {(12, 8)}
    assert {frame.size for frame in read(files, "video", ["a.png", "a.png"], **limits)} == {(12, 8)}
    assert read(files, "image", "a.png", **limits).size == (24, 16)
    assert read(files, "video", "a.gif", max_pixels=96, max_frame_pixels=24 * 16)[0].size == (24, 16)
    assert read(files, "video", "a.gif", max_pixels=96)[0].size == (12, 8)


@pytest.mark.parametrize("kind, name", [("image", "a.png"), ("video", "a.gif"), ("audio", "a.wav")])
def test_whatever_bytes_a_file_holds_are_a_file_or_a_problem(files: Path, kind: str, name: str) -> None:
    """Every kind of error of a decoder is a problem of that row, and none the end of the run."""
    chance = np.random.default_rng(0)
    whole = np.frombuffer((files / name).read_bytes(), dtype=np.uint8)
    unreadable = 0
    for _ in range(200):
        broken = whole[: chance.integers(1, len(whole) + 1)].copy()
        places = chance.integers(0, len(broken), 3)
        broken[places] = chance.integers(0, 256, 3)
        try:
            read(files, kind, broken.tobytes())
        except Problem:
            unreadable += 1
    assert unreadable


@pytest.fixture(scope="module")
def strange(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files, with a link to itself and sounds without sense."""
    import soundfile

    files = shutil.copytree(files, tmp_path_factory.mktemp("strange") / "files")
    (files / "loop.png").symlink_to("loop.png")
    soundfile.write(files / "nan.wav", np.array([0, np.nan, 0] * 1000), 8000, subtype="FLOAT")
    soundfile.write(files / "click.wav", np.zeros(400), 8000)
    soundfile.write(files / "empty.wav", np.zeros(0), 8000)
    (files / "half.wav").write_bytes((files / "long.wav").read_bytes()[:80044])
    return files


@pytest.mark.parametrize(
    "kind, file, problem",
    [
        ("image", "none.png", r"image 1 \(none.png\): there is no such file"),
        ("image", "broken.png", r"not a readable image: .*truncated"),
        ("image", "a.wav", "not a readable image: cannot identify"),
        ("audio", "a.png", "not readable audio"),
        ("audio", "long.wav", "it lasts 90.0 s, --max-seconds is 60"),
        ("image", "../secret.png", "is outside .*--media-root names the folder"),
        ("image", "/etc/passwd", "is outside"),
        ("image", "https://example.org/a.png", "a network address, which is not fetched"),
        ("image", "s3://bucket/a.png", "a network address"),
        ("image", ".", "it is not a file"),
        ("image", "file:///none/a%20b.png", "is outside"),
        ("image", "loop.png", "not a file path: .*(Symlink loop|Too many levels of symbolic links)"),
        ("image", "~nobody-of-that-name/a.png", "not a file path: Could not determine home"),
        ("image", "iVBORw0KGgo" * 100, r"\.\.\. \(1100 characters\)\): not a file path: .*too long"),
        ("audio", "click.wav", "it lasts 0.050 s, audio needs at least 0.1"),
        ("audio", "empty.wav", "the audio is empty"),
        ("audio", "half.wav", "it is truncated: its header says 90.00 s, but only 5.00 s are there"),
        ("audio", "nan.wav", "values that are not finite"),
        ("image", "data:image/png;base64,aGVsbG8=", r"image 1 \(data:image/png;base64,aG...\): not a readable image"),
        ("video", "a.wav", "not an animated GIF, WebP or PNG|not a readable video|has no frames"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(strange: Path, kind: str, file: str, problem: str) -> None:
    with pytest.raises(Problem, match=problem):
        read(strange, kind, file)


def test_a_sound_that_was_written_without_knowing_its_length_is_whole(files: Path) -> None:
    """As programs write it into a pipe."""
    whole = (files / "a.wav").read_bytes()
    streamed = whole.replace(b"data" + whole[40:44], b"data\xff\xff\xff\xff", 1)
    assert streamed != whole
    assert read(files, "audio", streamed, sampling_rate=8000).shape == (4000,)


@pytest.fixture(scope="module")
def film(files: Path) -> Path:
    """An MP4 of two seconds, ten pictures a second, each brighter than the one before."""
    av = pytest.importorskip("av")
    path = files / "film.mp4"
    with av.open(str(path), "w") as out:
        stream = out.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for i in range(20):
            picture = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 10 * i, dtype=np.uint8), format="rgb24")
            out.mux(stream.encode(picture))
        out.mux(stream.encode())
    return path


def test_a_film_is_frames_evenly_spread(files: Path, film: Path) -> None:
    for file in ("film.mp4", film.read_bytes()):
        frames = read(files, "video", file, max_frames=3, max_pixels=32 * 24)
        assert [frame.size for frame in frames] == [(32, 24)] * 3
        assert [np.asarray(frame).mean() for frame in frames] == pytest.approx([0, 100, 190], abs=8)
    assert read(files, "video", "film.mp4", fps=2).numbers == [0, 6, 13, 19]  # of two seconds
    assert {frame.size for frame in read(files, "video", "film.mp4", max_frame_pixels=32 * 24)} == {(32, 24)}
    with pytest.raises(Problem, match=r"video 1 \(film.mp4\): it lasts 2.0 s, --max-seconds is 1"):
        read(files, "video", "film.mp4", max_seconds=1)
    (files / "half.mp4").write_bytes(film.read_bytes()[:300])
    with pytest.raises(Problem, match="not a readable video"):
        read(files, "video", "half.mp4")


def test_of_a_film_no_thread_is_left(files: Path, film: Path) -> None:
    """A process that is forked later does not have it, and waits for it when it collects garbage."""
    found, there = [], Path("/proc/self/task")
    if not there.is_dir():
        pytest.skip("threads are listed on Linux")
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):  # libraries may start some once
            read(files, "video", "film.mp4")
            found.append(len(list(there.iterdir())))
    finally:
        gc.enable()
    assert found[1] == found[0]


def turned(film: bytes, matrix: tuple[int, int, int, int]) -> bytes:
    """The same MP4 to be shown through a matrix, as phones write it: its header says so, and its frames stay."""
    head = film.index(b"tkhd") + 4
    at = head + 4 + (20 if film[head] == 0 else 32) + 16
    was = struct.unpack(">9i", film[at : at + 36])
    xx, xy, yx, yy = (value << 16 for value in matrix)
    return film[:at] + struct.pack(">9i", xx, xy, 0, yx, yy, 0, *was[6:]) + film[at + 36 :]


@pytest.mark.parametrize(
    "matrix, corners",
    [
        ((1, 0, 0, 1), "rg/bw"),
        ((0, 1, -1, 0), "br/wg"),  # a phone upright: by a quarter to the right
        ((-1, 0, 0, -1), "wb/gr"),
        ((0, -1, 1, 0), "gw/rb"),
        ((-1, 0, 0, 1), "gr/wb"),  # a mirror
        ((0, 1, 1, 0), "rb/gw"),
    ],
)
def test_a_film_stands_upright(tmp_path: Path, matrix: tuple[int, int, int, int], corners: str) -> None:
    av = pytest.importorskip("av")
    colours = {"r": (255, 0, 0), "g": (0, 255, 0), "b": (0, 0, 255), "w": (255, 255, 255)}
    picture = (
        np.array([[colours[c] for c in line] for line in ("rg", "bw")], dtype=np.uint8).repeat(32, 0).repeat(48, 1)
    )
    with av.open(str(tmp_path / "film.mp4"), "w") as out:
        stream = out.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        out.mux([*stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")), *stream.encode()])
    (frame,) = read(tmp_path, "video", turned((tmp_path / "film.mp4").read_bytes(), matrix))
    width, height = frame.size
    assert (width, height) == ((64, 96) if matrix[0] == 0 else (96, 64))
    seen = [frame.getpixel((x, y)) for y in (height // 4, 3 * height // 4) for x in (width // 4, 3 * width // 4)]
    for colour, corner in zip(seen, corners.replace("/", ""), strict=True):
        assert np.abs(np.subtract(colour, colours[corner])).max() < 40, corner


@pytest.mark.parametrize("codec, container", [("mpeg2video", "mpegts"), ("mpeg1video", "mpeg1video")])
def test_a_film_is_as_long_as_from_its_first_frame_on(tmp_path: Path, codec: str, container: str) -> None:
    """Clocks of MPEG-TS begin anywhere. Pillow takes bare MPEG for a picture that it cannot read."""
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "film"), "w", format=container) as out:
        stream = out.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for i in range(25):
            picture = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 10 * i, dtype=np.uint8), format="rgb24")
            picture.pts = i + 25 * 100
            out.mux(stream.encode(picture))
        out.mux(stream.encode())
    frames = read(tmp_path, "video", "film", max_frames=3)
    assert [np.asarray(frame).mean() for frame in frames] == pytest.approx([0, 120, 240], abs=8)
    with pytest.raises(Problem, match=r"it lasts [01]\.\d s, --max-seconds is 0.5"):
        read(tmp_path, "video", "film", max_seconds=0.5)


def test_a_still_picture_as_a_video_is_that_picture(files: Path, tmp_path: Path) -> None:
    """Upright, and refused where it is refused as a picture, though FFmpeg would read what is left of it."""
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    noise = np.random.default_rng(0).integers(0, 255, (32, 48, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.jpg", exif=exif)
    small = Image.fromarray(noise).resize((12, 8))
    Image.fromarray(noise).save(tmp_path / "b.jpg", format="MPO", save_all=True, append_images=[small], exif=exif)
    for name in ("a.jpg", "b.jpg"):
        (frame,) = read(tmp_path, "video", name)
        assert frame.size == (32, 48)
        assert frame.tobytes() == read(tmp_path, "image", name).tobytes()
    for name in (tmp_path / "a.jpg", files / "a.png"):
        broken = name.read_bytes()[:-60]
        for kind in ("image", "video"):
            with pytest.raises(Problem, match=f"not a readable {kind}: .*trunc"):
                read(tmp_path, kind, broken)


def test_without_pyav_a_film_says_what_it_needs(files: Path, film: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(Problem, match=r"need PyAV: pip install 'shardproof\[video\]'"):
        read(files, "video", "film.mp4")
    assert read(files, "video", "a.gif")


def test_a_link_does_not_lead_out_of_the_root(files: Path, tmp_path: Path) -> None:
    inside = tmp_path / "data"
    inside.mkdir()
    (inside / "a.png").symlink_to(files / "a.png")
    with pytest.raises(Problem, match="is outside"):
        read(inside, "image", "a.png")
    assert files_of(row(inside, "image", str(files / "a.png")), Limits(root=files))["image"]


def test_a_picture_too_large_to_be_one_is_refused(files: Path, tmp_path: Path) -> None:
    from PIL import Image

    Image.new("1", (20000, 6000)).save(tmp_path / "large.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Pillow has a limit of its own, and warns of it
        for kind in ("image", "video"):
            with pytest.raises(Problem, match="20000 x 6000 pixels, more than 100,000,000"):
                read(tmp_path, kind, "large.png")


# --- rows ----------------------------------------------------------------------------------------------

ROWS = [
    {"query": "<image>which?", "response": "two", "images": ["a.png"]},
    {"query": "only text", "response": "yes indeed"},
    {"query": "<image> and <image>?", "response": "both", "images": ["b.png", "a.png"]},
]
OMNI_ROWS = [
    *ROWS,
    {"query": "hear <audio> see <image>", "response": "all", "images": ["a.png"], "audios": ["a.wav"]},
    {"query": "<video>?", "response": "moving", "videos": ["a.gif"]},
]


@pytest.fixture(scope="module")
def encoder(tiny_models):
    from shardproof.models.loading.processors import load_processor

    return lambda kind="qwen2_5_omni", **limits: MediaEncoder(load_processor(str(tiny_models(kind))), Limits(**limits))


@pytest.fixture
def rows(files: Path):
    def read(records, name: str = "rows.jsonl", **more):
        (files / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        return read_rows([files / name], **more)

    return read


@pytest.mark.parametrize("kind, records", [("qwen2_5_omni", OMNI_ROWS), ("minicpmv4_6", [*ROWS, OMNI_ROWS[-1]])])
def test_any_mixture_is_one_batch(encoder, rows, kind: str, records) -> None:
    """And the model takes it, with the loss on the answers."""
    import transformers

    made = encoder(kind, max_frames=2)
    encoded = encode_media_rows(rows(records), made, max_length=None)
    tokenizer = made.processor.tokenizer
    answers = [tokenizer.decode([i for i in encoded[n]["labels"] if i != -100]) for n in range(len(encoded))]
    assert answers == [f"{record['response']}<|im_end|>" for record in records]
    batch = MediaCollator(made)([encoded[n] for n in range(len(encoded))])
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape
    assert {"pixel_values", "pixel_values_videos"} <= batch.keys()
    model = transformers.AutoModelForMultimodalLM.from_pretrained(made.processor.tokenizer.name_or_path)
    forward = getattr(model, "thinker", model)
    alone = [MediaCollator(made)([encoded[n]]) for n in range(len(encoded))]
    assert "pixel_values" not in alone[1]
    together = forward(**batch, num_items_in_batch=1).loss
    assert together.item() == pytest.approx(
        sum(forward(**b, num_items_in_batch=1).loss.item() for b in alone), abs=1e-3
    )


def test_a_processor_goes_to_other_processes(tiny_models) -> None:
    """As it does where ranks are spawned."""
    from shardproof.models.loading.processors import load_processor

    processor = load_processor(str(tiny_models("minicpmv4_6")))
    there = pickle.loads(pickle.dumps(processor))
    assert type(there) is type(processor)
    assert there.to_dict() == processor.to_dict()
    assert there.chat_template == processor.tokenizer.chat_template


def test_workers_encode_the_same(encoder, rows) -> None:
    here = encode_media_rows(rows(OMNI_ROWS), encoder(max_frames=2), max_length=None)
    there = encode_media_rows(rows(OMNI_ROWS), encoder(max_frames=2), max_length=None, workers=2)
    assert [here[i]["input_ids"] for i in range(5)] == [there[i]["input_ids"] for i in range(5)]


BAD = [
    ROWS[0],
    {"query": "<image>which?", "response": "two", "images": ["none.png"]},
    {"query": "<image>which?", "response": "two", "images": ["broken.png"]},
    {"query": "hear <audio>", "response": "two", "audios": ["long.wav"]},
    {"query": "see <image>", "response": "two"},
]


def test_bad_files_are_told_with_row_and_path(encoder, rows) -> None:
    with pytest.raises(DataError) as error:
        encode_media_rows(rows(BAD), encoder(), max_length=512)
    text = str(error.value)
    assert "4 of 5 rows cannot be used" in text
    assert "rows.jsonl:2: image 1 (none.png): there is no such file" in text
    assert "rows.jsonl:4: audio 1 (long.wav): it lasts 90.0 s" in text
    assert "rows.jsonl:5: the text contains <image>, but the row names no image" in text
    assert "--bad-rows skip" in text
    found = rows(BAD)
    encoded = encode_media_rows(found, encoder(), max_length=512, bad_rows="skip")
    assert len(encoded) == encoded.report.rows == 1
    assert [bad.line for bad in found.skipped] == [2, 3, 4, 5]


def test_where_no_row_is_short_enough_the_advice_is_one_that_helps(rows, encoder) -> None:
    with pytest.raises(DataError, match=r"Raise --max-length, or make files smaller \(--max-pixels, --max-frames\)"):
        encode_media_rows(rows([ROWS[0]]), encoder(), max_length=4)
    with pytest.raises(DataError, match="Raise --max-length, or allow rows to be cut with --truncation"):
        encode_media_rows(rows([ROWS[0], {"query": "what is said?", "response": "nothing"}]), encoder(), max_length=4)


def test_a_plain_prompt_has_its_files_where_it_says(encoder, rows) -> None:
    """As the template marks them in a question; as bare tokens where there is no template."""
    plain = {"prompt": "see <image> and", "completion": " two", "images": ["a.png"]}
    made = encoder()
    encoded = encode_media_rows(rows([plain]), made, max_length=512)
    ids, labels = encoded[0]["input_ids"], encoded[0]["labels"]
    tokenizer = made.processor.tokenizer
    picture = tokenizer.image_token_id
    shown = tokenizer.decode([token for i, token in enumerate(ids) if token != picture or ids[i - 1] != picture])
    assert shown == "see <|vision_bos|><|IMAGE|><|vision_eos|> and two<|im_end|>"
    assert ids.count(picture) == MediaCollator(made)([encoded[0]])["pixel_values"].shape[0] // 4
    assert tokenizer.decode([label for label in labels if label != -100]) == " two<|im_end|>"
    bare = encoder("qwen2_5_vl")
    bare.processor.tokenizer.chat_template = None
    ids = encode_media_rows(rows([plain]), bare, max_length=512)[0]["input_ids"]
    assert bare.processor.tokenizer.decode(ids).startswith("see <|image_pad|><|image_pad|>")


@pytest.mark.parametrize(
    "row", [{"query": "a <image_soft_token>?", "response": "b"}, {**ROWS[0], "response": "<image_soft_token>"}]
)
def test_what_a_picture_becomes_stands_in_no_text(encoder, rows, row) -> None:
    """Gemma 3's processor looks for its mark of a picture alone, and the model for what it puts there."""
    with pytest.raises(DataError, match=r"rows.jsonl:1: <image_soft_token> is in the text"):
        encode_media_rows(rows([row]), encoder("gemma3"), max_length=512)


def test_every_text_begins_once(encoder, rows) -> None:
    """Rows of a template that leaves the begin-of-text token out (LLaVA's) and plain ones go together."""
    from tokenizers.processors import TemplateProcessing

    made = encoder("llava")
    tokenizer = made.processor.tokenizer
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    begin = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    plain = {"prompt": "see <image> and", "completion": " two", "images": ["a.png"]}
    encoded = encode_media_rows(rows([ROWS[0], plain, ROWS[1]]), made, max_length=512)
    for order in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        batch = MediaCollator(made, on_lost="stop")([encoded[n] for n in order])
        ids = batch["input_ids"]
        assert (ids == begin).sum(dim=1).tolist() == [1, 1, 1]
        assert ids[:, 0].tolist() == [begin] * 3
        answers = [tokenizer.decode(row[row != -100]) for row in batch["labels"]]
        assert sorted(answers) == [" two<|im_end|>", "two<|im_end|>", "yes indeed<|im_end|>"]
    asked = made.question([{"role": "user", "content": "which?"}], "")["input_ids"]
    assert asked[0, 0] == begin
    assert (asked == begin).sum() == 1


def test_an_answer_that_is_spoken_is_not_cut(encoder, rows) -> None:
    """Its codes are those of all of its words."""
    spoken = {"query": "which?", "response": "yes " * 40, "codes": [5, 6]}
    most = {"max_length": 30, "truncation": "right"}
    assert encode_media_rows(rows([spoken, ROWS[1]]), encoder(), **most).report.truncated == 1
    report = encode_media_rows(rows([spoken, ROWS[1]]), encoder(), speaks=True, **most).report
    assert (report.kept, report.dropped, report.truncated) == (1, 1, 0)


@pytest.mark.parametrize("files_of_row", [{"images": ["a.png"]}, {}])
def test_what_is_asked_is_what_was_learnt_up_to_the_answer(encoder, rows, files_of_row) -> None:
    """The tools of a row among it, with files and without."""
    made = encoder("qwen2_5_vl")
    made.processor.tokenizer.chat_template = "{{ tools | tojson if tools }}" + made.processor.tokenizer.chat_template
    made = MediaEncoder(made.processor, made.limits)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    row = {"query": "which?", "response": "two", "tools": tools, **files_of_row}
    (encoded,) = encode_media_rows(rows([row]), made, max_length=512)
    learnt = encoded["row"]
    asked = made.question(learnt.messages[:-1], learnt.source, learnt.extra["tools"])["input_ids"][0].tolist()
    assert '"name": "add"' in made.processor.tokenizer.decode(asked)
    assert encoded["input_ids"][: len(asked)] == asked


def test_a_video_says_when_its_pictures_were(encoder, rows) -> None:
    """Qwen3-VL reads the times of its patches, of two pictures each: here one every 0.1 s."""
    made = encoder("qwen3_vl")
    encoded = encode_media_rows(rows([OMNI_ROWS[4]]), made, max_length=512)
    times = re.findall(r"<(\d\.\d) seconds>", made.processor.tokenizer.decode(encoded[0]["input_ids"]))
    assert times == [f"{time:.1f}" for time in (0.05, 0.25)]


@pytest.mark.parametrize(
    "kind, name, assumed",
    [
        ("qwen2_5_omni", "video_second_per_grid", 1.0),
        ("qwen3_omni_moe", "video_second_per_grid", 2.0),
        ("qwen2_5_vl", "second_per_grid_ts", 2 / 24),
    ],
)
def test_each_video_has_its_own_seconds_between_patches(encoder, rows, files: Path, kind, name, assumed) -> None:
    """Of two pictures each. What a processor assumes holds where nobody knows when the pictures were."""
    from PIL import Image, ImageSequence

    with Image.open(files / "a.gif") as moving:
        pictures = [picture.copy() for picture in ImageSequence.Iterator(moving)]
    pictures[0].save(files / "slow.gif", save_all=True, append_images=pictures[1:] * 3, duration=500)
    videos = ["a.gif", ["a.png", "a.png"], "slow.gif"]  # a picture every 0.1 s, unknown, 4 taken of 10 every 0.5 s
    records = [{"query": "<video>?", "response": "moving", "videos": [video]} for video in videos]
    made, some = encoder(kind, max_frames=4), list(rows([*records, ROWS[1]], f"{kind}.jsonl"))
    read = [made.files(row) for row in some]
    expected = pytest.approx([0.2, assumed, 2.5])
    assert made.batch(some, read)[name].tolist() == expected
    assert made.asked([row.messages[:-1] for row in some], read)[name].tolist() == expected


def test_videos_that_do_not_go_together_are_one_batch(encoder, rows, caplog) -> None:
    """InternVL stacks videos, which must be of one length: of others each row is prepared by itself."""
    made = encoder("internvl")
    short = {"query": "<video> and?", "response": "still", "videos": [["a.png", "a.png"]]}
    encoded = encode_media_rows(rows([OMNI_ROWS[4], ROWS[0], short]), made, max_length=512)
    both, alone = (MediaCollator(made)([encoded[n] for n in some]) for some in ((0, 1, 2), (2,)))
    assert both["input_ids"].shape[0] == 3
    assert both["pixel_values"][-2:].equal(alone["pixel_values"])
    assert both["labels"][2][: alone["labels"].shape[1]].equal(alone["labels"][0])
    assert not caplog.text


@pytest.mark.parametrize(
    ("codes", "padded"),
    [
        ([[9], [5, 7, 1], None], [[9, -100, -100], [5, 7, 1], [-100] * 3]),
        ([[[1, 2]], None, [[3, 4], [5, 6]]], [[[1, 2], [-100] * 2], [[-100] * 2] * 2, [[3, 4], [5, 6]]]),
    ],
)
def test_codes_of_spoken_answers_are_as_many_as_of_the_longest(encoder, rows, codes: Any, padded: Any) -> None:
    made = encoder("qwen2_5_omni")
    said = [{"query": "a", "response": "b"} | ({"codes": some} if some else {}) for some in codes]
    encoded = encode_media_rows(rows(said), made, max_length=512)
    batch = MediaCollator(made, speaks=True)([encoded[n] for n in range(3)])
    assert batch["codes"].tolist() == padded
    silent = next(n for n, some in enumerate(codes) if not some)
    assert "codes" not in MediaCollator(made, speaks=True)([encoded[silent]])
    assert "codes" not in MediaCollator(made)([encoded[0]])  # a model that writes alone


def test_rows_that_do_not_go_together_are_padded_by_token_only() -> None:
    """A sound may have as many bands, or frames, as its row has tokens; Mllama says of each token what it sees."""
    ids = [torch.ones(1, length, dtype=torch.int64) for length in (3, 5)]
    sees = [torch.ones(1, length, 1, 2) for length in (3, 5)]
    sound = {"input_features": torch.ones(1, 3, 4), "input_features_mask": torch.ones(1, 3)}
    rows = [
        {"input_ids": ids[0], "mm_token_type_ids": ids[0], "cross_attention_mask": sees[0], **sound},
        {"input_ids": ids[1], "mm_token_type_ids": ids[1], "cross_attention_mask": sees[1]},
    ]
    batch = together(rows, pad=9)
    assert batch["input_ids"].tolist() == [[1, 1, 1, 9, 9], [1, 1, 1, 1, 1]]
    assert batch["mm_token_type_ids"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert batch["cross_attention_mask"][:, :, 0, 1].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    for name, value in sound.items():
        assert batch[name].equal(value)


@pytest.mark.parametrize("kind", ["qwen2_5_omni", "qwen3_omni_moe", "qwen2_audio"])
def test_the_shortest_sound_is_heard(encoder, rows, files: Path, kind: str) -> None:
    """Of less, one processor makes no token, one fails, and one model cannot find the place of its only token."""
    import soundfile
    import transformers

    soundfile.write(files / "short.wav", np.zeros(1600), 16000)
    made = encoder(kind)
    row = {"query": "<audio>?", "response": "two", "audios": ["short.wav"]}
    encoded = encode_media_rows(rows([row]), made, max_length=512)
    model = transformers.AutoModelForMultimodalLM.from_pretrained(made.processor.tokenizer.name_or_path)
    forward = getattr(model, "thinker", model)
    assert forward(**MediaCollator(made)([encoded[0]])).loss.isfinite()


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["qwen2_5_omni", "qwen3_omni_moe", "qwen2_audio"])
def test_sounds_of_any_length_have_in_a_batch_the_losses_that_they_have_alone(
    encoder, rows, files: Path, kind: str
) -> None:
    """Processors pad samples, and make more or other frames of a sound beside a longer one than of it alone."""
    import soundfile

    lengths = [1600, 1601, 1640, 1759, 9000, 16000, 16001]
    for length in lengths:
        soundfile.write(files / f"{length}.wav", 0.1 * np.random.default_rng(0).standard_normal(length), 16000)
    records = [{"query": "<audio>?", "response": "two", "audios": [f"{length}.wav"]} for length in lengths]
    records += [{"query": "<audio><audio>?", "response": "two", "audios": ["9000.wav", "16001.wav"]}]
    check_batches(encoder(kind), rows(records))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "llava", "gemma3", "minicpmv4_6", "qwen3_omni_moe"]
)
def test_pictures_and_videos_of_any_size_have_in_a_batch_the_losses_that_they_have_alone(
    encoder, rows, files: Path, kind: str
) -> None:
    from PIL import Image

    chance = np.random.default_rng(0)
    sizes = {"small": (9, 8), "wide": (150, 20), "tall": (17, 120), "large": (121, 90)}
    for name, (width, height) in sizes.items():
        pixels = chance.integers(0, 255, (3, height, width, 3), dtype=np.uint8)
        frames = [Image.fromarray(frame) for frame in pixels]
        frames[0].save(files / f"{name}.png")
        frames[0].save(files / f"{name}.gif", save_all=True, append_images=frames[1 : 1 + len(name) % 3])
    records = [{"query": "<image>?", "response": name, "images": [f"{name}.png"]} for name in sizes]
    records += [{"query": "<image>, <image>?", "response": "both", "images": ["tall.png", "wide.png"]}, ROWS[1]]
    made = encoder(kind)
    if "video" in made.takes:
        records += [{"query": "<video>?", "response": name, "videos": [f"{name}.gif"]} for name in sizes]
    check_batches(made, rows(records))


def check_batches(made: MediaEncoder, rows: Any) -> None:
    """The loss of rows in a batch is that of each alone, weighed by what is learnt."""
    import transformers

    encoded, collate = encode_media_rows(rows, made, max_length=512), MediaCollator(made, on_lost="stop")
    model = transformers.AutoModelForMultimodalLM.from_pretrained(made.processor.tokenizer.name_or_path)
    forward = getattr(model, "thinker", model)
    every = range(len(encoded))
    learnt = [sum(label != -100 for label in encoded[n]["labels"]) for n in every]
    with torch.no_grad():
        alone = [forward(**collate([encoded[n]])).loss.item() for n in every]
        for batch in every[::2], every[1::2], every[:4], every[-3:]:
            together = forward(**collate([encoded[n] for n in batch])).loss.item()
            weights = [learnt[n] for n in batch]
            assert together == pytest.approx(np.average([alone[n] for n in batch], weights=weights), abs=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind, hears", [("qwen2_5_omni", 4), ("qwen2_audio", 2), ("qwen3_omni_moe", None)])
def test_a_sound_that_a_model_hears_a_part_of_is_no_row(encoder, rows, files, kind: str, hears, workers: int) -> None:
    """Its processor cuts it at its window without a word, and the answer about all of it would be learnt. Of Qwen3-Omni
    there is no window."""
    import soundfile

    lengths = [0.1, 1.9, 2, 3.9, 4, 4.01, 5, 40]
    for length in lengths:
        soundfile.write(files / f"{length}s.wav", np.zeros(round(length * 44100)), 44100)
    records = [{"query": "<audio>?", "response": "two", "audios": [f"{length}s.wav"]} for length in lengths]
    records += [{"query": "<audio><audio>?", "response": "two", "audios": ["1.9s.wav", "40s.wav"]}]
    found = rows(records, "sounds.jsonl", bad_rows="skip")
    encoded = encode_media_rows(found, encoder(kind), max_length=None, bad_rows="skip", workers=workers)
    heard = [length for length in lengths if hears is None or length < hears + 0.1]
    assert len(encoded) == len(heard) + (hears is None)
    if hears is None:
        return
    said = [
        f"audio 1 ({n}s.wav): it lasts {n:.1f} s, but this model takes at most {hears:.1f} s"
        for n in lengths
        if n not in heard
    ]
    said += [f"audio 2 (40s.wav): it lasts 40.0 s, but this model takes at most {hears:.1f} s"]
    assert [bad.problem for bad in found.skipped] == said
    with pytest.raises(
        DataError, match=r"sounds.jsonl:8: audio 1 \(40s.wav\): it lasts 40.0 s, but this model takes at most"
    ):
        encode_media_rows(rows(records, "sounds.jsonl"), encoder(kind), max_length=None, workers=workers)
    question = [{"role": "user", "content": [{"type": "audio", "audio": "40s.wav"}]}]
    with pytest.raises(DataError, match=r"audio 1 \(40s.wav\): it lasts 40.0 s, but this model takes at most"):
        encoder(kind).question(question, str(files / "sounds.jsonl"))


def test_whatever_a_processor_raises_is_a_problem_of_the_row(encoder, rows, caplog, monkeypatch) -> None:
    """Before training, and in its middle: the others are trained on."""
    made = encoder()
    encoded = encode_media_rows(rows(ROWS), made, max_length=512)

    def refuses(self, *args, **kwargs):
        raise RuntimeError("no such picture")

    monkeypatch.setattr(type(made.processor.image_processor), "preprocess", refuses)
    with pytest.raises(DataError, match=r"rows.jsonl:1: Qwen2_5OmniProcessor refuses it: no such picture"):
        encode_media_rows(rows(ROWS), made, max_length=512)
    batch = MediaCollator(made)([encoded[0], encoded[1]])
    assert batch["input_ids"].shape[0] == 1
    assert "rows.jsonl:1 is left out of its step: Qwen2_5OmniProcessor refuses it: no such picture" in caplog.text
    assert MediaCollator(made)([encoded[0]])["labels"].eq(-100).all(), "and nothing is learnt where there is no other"


def test_a_model_says_what_it_cannot_take(encoder, rows) -> None:
    with pytest.raises(DataError, match="a file of type audio, but the model takes image, video"):
        encode_media_rows(rows([OMNI_ROWS[3]]), encoder("minicpmv4_6"), max_length=512)


def test_rows_with_files_are_left_out_and_not_cut(encoder, rows) -> None:
    long = {"query": "a b c d e f " * 20, "response": "end"}
    encoded = encode_media_rows(rows([ROWS[2], long]), encoder(), max_length=20, truncation="left")
    assert (encoded.report.dropped, encoded.report.truncated) == (1, 1)
    batch = MediaCollator(encoder())([encoded[0]])
    assert batch["input_ids"].tolist() == [encoded[0]["input_ids"]]
    assert batch["input_ids"].shape == (1, 20)
    with pytest.raises(DataError, match=r"rows.jsonl:1: the row has \d+ tokens, --max-length is 20"):
        encode_media_rows(rows([ROWS[2], long]), encoder(), max_length=20, truncation="raise")
    with pytest.raises(ConfigError, match="--max-length 1 leaves no room"):
        encode_media_rows(rows([long]), encoder(), max_length=1)


def test_a_file_that_is_lost_later_takes_its_row_along(encoder, rows, files, tmp_path, caplog) -> None:
    shutil.copytree(files, tmp_path / "own")
    (tmp_path / "own" / "rows.jsonl").write_text("".join(json.dumps(record) + "\n" for record in ROWS))
    made = encoder()
    encoded = encode_media_rows(read_rows([tmp_path / "own" / "rows.jsonl"]), made, max_length=512)
    features = [encoded[0], encoded[1]]
    (tmp_path / "own" / "a.png").unlink()
    batch = MediaCollator(made)(features)
    assert batch["input_ids"].shape[0] == 1
    assert "rows.jsonl:1 is left out of its step: image 1 (a.png): there is no such file" in caplog.text
    nothing = MediaCollator(made)(features[:1])
    assert (nothing["labels"] == -100).all()
    with pytest.raises(DataError, match="no such file"):
        MediaCollator(made, on_lost="stop")(features)
    shutil.copy(files / "b.png", tmp_path / "own" / "a.png")  # of another size: other tokens
    assert MediaCollator(made)(features)["input_ids"].shape[0] == 1
    assert "a file has changed since training began" in caplog.text


def test_limits_are_those_of_the_run(encoder, rows) -> None:
    small = encode_media_rows(rows([ROWS[0]]), encoder(max_pixels=256), max_length=512)
    large = encode_media_rows(rows([ROWS[0]]), encoder(), max_length=512)
    assert len(small[0]["input_ids"]) < len(large[0]["input_ids"])
