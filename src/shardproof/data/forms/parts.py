"""Images, audio and video in a conversation: how rows name them, and the single form that all are normalised to.

The content of a turn with files is a list of parts, in the order in which the model sees them: `{"type": "text",
"text": ...}` and `{"type": "image", "image": file}`, and likewise `audio` and `video`. A file is a path or a data URI
(a string) or bytes; a video may also be a list of images.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from shardproof.data.forms.written import read_list

KINDS = ("image", "audio", "video")
FILE_COLUMNS = {kind: f"{kind}s" for kind in KINDS}  # the columns passed to rewards
# The fields of a record that name files, plural or singular.
FILE_FIELDS = {name: kind for kind in KINDS for name in (FILE_COLUMNS[kind], kind)}

LONGEST_SHOWN = 200  # characters of a path in an error message

_PLACEHOLDER = re.compile(r"<(image|audio|video)>")
# The names that OpenAI and others use for the same parts.
_PART_TYPES = {"image_url": "image", "input_image": "image", "audio_url": "audio", "input_audio": "audio"}
_PART_TYPES |= {"video_url": "video", "input_video": "video"}


class Problem(Exception):
    """The reason that a record cannot be used.

    Attributes:
        columns: a suggestion for --columns, `query=question,response=answer`, if its fields have likely names.
    """

    def __init__(self, text: str, columns: str = "") -> None:
        super().__init__(text)
        self.columns = columns


def refusal(processor: Any, error: Exception) -> Problem:
    """The Problem for a row whose files a model's code refuses, with any exception."""
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    return Problem(f"{type(processor).__name__} refuses it: {reason}")


def part_of_content(part: Any, at: str) -> dict[str, Any]:
    """One element of a content list; `at` is its place. Raises Problem if it is neither a text nor a file."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    known = _PART_TYPES.get(str(kind), kind)
    if known not in KINDS:
        raise Problem(f"the content of {at} has a part of type {str(kind)!r}; parts are text, image, audio or video")
    value = next((part[key] for key in (known, str(kind), "source", "url", "path") if part.get(key) is not None), None)
    if isinstance(value, dict) and "data" in value:  # OpenAI's audio: base64 and a format's name; Anthropic's files
        kind = value.get("media_type") or f"{known}/{value.get('format', 'wav')}"
        value = f"data:{kind};base64,{value['data']}"
    return {"type": known, known: None if value is None else file_of(value, known, f"a part of {at}")}


def file_of(value: Any, kind: str, at: str) -> Any:
    """The file that a value names: a path or a data URI as a string, bytes, or (for a video) a list of images."""
    if isinstance(value, dict):  # `datasets` stores files as {bytes, path}
        value = next((value[key] for key in ("bytes", "path", "url") if value.get(key) is not None), None)
    if isinstance(value, (bytes, bytearray)) and value:
        return bytes(value)
    if isinstance(value, str) and value.strip():
        return value.strip()
    if kind == "video" and isinstance(value, list) and value:
        return [file_of(frame, "image", f"a frame of {at}") for frame in value]
    raise Problem(f"{at} names no {kind}: a path, a data URI or bytes are expected")


def has_files(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether any turn has a file."""
    return next(parts_of(messages), None) is not None


def rows_of_kinds(rows: Iterable[Any]) -> dict[str, int]:
    """The kinds of files in the rows, each with the number of the first row that has one."""
    found: dict[str, int] = {}
    for number, row in enumerate(rows):
        for part in parts_of(row.messages):
            found.setdefault(part["type"], number)
        if len(found) == len(KINDS):
            break
    return found


def with_files(record: Mapping[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns with the files of a record's `images`, `audios` and `videos` in their places.

    `<image>` in a text is the place of the next image; parts without a file take the next one, too. If a record names
    files but its texts have no place for that kind, the files are put at the beginning of the first question.

    Raises:
        Problem: there are more places than files or vice versa, or an answer has a file.
    """
    files = {kind: _listed(record, kind) for kind in KINDS}
    named = {kind for kind in KINDS if files[kind]}
    if not named and all(isinstance(message["content"], str) for message in messages):
        return messages
    messages = [{**message, "content": _split(message["content"], named)} for message in messages]
    waiting = {kind: iter(files[kind]) for kind in KINDS}
    for kind in KINDS:
        places = [part for part in parts_of(messages, kind) if part[kind] is None]
        if files[kind] and not places:
            _put_first(messages, [{"type": kind, kind: file} for file in files[kind]])
        elif len(places) != len(files[kind]):
            raise Problem(
                f"{_count(len(places), f'place for {kind}s', f'places for {kind}s')} in the text"
                f" (<{kind}>) and {_count(len(files[kind]), 'file', 'files')} in '{kind}s'"
            )
        for part in places:
            part[kind] = next(waiting[kind])
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and any(part["type"] != "text" for part in message["content"]):
            raise Problem(f"messages[{i}] is an answer with a file in it; only questions can contain files")
    return [{**message, "content": _joined(message["content"])} for message in messages]


def parts_of(messages: Sequence[Mapping[str, Any]], kind: str | None = None) -> Iterator[dict[str, Any]]:
    """The parts with a file, in order; of one kind, or of all."""
    for message in messages:
        if isinstance(message["content"], list):
            yield from (p for p in message["content"] if p["type"] != "text" and kind in (None, p["type"]))


def text_of(content: str | list[dict[str, Any]]) -> str:
    """The text of a turn, with `<image>` and the like in the places of files."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in content)


def with_texts(
    content: str | Sequence[Mapping[str, Any]], change: Callable[[str], str]
) -> str | list[Mapping[str, Any]]:
    """A content with a function applied to its texts."""
    if isinstance(content, str):
        return change(content)
    return [{**part, "text": change(part["text"])} if part["type"] == "text" else part for part in content]


def placeholders(text: str) -> list[str]:
    """The kinds of files that a text has placeholders for."""
    return _PLACEHOLDER.findall(text)


def shown(file: Any) -> str:
    """A file as shown in an error message."""
    if isinstance(file, bytes):
        return f"{len(file)} bytes"
    if isinstance(file, list):
        return f"a video of {len(file)} frames"
    if file.startswith("data:"):
        return f"{file[:24]}..."
    return file if len(file) <= LONGEST_SHOWN else f"{file[:LONGEST_SHOWN]}... ({len(file)} characters)"


def decoded_uri(uri: str) -> bytes:
    """The bytes of a data URI. Raises Problem if it is invalid."""
    head, comma, body = uri.partition(",")
    if not comma or not head.endswith(";base64"):
        raise Problem("the data URI is not of the form data:TYPE;base64,DATA")
    try:
        return base64.b64decode(body, validate=True)
    except ValueError:
        raise Problem("the data URI is not base64") from None


def _listed(record: Mapping[str, Any], kind: str) -> list[Any]:
    for field in (f"{kind}s", kind):
        value = record.get(field)
        if value not in (None, "", []):
            # One image, or a list of images; a video may be a list of images itself.
            found = read_list(value)
            values = found if isinstance(found, list) else [value]
            return [file_of(file, kind, f"'{field}[{i}]'") for i, file in enumerate(values)]
    return []


def _split(content: str | list[dict[str, Any]], named: set[str]) -> list[dict[str, Any]]:
    """A content as parts: `<image>` is a placeholder only in records that name images, otherwise plain text."""
    parts: list[dict[str, Any]] = []
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        if part["type"] != "text":
            parts.append(dict(part))
            continue
        for i, piece in enumerate(_PLACEHOLDER.split(part["text"])):
            if i % 2 and piece in named:
                parts.append({"type": piece, piece: None})
            elif piece:
                parts.append({"type": "text", "text": f"<{piece}>" if i % 2 else piece})
    return parts


def _joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Merges adjacent texts; parts without any file become a text."""
    merged: list[dict[str, Any]] = []
    for part in parts:
        if merged and part["type"] == "text" == merged[-1]["type"]:
            merged[-1] = {"type": "text", "text": merged[-1]["text"] + part["text"]}
        else:
            merged.append(part)
    return "".join(p["text"] for p in merged) if all(p["type"] == "text" for p in merged) else merged


def _put_first(messages: list[dict[str, Any]], parts: list[dict[str, Any]]) -> None:
    first = next((m for m in messages if m["role"] == "user"), None)
    if first is None:
        raise Problem("the record names files, but has no turn of role 'user' for them")
    first["content"] = parts + first["content"]


def _count(n: int, one: str, many: str) -> str:
    return f"{n or 'no'} {one if n == 1 else many}"
