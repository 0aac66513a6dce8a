"""Rows as ms-swift's data sets and users have them are read as there, or refused: none is read as something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trl

from shardproof.data.encoding.encode import encode_rows
from shardproof.data.forms.formats import SFT, Problem, normalise
from shardproof.data.forms.labels import Labels, labelled
from shardproof.data.forms.matches import Matches
from shardproof.data.forms.preferences import JUDGED, PAIRS, PROMPTS
from shardproof.data.rows import Row, read_rows
from shardproof.errors import DataError

Q, A, B = ({"role": role, "content": text} for role, text in (("user", "2+2?"), ("assistant", "4"), ("assistant", "5")))
SYSTEM = {"role": "system", "content": "be short"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
CALLED = {"role": "tool_call", "content": json.dumps(CALL["function"])}
SAID = {"role": "tool_response", "content": "4"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "description": "adds"}}


@pytest.mark.parametrize("prompt", ["2+2?", [Q]])
def test_a_question_that_both_conversations_hold_is_asked_once(prompt: Any) -> None:
    """ultrafeedback_binarized and its like have it in a column of its own, too; it stood there twice."""
    record = {"prompt": prompt, "chosen": [Q, A], "rejected": [Q, B], "messages": [Q, A]}
    assert PAIRS.normalise(record, None) == ([Q, A], {"split": 1, "rejected": [B]}, "chat")
    before = {"prompt": [SYSTEM], "chosen": [Q, A], "rejected": [Q, B]}
    assert PAIRS.normalise(before, None)[0] == [SYSTEM, Q, A]


@pytest.mark.parametrize("record", [{"query": "2+2?", "response": "4"}, {"conversations": [Q, A]}])
def test_the_system_message_of_openorca_and_its_like_is_one(record: dict[str, Any]) -> None:
    record = {**record, "system_prompt": "be short"}
    assert normalise(record)[0] == [SYSTEM, Q, A]
    assert PROMPTS.normalise(record, None)[0] == [SYSTEM, Q]
    assert PAIRS.normalise({**record, "rejected_response": "5"}, None)[0] == [SYSTEM, Q, A]
    assert normalise({**record, "system": "be long"})[0][0]["content"] == "be long"


@pytest.mark.parametrize(
    ("form", "record"),
    [
        (SFT, {"prompt": "2+2?", "completion": "4"}),
        (JUDGED, {"prompt": "2+2?", "completion": "4", "label": True}),
        (PAIRS, {"prompt": "2+2?", "chosen": "4", "rejected": "5"}),
        (PROMPTS, {"prompt": "2+2?"}),
    ],
)
def test_what_a_plain_text_cannot_show_is_not_passed_over(form: Any, record: dict[str, Any]) -> None:
    assert form.normalise({**record, "system": "", "history": []}, None)[2] == "text"
    for field, value in (("system", "be short"), ("system_prompt", "be short"), ("history", [["1+1?", "2"]])):
        with pytest.raises(Problem, match=f"'{field}' appears along with plain text in 'prompt'.*'query'.*--columns"):
            form.normalise({**record, field: value}, None)


def test_an_instruction_or_its_input_may_be_all_that_is_asked() -> None:
    for empty in ("", None):
        assert normalise({"instruction": empty, "input": "2+2?", "output": "4"})[0] == [Q, A]
        assert PROMPTS.normalise({"instruction": empty, "input": "2+2?"}, None)[0] == [Q]
    assert PROMPTS.normalise({"messages": None, "query": "2+2?"}, None)[0] == [Q]
    with pytest.raises(Problem, match="field 'instruction' is empty"):
        normalise({"instruction": "", "input": "", "output": "4"})


def test_lists_in_the_words_of_python_are_lists() -> None:
    """Tables that were written by pandas have them."""
    turns = str([{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}])
    assert normalise({"conversations": turns})[0] == [Q, A]
    assert normalise({"conversations": turns.replace("}, {", "}\n {")})[0] == [Q, A]  # numpy's
    assert normalise({"query": "2+2?", "response": "4", "history": "[['a', 'b']]"})[0][1]["content"] == "b"
    with pytest.raises(Problem, match="field 'history' must be a list, not text"):
        normalise({"query": "2+2?", "response": "4", "history": "[print('a')]"})


def test_the_turns_of_sharegpt_keep_what_is_not_learnt_and_know_more_words() -> None:
    turns = [("human", "2+2?"), ("function-call", CALLED["content"]), ("function_response", "4"), ("bot", "4")]
    listed = [{"from": who, "value": what, "weight": None} for who, what in turns]
    assert normalise({"conversations": listed})[0] == [Q, CALLS, {"role": "tool", "content": "4"}, A]
    listed = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4", "loss": False}, *listed]
    assert normalise({"conversations": listed})[0][1] == {**A, "loss": False}
    pairs = [{"human": "2+2?", "assistant": "4", "loss": False}, {"human": "2+2?", "assistant": "4", "weight": 1}]
    assert normalise({"conversation": pairs})[0] == [Q, {**A, "loss": False}, Q, {**A, "loss": True}]
    assert normalise({"conversation": [{"user": "2+2?", "bot": "4"}]})[0] == [Q, A]


def test_the_turns_of_sharegpt_keep_what_was_thought_and_called() -> None:
    """They were passed over, and the answer was learnt as one without."""
    beside = {"reasoning_content": "Hm.", "tool_calls": [CALL]}
    turns = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4", **beside}]
    assert normalise({"conversations": turns})[0] == [Q, {**A, **beside}]


def test_calls_of_which_one_is_not_learnt_are_turns_of_their_own() -> None:
    messages, *_ = normalise({"messages": [Q, {**CALLED, "loss": False}, CALLED, SAID, A]})
    assert messages[1:3] == [{**CALLS, "loss": False}, CALLS]
    messages, *_ = normalise({"messages": [Q, CALLED, CALLED, SAID, A]})
    assert messages[1]["tool_calls"] == [CALL, CALL]


def test_turns_may_be_written_in_a_text_of_a_table_and_texts_may_begin_as_lists() -> None:
    """Turns in `prompt` were learnt as JSON, as they are written, and answers that begin with [ were refused."""
    prompt, chosen, rejected = (json.dumps([turn]) for turn in (Q, A, B))
    assert normalise({"prompt": prompt, "completion": chosen}) == ([Q, A], {}, "chat")
    assert PROMPTS.normalise({"prompt": str([Q, A])}, None)[0::2] == ([Q], "chat")
    record = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    assert PAIRS.normalise(record, None) == ([Q, A], {"split": 1, "rejected": [B]}, "chat")
    assert PAIRS.normalise({"messages": [Q, A], "rejected_response": rejected}, None)[1]["rejected"] == [B]
    for text in ("[1, 2]", "[INST] 2+2? [/INST]", "[]", '[{"name": "Ada"}]', "[" * 100_000):
        assert normalise({"prompt": text, "completion": text})[2] == "text"
        assert PROMPTS.normalise({"prompt": text}, None)[2] == "text"
        messages, _, kind = PAIRS.normalise({"prompt": text, "chosen": text, "rejected": "no"}, None)
        assert (messages[1]["content"], kind) == (text, "text")
    with pytest.raises(Problem, match=r"conversation\[0\] has no 'assistant' beside 'user' \(it has user, x\)"):
        normalise({"conversation": [{"user": "2+2?", "x": "4"}]})


def test_tools_are_objects_however_they_are_written() -> None:
    bare = TOOL["function"]
    for tools in ([json.dumps(TOOL)], json.dumps([bare]), [bare | {"type": "function"}], [TOOL]):
        assert normalise({"messages": [Q, A], "tools": tools})[1] == {"tools": [TOOL]}
    assert normalise({"messages": [Q, A], "tools": "[]"})[1] == {}
    assert normalise({"messages": [Q, A], "tools": [{"type": "code_interpreter"}]})[1]
    with pytest.raises(Problem, match=r"tools\[0\] is not a JSON object that describes a function"):
        normalise({"messages": [Q, A], "tools": ["add(a)"]})


def test_arguments_that_openai_writes_as_a_text_are_objects() -> None:
    """Most templates would write them as JSON once more."""
    call = {"id": "1", **CALL, "function": {"name": "add", "arguments": '{"a": 2}'}}
    messages, *_ = normalise({"messages": [Q, {"role": "assistant", "content": None, "tool_calls": [call]}, SAID, A]})
    assert messages[1]["tool_calls"] == [{"id": "1", **CALL}]
    messages, *_ = normalise({"messages": [Q, {"role": "assistant", "tool_calls": json.dumps([call])}, SAID, A]})
    assert messages[1]["tool_calls"] == [{"id": "1", **CALL}]
    for wrong in ("add(2)", {"a": 1}, ["add"]):
        with pytest.raises(Problem, match=r"'tool_calls' of messages\[1\] must be a list of objects"):
            normalise({"messages": [Q, {"role": "assistant", "tool_calls": wrong}, CALLED, A]})


def test_what_is_said_before_a_call_is_of_one_turn_with_it() -> None:
    thought = {"role": "assistant", "content": "I look."}
    messages, *_ = normalise({"messages": [Q, thought, CALLED, CALLED, SAID, SAID, A]})
    assert messages[1] == {**CALLS, "content": "I look.", "tool_calls": [CALL, CALL]}
    messages, *_ = normalise({"messages": [Q, {**thought, "loss": False}, CALLED, SAID, A]})
    assert [turn["content"] for turn in messages[:3]] == ["2+2?", "I look.", ""]


TURNS = [("qwen3", 1), ("deepseekv3", 1), ("llama3_1", 2), ("gptoss_training", 2)]


@pytest.mark.parametrize(("template", "turns"), TURNS)
def test_templates_get_calls_as_they_write_them(tokenizer: Any, template: str, turns: int) -> None:
    """Of DeepSeek's arguments are a text; others leave out what is said before a call, so that it is a turn there."""
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja").read_text()
    thought = {"role": "assistant", "content": "I look."}
    messages, extra, kind = normalise({"messages": [Q, thought, CALLED, SAID, A]})
    encoded = encode_rows([Row(messages, "a.jsonl", 1, extra, kind)], tokenizer, max_length=None)[0]
    learnt = tokenizer.decode([i for i in encoded["labels"] if i >= 0])
    assert learnt.index("I look.") < learnt.index('{"a": 2}')
    between = tokenizer.decode(encoded["input_ids"]).partition("I look.")[2].partition('{"a": 2}')[0]
    assert between.count("<|eot_id|>") + between.count("<|end|>") == turns - 1


def test_parts_of_anthropics_are_turns_that_templates_know() -> None:
    """As ms-swift reads them."""
    use = {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 2}}
    seen = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    found = {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}
    turns = [
        {"role": "user", "content": [seen, {"type": "text", "text": "2+2?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use, use], "loss": False},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [found]}]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "content": "4"}, {"type": "text", "text": "So?"}]},
        A,
    ]
    tool = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}
    messages, extra, _ = normalise({"messages": turns, "tools": [tool]})
    assert messages[0]["content"][0] == {"type": "image", "image": "data:image/png;base64,aGk="}
    assert messages[1] == {**CALLS, "content": "I look.", "tool_calls": [CALL, CALL], "loss": False}
    assert messages[2] == {"role": "tool", "content": [{"type": "image", "image": "https://a/b.png"}]}
    assert messages[3:] == [CALLS, {"role": "tool", "content": "4"}, {"role": "user", "content": "So?"}, A]
    assert extra["tools"][0]["function"] == {"name": "add", "description": "adds", "parameters": {"type": "object"}}
    with pytest.raises(Problem, match="'tool_use' has no 'name'"):
        normalise({"messages": [Q, {"role": "assistant", "content": [{"type": "tool_use"}]}, A]})


def test_a_rejected_list_takes_the_place_of_all_behind_the_question() -> None:
    """As ms-swift's page on data sets has it. A text is in the place of the last answer."""
    record = {"messages": [Q, CALLED, SAID, A], "rejected_response": [B]}
    assert PAIRS.normalise(record, None)[1] == {"split": 1, "rejected": [B]}
    assert PAIRS.normalise({**record, "rejected_response": "5"}, None)[1] == {"split": 3, "rejected": [B]}
    with pytest.raises(Problem, match="'rejected_tools' differ from 'tools'"):
        PAIRS.normalise({**record, "tools": [TOOL], "rejected_tools": [CALL]}, None)


def test_what_only_one_row_tells_the_template_is_not_passed_over() -> None:
    for form, record in ((SFT, {"messages": [Q, A]}), (PROMPTS, {"query": "2+2?"})):
        assert form.normalise({**record, "chat_template_kwargs": {}}, None)
        with pytest.raises(Problem, match="'chat_template_kwargs' would apply to this row only"):
            form.normalise({**record, "chat_template_kwargs": {"enable_thinking": False}}, None)


FOUND = Matches(scored=True, files=True).form
TWO = labelled(Labels.numbered(2))


@pytest.mark.parametrize(
    ("form", "record", "columns"),
    [
        (SFT, {"Question": "q", "Complex_CoT": "c", "Response": "a"}, "query=Question,response=Response"),
        (SFT, {"INSTRUCTION": "q", "RESPONSE": "a", "SOURCE": "s"}, "query=INSTRUCTION,response=RESPONSE"),
        (SFT, {"question": "q", "context": "c", "answer": "a"}, "instruction=question,input=context,output=answer"),
        (SFT, {"instruction": "q", "context": "c", "response": "a"}, "input=context,output=response"),
        (SFT, {"instruction": "q", "input": "c", "response": "a"}, "output=response"),
        (SFT, {"instruction": "q", "context": "", "response": "a"}, "query=instruction"),
        (SFT, {"input": "q", "output": "a"}, "query=input,response=output"),
        (SFT, {"question": "q", "answer": "a", "text": "t"}, "query=question,response=answer"),
        (SFT, {"prompt": "q", "text": "a", "format": "f"}, "query=prompt,response=text"),
        (SFT, {"content": "q", "summary": "a"}, "query=content,response=summary"),
        (SFT, {"document": "q", "summary": "a", "id": 3}, "query=document,response=summary"),
        (SFT, {"content": "t", "url": "u"}, "text=content"),
        (SFT, {"raw_content": "t", "doc_id": 3}, "text=raw_content"),
        (PAIRS, {"question": "q", "chosen": "a", "rejected": "b"},
         "query=question,response=chosen,rejected_response=rejected"),
        (FOUND, {"sentence1": "q", "sentence2": "a", "score": 0.5}, "query=sentence1,positive=sentence2,label=score"),
        (FOUND, {"question": "q", "answer": "a", "label": 0.5}, "query=question,response=answer"),
        (TWO, {"text": "q", "label": 1}, "query=text"),
        (TWO, {"sentence": "q", "label": 1}, "query=sentence"),
    ],
)  # fmt: skip
def test_fields_of_other_names_are_refused_with_the_columns_to_give(form: Any, record: Any, columns: str) -> None:
    with pytest.raises(Problem) as problem:
        form.normalise(record, None)
    assert problem.value.columns == columns
    assert form.normalise(record, dict(one.split("=") for one in columns.split(",")))


def test_a_text_beside_a_question_and_its_answer_is_learnt_where_it_is_named() -> None:
    record = {"question": "q", "answer": "a", "text": "t"}
    assert SFT.normalise(record, {"text": "text"})[2] == "text"
    assert SFT.normalise({"text": "t", "title": "q", "id": 3}, None)[2] == "text"


def test_what_a_reranker_finds_may_hold_files_where_it_is_called_an_answer() -> None:
    """ms-swift's page on rerankers has its documents so."""
    found = {"role": "assistant", "content": "<image>a cat"}
    record = {"messages": [Q], "positive_messages": [[found]], "positive_images": [["a.png"]], "label": 1}
    said = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "a cat"}]
    assert FOUND.normalise(record, None)[1]["positive"] == [[{"role": "user", "content": said}]]


@pytest.mark.parametrize(
    ("loss", "learnt"),
    [("answer", ["one", "three"]), ("last_round", ["one", "three"]), ("all", ["1?", "one", "2?", "3?", "three"])],
)
def test_what_a_turn_says_of_its_loss_goes_before_the_option(tokenizer: Any, loss: Any, learnt: list[str]) -> None:
    """An answer with `"loss": false` was learnt with --loss all, and one with true was not with last_round."""
    said = [("1?", "one", {"loss": True}), ("2?", "two", {"loss": False}), ("3?", "three", {})]
    turns = [
        turn
        for asked, told, more in said
        for turn in ({"role": "user", "content": asked}, {"role": "assistant", "content": told, **more})
    ]
    encoded = encode_rows([Row(turns, "a.jsonl", 1)], tokenizer, max_length=None, loss=loss)[0]
    found = tokenizer.decode([token for token in encoded["labels"] if token >= 0])
    words = ("1?", "one", "2?", "two", "3?", "three")
    assert [word for word in words if word in found] == learnt


@pytest.mark.parametrize("form", [FOUND, labelled(Labels.numbered(1))])
def test_a_label_that_is_too_large_a_number_is_a_bad_row(form: Any) -> None:
    with pytest.raises(Problem, match="field 'label' is a number"):
        form.normalise({"query": "q", "positive": "a", "label": 10**400}, None)


def test_several_subsets_in_one_name_are_said_to_be_datasets() -> None:
    said = r"of several subsets, each is a dataset: MS::swift/medical_zh:en MS::swift/medical_zh:zh"
    with pytest.raises(DataError, match=said):
        read_rows(["MS::swift/medical_zh:en/zh#100"])
