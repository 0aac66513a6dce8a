"""Which turns of a conversation, and which spans of its text, are learned, besides what each turn itself specifies;
their weights, and the tokens they correspond to."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from shardproof.data.encoding.template import MARK, Span, Template
from shardproof.data.encoding.weights import Part, Weights, laid_over, parts_of_text
from shardproof.data.forms.parts import Problem, text_of

IGNORE = -100  # the label that cross entropy leaves out
Spans = Sequence[Span] | Sequence[Part]  # the learned spans of a text, in order, and their weights

_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*")


def only_last_round(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same turns, with only these answers learned: those to the last question (tool calls and the answers to their
    results included), and those that ask for it themselves. Raises Problem if there are none."""
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
    """The text of a conversation, and the spans of its learned answers. Raises ValueError like `render_answers`."""
    return template.render_answers(messages, **extra)


def past_empty_thoughts(text: str, answers: Sequence[Span]) -> list[Span]:
    """The same answers without an empty thought at their beginning, including one that the prompt opened."""
    empty = [found.span() for found in _EMPTY_THOUGHT.finditer(text)]
    ends = {start: next((b for a, b in empty if a <= start < b), start) for start, _ in answers}
    return [(min(ends[start], end), end) for start, end in answers]


def all_but_unlearnt(
    template: Template, messages: Sequence[dict[str, Any]], extra: Mapping[str, Any]
) -> tuple[str, list[Span]]:
    """The text of a conversation, and the spans of all of it except the turns that are not learned: answers with the
    tokens that end them, and the content of other turns.

    Raises:
        ValueError: one of these turns cannot be found in the text.
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
    """The span of a message's content in the text of a conversation. Raises ValueError if it cannot be found."""
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
    """The learned parts of a conversation with their weights: that of the turn, or those given by `sets`, see
    `weighed`.

    Args:
        spans: the learned spans of `text`.
        answers: the learned answers, which are among these spans or within them.

    Raises:
        Problem: all of it has weight 0.
        ValueError: turns and answers cannot be matched.
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
    """The ids of tokens that begin inside a span, and -100 for the others and those in a span with weight 0; and the
    weights of all tokens, if the spans have weights.

    A token that begins before the span contains text that the model is given, and is not learned unless that text is
    only white space: `Answer: ` and `yes` meet in the token ` yes`, which is all there is to learn.
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
