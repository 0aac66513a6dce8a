"""What a chat template leaves out of a conversation makes a bad row, and is not passed over in silence. What it means
to leave out is no loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trl

from shardproof.data.encoding.encode import encode_rows
from shardproof.data.encoding.seen import Seen
from shardproof.data.encoding.template import Template
from shardproof.data.rows import Row, read_rows
from shardproof.errors import ConfigError, DataError
from shardproof.models.chatml import CHATML

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
# Turns of questions and answers, and no other.
PAIRS_ONLY = (
    "{% for m in messages if m.role in ('user', 'assistant') %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REFUSES_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + PAIRS_ONLY
# Thinking is written in answers behind the last question, and taken out of earlier ones.
LAST_THINKS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content and loop.index0 > ns.last %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def user(text: str = "Which?") -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str = "This one.", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def row(*turns: dict[str, Any], line: int = 7, **extra: Any) -> Row:
    return Row(list(turns), "a.jsonl", line, extra, "chat")


def text_of(tokenizer: Any, one: Row, **options: Any) -> str:
    return tokenizer.decode(encode_rows([one], tokenizer, max_length=None, **options)[0]["input_ids"])


@pytest.mark.parametrize("role", ["system", "developer", "tool"])
@pytest.mark.parametrize("loss", ["answer", "all"])
def test_a_turn_that_is_not_written_makes_a_bad_row(tokenizer: Any, role: str, loss: Any) -> None:
    turn = {"role": role, "content": "Be brief."}
    odd = row(user(), answer(), turn, user(), answer()) if role == "tool" else row(turn, user(), answer())
    tokenizer.chat_template = PAIRS_ONLY
    named = f"messages[{2 if role == 'tool' else 0}] ({'system' if role == 'developer' else role})"
    with pytest.raises(DataError) as caught:
        encode_rows([odd, row(user(), answer())], tokenizer, max_length=None, loss=loss)
    assert f"a.jsonl:7: the chat template does not write {named}" in str(caught.value)
    assert "--chat-template" in str(caught.value)
    rows = [odd, row(user(), answer(), line=8)]
    assert len(encode_rows(rows, tokenizer, max_length=None, loss=loss, bad_rows="skip")) == 1
    tokenizer.chat_template = CHATML
    assert "Be brief." in text_of(tokenizer, odd, loss=loss)


def test_a_developer_is_the_system_where_the_template_knows_none(tokenizer: Any) -> None:
    told = row({"role": "developer", "content": "Be brief."}, user(), answer())
    tokenizer.chat_template = CHATML
    assert "developer\nBe brief." in text_of(tokenizer, told)
    tokenizer.chat_template = PAIRS_ONLY.replace("'user',", "'user', 'system',")
    assert "system\nBe brief." in text_of(tokenizer, told)
    assert "Another" not in text_of(tokenizer, told, system="Another")  # the row has one


@pytest.mark.parametrize("template", [PAIRS_ONLY, REFUSES_SYSTEM])
def test_the_option_is_named_where_it_is_what_is_left_out(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match="--system: this model's chat template writes no system message"):
        encode_rows([row(user(), answer())], tokenizer, max_length=None, system="Be brief.", bad_rows="skip")
    own = row({"role": "system", "content": "Be kind."}, user(), answer())
    with pytest.raises(DataError, match=r"messages\[0\] \(system\)|no system here"):
        encode_rows([own], tokenizer, max_length=None)


def test_thinking_that_is_not_written_makes_a_bad_row(tokenizer: Any) -> None:
    """In an earlier answer only where the template does not take thinking out of such."""
    last = row(user(), answer(reasoning_content="Hm, hm."))
    earlier = row(user(), answer(reasoning_content="Hm, hm."), user(), answer())
    empty = row(user(), answer(reasoning_content=" "))
    for template, bad in (
        (CHATML, [last, earlier]),
        (LAST_THINKS, []),
        (LAST_THINKS.replace("m.reasoning_content", "m.other"), [last]),
    ):
        tokenizer.chat_template = template
        for one in (last, earlier, empty):
            if not any(one is other for other in bad):
                text_of(tokenizer, one)
                continue
            with pytest.raises(DataError, match=r"a.jsonl:7: .* 'reasoning_content' of messages\[1\]"):
                encode_rows([one], tokenizer, max_length=None)
    tokenizer.chat_template = LAST_THINKS
    assert "Hm, hm." in text_of(tokenizer, last)


# Thinking is taken out of every answer, as by the template of DeepSeek-R1.
NEVER_THINKS = PAIRS_ONLY.replace("m.content", "m.content.split('</think>')[-1]")


def test_thinking_in_the_content_that_is_not_written_makes_a_bad_row(tokenizer: Any) -> None:
    """What stands between <think> and </think> would not be learnt; nor is it said that it may be written there."""
    thought = "<think>\nHm, hm.\n</think>\n\nThis one."
    for turns, bad in (
        ([user(), answer(thought)], True),
        ([user(), answer(), user(), answer(thought)], True),
        ([user(), answer(thought), user(), answer()], False),  # of an earlier answer it means to
        ([user(), answer("<think>\n\n</think>\n\nThis one.")], False),
    ):
        one = row(*turns)
        for template in (CHATML, LAST_THINKS.replace("m.content.split('</think>')[-1]", "m.content")):
            tokenizer.chat_template = template
            assert "</think>" in text_of(tokenizer, one) or "<think>" not in str(turns)
        for template in (NEVER_THINKS, LAST_THINKS):
            tokenizer.chat_template = template
            if not bad:
                text_of(tokenizer, one)
                continue
            with pytest.raises(DataError, match=r"a.jsonl:7: .* the thinking .*messages\[\d\]; give one"):
                encode_rows([one], tokenizer, max_length=None)
    tokenizer.chat_template = NEVER_THINKS
    with pytest.raises(DataError) as caught:
        encode_rows([row(user(), answer(reasoning_content="Hm, hm."))], tokenizer, max_length=None)
    assert "--chat-template" in str(caught.value)
    assert "into the content" not in str(caught.value)


# Of models whose templates write system messages, tools and thinking, some of it in the last answers only.
COMPLETE = ("qwen3", "qwen3_training", "glm4moe", "nemotron_3_nano", "lfm2_2_5")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 3}}}
SHAPE = {"type": "object", "properties": {"a": {"type": "integer", "description": "n"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": SHAPE}}]
CALLED = (
    user(),
    answer("", tool_calls=[CALL], reasoning_content="x"),
    {"role": "tool", "content": '{"b": 7}'},
    answer(),
)


@pytest.mark.parametrize("name", COMPLETE)
def test_templates_of_real_models_are_not_refused_for_what_they_mean_to_leave_out(tokenizer: Any, name: str) -> None:
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    seen = Seen(Template(tokenizer))
    for turns, tools in [
        ([{"role": "system", "content": "Be brief."}, user(), answer()], None),
        ([{"role": "developer", "content": "Be brief."}, user(), answer()], None),
        ([user(), answer(reasoning_content="Hm."), user(), answer()], None),
        ([user(), answer(reasoning_content="Hm."), user(), answer(reasoning_content="Hm!")], None),
        ([user(), answer("<think>\nHm.\n</think>\n\nYes."), user(), answer("<think>\nHm!\n</think>\n\nNo.")], None),
        ([*CALLED], TOOLS),
        ([*CALLED, user(), answer()], TOOLS),
    ]:
        seen.check(row(*turns, **({"tools": tools} if tools else {})), seen.turns(turns))


def test_what_was_seen_once_costs_nothing(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, rendered = Seen(Template(tokenizer)), []
    monkeypatch.setattr(Template, "render", lambda self, *args, **options: rendered.append(1) or "zqShardproofTextzq")
    turns = [{"role": "system", "content": "Be brief."}, user(), answer(reasoning_content="Hm.")]
    for _ in range(10):
        seen.check(row(*turns), turns)
    assert len(rendered) == 2


# --- answers that cannot be found --------------------------------------------------------------------

MIXED = PAIRS_ONLY.replace("m.content", "m.content | replace('odd', 'even')")


def test_a_row_whose_answers_are_mixed_is_skipped(tokenizer: Any, write: Any) -> None:
    tokenizer.chat_template = MIXED
    file = write("rows.jsonl", [{"query": "a?", "response": text} for text in ("seven", "odd", "eight")])
    with pytest.raises(ConfigError, match=r"rows.jsonl:2: .*messages\[1\](?s:.*)--loss all"):
        encode_rows(read_rows([file]), tokenizer, max_length=None)
    rows = read_rows([file])
    assert len(encode_rows(rows, tokenizer, max_length=None, bad_rows="skip")) == 2
    assert [str(bad).split(": ")[0] for bad in rows.skipped] == [f"{file}:2"]
    assert "messages[1]" in str(rows.skipped[0])


def test_when_nothing_is_left_the_first_reasons_are_told(tokenizer: Any, write: Any) -> None:
    tokenizer.chat_template = MIXED
    file = write("rows.jsonl", [{"query": "a?", "response": "odd"}] * 9)
    with pytest.raises(DataError) as caught:
        encode_rows(read_rows([file]), tokenizer, max_length=None, bad_rows="skip")
    assert "Nothing was left to train: 9 of 9 rows cannot be used:" in str(caught.value)
    assert f"{file}:1: the chat template leaves out the text of messages[1]" in str(caught.value)
    assert "--bad-rows skip" not in str(caught.value)
    file = write("rows.jsonl", [{"query": "a?", "response": text} for text in ("odd", "seven " * 90)])
    with pytest.raises(DataError) as caught:
        encode_rows(read_rows([file]), tokenizer, max_length=40, bad_rows="skip")
    assert "Every row is longer than --max-length 40" in str(caught.value)
    assert f"1 of 2 rows cannot be used:\n  {file}:1: " in str(caught.value)
