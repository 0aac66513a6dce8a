"""Which turns of a conversation are learnt, and which places of its text, beyond what each turn says; how much each
weighs, and which tokens these are."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from shardproof.data.encoding.template import MARK, Span, Template
from shardproof.data.encoding.weights import Part, Weights, laid_over, parts_of_text
from shardproof.data.forms.parts import Problem, text_of

IGNORE = -100  # the label that cross entropy leaves out
Spans = Sequence[Span] | Sequence[Part]  # where in a text stands what is learnt, in its order, and what it weighs

_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*")


def only_last_round(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same turns, of which no answers are learnt but those to the last question, calls of tools with what is said
    to their results, and those that say themselves that they are. Raises Problem where none is."""
    answers = [i for i, turn in enumerate(messages) if turn["role"] == "assistant"]
    before = messages[: max(answers, default=0)]
    asked = max((i for i, turn in enumerate(before) if turn["role"] == "user"), default=-1)
    learnt = [i for i in answers if messages[i].get("loss", i > asked or "weight" in messages[i])]
    if answers and not learnt:
        raise Problem("its last answer has loss: false, but --loss last_round learns only that one")
    return [{**turn, "loss": False} if i in answers and i not in learnt else turn for i, turn in enumerate(messages)]


def answers_of(
    template: Template, messages: Sequence[dict[str, Any]], extra: Mapping[str, Any]
) -> tuple[str, list[Span]]:
    """The text of a conversation, and the answers in it that are to be learnt. Raises ValueError as `render_answers`
    does."""
    return template.render_answers(messages, **extra)


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
        raise ValueError(f"cannot locate messages[{i}] in the output of the chat template")
    return len(before), len(text) - len(behind)


def with_weights(
    template: Template,
    sets: Sequence[Weights],
    messages: Sequence[dict[str, Any]],
    text: str,
    spans: Sequence[Span],
    answers: Sequence[Span],
) -> list[Part]:
    """What is learnt of a conversation, with weights: that of its turn, or by these sets, see `weighed`.

    Args:
        spans: of `text`, what is learnt.
        answers: of them or within them, the answers that are learnt.

    Raises:
        Problem: nothing of it weighs anything.
        ValueError: which turn is which answer cannot be told.
    """
    turns = [i for i, turn in enumerate(messages) if turn["role"] == "assistant" and turn.get("loss", True)]
    if len(turns) != len(answers):
        raise ValueError(f"the chat template marks {len(answers)} of {len(turns)} answers, so they cannot be weighted")
    parts: list[Part] = []
    for i, (start, end) in zip(turns, answers, strict=True):
        if "weight" in messages[i]:
            parts.append((start, end, messages[i]["weight"]))
            continue
        question = text_of(messages[i - 1]["content"]) if i else ""
        parts += parts_of_text(sets, text, (start, template.said(text, start, end)), question)
    found = laid_over(spans, parts)
    if not any(weight for _, _, weight in found):
        raise Problem("--token-weights gives all of its answers weight 0, so there is nothing to learn")
    return found


def labels_of(ids: list[int], offsets: Sequence[Span], spans: Spans, text: str) -> tuple[list[Any], ...]:
    """The tokens that begin inside a span, and -100 for the others, and in one that weighs 0; and the weights of all,
    if the spans have some.

    A token that begins before it holds text that the model is given, and is not learnt, unless that text is only white
    space: `Answer: ` and `yes` meet in the token ` yes`, which is all there is to learn.
    """
    labels, weights = [IGNORE] * len(ids), [1.0] * len(ids)
    starts = [start for start, _ in offsets]
    for start, end, *weight in spans:
        first, last = bisect_left(starts, start), bisect_left(starts, end)
        if first and start < min(end, offsets[first - 1][1]) and text[starts[first - 1] : start].isspace():
            first -= 1
        if weight == [0]:
            labels[first:last] = [IGNORE] * (last - first)
            continue
        labels[first:last] = ids[first:last]
        weights[first:last] = [w for w in weight or (1.0,) for _ in range(last - first)]
    return (labels, weights) if any(len(span) > 2 for span in spans) else (labels,)
