"""Checks for turns of which only the texts are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardproof.data.forms.parts import Problem

THINKING = "reasoning_content"
WRITE = "write it into the texts, or remove it"


def check_texts(turns: Sequence[Any], tools: Any = None, at: str = "messages") -> None:
    """Raise Problem for anything in turns besides their texts, if only these are read."""
    if tools:
        raise Problem(f"it has tools, but there is no chat template to write them: {WRITE}")
    for i, turn in enumerate(turns):
        for field, what in (("tool_calls", "calls of tools"), (THINKING, "thinking")):
            if turn.get(field):
                raise Problem(
                    f"{at}[{i}] has {what} besides its text, but there is no chat template to write it: {WRITE}"
                )
