"""Reads lists and objects that tables store as text: CSV has only text."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

_NO_COMMA = re.compile(r"\}\s*\n\s*\{")  # a string in a Python literal has no literal line breaks


def read_out(value: Any) -> Any:
    """The value of a JSON string; anything else unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def read_list(value: Any) -> Any:
    """The same for JSON, or for a list written as a Python literal."""
    said = read_out(value)
    return _literal(said) if said is value and isinstance(value, str) else said


def are_turns(value: Any) -> bool:
    """Whether a value is a list, or a string with a list of turns: a plain text may begin with `[`, too."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = read_list(value)
        turns = value if isinstance(value, list) else []
        return bool(turns) and all(isinstance(turn, dict) and {"role", "from"} & turn.keys() for turn in turns)
    return isinstance(value, list)


def _literal(text: str) -> Any:
    """A list as written by Python or numpy (without commas), as many tables have it; any other text unchanged."""
    try:
        return ast.literal_eval(_NO_COMMA.sub("}, {", text.strip())) if text.lstrip().startswith("[") else text
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
