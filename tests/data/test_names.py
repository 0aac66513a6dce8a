"""Names that rows leave open are filled in, in each row's language, in all that is made of it."""

from __future__ import annotations

import pytest

from shardproof.data.forms.converted import converted
from shardproof.data.forms.formats import SFT
from shardproof.data.forms.names import check_left_open, named
from shardproof.data.forms.preferences import PAIRS, PROMPTS
from shardproof.data.rows import read_rows
from shardproof.errors import ConfigError

ENGLISH = {"query": "Who are you?", "response": "I am {{NAME}}, by {{AUTHOR}}. {{NAME}}!", "tag": "en"}
CHINESE = {"query": "{{NAME}}?", "response": "我是{{NAME}},由{{AUTHOR}}开发。", "tag": "zh"}
BOTH = [["小黄", "Xiao Huang"], ["魔搭", "ModelScope"]]


def filled(record: dict, form=SFT, names=BOTH) -> tuple:
    return named(form, [], *names).normalise(record, None)


def test_each_row_says_the_names_in_its_language():
    (_, answer), *_ = filled(ENGLISH)
    assert answer["content"] == "I am Xiao Huang, by ModelScope. Xiao Huang!"
    (question, answer), *_ = filled(CHINESE)
    assert (question["content"], answer["content"]) == ("小黄?", "我是小黄,由魔搭开发。")


def test_one_name_is_that_of_all_languages():
    (_, answer), *_ = filled(CHINESE, names=[["robot"], ["me"]])
    assert answer["content"] == "我是robot,由me开发。"


def test_a_name_that_is_not_given_stays_open():
    (_, answer), *_ = filled(ENGLISH, names=[["robot"], []])
    assert answer["content"] == "I am robot, by {{AUTHOR}}. robot!"
    assert named(SFT, ["a.jsonl"], [], []) is SFT


def test_rows_of_all_forms_are_filled():
    turns = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "{{NAME}}"}]
    (_, answer), extra, _ = filled({"messages": turns, "rejected_response": "not {{NAME}}"}, PAIRS)
    assert answer["content"] == "Xiao Huang"
    assert extra["rejected"][-1]["content"] == "not Xiao Huang"
    _, extra, _ = filled({"query": "who?", "solution": ["{{NAME}}"]}, PROMPTS)
    assert extra["columns"]["solution"] == ["Xiao Huang"]
    assert turns[1]["content"] == "{{NAME}}"


def test_fields_of_other_names_and_functions_of_the_users_see_what_is_filled_in():
    form = converted(SFT, "mine", lambda record: {"query": record["query"], "response": record["response"].upper()})
    (_, answer), *_ = filled(ENGLISH, form)
    assert answer["content"].startswith("I AM XIAO HUANG")
    record = {"asked": "who?", "said": "{{NAME}}"}
    (_, answer), *_ = named(SFT, [], *BOTH).normalise(record, {"query": "asked", "response": "said"})
    assert answer["content"] == "Xiao Huang"


def test_a_model_does_not_learn_to_be_called_by_a_placeholder(tmp_path):
    """Whoever names rows of self-cognition and no names is told before anything is read."""
    for names in ([[], []], [["robot"], []]):
        with pytest.raises(ConfigError, match=r"cognition#500 have placeholders .* --model-name and --model-author"):
            named(SFT, ["a.jsonl", "MS::swift/self-cognition#500"], *names)
    with pytest.raises(ConfigError, match="--model-author a b c: give one name, or a Chinese and an English one"):
        named(SFT, [], ["robot"], ["a", "b", "c"])


def test_rows_are_filled_whenever_they_are_read(tmp_path):
    file = tmp_path / "self-cognition.csv"
    file.write_text("query,response,tag\nwho?,{{NAME}} of {{AUTHOR}},en\n你是谁?,{{NAME}},zh\n")
    rows = read_rows([file], form=named(SFT, [str(file)], *BOTH))
    assert [row.messages[-1]["content"] for row in rows] == ["Xiao Huang of ModelScope", "小黄"]


def test_names_that_no_row_asks_for_are_refused(tmp_path):
    plain, asks = tmp_path / "plain.jsonl", tmp_path / "asks.jsonl"
    plain.write_text('{"query": "who?", "response": "{{name}}"}\n')
    asks.write_text('{"query": "who?", "response": "it is {{NAME}}"}\n')
    without, has = read_rows([plain]), read_rows([asks])
    with pytest.raises(
        ConfigError, match="--model-name and --model-author: no row of plain has a placeholder for the model"
    ):
        check_left_open(*BOTH, ["plain"], without, None)
    with pytest.raises(ConfigError, match=r"--model-name: no row .* Leave it out"):
        check_left_open(BOTH[0], [], ["plain"], without, without)
    check_left_open(*BOTH, ["plain", "asks"], without, has)
    check_left_open([], [], ["plain"], without)
    check_left_open(*BOTH, ["swift/self-cognition#5"], without)  # those that were drawn may have none
    check_left_open(*BOTH, ["streamed"], iter(()))
