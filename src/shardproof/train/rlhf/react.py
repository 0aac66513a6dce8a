"""Rewards for answers that call a tool in the words of ReAct, which ms-swift has under these names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

_CALL = re.compile(r"Action:\s*(?P<name>.*?)\s*(?:Action Input:\s*(?P<input>.*?)\s*)?(?:Observation:.*)?$", re.DOTALL)
_FORM = re.compile(r"<think>.*?</think>\s*Action:.*?Action Input:", re.DOTALL)


def rewards(text_of: Callable[[Any], str]) -> dict[str, Callable[..., list[float | None]]]:
    """The functions by their names; `text_of`: what was generated."""

    def toolbench(completions: Sequence[Any], solution: Sequence[Any], **columns: Any) -> list[float | None]:
        """1 where the last call of an answer is that of the solution, 0 elsewhere."""
        return [
            float(call_of(text_of(one)) == call_of(text_of(right)))
            for one, right in zip(completions, solution, strict=True)
        ]

    def react_format(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """1 where an answer thinks and then calls, 0 elsewhere."""
        return [float(_FORM.match(text_of(one)) is not None) for one in completions]

    return {"toolbench": toolbench, "react_format": react_format}


def call_of(text: str) -> tuple[str, Any]:
    """The name of the tool that the last call in a text names, and its input: JSON, if it is some, or a text. `none`
    where nothing is called."""
    found = _CALL.search(text, max(text.rfind("Action:"), 0))
    if found is None:
        return "none", {}
    given = found["input"] or "{}"
    try:
        return found["name"], json.loads(given)
    except ValueError:
        return found["name"], given
