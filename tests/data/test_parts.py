"""How rows name pictures, sounds and videos, and what they all become."""

from __future__ import annotations

import pytest

from shardproof.data.forms.formats import Problem, normalise
from shardproof.data.forms.parts import decoded_uri, text_of

A = {"role": "assistant", "content": "seven"}
URI = "data:image/png;base64,aGVsbG8="


def asked(content):
    return {"role": "user", "content": content}


def image(file):
    return {"type": "image", "image": file}


def text(value):
    return {"type": "text", "text": value}


@pytest.mark.parametrize(
    "record, content",
    [
        ({"messages": [asked("<image>which?"), A], "images": ["a.png"]}, [image("a.png"), text("which?")]),
        ({"messages": [asked("which?"), A], "images": "a.png"}, [image("a.png"), text("which?")]),
        ({"messages": [asked("which?"), A], "images": "['a.png']"}, [image("a.png"), text("which?")]),  # of CSV
        ({"messages": [asked("<video>"), A], "videos": '[["a", "b"]]'}, [{"type": "video", "video": ["a", "b"]}]),
        ({"messages": [asked("which?"), A], "images": "[1].png"}, [image("[1].png"), text("which?")]),
        ({"query": "see <image> and <image>", "response": "x", "images": ["a", "b"]}, None),
        ({"messages": [asked([image("a.png"), text("which?")]), A]}, [image("a.png"), text("which?")]),
        ({"messages": [asked([{"type": "image"}, text("?")]), A], "images": ["a"]}, [image("a"), text("?")]),
        (
            {"messages": [asked([{"type": "image_url", "image_url": {"url": URI}}, text("which?")]), A]},
            [image(URI), text("which?")],
        ),
        (
            {"messages": [asked([{"type": "input_audio", "input_audio": {"data": "aGk=", "format": "mp3"}}]), A]},
            [{"type": "audio", "audio": "data:audio/mp3;base64,aGk="}],
        ),
        (
            {"conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "x"}], "image": "a"},
            [image("a"), text("?")],
        ),
        ({"messages": [asked("<image>"), A], "images": [{"bytes": b"12", "path": None}]}, [image(b"12")]),
        ({"messages": [asked("<video>"), A], "videos": [["a", "b"]]}, [{"type": "video", "video": ["a", "b"]}]),
        ({"instruction": "hear", "output": "x", "audios": ["a"]}, [{"type": "audio", "audio": "a"}, text("hear")]),
        ({"prompt": "see <image>.", "completion": "x", "image": "a"}, [text("see "), image("a"), text(".")]),
        ({"prompt": "", "completion": "x", "images": ["a"]}, [image("a")]),
        # Texts about tags are no places for files.
        ({"messages": [asked("what does <image> mean?"), A]}, "what does <image> mean?"),
        ({"messages": [asked([text("a"), text("b")]), A]}, "ab"),
        ({"messages": [asked("<audio> <image>"), A], "images": ["a"]}, [text("<audio> "), image("a")]),
    ],
)
def test_files_take_their_places(record, content) -> None:
    messages = normalise(record)[0]
    if content is None:
        content = [text("see "), image("a"), text(" and "), image("b")]
    assert messages[0]["content"] == content
    assert isinstance(messages[1]["content"], str)


@pytest.mark.parametrize(
    "record, problem",
    [
        (
            {"messages": [asked("<image><image>"), A], "images": ["a"]},
            "2 places for images in the text (<image>) and 1",
        ),
        ({"messages": [asked("<image>"), A], "images": ["a", "b"]}, "1 place for images in the text (<image>) and 2"),
        ({"messages": [asked([{"type": "image"}]), A]}, "1 place for images in the text (<image>) and no files in"),
        ({"messages": [asked("x"), {**A, "content": "<image>"}], "images": ["a"]}, "an answer with a file in it"),
        ({"messages": [asked("x"), A], "images": [5]}, "'images[0]' names no image: a path, a data URI or bytes"),
        (
            {"messages": [asked([{"type": "smell"}]), A]},
            "a part of type 'smell'; parts are text, image, audio or video",
        ),
        (
            {"prompt": "<image>", "completion": "y", "images": ["a", "b"]},
            "1 place for images in the text (<image>) and 2",
        ),
    ],
)
def test_files_without_a_place_and_places_without_a_file(record, problem: str) -> None:
    with pytest.raises(Problem) as error:
        normalise(record)
    assert problem in str(error.value)


def test_codes_of_speech_are_numbers_or_groups_of_numbers() -> None:
    row = {"query": "say it", "response": "yes"}
    for codes in ([1, 2], [[1, 2], [3, 4]], "[5]"):
        assert normalise({**row, "codes": codes})[1]["codes"] == ([5] if codes == "[5]" else codes)
    for codes in ([1, "2"], [1, -2], [[1], [2, 3]], [[]], [1, [2]], [[1], 2], [True]):
        with pytest.raises(Problem, match="'codes' must be a list of integers"):
            normalise({**row, "codes": codes})


def test_a_text_shows_where_files_stand() -> None:
    assert text_of([text("a "), image("x"), text("b")]) == "a <image>b"


def test_a_data_uri_holds_its_bytes() -> None:
    assert decoded_uri(URI) == b"hello"
    for uri in ("data:image/png,hello", "data:image/png;base64,??", "data:"):
        with pytest.raises(Problem, match="data URI"):
            decoded_uri(uri)
