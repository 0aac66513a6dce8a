"""Guesses which field of a record corresponds to which of ours, for errors about missing fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

# Common other names of two fields, the likeliest first, in lower case.
QUESTION, ANSWER = "query", "response"
LIKELY = {
    QUESTION: (
        *("question", "prompt", "instruction", "problem", "input", "inputs", "user", "human"),
        *("sentence", "text", "content", "document", "article"),
    ),
    ANSWER: (
        *("answer", "output", "completion", "solution", "target", "targets", "assistant", "answer_key", "text"),
        *("summary", "highlights"),
    ),
}
GIVEN = ("input", "context")  # context for a question
RAW = ("content", "raw_content", "document", "code")


def likely(record: Mapping[str, Any], *fields: str) -> str:
    """A value of --columns that gives a record these fields; empty if one has no likely name there."""
    found: dict[str, str] = {}
    for field in fields:
        name = likely_name(record, field, found.values())
        if name is None:
            return ""
        found[field] = name
    given = _first(record, GIVEN, found.values())
    if given is not None and found.keys() == {QUESTION, ANSWER} and record[given].strip():
        found = {"instruction": found[QUESTION], "input": given, "output": found[ANSWER]}
    return ",".join(f"{field}={name}" for field, name in found.items() if name != field)


def likely_name(record: Mapping[str, Any], field: str, taken: Collection[str] = ()) -> str | None:
    """The likely name of this field in a record."""
    return _first(record, (field, *LIKELY[field]), taken)


def likely_text(record: Mapping[str, Any]) -> str:
    """A value of --columns that makes a record a raw text."""
    name = _first(record, RAW)
    return "" if name is None else f"text={name}"


def _first(record: Mapping[str, Any], names: Collection[str], taken: Collection[str] = ()) -> str | None:
    """The first of these names that a text field of a record has, ignoring case."""
    texts = {str(name).lower(): name for name, value in record.items() if isinstance(value, str)}
    return next((texts[name] for name in names if name in texts and texts[name] not in taken), None)
