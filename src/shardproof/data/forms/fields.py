"""One field of a record: a text or a list, or in words what else it is."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from shardproof.data.forms.parts import Problem

_NO_COMMA = re.compile(r"\}\s*\n\s*\{")  # in Python's words no text has a line end of its own


def text_field(
    record: Mapping[str, Any], field: str, *, with_field: str | None = None, may_be_empty: bool = False
) -> str:
    value = record.get(field)
    if value is None:
        beside = f" beside '{with_field}'" if with_field and with_field in record else ""
        state = "is null" if field in record else "is missing"
        raise Problem(f"field '{field}' {state}{beside} ({shown_fields(record)})")
    if not isinstance(value, str):
        raise Problem(f"field '{field}' must be text, not {kind_of(value)}")
    if not may_be_empty and not value.strip():
        raise Problem(f"field '{field}' is empty")
    return value


def read_out(value: Any) -> Any:
    """What a text that is JSON says (CSV has nothing but texts); anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def list_field(record: Mapping[str, Any], field: str, *, may_be_empty: bool = False) -> list[Any]:
    """A list, or a list written as JSON or in Python's words in a text field (CSV has nothing else)."""
    value = record.get(field)
    if value is None:
        raise Problem(f"field '{field}' {'is null' if field in record else 'is missing'} ({shown_fields(record)})")
    value = _read_list(value)
    if not isinstance(value, list):
        raise Problem(f"field '{field}' must be a list, not {kind_of(value)}")
    if not value and not may_be_empty:
        raise Problem(f"field '{field}' is an empty list")
    return value


def are_turns(value: Any) -> bool:
    """Whether a value is a list, or a text in which turns are written as one: a plain text may begin with `[`, too."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _read_list(value)
        turns = value if isinstance(value, list) else []
        return bool(turns) and all(isinstance(turn, dict) and {"role", "from"} & turn.keys() for turn in turns)
    return isinstance(value, list)


def _read_list(value: Any) -> Any:
    """What a text that is a list says; anything else as it is."""
    said = read_out(value)
    return _literal(said) if said is value and isinstance(value, str) else said


def _literal(text: str) -> Any:
    """A list as Python or numpy (without commas) writes it, as many a table has it; any other text as it is."""
    try:
        return ast.literal_eval(_NO_COMMA.sub("}, {", text.strip())) if text.lstrip().startswith("[") else text
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def kind_of(value: Any) -> str:
    """The type of a value in the words of JSON, with a glimpse of what it is."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    for kind, name in names.items():
        if isinstance(value, kind):
            return name
    if isinstance(value, (int, float)):
        return f"a number ({value})"
    return f"a {type(value).__name__}"


def shown_fields(record: Mapping[str, Any]) -> str:
    names = ", ".join(str(key) for key in list(record)[:8])
    return f"it has {names}{', ...' if len(record) > 8 else ''}"
