"""Rows without a chat template: `--plain`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardproof.data.forms.formats import SYSTEM, Form, Messages, Normal
from shardproof.data.forms.parts import Problem
from shardproof.data.forms.texts import THINKING

SHAPES = ["user", "assistant"], ["assistant"]


@dataclass(frozen=True)
class Joined:
    """`normalise` for a form whose conversations become plain text: a question and its answer, or an answer alone."""

    form: Form

    def __call__(self, record: Any, columns: Mapping[str, str] | None = None) -> Normal:
        messages, extra, kind = self.form.normalise(record, columns)
        if kind == "text":
            return messages, extra, kind
        _check_seen(messages, extra)
        if len(messages) == 1:
            messages = [{"role": "user", "content": ""}, *messages]
        return messages, extra, "text"


def joined(form: Form) -> Form:
    """The form of rows whose texts are joined as they are."""
    return replace(form, normalise=Joined(form))


def _check_seen(messages: Messages, extra: Mapping[str, Any]) -> None:
    """Raise Problem for anything that only a chat template could show."""
    roles = [message["role"] for message in messages]
    lost = next((role for role in roles if role in SYSTEM), None) or next((name for name in extra if extra[name]), None)
    if lost is None:
        lost = next((name for name in ("tool_calls", THINKING) if any(turn.get(name) for turn in messages)), None)
    if lost is not None:
        raise Problem(
            f"it has '{lost}', which only a chat template writes: leave --plain out, or remove it from the row"
        )
    if roles not in SHAPES:
        raise Problem(
            f"it has {len(roles)} turns ({', '.join(roles[:6])}), but --plain joins one question and its answer, or "
            "takes an answer alone"
        )
