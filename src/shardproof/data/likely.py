"""Which field of a record may be which of ours, for whoever is told that ours are not there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What other people call two fields, the likeliest first.
QUESTION, ANSWER = "query", "response"
LIKELY = {
    QUESTION: ("question", "prompt", "instruction", "problem", "input", "inputs", "user", "human"),
    ANSWER: ("answer", "output", "completion", "solution", "target", "targets", "assistant"),
}


def likely(record: Mapping[str, Any], *fields: str) -> str:
    """What --columns could say, so that these fields are in a record: nothing where one has no likely name there."""
    found: dict[str, str] = {}
    for field in fields:
        names = (name for name in (field, *LIKELY[field]) if isinstance(record.get(name), str))
        name = next((name for name in names if name not in found.values()), None)
        if name is None:
            return ""
        found[field] = name
    return ",".join(f"{field}={name}" for field, name in found.items() if name != field)
