"""Rows for preference and reinforcement training: pairs, judged answers, and prompts.

Each extends one of the formats of `formats.py`. `Row.messages` is a conversation as for supervised training (for a
pair, the better one); `Row.extra` has the additional data:

| form | extra |
|---|---|
| PAIRS | `split`: where in the messages the better answer begins; `rejected`: the turns of the worse one; a `margin` |
| JUDGED | `split`: where the answer begins; `label`: whether it is good |
| PROMPTS | `columns`: every other field of the record, for rewards; the messages end with a question |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from shardproof.data.forms.fields import kind_of, shown_fields, text_field
from shardproof.data.forms.formats import (
    FIELDS,
    TURNS,
    Form,
    Messages,
    Normal,
    Problem,
    check_learnt,
    check_plain,
    history_of,
    instruction_of,
    normalise,
    opened,
    tools_of,
    turns_of,
    with_own_system,
)
from shardproof.data.forms.likely import QUESTION, likely, likely_name
from shardproof.data.forms.objects import OBJECTS, check_filled, placed
from shardproof.data.forms.parts import FILE_FIELDS
from shardproof.data.forms.written import are_turns

PREFERENCE_FIELDS = (*FIELDS, "chosen", "rejected", "rejected_response", "rejected_messages", "label")

_PAIR_COLUMNS = "query={},response=chosen,rejected_response=rejected"  # makes the row a conversation

_YES, _NO = (True, 1, "1", "true", "True"), (False, 0, "0", "false", "False")


def _pair(record: Any, columns: Mapping[str, str] | None = None) -> Normal:
    record = opened(record, columns)
    for field in ("chosen", "rejected"):
        if record.get(field) is not None:
            return _chosen_and_rejected(record)
    for field in (*FILE_FIELDS, OBJECTS, "tools"):
        other = record.get(f"rejected_{field}")
        if other not in (None, []) and other != record.get(field):
            raise Problem(f"'rejected_{field}' differ from '{field}': both answers must be about the same ones")
    for field in ("rejected_response", "rejected_messages"):
        if record.get(field) not in (None, "", []):
            break
    else:
        for field in ("rejected_response", "rejected_messages"):
            if field in record:
                raise Problem(f"field '{field}' is {'null' if record[field] is None else 'empty'}")
        raise Problem(f"there is no 'rejected_response', 'rejected_messages' or 'rejected' ({shown_fields(record)})")
    messages, extra, kind = normalise({key: value for key, value in record.items() if key != field})
    answer = _last_answer(messages)
    if field == "rejected_messages" or are_turns(record[field]):
        worse = turns_of(record, field)
        if worse[0]["role"] != "assistant":
            worse = placed(record, with_own_system(record, worse))
        # The full conversation, or the replacement of the answer; for a list, of everything after the last question.
        if worse[0]["role"] != "assistant":
            split = _common(messages, worse)
        else:
            split = answer if field == "rejected_messages" else _last_question(messages) + 1
        rejected = worse if worse[0]["role"] == "assistant" else worse[split:]
    else:
        split, rejected = answer, [{"role": "assistant", "content": text_field(record, field)}]
    return _compared(record, messages, split, rejected, extra, kind)


def _chosen_and_rejected(record: Mapping[str, Any]) -> Normal:
    """TRL's formats: texts after a prompt, turns after a prompt, or two conversations with a common beginning."""
    prompt, chosen = record.get("prompt"), record.get("chosen")
    if isinstance(chosen, str) and (prompt is None or isinstance(prompt, str)) and not are_turns(chosen):
        if prompt is None and (asks := likely_name(record, QUESTION)):
            lacks = f"field 'prompt' is missing beside 'chosen' ({shown_fields(record)})"
            raise Problem(lacks, _PAIR_COLUMNS.format(asks))
        turns = [
            {"role": "user", "content": text_field(record, "prompt", with_field="chosen", may_be_empty=True)},
            {"role": "assistant", "content": text_field(record, "chosen", with_field="rejected")},
        ]
        worse = [{"role": "assistant", "content": text_field(record, "rejected", with_field="chosen")}]
        _check_no_files(record)
        check_plain(record, "'query', 'response' and 'rejected_response'")
        return _compared(record, turns, 1, worse, {}, "text")
    better, worse = turns_of(record, "chosen"), turns_of(record, "rejected")
    if isinstance(prompt, str) and not are_turns(prompt):
        begin: Messages = [{"role": "user", "content": text_field(record, "prompt")}]
        # Full conversations contain their question, whatever other fields say, as in TRL.
        in_both = any(turns[0]["role"] != "assistant" for turns in (better, worse))
    else:
        begin = turns_of(record, "prompt") if prompt is not None else []
        in_both = better[: len(begin)] == begin == worse[: len(begin)]
    if begin and not in_both:
        messages, split, rejected = begin + better, len(begin), worse
    else:
        split = _common(better, worse)
        messages, rejected = better, worse[split:]
    before = len(messages)
    messages = with_own_system(record, messages)
    split += len(messages) - before
    return _compared(record, placed(record, messages), split, rejected, tools_of(record), "chat")


def _compared(
    record: Mapping[str, Any],
    messages: Messages,
    split: int,
    rejected: Messages,
    extra: dict[str, Any],
    kind: Literal["chat", "text"],
) -> Normal:
    if split == 0:
        raise Problem("the chosen and the rejected conversation have no question in common")
    for turns, name in ((messages[split:], "chosen"), (rejected, "rejected")):
        if not any(turn["role"] == "assistant" for turn in turns):
            raise Problem(f"the {name} conversation holds no answer of its own (a turn of role 'assistant')")
        _check_learnt_whole(turns, f"the {name} answer")
    if messages[split:] == rejected:
        raise Problem("the chosen and the rejected answer are the same")
    check_filled(record, [*messages, *rejected])
    margin = {"margin": record["margin"]} if record.get("margin") else {}
    return messages, {**extra, "split": split, "rejected": rejected, **margin}, kind


def _check_learnt_whole(turns: Messages, named: str) -> None:
    """Raise Problem if a part of an answer is not to be learned: TRL's trainers would learn it anyway."""
    check_learnt(turns, f" of {named}")
    if any(turn["role"] == "assistant" and not turn.get("loss", True) for turn in turns):
        raise Problem(f"a turn of {named} has loss: false, but these answers are always learned in full")


def _judged(record: Any, columns: Mapping[str, str] | None = None) -> Normal:
    record = opened(record, columns)
    label = record.get("label")
    if label is None:
        raise Problem(f"field 'label' is missing: true for a good answer, false for a bad one ({shown_fields(record)})")
    if label not in (*_YES, *_NO):
        raise Problem(f"field 'label' must be true or false, not {label!r:.40} ({kind_of(label)})")
    messages, extra, kind = normalise(record)
    split = _last_answer(messages)
    _check_learnt_whole(messages[split:], "the answer that is judged")
    return messages, {**extra, "split": split, "label": label in _YES}, kind


def _prompt(record: Any, columns: Mapping[str, str] | None = None) -> Normal:
    whole, record = record, opened(record, columns)
    names = [name for name in (*TURNS, "prompt", "query", "instruction") if name in record]
    field = next((name for name in names if record[name] is not None), names[0] if names else "")
    used = {field, "system", "history", "tools", "input"} if field in ("query", "instruction") else {field, "system"}
    kind: Literal["chat", "text"] = "chat"
    if not field:
        lacks = f"it has none of 'messages', 'prompt' and 'query' ({shown_fields(record)})"
        raise Problem(lacks, likely(record, QUESTION))
    if field in TURNS or (field != "instruction" and (not isinstance(record[field], str) or are_turns(record[field]))):
        messages = turns_of(record, field)
        while len(messages) > 1 and messages[-1]["role"] == "assistant":
            messages.pop()  # the answer is generated
    elif field == "prompt":
        messages, kind = [{"role": "user", "content": text_field(record, "prompt")}], "text"
        _check_no_files(record)
        check_plain(record, "'query'", but="tools")
    else:
        text = instruction_of(record) if field == "instruction" else text_field(record, field)
        messages = [*history_of(record), {"role": "user", "content": text}]
    if messages[-1]["role"] not in ("user", "tool"):
        raise Problem(f"the last turn must be a question (role 'user'), not of role {messages[-1]['role']!r}")
    if kind == "chat":
        messages = placed(record, with_own_system(record, messages), spare=True)
        used |= FILE_FIELDS.keys()
    check_filled(record, messages)
    # Under their own names, and also under ours if --columns maps them.
    rest = {key: value for key, value in {**whole, **record}.items() if key not in used}
    tools = tools_of(record) if kind == "chat" else {}
    return messages, {"columns": {**rest, **tools}, **tools}, kind


def _check_no_files(record: Mapping[str, Any]) -> None:
    for field in FILE_FIELDS:
        if record.get(field):
            raise Problem(f"'{field}' appears along with plain text; with files, give 'messages' or 'query'")


def _last_answer(messages: Messages) -> int:
    """The index of a conversation's final answer."""
    if messages[-1]["role"] != "assistant":
        raise Problem(f"the last turn must be the answer (role 'assistant'), not of role {messages[-1]['role']!r}")
    if len(messages) == 1:
        raise Problem("there is an answer and no question")
    return len(messages) - 1


def _last_question(messages: Messages) -> int:
    return max((i for i, turn in enumerate(messages) if turn["role"] == "user"), default=-1)


def _common(a: Messages, b: Messages) -> int:
    """The number of turns in the common beginning of two conversations."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


PAIRS = Form(
    _pair,
    "'messages' with 'rejected_response' or 'rejected_messages', 'query' + 'response' + 'rejected_response', or"
    " 'prompt' + 'chosen' + 'rejected'.",
)
JUDGED = Form(_judged, "'messages', 'query' + 'response' or 'prompt' + 'completion', with 'label': true or false.")
PROMPTS = Form(_prompt, "'messages', 'query' or 'prompt', and any other fields that the rewards need.")
