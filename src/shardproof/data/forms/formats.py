"""The formats a record may have, and the single form that all are normalised to.

Pure functions over plain dicts. `normalise` either returns messages or raises `Problem`, whose message says what is
wrong with this record in terms of the user's own fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Literal

from shardproof.data.forms.calls import called, functions, turns_of_blocks, with_objects
from shardproof.data.forms.fields import kind_of, list_field, shown_fields, text_field
from shardproof.data.forms.likely import ANSWER, QUESTION, likely, likely_text
from shardproof.data.forms.objects import OBJECTS, placed
from shardproof.data.forms.parts import FILE_FIELDS, Problem, part_of_content
from shardproof.data.forms.texts import THINKING
from shardproof.data.forms.written import are_turns

Messages = list[dict[str, Any]]
Normal = tuple[Messages, dict[str, Any], Literal["chat", "text"]]

SYSTEM = ("system", "developer")
ROLES = (*SYSTEM, "user", "assistant", "tool")

EXPECTED = (
    "an object with 'messages' (a list of role and content),"
    " or 'prompt' + 'completion', 'query' + 'response', 'instruction' + 'output'."
)

TURNS = ("messages", "conversations", "conversation")  # fields that hold a conversation

ANSWERS = ("response", "completion", "output")  # fields for an answer outside the turns

SYSTEMS = ("system", "system_prompt")  # fields for a system message outside the turns

# Fields by which the format of a record is recognised.
FIELDS = (
    *(*TURNS, "prompt", "completion", "query", "response", "history"),
    *("instruction", "input", "output", *SYSTEMS, "tools"),
    *(*FILE_FIELDS, OBJECTS),
    "codes",
)

_PAIRS = {"prompt": "completion", "query": "response", "instruction": "output"}

# Roles in ShareGPT's `conversations`, and the keys of a question and an answer in a single turn there.
_SHAREGPT = {"human": "user", "gpt": "assistant", "bot": "assistant", "function_call": "tool_call"}
_SHAREGPT |= dict.fromkeys(("observation", "observations", "function_response"), "tool")
_WEIGHTS = ("weight", "loss_scale")  # what OpenAI and ms-swift call the setting whether a turn is learned
_ASKS, _ANSWERS = ("human", "user"), ("assistant", "gpt", "bot")


def normalise(record: Any, columns: Mapping[str, str] | None = None, weighs: bool = False) -> Normal:
    """Messages, other arguments for the template, and whether the row is a chat or plain text.

    `columns` maps fields to their names in the record; a format whose fields it names takes precedence. `weighs`: a
    turn may have a weight other than 0 and 1.

    Raises:
        Problem: the record has none of the formats, or a field is missing, empty or of the wrong type.
    """
    record = opened(record, columns)
    for key, build in sorted(_FORMATS.items(), key=lambda form: form[0] not in (columns or ())):
        if record.get(key) is not None or (key in record and not _elsewhere(record, key)):
            try:
                return build(record, weighs)
            except Problem as problem:
                if key in _PAIRS and _PAIRS[key] not in record:
                    problem.columns = likely(record, QUESTION, ANSWER)
                raise
    raise Problem(_no_format(record), likely(record, QUESTION, ANSWER))


def opened(record: Any, columns: Mapping[str, str] | None) -> dict[str, Any]:
    """The fields of a record under our names; raises Problem if there are none."""
    if not isinstance(record, dict):
        raise Problem(f"the row is {kind_of(record)}, not an object with fields")
    if columns:
        _check_given(record, columns)
        record = renamed(record, columns)
    if not record:
        raise Problem("the row is empty")
    return record


def renamed(record: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    taken = set(columns.values())
    rest = {key: value for key, value in record.items() if key not in taken}
    return rest | {field: record[column] for field, column in columns.items() if column in record}


def _check_given(record: Mapping[str, Any], columns: Mapping[str, str]) -> None:
    """Raise Problem if `columns` maps another field to Alpaca's instruction, so that its `input` would be dropped."""
    field = next((field for field, column in columns.items() if column == "instruction" != field), None)
    given = record.get("input")
    if field is not None and isinstance(given, str) and given.strip() and "input" not in columns.values():
        raise Problem(
            f"'input' is filled as well as 'instruction', but with --columns {field}=instruction the model would not "
            "see it: without --columns for 'instruction' and 'output', both form the question"
        )


def _elsewhere(record: Mapping[str, Any], key: str) -> bool:
    """Whether another format's key has a value: a table may have columns for several formats, empty in most rows."""
    return any(record.get(other) is not None for other in _FORMATS if other != key)


def _no_format(record: Mapping[str, Any]) -> str:
    first = next((first for first, second in _PAIRS.items() if second in record), None)
    if first is not None:
        return f"field '{first}' is missing beside '{_PAIRS[first]}' ({shown_fields(record)})"
    return f"it has none of the known fields ({shown_fields(record)})"


@dataclass(frozen=True)
class Form:
    """The form of rows for one kind of training.

    Attributes:
        normalise: from a record and the names of its columns to messages, what goes with them, and chat or text.
        expected: one sentence on what a record must contain.
    """

    normalise: Callable[[Any, Mapping[str, str] | None], Normal]
    expected: str


SUPERVISED = Form(normalise, EXPECTED)


def raw_or_supervised(record: Any, columns: Mapping[str, str] | None = None, weighs: bool = False) -> Normal:
    """Like `normalise`, but also takes a record with only a `text`: an answer without a question, all of it learned."""
    found = opened(record, columns)
    if found.get("text") is None or any(found.get(key) is not None for key in (*_FORMATS, *ANSWERS)):
        try:
            return normalise(record, columns, weighs)
        except Problem as problem:
            problem.columns = problem.columns or likely_text(found)
            raise
    rest = {key: value for key, value in found.items() if key != "text"}
    if "text" not in (columns or ()) and (other := likely(rest, QUESTION, ANSWER)):
        raise Problem(
            f"'text' appears along with a question and its answer ({shown_fields(found)}): --columns text=text", other
        )
    answer = {"role": "assistant", "content": text_field(found, "text")}
    return placed(found, [{"role": "user", "content": ""}, answer]), {}, "text"


SFT_FIELDS = (*FIELDS, "text")
SFT = Form(raw_or_supervised, EXPECTED.removesuffix(".") + ", or 'text' alone.")
WEIGHED = Form(partial(raw_or_supervised, weighs=True), SFT.expected)


# --- the formats -------------------------------------------------------------------------------------


def _from_turns(record: Mapping[str, Any], weighs: bool, field: str) -> Normal:
    return _finish(record, turns_of(record, field, weighs))


def turns_of(record: Mapping[str, Any], field: str, weighs: bool = False) -> Messages:
    """A list of turns, also in the terms of ShareGPT (`from` and `value`; `function_call`, `observation`), ms-swift
    (`tool_call`, `tool_response`; `human` and `assistant` in one turn) and Anthropic (`tool_use`, `tool_result`)."""
    messages: Messages = []
    listed = enumerate(list_field(record, field))
    for i, turn in ((i, part) for i, blocks in listed for part in turns_of_blocks(blocks)):
        if isinstance(turn, dict) and (said := turn.get("from")) is not None:
            who = _SHAREGPT.get(said.replace("-", "_"), said) if isinstance(said, str) else said
            turn = {**_beside_text(turn), "role": who, "content": turn.get("value")}
        role = turn.get("role") if isinstance(turn, dict) else None
        if role == "tool_call":
            calls = called(turn.get("content"), f"{field}[{i}] ({role})")
            turn = {**turn, "role": "assistant", "content": "", "tool_calls": calls}
            if _goes_on(messages, checked_turn(turn, i, field, weighs)):
                messages[-1].setdefault("tool_calls", []).extend(calls)
                continue
        elif role == "tool_response":
            turn = {**turn, "role": "tool"}
        elif role is None and isinstance(turn, dict) and (asks := next(filter(turn.__contains__, _ASKS), None)):
            messages += _question_and_answer(turn, asks, i, field, weighs)
            continue
        messages.append(checked_turn(turn, i, field, weighs))
    return messages


def _goes_on(messages: Messages, calls: Mapping[str, Any]) -> bool:
    """Whether a turn with calls continues the answer before it (thinking, other calls), so that the two are merged."""
    before = messages[-1] if messages else {}
    return before.get("role") == "assistant" and all(before.get(name) == calls.get(name) for name in ("loss", "weight"))


def _question_and_answer(pair: Mapping[str, Any], asks: str, index: int, field: str, weighs: bool) -> Messages:
    """Two turns written as one, as in ms-swift's ShareGPT format."""
    answers = next((name for name in _ANSWERS if pair.get(name) is not None), None)
    if answers is None:
        raise Problem(f"{field}[{index}] has no 'assistant' beside '{asks}' ({shown_fields(pair)})")
    answer = {**_beside_text(pair), "role": "assistant", "content": pair[answers]}
    return [checked_turn(turn, index, field, weighs) for turn in ({"role": "user", "content": pair[asks]}, answer)]


def _beside_text(turn: Mapping[str, Any]) -> dict[str, Any]:
    """The known fields of a turn in another format, besides its text."""
    return {name: turn[name] for name in ("loss", *_WEIGHTS, "tool_calls", THINKING) if name in turn}


def _from_prompt(record: Mapping[str, Any], weighs: bool) -> Normal:
    prompt, completion = record["prompt"], record.get("completion")
    if are_turns(prompt) or are_turns(completion):
        turns = turns_of(record, "prompt")
        # The prompt is context even if it contains earlier answers.
        messages = [{**m, "loss": False} if m["role"] == "assistant" else m for m in turns]
        messages += turns_of(record, "completion", weighs)
        return _finish(record, messages)
    check_plain(record, "'query' and 'response'")
    messages = [
        {"role": "user", "content": text_field(record, "prompt", with_field="completion", may_be_empty=True)},
        {"role": "assistant", "content": text_field(record, "completion", with_field="prompt")},
    ]
    return placed(record, messages), {}, "text"


def _from_query(record: Mapping[str, Any], weighs: bool) -> Normal:
    last = [
        {"role": "user", "content": text_field(record, "query", with_field="response")},
        {"role": "assistant", "content": text_field(record, "response", with_field="query")},
    ]
    return _finish(record, history_of(record) + last)


def _from_instruction(record: Mapping[str, Any], weighs: bool) -> Normal:
    last = [
        {"role": "user", "content": instruction_of(record)},
        {"role": "assistant", "content": text_field(record, "output", with_field="instruction")},
    ]
    return _finish(record, history_of(record) + last)


def instruction_of(record: Mapping[str, Any]) -> str:
    """The question of an Alpaca record: its instruction, its input, or both."""
    given = "" if record.get("input") is None else text_field(record, "input", may_be_empty=True)
    if given.strip() and record.get("instruction") in (None, ""):
        return given
    instruction = text_field(record, "instruction", with_field="output")
    return f"{instruction}\n\n{given}" if given.strip() else instruction


def check_plain(record: Mapping[str, Any], names: str, but: str = "") -> None:
    """Raise Problem for fields that only a chat template could show, next to a text without a template; `names`: the
    fields that would make it a conversation."""
    for field in (*SYSTEMS, "history", "tools"):
        if field != but and record.get(field) not in (None, "", [], "[]"):
            raise Problem(
                f"'{field}' appears along with plain text in 'prompt', where the model would not see it: under the "
                f"name{'s' * (' ' in names)} {names} (--columns) the row becomes a conversation"
            )


_FORMATS: dict[str, Callable[[Mapping[str, Any], bool], Normal]] = {
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
    """A conversation with a system message in front, unless it already has one, or there is none to add."""
    if not text or messages[0]["role"] in SYSTEM:
        return messages
    return [{"role": "system", "content": text}, *messages]


def with_own_system(record: Mapping[str, Any], messages: Messages) -> Messages:
    """The conversation with the system message from a separate field of its row."""
    field = next((name for name in SYSTEMS if record.get(name) not in (None, "")), None)
    if field is None or messages[0]["role"] in SYSTEM:
        return messages
    return with_system(messages, text_field(record, field))


def _finish(record: Mapping[str, Any], messages: Messages) -> Normal:
    """Add the row's own system message, find its tools, and check that there is something to learn."""
    messages = placed(record, with_own_system(record, messages))
    if not any(m["role"] == "assistant" for m in messages):
        roles = ", ".join(m["role"] for m in messages[:6])
        raise Problem(f"no turn of role 'assistant', so there is nothing to learn (roles: {roles})")
    check_learnt(messages)
    extra = tools_of(record)
    if record.get("codes") not in (None, "", []):
        extra["codes"] = _codes(list_field(record, "codes"))
    return messages, extra, "chat"


def check_learnt(turns: Messages, of: str = "") -> None:
    """Raise Problem if no answer in these turns is learned."""
    if not any(m["role"] == "assistant" and m.get("loss", True) for m in turns):
        raise Problem(f"every turn of role 'assistant'{of} has loss: false, so there is nothing to learn")


def tools_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The chat template's arguments from a record besides its messages: its `tools`, or nothing."""
    if record.get("chat_template_kwargs") not in (None, "", {}, "{}"):
        raise Problem(
            "'chat_template_kwargs' would apply to this row only: put values for all rows into --template-variables "
            "(sizes of files into --max-pixels and the like), and remove the field"
        )
    given = record.get("tools") not in (None, "", []) and list_field(record, "tools", may_be_empty=True)
    return {"tools": functions(given)} if given else {}


def _codes(codes: list[Any]) -> list[Any]:
    """The codes of a spoken answer, or groups of codes of equal length, after a check."""
    groups = [codes] if isinstance(codes[0], int) else codes
    if not all(isinstance(group, list) and group and len(group) == len(groups[0]) for group in groups) or not all(
        type(code) is int and code >= 0 for group in groups for code in group
    ):
        raise Problem(
            "field 'codes' must be a list of integers, the codes of the spoken answer, or of groups of them of equal "
            "length"
        )
    return codes


# --- one message, one field --------------------------------------------------------------------------


def checked_turn(message: Any, index: int, field: str = "messages", weighs: bool = False) -> dict[str, Any]:
    at = f"{field}[{index}]"
    if not isinstance(message, dict):
        raise Problem(f"{at} is {kind_of(message)}, not an object with role and content")
    # Parquet and JSON tables fill the missing fields of a turn with null.
    message = {key: value for key, value in message.items() if value is not None}
    role = message.get("role")
    if role is None:
        raise Problem(f"{at} has no 'role' ({shown_fields(message) if message else 'it is empty'})")
    if role not in ROLES:
        raise Problem(f"{at} has the role {role!r}; roles are {', '.join(ROLES)}")
    content = message.get("content")
    acts = role == "assistant" and bool(message.get("tool_calls"))
    if content is None and not acts:
        raise Problem(f"{at} ({role}) has no 'content'")
    text = "" if content is None else _content(content, f"{at} ({role})")
    if acts:
        message["tool_calls"] = with_objects(message["tool_calls"], at)
    if role in ("user", "assistant") and not (text if isinstance(text, list) else text.strip()) and not acts:
        raise Problem(f"the content of {at} ({role}) is empty")
    if set(_WEIGHTS) <= set(message):
        raise Problem(f"{at} has both 'weight' and 'loss_scale', which mean the same")
    for word in _WEIGHTS:
        if (weight := message.pop(word, None)) is not None:
            if weighs and type(weight) in (int, float) and 0 < weight < inf and message.get("loss") is not False:
                message |= {"loss": True} if weight == 1 else {"weight": weight}
                continue
            if weight not in (0, 1) or "loss" in message:
                allowed = "a number, 0 or more" if weighs else "0 or 1 here, where all learned tokens weigh the same"
                raise Problem(f"{word!r} of {at} must be {allowed}; 'loss' is another name for it")
            message["loss"] = bool(weight)
    if not isinstance(message.get("loss", True), bool):
        raise Problem(f"'loss' of {at} must be true or false, not {kind_of(message['loss'])}")
    return {**message, "content": text}


def _content(content: Any, at: str) -> str | list[dict[str, Any]]:
    """Text, or a list of parts; a list without files becomes a text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Problem(f"the content of {at} is {kind_of(content)}, not text")
    parts = [part_of_content(part, at) for part in content]
    return "".join(part["text"] for part in parts) if all(part["type"] == "text" for part in parts) else parts
