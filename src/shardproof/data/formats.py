"""What a record may look like, and the one form that all of them become.

Pure functions over plain dicts. `normalise` either returns messages or raises `Problem`, whose text says what is
wrong with this record in terms of the fields the user wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from shardproof.data.likely import ANSWER, QUESTION, likely
from shardproof.data.objects import OBJECTS, placed
from shardproof.data.parts import FILE_FIELDS, Problem, part_of_content

Messages = list[dict[str, Any]]
Normal = tuple[Messages, dict[str, Any], Literal["chat", "text"]]

SYSTEM = ("system", "developer")
ROLES = (*SYSTEM, "user", "assistant", "tool")

EXPECTED = (
    "an object with 'messages' (a list of role and content),"
    " or 'prompt' + 'completion', 'query' + 'response', 'instruction' + 'output'."
)

TURNS = ("messages", "conversations", "conversation")  # fields that hold a conversation

ANSWERS = ("response", "completion", "output")  # where an answer stands, if not at the end of turns

# What a record is looked at for.
FIELDS = (
    *(*TURNS, "prompt", "completion", "query", "response", "history"),
    *("instruction", "input", "output", "system", "tools"),
    *(*FILE_FIELDS, OBJECTS),
    "codes",
)

_PAIRS = {"prompt": "completion", "query": "response", "instruction": "output"}

# Roles and keys of ShareGPT's `conversations`.
_SHAREGPT = {"human": "user", "gpt": "assistant", "function_call": "tool_call", "observation": "tool"}


def normalise(record: Any, columns: Mapping[str, str] | None = None) -> Normal:
    """Messages, what the template needs besides them, and whether the row is a chat or plain text.

    `columns` says for fields under which other name they stand in the record; a format it names goes before others.

    Raises:
        Problem: the record is in none of the forms, or a field of it is missing, empty or of the wrong type.
    """
    record = opened(record, columns)
    for key, build in sorted(_FORMATS.items(), key=lambda form: form[0] not in (columns or ())):
        if record.get(key) is not None or (key in record and not _elsewhere(record, key)):
            try:
                return build(record)
            except Problem as problem:
                if key in _PAIRS and _PAIRS[key] not in record:
                    problem.columns = likely(record, QUESTION, ANSWER)
                raise
    raise Problem(_no_format(record), likely(record, QUESTION, ANSWER))


def opened(record: Any, columns: Mapping[str, str] | None) -> dict[str, Any]:
    """The fields of a record under our names; raises Problem where there are none."""
    if not isinstance(record, dict):
        raise Problem(f"the row is {kind_of(record)}, not an object with fields")
    if columns:
        record = renamed(record, columns)
    if not record:
        raise Problem("the row is empty")
    return record


def renamed(record: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    taken = set(columns.values())
    rest = {key: value for key, value in record.items() if key not in taken}
    return rest | {field: record[column] for field, column in columns.items() if column in record}


def _elsewhere(record: Mapping[str, Any], key: str) -> bool:
    """Whether another format's key is filled: a table may have columns for several formats, empty in most rows."""
    return any(record.get(other) is not None for other in _FORMATS if other != key)


def _no_format(record: Mapping[str, Any]) -> str:
    first = next((first for first, second in _PAIRS.items() if second in record), None)
    if first is not None:
        return f"field '{first}' is missing beside '{_PAIRS[first]}' ({shown_fields(record)})"
    return f"none of the known fields is here ({shown_fields(record)})"


def shown_fields(record: Mapping[str, Any]) -> str:
    names = ", ".join(str(key) for key in list(record)[:8])
    return f"it has {names}{', ...' if len(record) > 8 else ''}"


@dataclass(frozen=True)
class Form:
    """What rows of one kind of training look like.

    Attributes:
        normalise: from a record and the names of its columns to messages, what goes with them, and chat or text.
        expected: in one sentence, what a record must hold.
    """

    normalise: Callable[[Any, Mapping[str, str] | None], Normal]
    expected: str


SUPERVISED = Form(normalise, EXPECTED)


def raw_or_supervised(record: Any, columns: Mapping[str, str] | None = None) -> Normal:
    """As `normalise`, and a record of a `text` alone: all of it is the answer to nothing, and so is learnt."""
    found = opened(record, columns)
    if found.get("text") is None or any(found.get(key) is not None for key in (*_FORMATS, *ANSWERS)):
        return normalise(record, columns)
    answer = {"role": "assistant", "content": text_field(found, "text")}
    return placed(found, [{"role": "user", "content": ""}, answer]), {}, "text"


SFT_FIELDS = (*FIELDS, "text")
SFT = Form(raw_or_supervised, EXPECTED.removesuffix(".") + ", or 'text' alone.")


# --- the formats -------------------------------------------------------------------------------------


def _from_turns(record: Mapping[str, Any], field: str) -> Normal:
    return _finish(record, turns_of(record, field))


def turns_of(record: Mapping[str, Any], field: str) -> Messages:
    """A list of turns, also in the words of ShareGPT (`from` and `value`; `function_call`, `observation`) and of
    ms-swift (`tool_call`, `tool_response`; `human` and `assistant` in one)."""
    messages: Messages = []
    before = role = None
    for i, turn in enumerate(list_field(record, field)):
        if isinstance(turn, dict) and "from" in turn:
            said = turn["from"]
            turn = {"role": _SHAREGPT.get(said, said) if isinstance(said, str) else said, "content": turn.get("value")}
        before, role = role, (turn.get("role") if isinstance(turn, dict) else None)
        if role == "tool_call":
            calls = _called(turn.get("content"), f"{field}[{i}] ({role})")
            if before == role:
                messages[-1]["tool_calls"] += calls
                continue
            turn = {**turn, "role": "assistant", "content": "", "tool_calls": calls}
        elif role == "tool_response":
            turn = {**turn, "role": "tool"}
        elif role is None and isinstance(turn, dict) and "human" in turn:
            messages += _question_and_answer(turn, i, field)
            continue
        messages.append(checked_turn(turn, i, field))
    return messages


def _question_and_answer(pair: Mapping[str, Any], index: int, field: str) -> Messages:
    """Two turns in one, as ms-swift's ShareGPT has them."""
    if pair.get("assistant") is None:
        raise Problem(f"{field}[{index}] has no 'assistant' beside 'human' ({shown_fields(pair)})")
    turns = (("user", pair["human"]), ("assistant", pair["assistant"]))
    return [checked_turn({"role": role, "content": content}, index, field) for role, content in turns]


def _called(content: Any, at: str) -> list[dict[str, Any]]:
    """The calls of tools as ms-swift and LLaMA-Factory write them, a JSON object with `name` and `arguments` or a list
    of such, as templates want them."""
    try:
        found = json.loads(content) if isinstance(content, str) else content
        calls = [(call["name"], call["arguments"]) for call in (found if isinstance(found, list) else [found])]
        return [
            {"type": "function", "function": {"name": name, "arguments": json.loads(x) if isinstance(x, str) else x}}
            for name, x in calls
        ]
    except (ValueError, TypeError, KeyError):
        raise Problem(f"the content of {at} is no JSON object with 'name' and 'arguments'") from None


def _from_prompt(record: Mapping[str, Any]) -> Normal:
    prompt, completion = record["prompt"], record.get("completion")
    if isinstance(prompt, list) or isinstance(completion, list):
        turns = turns_of(record, "prompt")
        # The prompt is context even where it holds earlier answers.
        messages = [{**m, "loss": False} if m["role"] == "assistant" else m for m in turns]
        messages += turns_of(record, "completion")
        return _finish(record, messages)
    messages = [
        {"role": "user", "content": text_field(record, "prompt", with_field="completion", may_be_empty=True)},
        {"role": "assistant", "content": text_field(record, "completion", with_field="prompt")},
    ]
    return placed(record, messages), {}, "text"


def _from_query(record: Mapping[str, Any]) -> Normal:
    last = [
        {"role": "user", "content": text_field(record, "query", with_field="response")},
        {"role": "assistant", "content": text_field(record, "response", with_field="query")},
    ]
    return _finish(record, history_of(record) + last)


def _from_instruction(record: Mapping[str, Any]) -> Normal:
    question = text_field(record, "instruction", with_field="output")
    if record.get("input") is not None and (given := text_field(record, "input", may_be_empty=True)).strip():
        question = f"{question}\n\n{given}"
    last = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": text_field(record, "output", with_field="instruction")},
    ]
    return _finish(record, history_of(record) + last)


_FORMATS: dict[str, Callable[[Mapping[str, Any]], Normal]] = {
    **{field: partial(_from_turns, field=field) for field in TURNS},
    "prompt": _from_prompt,
    "query": _from_query,
    "instruction": _from_instruction,
}


def history_of(record: Mapping[str, Any]) -> Messages:
    """Earlier turns: a list of [question, answer]."""
    if record.get("history") in (None, ""):
        return []
    messages = []
    for i, pair in enumerate(list_field(record, "history", may_be_empty=True)):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            found = f"[{', '.join(map(kind_of, pair))}]" if isinstance(pair, (list, tuple)) else kind_of(pair)
            raise Problem(f"history[{i}] must be a pair of texts, [question, answer], not {found}")
        if not pair[1].strip():
            raise Problem(f"the answer in history[{i}] is empty")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return messages


def with_system(messages: Messages, text: str | None) -> Messages:
    """A conversation behind a system message, unless it has one, or there is none to give."""
    if not text or messages[0]["role"] in SYSTEM:
        return messages
    return [{"role": "system", "content": text}, *messages]


def with_own_system(record: Mapping[str, Any], messages: Messages) -> Messages:
    """The same with the system message that stands beside the conversation in its row."""
    if record.get("system") in (None, "") or messages[0]["role"] in SYSTEM:
        return messages
    return with_system(messages, text_field(record, "system"))


def _finish(record: Mapping[str, Any], messages: Messages) -> Normal:
    """Add the row's own system message, find its tools, and see that there is something to learn."""
    messages = placed(record, with_own_system(record, messages))
    if not any(m["role"] == "assistant" for m in messages):
        roles = ", ".join(m["role"] for m in messages[:6])
        raise Problem(f"no turn of role 'assistant', so there is nothing to learn (roles: {roles})")
    if not any(m["role"] == "assistant" and m.get("loss", True) for m in messages):
        raise Problem("every turn of role 'assistant' has loss: false, so there is nothing to learn")
    extra = tools_of(record)
    if record.get("codes") not in (None, "", []):
        extra["codes"] = _codes(list_field(record, "codes"))
    return messages, extra, "chat"


def tools_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a record gives to the chat template besides messages: its `tools`, or nothing."""
    return {"tools": list_field(record, "tools")} if record.get("tools") not in (None, "", []) else {}


def _codes(codes: list[Any]) -> list[Any]:
    """The codes of a spoken answer, or groups of them of one length, seen to be such."""
    groups = [codes] if isinstance(codes[0], int) else codes
    if not all(isinstance(group, list) and group and len(group) == len(groups[0]) for group in groups) or not all(
        type(code) is int and code >= 0 for group in groups for code in group
    ):
        raise Problem(
            "field 'codes' must be a list of whole numbers, the codes of the spoken answer, or of groups of them that"
            " are all of one length"
        )
    return codes


# --- one message, one field --------------------------------------------------------------------------


def checked_turn(message: Any, index: int, field: str = "messages") -> dict[str, Any]:
    at = f"{field}[{index}]"
    if not isinstance(message, dict):
        raise Problem(f"{at} is {kind_of(message)}, not an object with role and content")
    # Parquet and JSON tables fill what a turn does not have with null.
    message = {key: value for key, value in message.items() if value is not None}
    role = message.get("role")
    if role is None:
        raise Problem(f"{at} has no 'role' ({shown_fields(message) if message else 'it is empty'})")
    if role not in ROLES:
        raise Problem(f"{at} has the role {role!r}; a role is one of {', '.join(ROLES)}")
    content = message.get("content")
    acts = role == "assistant" and bool(message.get("tool_calls"))
    if content is None and not acts:
        raise Problem(f"{at} ({role}) has no 'content'")
    text = "" if content is None else _content(content, f"{at} ({role})")
    if role in ("user", "assistant") and not (text if isinstance(text, list) else text.strip()) and not acts:
        raise Problem(f"the content of {at} ({role}) is empty")
    for word in ("weight", "loss_scale"):  # OpenAI's word for it, and ms-swift's
        if (weight := message.pop(word, None)) is not None:
            if weight not in (0, 1) or "loss" in message:
                raise Problem(f"{word!r} of {at} must be 0 or 1, and 'loss' is another word for it")
            message["loss"] = bool(weight)
    if not isinstance(message.get("loss", True), bool):
        raise Problem(f"'loss' of {at} must be true or false, not {kind_of(message['loss'])}")
    return {**message, "content": text}


def _content(content: Any, at: str) -> str | list[dict[str, Any]]:
    """Text, or a list of parts, which is a text where no part is a file."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Problem(f"the content of {at} is {kind_of(content)}, not text")
    parts = [part_of_content(part, at) for part in content]
    return "".join(part["text"] for part in parts) if all(part["type"] == "text" for part in parts) else parts


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
    """A list, or a list written as JSON in a text field (CSV has nothing else)."""
    value = record.get(field)
    if value is None:
        raise Problem(f"field '{field}' {'is null' if field in record else 'is missing'} ({shown_fields(record)})")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise Problem(f"field '{field}' must be a list, not text") from None
    if not isinstance(value, list):
        raise Problem(f"field '{field}' must be a list, not {kind_of(value)}")
    if not value and not may_be_empty:
        raise Problem(f"field '{field}' is an empty list")
    return value


def kind_of(value: Any) -> str:
    """The type of a value in the words of JSON, with a glimpse of what it is."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    for kind, name in names.items():
        if isinstance(value, kind):
            return name
    if isinstance(value, (int, float)):
        return f"a number ({value})"
    return f"a {type(value).__name__}"
