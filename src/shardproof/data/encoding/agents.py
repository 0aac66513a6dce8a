"""How tools, calls and their results are written if a tokenizer's own template does not support them:
`--agent-template`.

[Note: in front of a template] The Jinja here is put in front of a tokenizer's own template. It turns tools, calls and
results into plain turns, and passes these to the template that follows. So the format is part of the tokenizer: it is
saved with the model, and everything that renders a conversation uses it, here and elsewhere.

[Note: results within an answer] In the formats with keys, an answer continues after a result: the call, the result and
the text after it are one turn. A template does not mark where in this turn one answer stops and the next continues, so
`goes_on` tells `Template` that a result is between two answers, and that the turn after a result is already open.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardproof.errors import ConfigError, did_you_mean

OPTION = "--agent-template"
_BEGIN, _END = "{{#- {option} {name}, put in front by shardproof #}}", "{#- the model's own template #}"
_FRONT = re.compile(_BEGIN.format(option=OPTION, name=r"(\w+)").replace("{", r"\{").replace("}", r"\}"))


@dataclass(frozen=True)
class Form:
    """How tools and calls are written; `{names}` stands for the names of the tools.

    Attributes:
        before, behind: the texts before and after the tools; each tool begins on a line of its own.
        tool: Jinja for one tool, the variable `tool`.
        call: Jinja for one call, with the variables `name` and `arguments` (a string); and the text after all calls of
            an answer.
        result: the texts before and after a tool's result.
        within: whether results are part of the answer that makes the calls: see [Note: results within an answer].
    """

    before: str
    behind: str
    tool: str
    call: tuple[str, str]
    result: tuple[str, str]
    within: bool


def _keyed(keys: tuple[str, str, str], intro: str, form: str, described: str) -> Form:
    """A format with a key at the start of each line. `described`: the text between a tool and its input."""
    act, given, seen = map(json.dumps, keys)
    told = f"tool.name ~ ': ' ~ (tool.description or '') ~ {json.dumps(described)} ~ (tool.parameters or {{}})|tojson"
    call = f"{act} ~ ' ' ~ name ~ '\\n' ~ {given} ~ ' ' ~ arguments", f"'\\n' ~ {seen}"
    return Form(f"{intro}\n", f"\n\n{form}", f"'\\n' ~ {told}", call, (keys[2], "\n"), True)


_REACT = "Action:", "Action Input:", "Observation:"
_QWEN = "✿FUNCTION✿:", "✿ARGS✿:", "✿RESULT✿:"
_EN, _ZH = "You can use these tools:", "你可以使用以下工具："
_INPUT, _INPUT_ZH = " Its input, as a JSON schema: ", " 输入的 JSON schema："

FORMS = {
    "hermes": Form(
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function"
        " signatures within <tools></tools> XML tags:\n<tools>",
        "\n</tools>\n\nFor each function call, return a json object with function name and arguments within"
        ' <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
        "</tool_call>",
        "'\\n' ~ whole|tojson",
        ("'<tool_call>\\n{\"name\": \"' ~ name ~ '\", \"arguments\": ' ~ arguments ~ '}\\n</tool_call>'", "''"),
        ("<tool_response>\n", "\n</tool_response>"),
        within=False,
    ),
    "react_en": _keyed(
        _REACT,
        _EN,
        "Answer in this form, line by line:\n\nThought: what to do next\nAction: a tool, one of {names}\nAction"
        " Input: its input, a JSON object\nObservation: what the tool says\n(as often as it takes)\n"
        "Thought: the answer is known\nFinal Answer: the answer to the question",
        _INPUT,
    ),
    "react_zh": _keyed(
        _REACT,
        _ZH,
        "请逐行按以下格式回答：\n\nThought: 下一步做什么\nAction: 要用的工具，取自 {names}\n"
        "Action Input: 它的输入，一个 JSON 对象\nObservation: 工具给出的内容\n（可重复多次）\n"
        "Thought: 已经知道答案\nFinal Answer: 对问题的回答",
        _INPUT_ZH,
    ),
    "react_grpo": _keyed(
        _REACT,
        _EN,
        "Answer in this form, line by line:\n\n<think>what to do next</think>\nAction: a tool, one of {names}\nAction"
        " Input: its input, a JSON object\nObservation: what the tool says\n(as often as it takes)\nFinal Answer: the"
        " answer to the question",
        _INPUT,
    ),
    "qwen_en": _keyed(
        _QWEN,
        _EN,
        "To call one, as often as it takes, write into your answer:\n\n✿FUNCTION✿: a tool, one of {names}\n✿ARGS✿: its"
        " input\n✿RESULT✿: what the tool says\n✿RETURN✿: what you say to that",
        _INPUT,
    ),
    "qwen_zh": _keyed(
        _QWEN,
        _ZH,
        "需要时可在回答中多次写入以下内容来调用：\n\n✿FUNCTION✿: 要用的工具，取自 {names}\n"
        "✿ARGS✿: 它的输入\n✿RESULT✿: 工具给出的内容\n✿RETURN✿: 据此作出的回答",
        _INPUT_ZH,
    ),
}
# Other ms-swift formats: those of model families, whose own templates write them.
OF_MODELS = (
    *("qwen3_coder", "qwen3_5", "hunyuan_hermes", "hy_v3", "hy_v3_preview", "chatglm4", "glm4", "glm4_5", "glm4_7"),
    *("glm5_1", "llama3", "llama4", "deepseek_v3_1", "deepseek_v4", "minimax_m2", "minimax_m3", "seed_oss", "gemma4"),
    *("mistral", "youtu", "kimi_k25", "kimi_k3", "minicpm5"),
)

_JINJA = """\
{%- macro said(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}
        {%- for part in content or [] %}
            {%- if part.type != 'text' %}
                {{- raise_exception('--agent-template NAME writes texts, and there is a part of type ' ~ part.type) }}
            {%- endif %}
            {{- part.text }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- macro calls_of(turn) %}
    {%- for one in turn.tool_calls or [] %}
        {%- set call = one.function or one %}
        {%- set name = call.name %}
        {%- set arguments = call.arguments if call.arguments is string else call.arguments|tojson %}
        {{- ('' if loop.first else '\\n') ~ CALL ~ (BEYOND if loop.last else '') }}
    {%- endfor %}
{%- endmacro %}
{%- set agent = namespace(turns=[], names=[], tools='', before='') %}
{%- for whole in tools or [] %}
    {%- set tool = whole.function or whole %}
    {%- if not tool.name %}
        {{- raise_exception('--agent-template NAME: a tool has no name') }}
    {%- endif %}
    {%- set agent.names = agent.names + [tool.name] %}
    {%- set agent.tools = agent.tools ~ TOOL %}
{%- endfor %}
{%- if agent.names %}
    {%- set first = messages[0] if messages[0].role == 'system' else {'role': 'system', 'content': ''} %}
    {%- set own = said(first.content) %}
    {%- set text = (own ~ '\\n\\n' if own else '') ~ BEFORE ~ agent.tools ~ BEHIND %}
    {%- set in_parts = messages[0].content is not string %}
    {%- set content = [{'type': 'text', 'text': text}] if in_parts else text %}
    {%- set agent.turns = [{'role': 'system', 'content': content}] %}
    {%- set messages = messages[1:] if messages[0].role == 'system' else messages %}
{%- endif %}
{%- for turn in messages %}
    {%- set last = agent.turns[-1] if agent.turns else {'role': '', 'content': ''} %}
    {%- set in_parts = turn.content is not string and turn.content %}
    {%- if turn.role == 'tool' %}
        {%- set result = said(turn.content) %}
RESULT
    {%- elif turn.role == 'assistant' and (turn.tool_calls or agent.before == 'tool') %}
        {%- set own = said(turn.content) %}
        {%- set calls = calls_of(turn) %}
        {%- set text = own ~ ('\\n' if own and calls and not own.endswith('\\n') else '') ~ calls %}
ANSWER
        {%- set kept = turn.items()|rejectattr(0, 'in', ['tool_calls', 'content'])|list %}
        {%- set content = [{'type': 'text', 'text': text}] if in_parts else text %}
        {%- set agent.turns = agent.turns + [dict(kept, content=content)] %}
ENDANSWER
    {%- else %}
        {%- set agent.turns = agent.turns + [turn] %}
    {%- endif %}
    {%- set agent.before = turn.role %}
{%- endfor %}
THOUGHTS
{%- set messages = agent.turns %}
{%- set tools = none %}
"""
_ADDED = """\
{%- set text = said(last.content) ~ MORE %}
            {%- set content = [{'type': 'text', 'text': text}] if in_parts else text %}
            {%- set agent.turns = agent.turns[:-1] + [dict(last, content=content)] %}"""
_OWN = """\
        {%- if agent.before == 'tool' %}
            ADDED
        {%- else %}
            {%- set text = BEGIN ~ result ~ CLOSE %}
            {%- set content = [{'type': 'text', 'text': text}] if in_parts else text %}
            {%- set agent.turns = agent.turns + [{'role': 'user', 'content': content}] %}
        {%- endif %}"""
# The call has already written the key of the first result; every other result writes its own.
_WITHIN = """\
        {%- if last.role != 'assistant' %}
            {{- raise_exception('--agent-template NAME: a result of a tool stands behind no call of one') }}
        {%- endif %}
        {%- if add_generation_prompt and loop.last %}
            {{- raise_exception('--agent-template NAME: an answer goes on behind a result, and is not begun anew; '
                ~ 'a prompt of rlhf ends with a question') }}
        {%- endif %}
        ADDED"""
_GOES_ON = """\
        {%- if agent.before == 'tool' %}
            {%- if turn.reasoning_content %}
                {{- raise_exception("--agent-template NAME: 'reasoning_content' of an answer behind a result has no "
                    ~ 'place in this form; write it into the content') }}
            {%- endif %}
            ADDED
        {%- else %}"""

# A template that looks for thinking in the content takes everything before the last </think> as thinking, and loses the
# text before a later thought. So the first thought of an answer with several is passed separately.
_THOUGHTS = """\
{%- set thinking = namespace(turns=[]) %}
{%- for turn in agent.turns %}
    {%- set text = turn.content if turn.role == 'assistant' and turn.content is string else '' %}
    {%- set first = text.split('</think>')[0] if text.startswith('<think>') else '' %}
    {%- if '</think>' in text[first|length + 1:] and turn.reasoning_content is not string %}
        {%- set own = text[first|length + 8:] if first else text %}
        {%- set turn = dict(turn, reasoning_content=first[7:].strip('\\n'), content=own.lstrip('\\n')) %}
    {%- endif %}
    {%- set thinking.turns = thinking.turns + [turn] %}
{%- endfor %}
{%- set agent.turns = thinking.turns %}"""
# A template that drops everything up to the last </think> of earlier answers drops their calls too, unless told to keep
# thinking.
_KEPT = "{%- set preserve_thinking = preserve_thinking|default(true) %}"


def with_agent(template: object, name: str) -> str:
    """A chat template that writes tools in the format with this name.

    Raises:
        ConfigError: there is no such format, or the template is not a single string.
    """
    check_agent(name)
    if not isinstance(template, str):
        raise ConfigError(f"{OPTION}: the tokenizer has no chat template, or several. Add --chat-template.")
    form = FORMS[name]
    begin, close = (json.dumps(text, ensure_ascii=False) for text in form.result)
    if form.within:
        closed = f"result ~ ('' if result.endswith('\\n') else {close})"
        first = (
            f"('' if agent.before == 'assistant' and said(last.content).endswith({begin})"
            f" else ('' if said(last.content).endswith('\\n') else '\\n') ~ {begin}) ~ {closed}"
        )
        result, answer, end = _WITHIN.replace("ADDED", _ADDED.replace("MORE", first)), _GOES_ON, "        {%- endif %}"
        answer = answer.replace("ADDED", _ADDED.replace("MORE", "text"))
    else:
        more = f"'\\n' ~ {begin} ~ result ~ {close}"
        result, answer, end = _OWN.replace("ADDED", _ADDED.replace("MORE", more)), "", ""
        result = result.replace("BEGIN", begin).replace("CLOSE", close)
    behind = json.dumps(form.behind, ensure_ascii=False)
    parts: Mapping[str, str] = {
        "RESULT\n": f"{result}\n",
        "ENDANSWER\n": f"{end}\n",
        "ANSWER\n": f"{answer}\n",
        "BEFORE": json.dumps(form.before, ensure_ascii=False),
        "BEHIND": f"{behind}.replace('{{names}}', agent.names|join(', '))",
        "CALL": f"({form.call[0]})",
        "BEYOND": f"({form.call[1]})",
        "TOOL": f"({form.tool})",
        "NAME": name,
    }
    thoughts = ""
    if form.within and "reasoning_content" in template and "split('</think>')" in template:
        thoughts = f"{_THOUGHTS}\n"
    elif form.within and "preserve_thinking" in template:
        thoughts = f"{_KEPT}\n"
    text = _JINJA.replace("THOUGHTS\n", thoughts)
    for mark, meant in parts.items():
        text = text.replace(mark, meant)
    if front := _FRONT.search(template):  # the values of --template-variables come before it
        template = template[: front.start()] + template[front.end() :].partition(_END)[2]
    return _BEGIN.format(option=OPTION, name=name) + text + _END + template


def check_agent(name: str) -> None:
    """Raise ConfigError for an unknown format."""
    if name in FORMS:
        return
    if name in OF_MODELS:
        raise ConfigError(
            f"{OPTION} {name}: that is the format of a model family, whose own chat templates write it. Leave the "
            f"option out for these models; for others, use {', '.join(FORMS)}."
        )
    if (one := name.removesuffix("_parallel")) in FORMS:
        raise ConfigError(f"{OPTION} {name}: use {one}, which also writes several calls of one answer side by side.")
    raise ConfigError(f"{OPTION} {name}: must be one of {', '.join(FORMS)}.{did_you_mean(name, list(FORMS))}")


def agent_of(template: object) -> str | None:
    """The name of the format in front of a chat template; None if there is none."""
    found = _FRONT.search(template) if isinstance(template, str) else None
    return found[1] if found else None


def goes_on(template: object) -> bool:
    """Whether answers continue after results, see [Note: results within an answer]."""
    name = agent_of(template)
    return name is not None and FORMS[name].within
