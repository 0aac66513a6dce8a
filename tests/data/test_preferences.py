"""Rows for preference and reinforcement training: each documented form becomes the same, and a bad row says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardproof.data.forms.formats import Problem
from shardproof.data.forms.preferences import JUDGED, PAIRS, PROMPTS
from shardproof.data.rows import read_rows
from shardproof.errors import DataError

Q, A, B = ({"role": role, "content": text} for role, text in (("user", "2+2?"), ("assistant", "4"), ("assistant", "5")))
SYSTEM = {"role": "system", "content": "be short"}
CONTEXT = {**A, "loss": False}


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [Q, A], "rejected_response": "5"},
        {"messages": [Q, A], "rejected_messages": [Q, B]},
        {"messages": [Q, A], "rejected_messages": [B]},
        {"messages": json.dumps([Q, A]), "rejected_messages": json.dumps([Q, B])},
        {"query": "2+2?", "response": "4", "rejected_response": "5"},
        {
            "conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}],
            "rejected_response": "5",
        },
        {"conversation": [{"human": "2+2?", "assistant": "4"}], "rejected_response": "5"},
        {"prompt": [Q], "chosen": [A], "rejected": [B]},
        {"prompt": "2+2?", "chosen": [A], "rejected": [B]},
        {"chosen": [Q, A], "rejected": [Q, B]},
    ],
)
def test_every_form_of_a_pair_is_one_conversation_with_two_ends(record: dict[str, Any]) -> None:
    assert PAIRS.normalise(record, None) == ([Q, A], {"split": 1, "rejected": [B]}, "chat")


def test_plain_texts_stay_texts() -> None:
    messages, extra, kind = PAIRS.normalise({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, None)
    assert (kind, extra["split"], messages[1]["content"], extra["rejected"][0]["content"]) == ("text", 1, "4", "5")


def test_the_system_message_moves_the_answer_one_turn_on() -> None:
    record = {"query": "2+2?", "response": "4", "rejected_response": "5", "system": "be short"}
    assert PAIRS.normalise(record, None) == ([SYSTEM, Q, A], {"split": 2, "rejected": [B]}, "chat")
    record = {"prompt": [Q], "chosen": [A], "rejected": [B], "system": "be short"}
    assert PAIRS.normalise(record, None) == ([SYSTEM, Q, A], {"split": 2, "rejected": [B]}, "chat")
    record = {"messages": [Q, A], "rejected_messages": [Q, B], "system": "be short"}
    assert PAIRS.normalise(record, None) == ([SYSTEM, Q, A], {"split": 2, "rejected": [B]}, "chat")


def test_columns_have_other_names() -> None:
    columns = {"query": "q", "response": "good", "rejected_response": "bad"}
    assert PAIRS.normalise({"q": "2+2?", "good": "4", "bad": "5"}, columns)[1] == {"split": 1, "rejected": [B]}


@pytest.mark.parametrize(
    "label, meant", [(True, True), (False, False), (1, True), (0, False), ("true", True), ("0", False)]
)
def test_a_judged_answer_has_its_label(label: Any, meant: bool) -> None:
    expected = ([Q, A], {"split": 1, "label": meant}, "chat")
    assert JUDGED.normalise({"messages": [Q, A], "label": label}, None) == expected


def test_a_prompt_keeps_its_other_columns_and_loses_its_answer() -> None:
    record = {"messages": [Q, A], "solution": "4", "level": 3}
    assert PROMPTS.normalise(record, None) == ([Q], {"columns": {"solution": "4", "level": 3}}, "chat")
    record = {"question": "2+2?", "answer": "#### 4"}
    messages, extra, _ = PROMPTS.normalise(record, {"query": "question"})
    assert messages == [Q]
    assert extra["columns"]["answer"] == "#### 4"


@pytest.mark.parametrize(
    "form, record, problem",
    [
        (PAIRS, {"messages": [Q, A]}, "there is no 'rejected_response'"),
        (PAIRS, {"messages": [Q, A], "rejected_response": ""}, "field 'rejected_response' is empty"),
        (PAIRS, {"messages": [Q, A], "rejected_response": None}, "field 'rejected_response' is null"),
        (PAIRS, {"messages": [Q, A], "rejected_messages": []}, "field 'rejected_messages' is empty"),
        (PAIRS, {"messages": [Q, A], "rejected_response": "4"}, "are the same"),
        (PAIRS, {"messages": [Q, A], "rejected_response": 5}, "'rejected_response' must be text"),
        (PAIRS, {"messages": [Q], "rejected_response": "5"}, "no turn of role 'assistant'"),
        (PAIRS, {"messages": [Q, A, Q], "rejected_response": "5"}, "the last turn must be the answer"),
        (PAIRS, {"messages": [A], "rejected_response": "5"}, "there is an answer and no question"),
        (PAIRS, {"chosen": [Q, A], "rejected": [SYSTEM, B]}, "no question in common"),
        (PAIRS, {"prompt": "2+2=", "chosen": "4"}, "field 'rejected' is missing"),
        (
            PAIRS,
            {"messages": [Q, A, Q, CONTEXT], "rejected_response": "5"},
            "'assistant' of the chosen answer has loss: f",
        ),
        (
            PAIRS,
            {"prompt": [Q], "chosen": [A], "rejected": [{**B, "loss": False}]},
            "of the rejected answer has loss: f",
        ),
        (
            PAIRS,
            {"prompt": [Q], "chosen": [CONTEXT, Q, A], "rejected": [B]},
            "a turn of the chosen answer has loss: false",
        ),
        (JUDGED, {"messages": [Q, A, Q, CONTEXT], "label": True}, "of the answer that is judged has loss: false"),
        (JUDGED, {"messages": [Q, A]}, "field 'label' is missing"),
        (JUDGED, {"messages": [Q, A], "label": "good"}, "'label' must be true or false, not 'good'"),
        (PROMPTS, {"messages": [A]}, "the last turn must be a question"),
        (PROMPTS, {"text": "2+2?"}, "none of 'messages', 'prompt' and 'query'"),
        (PROMPTS, {"query": ""}, "field 'query' is empty"),
    ],
)
def test_a_bad_row_says_what_is_wrong(form: Any, record: dict[str, Any], problem: str) -> None:
    with pytest.raises(Problem, match=problem):
        form.normalise(record, None)


def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    good = {"messages": [Q, A], "rejected_response": "5"}
    file.write_text("\n".join(json.dumps(row) for row in (good, {"messages": [Q, A]}, good)))
    with pytest.raises(DataError, match=r"pairs.jsonl:2: there is no 'rejected_response'") as error:
        read_rows([file], form=PAIRS)
    assert PAIRS.expected in str(error.value)
    rows = read_rows([file], form=PAIRS, bad_rows="skip")
    assert [row.extra["split"] for row in rows.split(0.5)[0]] == [1]  # a part has the form of the whole


def test_pictures_of_the_worse_answer_alone_are_refused() -> None:
    seen = {"role": "user", "content": "<image>?"}
    with pytest.raises(Problem, match="'rejected_images' differ from 'images'"):
        PAIRS.normalise({"messages": [seen, A], "images": ["a.png"], "rejected_images": ["b.png"]}, None)


def test_calls_of_tools_in_the_words_of_swift() -> None:
    """Those of one turn belong together; a template gets them as it wants them."""

    def call(city: str) -> dict[str, Any]:
        return {"role": "tool_call", "content": json.dumps({"name": "air", "arguments": {"city": city}})}

    answers = [{"role": "tool_response", "content": text} for text in ("10", "72")]
    record = {"messages": [Q, call("Oslo"), call("Rome"), *answers, A], "rejected_response": "5"}
    messages, extra, _ = PAIRS.normalise(record, None)
    names = [turn["role"] for turn in messages]
    assert names == ["user", "assistant", "tool", "tool", "assistant"]
    assert [c["function"]["arguments"] for c in messages[1]["tool_calls"]] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert extra["split"] == 4
    with pytest.raises(Problem, match="not a JSON object with 'name' and 'arguments'"):
        PAIRS.normalise({**record, "messages": [Q, {"role": "tool_call", "content": "air(Oslo)"}, A]}, None)
