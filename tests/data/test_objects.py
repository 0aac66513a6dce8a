"""What ms-swift's `objects` hold belongs in a place of a text each, or the row says what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardproof.data.forms.formats import normalise
from shardproof.data.forms.matches import Matches
from shardproof.data.forms.objects import PLACED, Box
from shardproof.data.forms.parts import Problem
from shardproof.data.forms.preferences import PAIRS, PROMPTS
from shardproof.data.rows import read_rows
from shardproof.errors import DataError

ASKED = {"query": "<image>find <ref-object>", "images": ["a.png"]}
ROW = {**ASKED, "response": "<bbox> and <bbox>"}
OBJECTS = {"ref": ["a dog"], "bbox": [[1, 2, 3, 4], [5.5, 6]]}


def kept(record: dict[str, Any]) -> list[Any]:
    return [turn.get(PLACED) for turn in normalise(record)[0]]


@pytest.mark.parametrize(
    "objects, boxes",
    [
        (OBJECTS, [Box((1, 2, 3, 4), 0, True), Box((5.5, 6), 0, True)]),
        (json.dumps(OBJECTS), [Box((1, 2, 3, 4), 0, True), Box((5.5, 6), 0, True)]),
        # Corners in any order, as there.
        ({**OBJECTS, "bbox": [[3, 2, 1, 4], [3, 4, 1, 2]]}, [Box((1, 2, 3, 4), 0, True)] * 2),
        (
            {**OBJECTS, "bbox": [[0, 0.5, 1, 1], [0, 1]], "bbox_type": "norm1", "image_id": [0, 0]},
            [Box((0, 0.5, 1, 1), 0, False), Box((0, 1), 0, False)],
        ),
        # As Parquet fills in what a row does not have.
        ({**OBJECTS, "bbox_type": None, "image_id": None}, [Box((1, 2, 3, 4), 0, True), Box((5.5, 6), 0, True)]),
    ],
)
def test_turns_keep_what_belongs_in_their_texts(objects, boxes) -> None:
    assert kept({**ROW, "objects": objects}) == [["a dog"], boxes]


def test_names_and_boxes_take_their_places_in_the_order_of_the_texts() -> None:
    row = {
        "system": "mind <bbox>",
        "messages": [
            {"role": "user", "content": [{"type": "image", "image": "a"}, {"type": "text", "text": "<bbox>"}]},
            {"role": "assistant", "content": "<ref-object><bbox>"},
        ],
        "images": [],
        "objects": {"ref": ["x"], "bbox": [[1, 1], [2, 2], [3, 3]]},
    }
    one, two, three = (Box((i, i), 0, True) for i in (1, 2, 3))
    assert kept(row) == [[one], [two], ["x", three]]
    # Texts about tags, and fields of that name, are nothing to fill in.
    assert kept(ROW) == [None, None]
    assert kept({"query": "find it", "response": "here", "objects": OBJECTS}) == [None, None]


@pytest.mark.parametrize(
    "objects, problem",
    [
        ({"ref": ["a dog"], "bbox": [[1, 2]]}, "there are 2 <bbox> in the texts, and 1 in 'objects.bbox'"),
        ({"bbox": [[1, 2]] * 2}, "there are 1 <ref-object> in the texts, and 0 in 'objects.ref'"),
        ({**OBJECTS, "ref": ["a", "b"]}, "there are 1 <ref-object> in the texts, and 2 in 'objects.ref'"),
        ("a dog", "'objects' must be an object with 'ref' and 'bbox'"),
        ([1], "'objects' must be an object with 'ref' and 'bbox'"),
        ({**OBJECTS, "ref": "a dog"}, "'objects.ref' must be a list"),
        ({**OBJECTS, "ref": [5]}, "'objects.ref' must be a list of texts"),
        ({**OBJECTS, "bbox": [[1, 2], [1, 2, 3]]}, "'objects.bbox[1]' must be [x1, y1, x2, y2] or a point [x, y]"),
        ({**OBJECTS, "bbox": [[1, "2"], [1, 2]]}, "'objects.bbox[0]' must be"),
        ({**OBJECTS, "bbox": [[True, 2], [1, 2]]}, "'objects.bbox[0]' must be"),
        ({**OBJECTS, "bbox": [[float("nan"), 2], [1, 2]]}, "'objects.bbox[0]' must be"),
        ({**OBJECTS, "bbox": [[-1, 2], [1, 2]]}, "pixels, 0 or more"),
        ({**OBJECTS, "bbox_type": "norm1"}, "'objects.bbox[0]' must be .*numbers from 0 to 1"),
        ({**OBJECTS, "bbox_type": "norm1000"}, "'objects.bbox_type' must be 'real' (pixels) or 'norm1' (0 to 1)"),
        ({**OBJECTS, "image_id": [0]}, "'objects.image_id' must give the image of each of 2 boxes"),
        ({**OBJECTS, "image_id": [0, 1]}, "from 0 to 0"),
    ],
)
def test_objects_of_another_form_are_named(objects, problem: str) -> None:
    with pytest.raises(Problem) as error:
        normalise({**ROW, "objects": objects})
    assert all(part in str(error.value) for part in problem.split(".*"))


def test_objects_are_of_pictures_and_told_with_their_line(tmp_path) -> None:
    file = tmp_path / "rows.jsonl"
    bad = {"query": "find <ref-object>", "response": "<bbox>", "objects": {"ref": ["x"], "bbox": [[1, 2]]}}
    file.write_text(f"{json.dumps({**ROW, 'objects': OBJECTS})}\n{json.dumps(bad)}\n")
    with pytest.raises(DataError, match=r"rows.jsonl:2: the row has 'objects' but no image for them"):
        read_rows([file])


def test_of_pairs_only_what_is_better_has_places() -> None:
    objects = {"ref": ["a dog"], "bbox": [[1, 2]]}
    pair = {**ASKED, "response": "<bbox>", "rejected_response": "nowhere", "objects": objects}
    assert [turn.get(PLACED) for turn in PAIRS.normalise(pair, None)[0]] == [["a dog"], [Box((1, 2), 0, True)]]
    plain = {"prompt": "find it", "chosen": "<bbox>", "rejected": "nowhere", "objects": objects}
    for bad, problem in (
        ({**pair, "rejected_response": "<bbox>!"}, "<bbox> refers to 'objects' in a plain text or a rej"),
        ({**pair, "rejected_objects": {"ref": [], "bbox": []}}, "'rejected_objects' differ from 'objects'"),
        (plain, "<bbox> refers to 'objects' in a plain text"),
    ):
        with pytest.raises(Problem, match=problem):
            PAIRS.normalise(bad, None)


def test_a_prompt_leaves_boxes_to_its_reward() -> None:
    row = {**ASKED, "objects": OBJECTS}
    for record in (row, {**row, "response": "<bbox> and <bbox>"}):
        messages, extra, _ = PROMPTS.normalise(record, None)
        assert [turn.get(PLACED) for turn in messages] == [["a dog"]]
        assert extra["columns"]["objects"] == OBJECTS
    with pytest.raises(Problem, match=r"there are 1 <ref-object> in the texts, and 0 in 'objects\.ref'"):
        PROMPTS.normalise({**row, "objects": {"bbox": [[1, 2]]}}, None)
    with pytest.raises(Problem, match="in a plain text"):
        PROMPTS.normalise({"prompt": "find <ref-object>", "objects": OBJECTS}, None)


def test_what_is_found_or_ranked_has_no_places() -> None:
    row = {**ASKED, "positive": "at <bbox>", "negative": "nowhere", "objects": {"ref": ["a dog"], "bbox": []}}
    for found in (row, {**row, "positive": "there", "negative": ["no", "<bbox>"]}):
        with pytest.raises(Problem, match="<bbox> refers to 'objects' in a text that is to be found or ranked"):
            Matches(several=True, files=True)(found)
