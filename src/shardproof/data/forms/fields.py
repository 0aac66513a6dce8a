"""One field of a record: a text or a list, or a description of what else it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardproof.data.forms.parts import Problem
from shardproof.data.forms.written import read_list


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


def list_field(record: Mapping[str, Any], field: str, *, may_be_empty: bool = False) -> list[Any]:
    """A list, or a list written as JSON or a Python literal in a text field (CSV has only text)."""
    value = record.get(field)
    if value is None:
        raise Problem(f"field '{field}' {'is null' if field in record else 'is missing'} ({shown_fields(record)})")
    value = read_list(value)
    if not isinstance(value, list):
        raise Problem(f"field '{field}' must be a list, not {kind_of(value)}")
    if not value and not may_be_empty:
        raise Problem(f"field '{field}' is an empty list")
    return value


def kind_of(value: Any) -> str:
    """The type of a value in JSON terms, with a short excerpt of the value."""
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
