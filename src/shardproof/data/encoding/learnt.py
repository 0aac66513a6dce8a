"""Which turns of a conversation are learnt, and which places of its text, beyond what each turn says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from shardproof.data.encoding.template import MARK, Span, Template
from shardproof.data.forms.parts import Problem

_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*")


def only_last_answer(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same turns, of which no answer but the last is learnt, and those that say themselves that they are. Raises
    Problem where none is."""
    answers = [i for i, turn in enumerate(messages) if turn["role"] == "assistant"]
    if answers and not any(messages[i].get("loss", i == answers[-1]) for i in answers):
        raise Problem("its last answer has loss: false, and --loss last_round learns no other")
    return [
        {**turn, "loss": False} if i in answers[:-1] and not turn.get("loss") else turn
        for i, turn in enumerate(messages)
    ]


def past_empty_thoughts(text: str, answers: Sequence[Span]) -> list[Span]:
    """The same answers without a thought of nothing that they begin with, or that a prompt has opened for them."""
    empty = [found.span() for found in _EMPTY_THOUGHT.finditer(text)]
    ends = {start: next((b for a, b in empty if a <= start < b), start) for start, _ in answers}
    return [(min(ends[start], end), end) for start, end in answers]


def all_but_unlearnt(
    template: Template, messages: Sequence[dict[str, Any]], extra: Mapping[str, Any]
) -> tuple[str, list[Span]]:
    """The text of a conversation, and all of it but for the turns that are not to be learnt: answers with what ends
    them, and what others say.

    Raises:
        ValueError: such a turn cannot be found in the text.
    """
    if all(turn.get("loss", True) for turn in messages):
        text = template.render(messages, **extra)
        return text, [(0, len(text))]
    left_out = [{**turn, "loss": not turn.get("loss", True)} for turn in messages]
    text, found = template.render_answers(left_out, **extra)
    others = [i for i, turn in enumerate(left_out) if turn["loss"] and turn["role"] != "assistant"]
    found = sorted([*found, *(_content(template, messages, i, extra) for i in others)])
    starts, ends = [0, *(end for _, end in found)], [*(start for start, _ in found), len(text)]
    return text, [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]


def _content(template: Template, messages: Sequence[dict[str, Any]], i: int, extra: Mapping[str, Any]) -> Span:
    """Where in the text of a conversation the content of a message stands. Raises ValueError where that is not seen."""
    text = template.render(messages, **extra)
    stand_in = [*messages[:i], {**messages[i], "content": MARK}, *messages[i + 1 :]]
    before, mark, behind = template.render(stand_in, **extra).partition(MARK)
    if not (mark and text.startswith(before) and text.endswith(behind)):
        raise ValueError(f"cannot tell where messages[{i}] stands in what the chat template makes of it")
    return len(before), len(text) - len(behind)
