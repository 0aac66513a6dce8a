"""What texts stand for in which tables hold lists and objects: CSV has nothing but texts."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

_NO_COMMA = re.compile(r"\}\s*\n\s*\{")  # in Python's words no text has a line end of its own


def read_out(value: Any) -> Any:
    """What a text that is JSON says; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def read_list(value: Any) -> Any:
    """The same of JSON, or of a list in the words of Python."""
    said = read_out(value)
    return _literal(said) if said is value and isinstance(value, str) else said


def are_turns(value: Any) -> bool:
    """Whether a value is a list, or a text in which turns are written as one: a plain text may begin with `[`, too."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = read_list(value)
        turns = value if isinstance(value, list) else []
        return bool(turns) and all(isinstance(turn, dict) and {"role", "from"} & turn.keys() for turn in turns)
    return isinstance(value, list)


def _literal(text: str) -> Any:
    """A list as Python or numpy (without commas) writes it, as many a table has it; any other text as it is."""
    try:
        return ast.literal_eval(_NO_COMMA.sub("}, {", text.strip())) if text.lstrip().startswith("[") else text
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
