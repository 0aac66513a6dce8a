"""Rows of every format become one form; a bad one is named by file and line before anything is trained."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc
from pathlib import Path

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.data.forms.converted import converted
from shardproof.data.forms.formats import SFT, SUPERVISED, Problem, normalise, raw_or_supervised
from shardproof.data.forms.preferences import JUDGED, PAIRS, PROMPTS
from shardproof.data.rows import read_rows
from shardproof.data.sources.readings import open_stream
from shardproof.errors import DataError

QUESTION = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}
GOOD = {"query": "2 + 2?", "response": "4"}


@pytest.mark.parametrize(
    "record, messages",
    [
        ({"messages": [QUESTION, ANSWER]}, [QUESTION, ANSWER]),
        ({"messages": [QUESTION, ANSWER], "system": "Be brief."}, [SYSTEM, QUESTION, ANSWER]),
        ({"messages": [SYSTEM, QUESTION, ANSWER], "system": "not this"}, [SYSTEM, QUESTION, ANSWER]),
        ({"messages": json.dumps([QUESTION, ANSWER])}, [QUESTION, ANSWER]),
        ({"query": "2 + 2?", "response": "4"}, [QUESTION, ANSWER]),
        ({"query": "2 + 2?", "response": "4", "system": "Be brief."}, [SYSTEM, QUESTION, ANSWER]),
        (
            {"query": "2 + 2?", "response": "4", "history": [["Hi", "Hello"]]},
            [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, QUESTION, ANSWER],
        ),
        ({"query": "2 + 2?", "response": "4", "history": [], "system": ""}, [QUESTION, ANSWER]),
        ({"instruction": "2 + 2?", "output": "4"}, [QUESTION, ANSWER]),
        ({"instruction": "2 + 2?", "input": "", "output": "4"}, [QUESTION, ANSWER]),
        (
            {"instruction": "Translate", "input": "Hund", "output": "dog"},
            [{"role": "user", "content": "Translate\n\nHund"}, {"role": "assistant", "content": "dog"}],
        ),
        ({"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]}, [QUESTION, ANSWER]),
        (
            {
                "conversation": [{"human": "Hi", "assistant": "Hello"}, {"human": "2 + 2?", "assistant": "4"}],
                "system": "Be brief.",
            },
            [SYSTEM, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, QUESTION, ANSWER],
        ),
        ({"prompt": [QUESTION], "completion": [ANSWER]}, [QUESTION, ANSWER]),
        (
            {"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]},
            [QUESTION, {**ANSWER, "loss": False}, QUESTION, ANSWER],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}, ANSWER]},
            [QUESTION, ANSWER],
        ),
        ({"messages": [{**QUESTION, "name": None}, ANSWER], "query": None}, [QUESTION, ANSWER]),
        ({"messages": None, "query": "2 + 2?", "response": "4"}, [QUESTION, ANSWER]),
    ],
)
def test_every_format_becomes_messages(record, messages):
    assert normalise(record) == (messages, {}, "chat")


def test_plain_prompt_and_completion_stay_text():
    messages, _, kind = normalise({"prompt": "2 + 2 = ", "completion": "4"})
    assert (kind, [m["content"] for m in messages]) == ("text", ["2 + 2 = ", "4"])


def test_raw_text_is_learnt_whole_and_only_where_nothing_else_says_what_is():
    assert raw_or_supervised({"text": "2 + 2 = 4", "id": 3}) == (
        [{"role": "user", "content": ""}, {"role": "assistant", "content": "2 + 2 = 4"}],
        {},
        "text",
    )
    assert raw_or_supervised({"content": "4"}, {"text": "content"})[2] == "text"
    assert raw_or_supervised({"text": "not this", "messages": [QUESTION, ANSWER]}) == ([QUESTION, ANSWER], {}, "chat")
    assert raw_or_supervised({"text": None, **GOOD}) == ([QUESTION, ANSWER], {}, "chat")


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"text": "2 + 2?", "response": "4"}, "field 'query' is missing beside 'response' (it has text, response)"),
        ({"text": " \n"}, "field 'text' is empty"),
        ({"text": 4}, "field 'text' must be text, not a number (4)"),
        ({"text": None}, "it has none of the known fields (it has text)"),
        ({"text": "a <image>", "images": ["a.png"]}, "messages[1] is an answer with a file in it"),
    ],
)
def test_text_that_cannot_be_learnt_is_a_bad_row(record, why):
    with pytest.raises(Problem) as problem:
        raw_or_supervised(record)
    assert why in str(problem.value)


def test_raw_text_is_for_sft():
    for form in (PAIRS, JUDGED, PROMPTS, SUPERVISED):
        with pytest.raises(Problem, match="none of "):
            form.normalise({"text": "2 + 2 = 4", "rejected_response": "5", "label": True}, None)


def test_tools_go_to_the_template():
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}]}
    messages, extra, _ = normalise({"messages": [QUESTION, call], "tools": json.dumps(tools)})
    assert extra == {"tools": tools}
    assert messages[1] == {**call, "content": ""}


CALLED = {"name": "add", "arguments": {"a": 1}}


@pytest.mark.parametrize("value", [CALLED, [CALLED], {**CALLED, "arguments": '{"a": 1}'}, [CALLED, CALLED]])
def test_calls_in_the_words_of_sharegpt_are_calls(value):
    """What LLaMA-Factory calls `function_call` was learnt as plain text, and what came back as what a tool says."""
    turns = (("human", "1 + 1?"), ("function_call", json.dumps(value)), ("observation", "2"), ("gpt", "It is 2."))
    messages, *_ = normalise({"conversations": [{"from": who, "value": what} for who, what in turns]})
    call = {"type": "function", "function": CALLED}
    assert messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [call] * (2 if value == [CALLED] * 2 else 1),
    }
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    turns = (("human", "1 + 1?"), ("function_call", "add(1)"))
    with pytest.raises(Problem, match="is not a JSON object with 'name' and 'arguments'"):
        normalise({"conversations": [{"from": who, "value": what} for who, what in turns]})


def test_a_weight_of_nought_is_an_answer_that_is_not_learnt():
    messages, *_ = normalise({"messages": [QUESTION, {**ANSWER, "weight": 0}, QUESTION, {**ANSWER, "weight": 1}]})
    assert [m.get("loss") for m in messages] == [None, False, None, True]
    assert not any("weight" in m for m in messages)
    for wrong in ({"weight": 0.5}, {"weight": 1, "loss": True}):
        with pytest.raises(Problem, match=r"'weight' of .* must be 0 or 1"):
            normalise({"messages": [QUESTION, ANSWER | wrong]})


def test_the_loss_scale_of_a_turn_is_its_weight_in_the_words_of_ms_swift():
    """It was passed over, and what it says is not to be learnt was learnt."""
    turns = [QUESTION, {**ANSWER, "loss_scale": 0}, QUESTION, {**ANSWER, "loss_scale": 1.0}, QUESTION, ANSWER]
    messages, *_ = normalise({"messages": turns})
    assert [m.get("loss") for m in messages] == [None, False, None, True, None, None]
    with pytest.raises(Problem, match=r"'loss_scale' of messages\[1\] must be 0 or 1"):
        normalise({"messages": [QUESTION, {**ANSWER, "loss_scale": 0.5}]})


@pytest.mark.parametrize(
    "record, problem",
    [
        ([], "the row is a list, not an object with fields"),
        ("text", "the row is text, not an object"),
        (None, "the row is null"),
        ({}, "the row is empty"),
        ({"text": "abc"}, "it has none of the known fields (it has text)"),
        ({"query": "a"}, "field 'response' is missing beside 'query' (it has query)"),
        ({"response": "a"}, "field 'query' is missing beside 'response'"),
        ({"query": "a", "response": None}, "field 'response' is null"),
        ({"query": "a", "response": 42}, "field 'response' must be text, not a number (42)"),
        ({"query": "a", "response": True}, "field 'response' must be text, not a boolean"),
        ({"query": "a", "response": " \n"}, "field 'response' is empty"),
        ({"query": "", "response": "a"}, "field 'query' is empty"),
        ({"prompt": "a"}, "field 'completion' is missing"),
        ({"prompt": "a", "completion": ""}, "field 'completion' is empty"),
        ({"prompt": [QUESTION], "completion": "a"}, "field 'completion' must be a list, not text"),
        ({"instruction": "a"}, "field 'output' is missing"),
        ({"instruction": "a", "input": 1, "output": "b"}, "field 'input' must be text"),
        ({"query": "a", "response": "b", "history": ["c"]}, "history[0] must be a pair of texts"),
        ({"query": "a", "response": "b", "history": [["c", None]]}, "[question, answer], not [text, null]"),
        ({"query": "a", "response": "b", "history": [["c"]]}, "[question, answer], not [text]"),
        ({"query": "a", "response": "b", "history": [["c", ""]]}, "the answer in history[0] is empty"),
        ({"query": "a", "response": "b", "history": "c"}, "field 'history' must be a list, not text"),
        ({"messages": []}, "field 'messages' is an empty list"),
        ({"messages": "hello"}, "field 'messages' must be a list, not text"),
        ({"messages": {"role": "user"}}, "field 'messages' must be a list, not an object"),
        ({"messages": ["hello"]}, "messages[0] is text, not an object with role and content"),
        ({"messages": [{"content": "a"}]}, "messages[0] has no 'role'"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "messages[0] has the role 'bot'; roles are system"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0] has the role ['user']"),
        ({"messages": [QUESTION, {"role": "assistant"}]}, "messages[1] (assistant) has no 'content'"),
        ({"messages": [QUESTION, {"role": "assistant", "content": " "}]}, "messages[1] (assistant) is empty"),
        ({"messages": [{"role": "user", "content": 3}, ANSWER]}, "messages[0] (user) is a number (3), not text"),
        ({"messages": [QUESTION]}, "no turn of role 'assistant', so there is nothing to learn (roles: user)"),
        ({"messages": [QUESTION, {**ANSWER, "loss": False}]}, "every turn of role 'assistant' has loss: false"),
        ({"messages": [QUESTION, {**ANSWER, "loss": "no"}]}, "'loss' of messages[1] must be true or false"),
    ],
)
def test_a_bad_record_says_what_is_wrong(record, problem):
    with pytest.raises(Problem) as error:
        normalise(record)
    assert problem in str(error.value)


FIELDS = "messages role content query response prompt completion history conversations from value".split()
FIELDS += "instruction input output system tools loss type text".split()
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(json_values)
def test_any_json_is_either_a_row_or_a_problem(record):
    try:
        messages, _, _ = normalise(record)
    except Problem:
        return
    assert all(isinstance(m["content"], str) for m in messages)
    assert any(m["role"] == "assistant" for m in messages)


# --- files -------------------------------------------------------------------------------------------

TABLE = 'query,response\n"2 + 2?",4\n"two\nlines","yes, ""two"""\n'


def test_json_lines_json_csv_and_parquet_give_the_same_rows(write, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = [GOOD, {"query": "two\nlines", "response": 'yes, "two"'}]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    files = [
        write("a.jsonl", records),
        write("a.json", records),
        write("b.json", "".join(json.dumps(r) + "\n" for r in records)),
        write("b.jsonl", json.dumps(records, indent=2)),
        write("a.csv", TABLE),
        write("a.tsv", TABLE.replace('",4', '"\t4').replace("query,", "query\t").replace('lines",', 'lines"\t')),
        str(tmp_path / "a.parquet"),
    ]
    for file in files:
        assert [row.messages for row in read_rows([file])] == [normalise(record)[0] for record in records], file


@pytest.mark.parametrize("column", ["tools", "functions"])
def test_a_table_adds_no_arguments_of_other_tools(tmp_path, column):
    """A column of Arrow's has the fields of all rows in each of them, whatever it is called."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    records = []
    for name, key, value in (("move", "x", 1), ("say", "text", "hello")):
        call = {"type": "function", "function": {"name": name, "arguments": {key: value}}}
        turns = [{"role": "user", "content": "Do"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        kind = {"type": "object", "properties": {key: {"type": "string"}}}
        tool = {"type": "function", "function": {"name": name, "parameters": kind}}
        records.append({"messages": [*turns, {"role": "assistant", "content": "done"}], column: [tool]})
    file, columns = str(tmp_path / "calls.parquet"), {} if column == "tools" else {"tools": column}
    pq.write_table(pa.Table.from_pylist(records), file)
    rows = read_rows([file], columns=columns)
    streamed = [record for _, record in open_stream(file, columns).reading()]
    for row, record, again in zip(rows, records, streamed, strict=True):
        assert (
            row.messages[1]["tool_calls"] == again["messages"][1]["tool_calls"] == record["messages"][1]["tool_calls"]
        )
        assert row.extra["tools"] == again[column] == record[column]


def test_a_table_adds_no_arguments_to_the_calls_of_anthropics(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    records = []
    for name, key in (("move", "x"), ("say", "text")):
        use = [{"type": "tool_use", "name": name, "input": {key: "1"}}]
        turns = [
            ("user", [{"type": "text", "text": "Do"}]),
            ("assistant", use),
            ("assistant", [{"type": "text", "text": "."}]),
        ]
        rest = {"input": {"a": 1, name: None}}  # of rewards, which may look for it
        records.append({"messages": [{"role": role, "content": content} for role, content in turns], **rest})
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "calls.parquet")
    rows = read_rows([tmp_path / "calls.parquet"])
    assert [row.messages for row in rows] == [normalise(record)[0] for record in records]
    assert [record["input"] for record in rows.records()] == [{"a": 1, "move": None, "say": None}] * 2


def test_rows_of_several_files_keep_file_and_line(write):
    lines, table = write("a.jsonl", "\n" + json.dumps(GOOD) + "\n\n" + json.dumps(GOOD)), write("b.csv", TABLE)
    listed = write("c.json", [GOOD, GOOD])
    rows = read_rows([lines, table, listed])
    assert [row.where for row in rows] == [
        f"{lines}:2",
        f"{lines}:4",
        f"{table}:2",
        f"{table}:3",
        f"{listed}:2",
        f"{listed}:6",
    ]


def test_byte_order_mark_and_windows_line_ends_do_no_harm(write):
    text = json.dumps(GOOD) + "\r\n" + json.dumps(GOOD) + "\r\n"
    for name, content in {
        "a.jsonl": text,
        "b.json": f"[{json.dumps(GOOD)}]",
        "c.csv": "query,response\r\na,b\r\n",
    }.items():
        file = write(name, b"\xef\xbb\xbf" + content.encode())
        assert read_rows([file])[0].messages[1]["role"] == "assistant"


@pytest.mark.parametrize("table", ["query,response\ra,b\r", "query,response\na,b\rc,d\n"])
def test_a_carriage_return_that_ends_a_line_is_told_in_words_of_ours(write, table):
    """Python's csv told of a newline argument of open()."""
    with pytest.raises(DataError, match=r"a carriage return \(\\r\) ends a line without"):
        read_rows([write("a.csv", table)])


def test_text_of_a_table_stays_text_and_an_empty_cell_is_no_field(write):
    rows = read_rows([write("a.csv", "instruction,input,output\n1,,042\n")])
    assert [m["content"] for m in rows[0].messages] == ["1", "042"]


def test_a_bad_row_stops_with_file_line_reason_and_what_is_expected(write):
    file = write("a.jsonl", json.dumps(GOOD) + '\n{"query": "a"}\n{"query": \n')
    with pytest.raises(DataError) as error:
        read_rows([file])
    assert str(error.value).splitlines() == [
        "2 of 3 rows cannot be used:",
        f"  {file}:2: field 'response' is missing beside 'query' (it has query)",
        f"  {file}:3: not JSON: Expecting value at column 11",
        "Expected: an object with 'messages' (a list of role and content), or 'prompt' + 'completion',"
        " 'query' + 'response', 'instruction' + 'output'.",
        "Repair them, or leave them out with --bad-rows skip.",
    ]


CALL = {"type": "function", "function": {"name": "air", "arguments": {"in": "Oslo \ud83d"}}}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    "form, record, where",
    [
        (SUPERVISED, {**GOOD, "query": "emoji cut \ud83d"}, "query"),
        (SUPERVISED, {**GOOD, "system": "\ude00"}, "system"),
        (SUPERVISED, {**GOOD, "history": [["a", "b"], ["c", "\ud83d d"]]}, "history[1][1]"),
        (SUPERVISED, {"instruction": "a", "input": "\ud83d", "output": "b"}, "input"),
        (SUPERVISED, {"prompt": "\ud83d", "completion": "b"}, "prompt"),
        (SUPERVISED, {"messages": [QUESTION, {**ANSWER, "content": "\ud83d"}]}, "messages[1].content"),
        (SUPERVISED, {"messages": json.dumps([QUESTION, {**ANSWER, "content": "\ud83d"}])}, "messages[1].content"),
        (
            SUPERVISED,
            {"messages": [{**QUESTION, "content": [{"type": "text", "text": "\ud83d"}]}, ANSWER]},
            "messages[0].content[0].text",
        ),
        (SUPERVISED, {**GOOD, "query": "<image> \ud83d", "images": ["a.png"]}, "query"),
        (
            SUPERVISED,
            {"messages": [QUESTION, {"role": "assistant", "tool_calls": [CALL]}, ANSWER]},
            "messages[1].tool_calls[0].function.arguments.in",
        ),
        (SUPERVISED, {**GOOD, "tools": [{"name": "air", "\ud83d": 1}]}, r"tools[0].\ud83d"),
        (SUPERVISED, {"note": "\ud83d", **GOOD, "query": "\ud83d!"}, "query"),
        (PAIRS, {**PAIR, "rejected": "c\ud83d"}, "rejected"),
        (JUDGED, {**GOOD, "response": "4\ud83d", "label": True}, "response"),
        (PROMPTS, {**GOOD, "solution": "\ud83d"}, "solution"),
    ],
)
def test_half_a_character_is_no_text(write, form, record, where):
    """A tokenizer takes none, and does not say which row it was."""
    half = r"\ude00" if where == "system" else r"\ud83d"
    good = PAIR if form is PAIRS else {**GOOD, "label": True}
    file = write("a.jsonl", [good, record])
    rows = read_rows([file], form=form, bad_rows="skip")
    said = [f"{file}:2: '{where}' has half a character ({half}), which is not valid text: something cut it in two;"]
    assert [str(bad).partition(" write")[0] for bad in rows.skipped] == said
    assert [row.line for row in rows] == [1]


def test_what_only_looks_like_half_a_character_is_a_row(write, tmp_path):
    records = [
        json.dumps({**GOOD, "query": "\U0001f600 \\ud83d"}),  # a pair of escapes, and the escape in letters
        json.dumps({**GOOD, "note": "\ud83d"}),  # is not read
        json.dumps({**GOOD, "images": [os.fsdecode(b"caf\xe9.png")]}),  # the name of a file in another encoding
    ]
    assert len(read_rows([write("a.jsonl", "\n".join(records))])) == 3


def test_half_a_character_in_what_is_said_of_a_row_can_be_written(write):
    file = write("a.jsonl", [GOOD, {"\ud83d": 1}])
    (bad,) = read_rows([file], bad_rows="skip").skipped
    assert str(bad).encode().endswith(rb"(it has \ud83d)")


def test_the_first_five_of_many_bad_rows_are_shown(write):
    file = write("a.jsonl", [{"query": "a"}] * 8 + [GOOD])
    with pytest.raises(DataError, match=r"8 of 9 rows") as error:
        read_rows([file])
    assert str(error.value).count(file) == 5
    assert "... and 3 more" in str(error.value)


def test_bad_rows_can_be_skipped_and_are_listed(write):
    file = write("a.jsonl", json.dumps(GOOD) + "\nnonsense\n" + json.dumps(GOOD) + "\n")
    rows = read_rows([file], bad_rows="skip")
    assert [row.line for row in rows] == [1, 3]
    assert [str(bad) for bad in rows.skipped] == [f"{file}:2: not JSON: Expecting value at column 1"]


def test_skipping_every_row_is_an_error(write):
    with pytest.raises(DataError, match="2 of 2 rows cannot be used"):
        read_rows([write("a.jsonl", [{}, {}])], bad_rows="skip")


@pytest.mark.parametrize(
    "name, content, text",
    [
        ("a.jsonl", "", "is empty"),
        ("a.jsonl", " \n\n", "is empty"),
        ("a.json", "[]", "has no rows"),
        ("a.csv", "query,response\n", "has no rows"),
        ("a.csv", "query,query\na,b\n", "names the column 'query' twice"),
        ("a.csv", "query,response\na,b,c\n", "a.csv:2: 3 values for the 2 columns of the header"),
        ("a.csv", b"query,response\na,\xff\n", "a.csv:2: not UTF-8 text"),
        ("a.csv", 'query,response\na,"b\n', "a.csv:2: not CSV"),
        ("a.txt", "hello", 'Of text, write a line {"text": ...} for each document.'),
        ("a.txt", "hello", "ends in '.txt'; files to read end in .jsonl"),
        ("a.jsonl.gz", "hello", ".parquet. Unpack it first: gunzip FILE."),
        ("a.arrow", "hello", "Convert it first: datasets.load_from_disk(FOLDER).to_parquet("),
        ("data", "hello", "has no extension"),
        ("a.parquet", "hello", "is not a Parquet file"),
        ("a.jsonl", b'{"query": "\xff", "response": "b"}', "a.jsonl:1: not UTF-8 text (byte 12 of the line)"),
        ("a.json", '[{"query": "a", "response": "b"},\n {"query" "a"}]', "a.json:2: not JSON: Expecting ':' delimiter"),
        ("a.json", '[{"query": "a", "response": "b"}\n {}]', "a.json:2: not JSON: Expecting ',' or ']'"),
        ("a.json", '[{"query": "a", "response": "b"},\n]', "a.json:2: not JSON: Nothing follows the last ','"),
        ("a.json", '[{"query": "a", "response": "b"}\n', "The list is not closed"),
        ("a.json", '[{"query": "a", "response": "b"}]\n[]', "a.json:2: not JSON: the list has ended"),
        ("a.jsonl", '[{"query": "a", "response": "b"}] {}', "a.jsonl:1: not JSON: the list has ended"),
        ("a.json", "[", "a.json:1: not JSON: Expecting value"),
        ("a.json", '[{"query": "a", "response": "b"},', "Nothing follows the last ','"),
        ("a.json", b"[\xff]", "is not UTF-8 text (byte 1)"),
        ("a.jsonl", '{"query": "你好", "response": "好"}\n'.encode("gb18030") * 2, "Write the file in UTF-8: iconv -f"),
        ("a.jsonl", json.dumps(GOOD).encode("utf-16") + b"\n" * 3, "Write the file in UTF-8: iconv -f"),
        ("a.jsonl", (json.dumps(GOOD) + "\n").encode("utf-16") * 2, "Write the file in UTF-8: iconv -f"),
        ("a.jsonl", "[" * 100000, "a.jsonl:1: not JSON"),
        ("a.jsonl", '{"id": ' + "9" * 5000 + "}", "a.jsonl:1: not JSON: a number has more than 4300 digits"),
        ("a.json", '[{},\n{"id": ' + "9" * 5000 + "}]", "a.json:2: not JSON: a number has more than 4300 digits"),
        ("a.jsonl", '{"query": "a\tb"}', "a.jsonl:1: not JSON: Invalid control character at column 13"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_clear_error(write, name, content, text):
    with pytest.raises(DataError) as error:
        read_rows([write(name, content)])
    assert text in str(error.value)


def test_a_missing_file_names_the_one_that_may_have_been_meant(write, tmp_path):
    write("train.jsonl", [GOOD])
    with pytest.raises(DataError, match=r"There is no file .*trian.jsonl \(did you mean .*train.jsonl\?\)"):
        read_rows([str(tmp_path / "trian.jsonl")])
    with pytest.raises(DataError, match="there is no folder"):
        read_rows([str(tmp_path / "nowhere" / "train.jsonl")])


def test_a_folder_of_save_to_disk_says_what_to_do_with_it(write, tmp_path):
    """The files in it that looked like rows were those about them."""
    datasets.Dataset.from_list([GOOD]).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=r"save_to_disk of datasets. Convert it first: datasets.load"):
        read_rows([str(tmp_path / "saved")])


def test_a_folder_is_not_a_file(write, tmp_path):
    write("train.jsonl", [GOOD])
    with pytest.raises(DataError, match=r"is a folder. Name the files in it to read. It holds train.jsonl."):
        read_rows([str(tmp_path)])


def test_no_dataset_at_all_is_an_error():
    with pytest.raises(DataError, match="No dataset was named"):
        read_rows([])


# --- samples, parts, and the sequence itself -----------------------------------------------------------


def test_a_number_behind_the_name_takes_a_sample_in_file_order(write):
    file = write("a.jsonl", [{"query": str(i), "response": "r"} for i in range(100)])
    lines = [row.line for row in read_rows([f"{file}#10"], seed=1)]
    assert len(lines) == 10
    assert lines == sorted(set(lines))
    assert lines == [row.line for row in read_rows([f"{file}#10"], seed=1)]
    assert lines != [row.line for row in read_rows([f"{file}#10"], seed=2)]


def test_rows_are_repeated_where_there_are_fewer_than_the_number(write):
    """As ms-swift does: all of them as often as they go into it, and a sample for the rest."""
    file = write("a.jsonl", [{"query": str(i), "response": "x"} for i in range(6)])
    rows = read_rows([f"{file}#14"], seed=1)
    lines = [row.line for row in rows]
    assert lines[:12] == [*range(1, 7), *range(1, 7)]
    assert lines[12:] == [row.line for row in read_rows([f"{file}#2"], seed=1)]
    kept, held = rows.split(0.3)
    assert len(held) == 2
    assert not {row.line for row in kept} & {row.line for row in held}
    assert len(kept) + sum(lines.count(row.line) for row in held) == 14


def test_a_bad_row_outside_the_sample_still_stops(write):
    file = write("a.jsonl", [GOOD] * 50 + [{}])
    with pytest.raises(DataError, match="1 of 51"):
        read_rows([f"{file}#1"])


@pytest.mark.parametrize("suffix", ["#0", "#-1", "#many", "#", "#1.5"])
def test_a_sample_is_a_whole_number_from_one(write, suffix):
    with pytest.raises(DataError, match="the number of rows to take"):
        read_rows([write("a.jsonl", [GOOD]) + suffix])


def test_a_file_may_have_the_sign_in_its_name(write):
    assert len(read_rows([write("a#1.jsonl", [GOOD] * 3)])) == 3


def test_fields_can_be_renamed(write):
    file = write("a.jsonl", [{"question": "2 + 2?", "answer": "4"}])
    rows = read_rows([file], columns={"query": "question", "response": "answer"})
    assert rows[0].messages == [QUESTION, ANSWER]


def test_a_renamed_field_goes_before_what_else_is_in_the_row(write):
    row = {"question": "2 + 2?", "answer": "4", "query": "SELECT 1", "messages": "three", "prompt": "p"}
    rows = read_rows([write("a.jsonl", [row])], columns={"query": "question", "response": "answer"})
    assert rows[0].messages == [QUESTION, ANSWER]


@pytest.mark.parametrize("field, form", [("query", SUPERVISED), ("prompt", SFT), ("query", PROMPTS)])
def test_what_an_instruction_is_given_is_not_dropped_by_a_name(write, field, form) -> None:
    row = {"instruction": "Translate", "input": "Haus", "output": "house"}
    columns = {field: "instruction", {"query": "response", "prompt": "completion"}[field]: "output"}
    with pytest.raises(DataError, match=f"'input' is filled .* with --columns {field}=instruction the model would not"):
        read_rows([write("a.jsonl", [row])], columns=columns, form=form)
    assert read_rows([write("b.jsonl", [{**row, "input": " "}])], columns=columns, form=form)
    (whole,) = read_rows([write("c.jsonl", [row])])
    assert whole.messages[0]["content"] == "Translate\n\nHaus"


def test_a_file_that_has_the_fields_themselves_needs_no_columns(write):
    files = [write("a.jsonl", [{"question": "2 + 2?", "answer": "4"}]), write("b.csv", "query,response\n2 + 2?,4\n")]
    rows = read_rows(files, columns={"query": "question", "response": "answer"})
    assert [row.messages for row in rows] == [[QUESTION, ANSWER]] * 2


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_a_column_that_no_row_has_is_named_with_those_that_are_there(write, tmp_path, name):
    row = {"question": "2 + 2?", "answer": "4"}
    if name == "a.parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist([row]), tmp_path / name)
        file = str(tmp_path / name)
    else:
        file = write(name, "question,answer\n2 + 2?,4\n" if name == "a.csv" else [row])
    with pytest.raises(DataError, match=r"no column 'frage', .*query=frage.*\n.*question, answer"):
        read_rows([file], columns={"query": "frage", "response": "answer"})


def test_so_is_one_where_rows_have_the_field_itself(write):
    files = [write("a.jsonl", [GOOD]), write("b.jsonl", [GOOD])]
    with pytest.raises(DataError, match=r"a.jsonl has no column 'nope', which .*query=nope.*\nIt has: query, response"):
        read_rows(files[:1], columns={"query": "nope"})
    with pytest.raises(
        DataError, match=r"a.jsonl, \S*b.jsonl\) has no column 'nope', which .*query=nope.*\nIt has: query"
    ):
        read_rows(files, columns={"query": "nope"})


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_to_evaluate_on_may_have_the_column_alone(write, caplog, streaming):
    from shardproof.train.options.config import SftConfig
    from shardproof.train.sft import recipe as sft

    named = write("b.jsonl", [{"question": "2 + 2?", "response": "4"}])
    options = {"dataset": [write("a.jsonl", [GOOD])], "val_dataset": [named], "streaming": streaming, "max_steps": 1}
    _, val_rows = sft.read(SftConfig(model="tiny", columns={"query": "question"}, **options))
    assert val_rows[0].messages == [QUESTION, ANSWER]
    if streaming:
        assert "a.jsonl have no column 'question'" in caplog.text
        return
    with pytest.raises(DataError, match=r"a.jsonl, \S*b.jsonl\) has no column 'nope'"):
        sft.read(SftConfig(model="tiny", columns={"query": "question", "response": "nope"}, **options))


def test_files_of_two_forms_take_one_columns(write, caplog):
    chat = write("chat.jsonl", [{"messages": [QUESTION, ANSWER]}])
    asked = write("asked.jsonl", [{"question": "2 + 2?", "answer": "4"}])
    rows = read_rows([chat, asked], columns={"query": "question", "response": "answer"})
    assert [row.messages for row in rows] == [[QUESTION, ANSWER]] * 2
    missing = [f"{chat} has no column '{name}', which --columns names." for name in ("question", "answer")]
    assert caplog.messages == missing


def test_split_holds_out_rows_that_the_other_part_does_not_have(write):
    rows = read_rows([write("a.jsonl", [{"query": str(i), "response": "r"} for i in range(40)])])
    train, held = rows.split(0.1, seed=3)
    assert (len(train), len(held)) == (36, 4)
    assert {r.line for r in train} | {r.line for r in held} == set(range(1, 41))
    with pytest.raises(DataError, match="Cannot hold out"):
        rows[:1].split(0.5)


@pytest.mark.parametrize("again", ["{file}", "near/../a.jsonl", "link.jsonl", "~/a.jsonl", "{file}#60"])
def test_a_file_that_is_named_twice_has_no_row_in_both_parts(write, tmp_path, monkeypatch, again):
    file = write("a.jsonl", [{"query": str(i), "response": "r"} for i in range(40)])
    other = write("b.jsonl", [{"query": f"b{i}", "response": "r"} for i in range(10)])
    (tmp_path / "near").mkdir()
    (tmp_path / "link.jsonl").symlink_to(file)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    rows = read_rows([file, other, again.format(file=file)])
    train, held = rows.split(0.2, seed=3)
    texts = [{row.messages[0]["content"] for row in part} for part in (train, held)]
    assert len(held) == len(texts[1]) == 10
    assert not texts[0] & texts[1]
    assert texts[0] | texts[1] == {row.messages[0]["content"] for row in rows}


def test_a_row_of_a_table_is_read_without_its_neighbours(tmp_path):
    """Rows with pictures are large: a thousand of them as Python objects are gigabytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    size = 1 << 20
    seen = [{**GOOD, "images": [{"bytes": bytes([i]) * size, "path": None}]} for i in range(60)]
    pq.write_table(pa.Table.from_pylist(seen), tmp_path / "a.parquet")
    tracemalloc.start()
    try:
        rows = read_rows([tmp_path / "a.parquet"])
        in_order = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        assert [rows[i].messages[0]["content"][0]["image"][:1] for i in (41, 3, 59)] == [b"\x29", b"\x03", b"\x3b"]
        at_random = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert in_order < 40 * size
    assert at_random < 8 * size
    assert [(row.line, row.messages[0]["content"][0]["image"]) for row in rows] == [
        (i + 1, row["images"][0]["bytes"]) for i, row in enumerate(seen)
    ]


def test_a_fork_does_not_move_the_place_in_the_file(tmp_path):
    """Ranks and their workers are forks that read rows of one file at the same time."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"query": str(i), "response": "x" * 9000}) + "\n" for i in range(9)))
    rows = read_rows([file])
    rows[0]
    here = rows._sources[0]._file.fileno()
    place = os.lseek(here, 0, os.SEEK_CUR)
    if (pid := os.fork()) == 0:
        os._exit(rows[8].messages[0]["content"] != "8")
    assert os.waitpid(pid, 0)[1] == 0
    assert os.lseek(here, 0, os.SEEK_CUR) == place


def test_of_many_files_few_are_open(tmp_path, monkeypatch):
    """A process may have some hundred, and a dataset thousands."""
    monkeypatch.setattr("shardproof.data.sources.records.OPEN", 2)
    files = [tmp_path / f"{name}.jsonl" for name in range(5)]
    for name, file in enumerate(files):
        file.write_text("".join(json.dumps({"query": f"{name} {i}", "response": "x"}) + "\n" for i in range(3)))
    rows = read_rows(files)
    asked = [row.messages[0]["content"] for row in [*rows, *rows[::-1]]]
    assert asked == [f"{name} {i}" for name in range(5) for i in range(3)] + [
        f"{name} {i}" for name in (4, 3, 2, 1, 0) for i in (2, 1, 0)
    ]
    links = Path("/proc/self/fd")
    assert sum(os.path.realpath(link).startswith(str(tmp_path)) for link in links.iterdir()) == 2


def test_rows_are_a_sequence_that_can_be_sliced_and_sent_to_another_process(write):
    rows = read_rows([write("a.csv", TABLE), write("a.jsonl", [GOOD] * 3), "stdlib#5"])
    assert len(rows) == 10
    assert rows[-1] == rows[9]
    assert [r.line for r in rows[2:5]] == [1, 2, 3]
    with pytest.raises(IndexError):
        rows[10]
    assert list(pickle.loads(pickle.dumps(rows))) == list(rows)
    assert list(rows.texts())[:2] == ["2 + 2?", "4"]


def test_the_checksum_of_a_row_is_of_its_record(tmp_path):
    """Not of how it is written, nor of where it stands; Parquet has bytes in it."""
    lines = [json.dumps({"query": "q", "response": "a"}), '{"response":"a",  "query":"q"}', json.dumps(GOOD)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    first, second, third = read_rows([tmp_path / "rows.jsonl"]).checksums()
    assert first == second != third
    assert list(read_rows([tmp_path / "rows.jsonl"])[1:].checksums()) == [second, third]
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    pictures = [{**GOOD, "images": [{"bytes": data, "path": None}]} for data in (b"\x00", b"\x01", b"\x00")]
    pq.write_table(pa.Table.from_pylist(pictures), tmp_path / "rows.parquet")
    a, b, c = read_rows([tmp_path / "rows.parquet"]).checksums()
    assert a == c != b


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"question": "a", "answer": "b"}, "query=question,response=answer"),
        ({"id": 3, "problem": "a", "solution": "b", "level": "x"}, "query=problem,response=solution"),
        ({"prompt": "a", "response": "b"}, "query=prompt"),
        ({"query": "a", "answer": "b", "output": "c"}, "response=answer"),
        ({"instruction": "a", "response": "b"}, "query=instruction"),
        ({"question": "a"}, "query=NAME,response=NAME"),
        ({"question": ["a"], "answer": "b"}, "query=NAME,response=NAME"),
        ({"title": "a", "body": "b"}, "query=NAME,response=NAME"),
    ],
)
def test_fields_of_other_names_are_told_with_the_option_that_names_them(write, record: dict, said: str) -> None:
    """And with it the rows are read."""
    file = write("a.jsonl", json.dumps(record) + "\n")
    with pytest.raises(DataError) as raised:
        read_rows([file])
    assert str(raised.value).endswith(f"If fields have other names, map them: --columns {said}")
    if "NAME" not in said:
        (row,) = read_rows([file], columns=dict(pair.split("=") for pair in said.split(",")))
        assert [message["content"] for message in row.messages] == ["a", "b"]


def test_questions_alone_have_one_field_to_name(write) -> None:
    from shardproof.data.forms.preferences import PROMPTS

    file = write("a.jsonl", json.dumps({"problem": "a", "solution": "b"}) + "\n")
    with pytest.raises(DataError, match=r"map them: --columns query=problem$"):
        read_rows([file], form=PROMPTS)
    assert read_rows([file], columns={"query": "problem"}, form=PROMPTS)[0].extra["columns"]["solution"] == "b"


def test_what_a_function_has_converted_is_not_named_by_columns(write) -> None:
    form = converted(SUPERVISED, "mine", lambda record: {"question": "a", "answer": "b"})
    with pytest.raises(DataError, match="query=NAME,response=NAME"):
        read_rows([write("a.jsonl", json.dumps({"question": "a", "answer": "b"}) + "\n")], form=form)
