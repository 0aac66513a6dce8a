"""Tools, calls and results are written in the form that is asked for, whatever template stands behind it, and what is
learnt of them is what the model is to say."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import trl

from shardproof.data.encoding.agents import FORMS, OF_MODELS, agent_of, goes_on, with_agent
from shardproof.data.encoding.encode import IGNORE, Encoder, encode_rows
from shardproof.data.encoding.template import Template, set_template
from shardproof.data.encoding.weights import WEIGHTS, weights_named
from shardproof.data.forms.formats import SFT
from shardproof.data.rows import Row, read_rows
from shardproof.errors import ConfigError, DataError
from shardproof.models.chatml import CHATML

PLAIN_CHATML = CHATML.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
PUBLISHED = Path(trl.__file__).with_name("chat_templates")
ADD = {"type": "object", "properties": {"a": {"type": "number"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}}]
KEYED = [name for name, form in FORMS.items() if form.within]


def calling(said: str, *numbers: int) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": n}}} for n in numbers]
    return {"role": "assistant", "content": said, "tool_calls": calls}


def says(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


TURNS = [
    says("user", "1 + 2?"),
    calling("I add.", 1, 2),
    says("tool", "3"),
    says("tool", "4"),
    says("assistant", "It is 3."),
    says("user", "And 1?"),
    calling("", 1),
    says("tool", "9"),
    says("assistant", "nine"),
]


def of_form(tokenizer: Any, name: str, template: str = PLAIN_CHATML) -> Template:
    tokenizer.chat_template = with_agent(template, name)
    return Template(tokenizer)


@pytest.mark.parametrize("system", [[], [says("system", "Be short.")]], ids=["", "system"])
@pytest.mark.parametrize("kind", ["qwen2_5", "qwen3", "qwen3_instruct_2507"])
def test_hermes_is_what_templates_of_that_form_write(tokenizer: Any, kind: str, system: list[Any]) -> None:
    own = (PUBLISHED / f"{kind}.jinja").read_text()
    tokenizer.chat_template = own
    turns = [*system, *TURNS]
    if kind == "qwen2_5" and not system:  # it has a system message of its own
        turns = [says("system", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."), *TURNS]
    for end in (len(turns), len(turns) - 1, len(turns) - 2, len(turns) - 5):
        how: dict[str, Any] = {"tools": TOOLS, "prompt": end < len(turns)}
        tokenizer.chat_template = own
        expected = Template(tokenizer).render(turns[:end], **how)
        assert of_form(tokenizer, "hermes", own).render(turns[:end], **how) == expected
        if kind != "qwen3":  # which writes a thought of nothing
            assert of_form(tokenizer, "hermes").render(turns[:end], **how) == expected


REACT = """<|im_start|>user
1 + 2?<|im_end|>
<|im_start|>assistant
I add.
Action: add
Action Input: {"a": 1}
Action: add
Action Input: {"a": 2}
Observation:3
Observation:4
It is 3.<|im_end|>
<|im_start|>user
And 1?<|im_end|>
<|im_start|>assistant
Action: add
Action Input: {"a": 1}
Observation:9
nine<|im_end|>
"""


def test_in_react_an_answer_goes_on_behind_a_result(tokenizer: Any) -> None:
    text = of_form(tokenizer, "react_en").render(TURNS, tools=TOOLS)
    system, turns = text[: text.index("<|im_start|>user")], text[text.index("<|im_start|>user") :]
    assert turns == REACT
    assert 'add: Adds. Its input, as a JSON schema: {"type": "object"' in system
    assert "Action: a tool, one of add\nAction Input: " in system
    assert system.endswith("Final Answer: the answer to the question<|im_end|>\n")


@pytest.mark.parametrize("own", [PLAIN_CHATML, CHATML], ids=["", "marked"])
@pytest.mark.parametrize("name", FORMS)
def test_calls_and_answers_are_learnt_and_results_are_not(tokenizer: Any, name: str, own: str, write: Any) -> None:
    of_form(tokenizer, name, own)
    turns = [says("user", "1 + 2?"), says("tool_call", '{"name": "add", "arguments": {"a": 1}}')]
    turns += [says("tool_response", "seventy"), says("assistant", "It is 3.")]
    rows = read_rows([write("rows.jsonl", [{"messages": turns, "tools": json.dumps(TOOLS)}])], form=SFT)
    row = encode_rows(rows, tokenizer, max_length=None)[0]
    learnt = tokenizer.decode([label for label in row["labels"] if label != IGNORE])
    form = FORMS[name]
    assert learnt.endswith("It is 3.<|im_end|>")
    assert learnt.count('{"a": 1}') == 1
    assert "seventy" not in learnt
    if form.within:
        assert learnt.endswith(f"{form.result[0]}It is 3.<|im_end|>")
    assert tokenizer.decode(row["input_ids"]).count("seventy") == 1


@pytest.mark.parametrize("name", KEYED)
def test_a_prompt_ends_where_the_answer_goes_on(tokenizer: Any, name: str) -> None:
    template = of_form(tokenizer, name)
    whole = template.render(TURNS, tools=TOOLS)
    prompt = template.render(TURNS[:-1], prompt=True, tools=TOOLS)
    assert whole == f"{prompt}nine<|im_end|>\n"
    with pytest.raises(Exception, match=f"--agent-template {name}: an answer goes on behind a result"):
        tokenizer.apply_chat_template(TURNS[:-1], tools=TOOLS, add_generation_prompt=True, tokenize=False)


@pytest.mark.parametrize("end", ["", "\n", "\nObservation:"])
def test_a_result_has_a_line_of_its_own_behind_a_call_that_is_written_out(tokenizer: Any, end: str) -> None:
    called = says("assistant", f"Action: add\nAction Input: {{}}{end}")
    text = of_form(tokenizer, "react_en").render([says("user", "a"), called, says("tool", "3"), says("assistant", "b")])
    assert "Action Input: {}\nObservation:3\nb<|im_end|>" in text


@pytest.mark.parametrize("name", ["hermes", "react_en"])
def test_the_last_round_has_the_calls_behind_the_last_question(tokenizer: Any, name: str, write: Any) -> None:
    of_form(tokenizer, name)
    rows = read_rows([write("rows.jsonl", [{"messages": TURNS, "tools": TOOLS}])], form=SFT)
    row = encode_rows(rows, tokenizer, max_length=None, loss="last_round")[0]
    learnt = tokenizer.decode([label for label in row["labels"] if label != IGNORE])
    assert learnt.count('{"a": 1}') == 1  # the first round has called with it, too
    assert learnt.endswith("nine<|im_end|>")
    assert "It is 3." not in learnt


def test_a_tool_without_a_name_is_refused(tokenizer: Any, write: Any) -> None:
    of_form(tokenizer, "react_en")
    file = write("rows.jsonl", [{"messages": TURNS, "tools": [{"name_for_model": "add", "description": "Adds."}]}])
    with pytest.raises(DataError, match="--agent-template react_en: a tool has no name"):
        encode_rows(read_rows([file], form=SFT), tokenizer, max_length=None, bad_rows="skip")


def test_thinking_that_a_form_has_no_place_for_is_not_lost(tokenizer: Any, write: Any) -> None:
    turns = [says("user", "a"), calling("", 1), says("tool", "3"), {**says("assistant", "b"), "reasoning_content": "c"}]
    file = write("rows.jsonl", [{"messages": turns, "tools": TOOLS}])
    of_form(tokenizer, "react_en", (PUBLISHED / "qwen3.jinja").read_text())
    with pytest.raises(DataError, match="'reasoning_content' of an answer behind a result"):
        encode_rows(read_rows([file], form=SFT), tokenizer, max_length=None, bad_rows="skip")
    of_form(tokenizer, "hermes", (PUBLISHED / "qwen3.jinja").read_text())
    assert encode_rows(read_rows([file], form=SFT), tokenizer, max_length=None)


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        *product(["qwen2_5", "qwen3", "qwen3_training", "qwen3_6"], ["<think>a</think>", ""]),
        *product(["qwen3", "qwen3_6"], ["reasoning_content"]),
        *product(["lfm2_2_5", "lfm2_2_5_v2"], ["<think>a</think>", ""]),
    ],
)
def test_an_answer_that_goes_on_may_think_again(tokenizer: Any, kind: str, first: str) -> None:
    """In front of templates that take what stands before the last </think> for the thought, too: the call was lost."""
    of_form(tokenizer, "react_grpo", (PUBLISHED / f"{kind}.jinja").read_text())
    call = {**calling("", 1), first: "a"} if first == "reasoning_content" else calling(first, 1)
    turns = [says("user", "1?"), call, says("tool", "9"), says("assistant", "<think>b</think>\nFinal Answer: nine")]
    again = [says("user", "2?"), calling("<think>c</think>", 2), says("tool", "8")]
    again += [says("assistant", "<think>d</think>\nFinal Answer: eight")]
    called = 'Action: add\nAction Input: {"a": N}\nObservation:'
    ends = [called.replace("N", "1"), "<think>b</think>\nFinal Answer: nine<|im_end|>"]
    ends += [called.replace("N", "2"), "<think>d</think>\nFinal Answer: eight<|im_end|>"]
    for row, thought in ((turns, "a" if first else ""), ([*turns, *again], "c")):
        text, spans = Encoder(tokenizer, "answer", None).text(Row(row, "", 0, {"tools": TOOLS}))
        learnt = [text[start:end] for start, end, *_ in spans]
        assert len(learnt) == len(row) // 2
        assert all(answer.endswith(end) for answer, end in zip(learnt, ends, strict=False))
        assert learnt[1::2] == ends[1 : len(learnt) : 2], "a result is no part of what is learnt"
        assert thought in learnt[-2].partition("</think>")[0]


def test_keys_weigh_what_they_weigh_in_a_text(tokenizer: Any, write: Any) -> None:
    of_form(tokenizer, "react_en")
    rows = read_rows([write("rows.jsonl", [{"messages": TURNS, "tools": TOOLS}])], form=SFT)
    row = encode_rows(rows, tokenizer, max_length=None, weights=weights_named(["react"]))[0]
    told = zip(row["input_ids"], row["labels"], row[WEIGHTS], strict=True)
    doubled = tokenizer.decode([token for token, label, weight in told if label != IGNORE and weight == 2])
    assert doubled.count('Action Input: {"a": 1}\n') == 2
    assert doubled.endswith("Observation:")
    assert "nine" not in doubled


def test_templates_that_are_published_stand_behind_every_form(tokenizer: Any) -> None:
    """Those that write no system message, or refuse one, say so, and none writes something else."""
    names = ("llama3", "phi3", "phi3_5", "gemma3", "deepseekv3", "qwen2_5", "cohere", "lfm2", "glm4moe")
    written = []
    for name in names:
        own = (PUBLISHED / f"{name}.jinja").read_text()
        for form in ("hermes", "react_en"):
            tokenizer.chat_template = with_agent(own, form)
            try:
                template = Template(tokenizer)
                text, spans = template.render_answers(TURNS, tools=TOOLS)
            except ConfigError:
                continue
            if template.leaves_out(TURNS, TOOLS):
                continue
            assert len(spans) == 4, (name, form)
            learnt = [text[start:end] for start, end in spans]
            parts = ('{"a": 2}', "It is 3.", '{"a": 1}', "nine")
            assert all(part in said for part, said in zip(parts, learnt, strict=True)), (name, form, learnt)
            written.append((name, form))
    assert len(written) >= 10, written


def test_parts_and_other_fields_are_kept(tokenizer: Any) -> None:
    template = of_form(tokenizer, "hermes")
    picture = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what?"}]
    with pytest.raises(Exception, match="--agent-template hermes writes texts, and there is a part of type image"):
        template.render([says("user", "a"), calling("", 1), {"role": "tool", "content": picture}])
    assert template.render([says("user", "a"), says("assistant", "b")]) == Template(tokenizer).render(
        [says("user", "a"), says("assistant", "b")]
    )


def test_a_template_has_one_form_in_front(tokenizer: Any) -> None:
    once = with_agent(PLAIN_CHATML, "hermes")
    assert with_agent(once, "hermes") == once
    assert agent_of(with_agent(once, "react_zh")) == "react_zh"
    assert goes_on(with_agent(once, "react_zh"))
    assert not goes_on(once)
    assert agent_of(PLAIN_CHATML) is None
    set_template(tokenizer, PLAIN_CHATML, None, "qwen_zh")
    assert agent_of(tokenizer.chat_template) == "qwen_zh"


def test_variables_of_the_template_leave_the_form_in_front_of_it(tokenizer: Any) -> None:
    own = PLAIN_CHATML + "{%- if add_generation_prompt and short %}{{- 'So' }}{%- endif %}"
    set_template(tokenizer, own, None, "react_en")
    set_template(tokenizer, None, {"short": "true"})
    assert agent_of(tokenizer.chat_template) == "react_en"
    assert goes_on(tokenizer.chat_template)
    set_template(tokenizer, None, None, "hermes")
    template = tokenizer.chat_template
    assert agent_of(template) == "hermes"
    assert template.count("put in front by shardproof") == 1
    assert Template(tokenizer).render([says("user", "a")], prompt=True).endswith("assistant\nSo")


@pytest.mark.parametrize("name", OF_MODELS)
def test_forms_of_models_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="whose own chat templates write it"):
        with_agent(PLAIN_CHATML, name)


def test_what_is_no_form_is_refused(tokenizer: Any, write: Any) -> None:
    with pytest.raises(
        ConfigError, match=re.escape("--agent-template reakt_en: must be one of hermes, ") + ".*react_en"
    ):
        with_agent(PLAIN_CHATML, "reakt_en")
    with pytest.raises(ConfigError, match="no chat template, or several"):
        with_agent(None, "hermes")
    of_form(tokenizer, "react_en")
    lone = [says("user", "a"), says("tool", "b"), says("assistant", "c")]
    rows = read_rows([write("rows.jsonl", [{"messages": lone}])], form=SFT)
    with pytest.raises(DataError, match="a result of a tool stands behind no call of one"):
        encode_rows(rows, tokenizer, max_length=None, bad_rows="skip")
