"""Names and boxes become the text that ms-swift's template of the model writes, in the check of rows and in batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardproof.data.forms.objects import PLACED
from shardproof.data.media.batches import MediaCollator
from shardproof.data.media.encode import MediaEncoder
from shardproof.data.media.limits import Limits
from shardproof.data.media.rows import encode_media_rows
from shardproof.data.rows import Rows, read_rows
from shardproof.errors import DataError
from shardproof.models.loading.processors import load_processor

ROW: dict[str, Any] = {
    "query": "<image>find <ref-object>",
    "response": "at <bbox>",
    "images": ["wide.png"],
    "objects": {"ref": ["it"], "bbox": [[12, 30, 99, 71]]},
}
QWEN = "find <|object_ref_start|>it<|object_ref_end|>", "at <|box_start|>{}<|box_end|>"
INTERNVL = "find <ref>it</ref>", "at <box>[{}]</box>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With pictures of 120 x 80 and 40 x 50 pixels, and one that is too narrow for Qwen's."""
    from PIL import Image

    made = tmp_path_factory.mktemp("grounding")
    for name, size in (("wide", (120, 80)), ("high", (40, 50)), ("line", (600, 2))):
        Image.new("RGB", size, "teal").save(made / f"{name}.png")
    return made


@pytest.fixture
def rows(folder: Path):
    def read(*records: dict[str, Any]) -> Rows:
        (folder / "rows.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return read_rows([folder / "rows.jsonl"])

    return read


@pytest.fixture(scope="module")
def encoder(tiny_models):
    return lambda kind, **limits: MediaEncoder(load_processor(str(tiny_models(kind))), Limits(**limits))


def texts(made: MediaEncoder, found: Rows) -> list[tuple[str, str]]:
    """Of each row what a batch of all holds, and what is learnt of it: the same as the check before training had."""
    encoded = encode_media_rows(found, made, max_length=None)
    batch = MediaCollator(made)(list(encoded))
    decode = made.processor.tokenizer.decode
    read = []
    for row, ids, labels in zip(encoded, batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        length = len(row["input_ids"])
        assert (ids[:length], labels[:length]) == (list(row["input_ids"]), list(row["labels"]))
        read.append((decode(ids), decode([label for label in labels if label != -100]).removesuffix("<|im_end|>")))
    return read


# Of 120 x 80 pixels, of which the tiny Qwen2.5-VL makes 72 x 48 and the tiny Qwen2.5-Omni, too.
FAMILIES = [
    ("qwen2_vl", QWEN, "(100,375),(825,888)"),
    ("qwen2_5_vl", QWEN, "(7,18),(59,43)"),
    ("qwen3_vl", QWEN, "(100,375),(825,888)"),
    ("qwen2_5_omni", QWEN, "(7,18),(59,43)"),
    ("qwen3_omni_moe", QWEN, "(100,375),(825,888)"),
    ("internvl", INTERNVL, "[100, 375, 825, 888]"),
]


@pytest.mark.parametrize("kind, form, numbers", FAMILIES)
def test_a_family_reads_boxes_as_it_was_taught(encoder, rows, kind: str, form: tuple[str, str], numbers: str) -> None:
    ((whole, learnt),) = texts(encoder(kind), rows(ROW))
    assert form[0] in whole
    assert learnt == form[1].format(numbers)


def test_boxes_are_of_the_picture_as_its_file_has_it(encoder, rows) -> None:
    """Whatever --max-pixels makes of it, and pixels those of what the processor makes of that."""
    made, found = encoder("qwen2_5_vl", max_pixels=2400), rows(ROW)  # 60 x 40, and then 64 x 40
    ((_, learnt),) = texts(made, found)
    assert learnt == QWEN[1].format("(6,15),(53,36)")
    files = made.files(found[0])
    grid = made.batch([found[0]], [files])["image_grid_thw"][0].tolist()
    assert (files["image"][0].size, grid) == ((60, 40), [1, 10, 16])  # patches of 4 pixels
    assert texts(encoder("qwen3_vl", max_pixels=2400), found)[0][1] == QWEN[1].format("(100,375),(825,888)")


def test_points_shares_and_other_pictures(encoder, rows) -> None:
    point = {**ROW, "objects": {"ref": ["it"], "bbox": [[12, 30]]}}
    shares = {**ROW, "objects": {"ref": ["it"], "bbox": [[0.1, 0, 0.55, 1]], "bbox_type": "norm1"}}
    second = {
        **ROW,
        "query": "<image><image>find <ref-object>",
        "images": ["wide.png", "high.png"],
        "objects": {**ROW["objects"], "bbox": [[12, 30, 40, 50]], "image_id": [1]},
    }
    found = rows(point, shares, second, {"query": "what?", "response": "<bbox>"})
    thousandths = ["(100,375)", "(100,0),(550,1000)", "(300,600),(1000,1000)"]
    learnt = [QWEN[1].format(numbers) for numbers in thousandths]
    assert [learnt for _, learnt in texts(encoder("qwen3_vl"), found)] == [*learnt, "<bbox>"]
    pixels = ["(7,18)", "(7,0),(40,48)", "(12,29),(40,48)"]  # 40 x 50 become 40 x 48
    learnt = [QWEN[1].format(numbers) for numbers in pixels]
    assert [learnt for _, learnt in texts(encoder("qwen2_5_vl"), found)] == [*learnt, "<bbox>"]


def test_a_question_is_asked_with_its_objects(encoder, rows) -> None:
    made, found = encoder("qwen3_vl"), rows(ROW)
    row = found[0]
    asked = made.question(row.messages[:1], row.source)
    assert QWEN[0] in made.processor.tokenizer.decode(asked["input_ids"][0])
    shown = made.shown(row.messages, made.files(row))
    assert not any(PLACED in turn for turn in shown)
    assert shown[1]["content"] == QWEN[1].format("(100,375),(825,888)")


def test_a_box_may_reach_out_by_a_part_of_a_pixel(encoder, rows) -> None:
    inside, beyond = (
        {**ROW, "objects": {"ref": ["it"], "bbox": [[12, 30, *end]]}} for end in ([120, 80], [120.4, 80.9])
    )
    made = encoder("qwen2_5_vl")
    assert texts(made, rows(inside)) == texts(made, rows(beyond))


def test_a_box_outside_of_its_picture_and_a_family_without_a_form(encoder, rows) -> None:
    outside = {**ROW, "objects": {"ref": ["it"], "bbox": [[12, 30, 120, 81]]}}
    with pytest.raises(DataError) as error:
        encode_media_rows(rows(ROW, outside), encoder("qwen2_5_vl"), max_length=None)
    problem = "a box of its 'objects', [12, 30, 120, 81], extends beyond image 1, which has 120 x 80 pixels"
    assert f"rows.jsonl:2: {problem}" in str(error.value)
    with pytest.raises(DataError) as error:
        encode_media_rows(rows(ROW), encoder("llava"), max_length=None)
    narrow = {**ROW, "images": ["line.png"], "objects": {"ref": ["it"], "bbox": [[1, 1]]}}
    with pytest.raises(DataError, match=r"rows.jsonl:1: Qwen2_5_VLProcessor refuses it: absolute aspect ratio"):
        encode_media_rows(rows(narrow), encoder("qwen2_5_vl"), max_length=None)
    unknown = (
        "its 'objects' cannot be filled in: their format for models with LlavaProcessor is not known, only that for"
    )
    assert f"rows.jsonl:1: {unknown} Qwen2.5-Omni, Qwen3-Omni, Qwen2-VL, Qwen2.5-VL, " in str(error.value)
