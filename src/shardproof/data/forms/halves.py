r"""Half characters, which JSON can write but text cannot contain, such as `"\ud83d"`, the first of the two escapes of
an emoji. Tokenizers and UTF-8 files refuse them, without saying which row they came from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardproof.data.forms.parts import KINDS, Problem


def refuse_halves(used: dict[str, Any], record: Any) -> None:
    """Raise Problem if a text in `used`, the normalised record, has half a character.

    Its place is given in terms of the record's fields, or, if the record has the text in another form (JSON in a
    string, a user's row format), in terms of those of `used`.
    """
    try:
        where, text = next(_halved(used), ("", ""))
        if text:
            own = [(name, there) for name, there in _halved(record) if there in text or text in there]
            where, _ = min(own, key=lambda place: place[1] != text, default=(where, text))
            half = printable(next(c for c in text if _is_half(c)))
            raise Problem(
                f"'{printable(where)}' has half a character ({half}), which is not valid text: something cut it in "
                "two; write the whole character, or leave it out"
            )
    except RecursionError:
        raise Problem("it is nested too deeply") from None


def printable(text: str) -> str:
    """The text, with half characters written as JSON writes them."""
    return text if _is_whole(text) else text.encode(errors="backslashreplace").decode()


def _is_half(character: str) -> bool:
    return "\ud800" <= character <= "\udfff"


def _is_whole(value: Any) -> bool:
    """Whether no text in a value has half a character. Files are not checked: a path may contain any bytes."""
    if isinstance(value, str):
        if value.isascii():  # a flag of the string, known without scanning
            return True
        try:
            value.encode()  # a gigabyte a second; searching for halves takes several times as long
        except UnicodeEncodeError:
            return False
        return True
    if isinstance(value, dict):
        return value.get("type") in KINDS or (all(map(_is_whole, value)) and all(map(_is_whole, value.values())))
    return all(map(_is_whole, value)) if isinstance(value, (list, tuple)) else True


def _halved(value: Any, at: str = "") -> Iterator[tuple[str, str]]:
    """The places of texts with half a character, such as `messages[0].content`, and these texts."""
    if _is_whole(value):
        return
    if isinstance(value, dict):
        for key, inner in value.items():
            place = f"{at}.{key}" if at else str(key)
            yield from _halved(key, place)
            yield from _halved(inner, place)
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            yield from _halved(inner, f"{at}[{i}]")
    else:
        yield at, value
