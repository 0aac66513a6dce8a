"""Promise: with --plain a question and its answer are joined as they stand; a row of more than that is a bad one."""

from __future__ import annotations

import pytest

from shardproof.data.encoding.encode import encode_rows
from shardproof.data.forms.formats import SFT
from shardproof.data.forms.parts import Problem
from shardproof.data.forms.plain import joined
from shardproof.data.rows import read_rows
from shardproof.errors import ConfigError
from shardproof.train.checks.contradictions import check_together
from shardproof.train.options.config import SftConfig

ASKED = {"role": "user", "content": "who?"}
TOLD = {"role": "assistant", "content": "me"}


@pytest.mark.parametrize(
    ("record", "question"),
    [
        ({"query": "who?", "response": "me"}, "who?"),
        ({"messages": [ASKED, TOLD]}, "who?"),
        ({"conversations": [{"from": "human", "value": "who?"}, {"from": "gpt", "value": "me"}]}, "who?"),
        ({"messages": [TOLD]}, ""),
        ({"prompt": "who?", "completion": "me"}, "who?"),
        ({"text": "me"}, ""),
    ],
)
def test_a_question_and_its_answer_are_plain_text(record, question):
    messages, extra, kind = joined(SFT).normalise(record, None)
    assert [message["content"] for message in messages] == [question, "me"]
    assert (extra, kind) == ({}, "text")


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"messages": [ASKED, TOLD, ASKED, TOLD]}, r"4 turns \(user, assistant, user, assistant\)"),
        ({"messages": [{"role": "system", "content": "short"}, ASKED, TOLD]}, "'system', which only a chat template"),
        ({"query": "who?", "response": "me", "system": "be short"}, "it has 'system'"),
        ({"query": "who?", "response": "me", "tools": [{"name": "call", "parameters": {}}]}, "it has 'tools'"),
        ({"messages": [ASKED, {**TOLD, "reasoning_content": "hm"}]}, "it has 'reasoning_content'"),
    ],
)
def test_what_only_a_template_writes_is_a_bad_row(record, why):
    with pytest.raises(Problem, match=why):
        joined(SFT).normalise(record, None)


def test_they_are_learnt_as_rows_of_prompt_and_completion_are(tmp_path, tokenizer):
    (tmp_path / "chat.jsonl").write_text(
        '{"query": "who?", "response": "me"}\n{"messages": [{"role": "assistant", "content": "a"}]}\n'
    )
    (tmp_path / "plain.jsonl").write_text('{"prompt": "who?", "completion": "me"}\n{"text": "a"}\n')
    chat = read_rows([str(tmp_path / "chat.jsonl")], form=joined(SFT))
    plain = read_rows([str(tmp_path / "plain.jsonl")], form=SFT)
    mine, theirs = (encode_rows(rows, tokenizer, max_length=100) for rows in (chat, plain))
    assert mine[:] == theirs[:]


@pytest.mark.parametrize("given", [{"system": "be short"}, {"chat_template": "chatml"}])
def test_what_is_said_of_a_template_does_not_go_with_it(given):
    with pytest.raises(ConfigError, match="--plain leaves the chat template out"):
        check_together(SftConfig(plain=True, **given))
