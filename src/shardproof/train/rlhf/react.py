"""Rewards for answers that call a tool in the ReAct format, under the names they have in ms-swift."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

_CALL = re.compile(r"Action:\s*(?P<name>.*?)\s*(?:Action Input:\s*(?P<input>.*?)\s*)?(?:Observation:.*)?$", re.DOTALL)
_FORM = re.compile(r"<think>.*?</think>\s*Action:.*?Action Input:", re.DOTALL)


def rewards(text_of: Callable[[Any], str]) -> dict[str, Callable[..., list[float | None]]]:
    """The functions by name; `text_of` returns the generated text."""

    def toolbench(completions: Sequence[Any], solution: Sequence[Any], **columns: Any) -> list[float | None]:
        """1 if the last call of an answer is that of the solution, otherwise 0."""
        return [
            float(call_of(text_of(one)) == call_of(text_of(right)))
            for one, right in zip(completions, solution, strict=True)
        ]

    def react_format(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """1 if an answer thinks and then calls, otherwise 0."""
        return [float(_FORM.match(text_of(one)) is not None) for one in completions]

    return {"toolbench": toolbench, "react_format": react_format}


def call_of(text: str) -> tuple[str, Any]:
    """The tool name of the last call in a text, and its input: parsed if it is JSON, otherwise as text. `none` without
    a call."""
    found = _CALL.search(text, max(text.rfind("Action:"), 0))
    if found is None:
        return "none", {}
    given = found["input"] or "{}"
    try:
        return found["name"], json.loads(given)
    except ValueError:
        return found["name"], given
