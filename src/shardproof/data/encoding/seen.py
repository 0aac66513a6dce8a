"""Checks that the model sees everything in a conversation, since chat templates leave things out silently.

[Note: what is left out] To find a turn, its text is replaced by a mark and the conversation rendered. Once a template
was seen to write a kind of turn, it is not checked again, so the check renders only a text or two for a whole file.
Thinking, in `reasoning_content` or as <think>...</think> in the content, is checked only in the turns after the last
question: many templates remove it from earlier turns on purpose. If a template writes it in a last answer, it is not
checked at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from shardproof.data.encoding.template import MARK, Template
from shardproof.data.forms.calls import with_texts_as_arguments
from shardproof.data.forms.formats import SYSTEM, Messages, with_system
from shardproof.data.forms.parts import Problem, with_texts
from shardproof.data.forms.texts import THINKING
from shardproof.data.rows import Row
from shardproof.errors import ConfigError

Turn = Mapping[str, Any]

_LOOKED_FOR = (*SYSTEM, "tool")  # `Template` itself checks questions and answers
_WITH = "give one that does with --chat-template"


@contextmanager
def refusals() -> Iterator[None]:
    """Turn any exception of Jinja or a chat template into a Problem. ValueError and ConfigError are raised by our own
    code."""
    try:
        yield
    except (Problem, ValueError, ConfigError):
        raise
    except Exception as error:
        raise Problem(f"the chat template refuses this conversation: {' '.join(str(error).split())}") from error


class Seen:
    """Finds out what a chat template writes.

    Args:
        system: the system message for conversations that have none, from --system.
    """

    def __init__(self, template: Template, system: str | None = None) -> None:
        self._template, self._system = template, system
        self._written: set[tuple[Any, ...]] = set()  # kinds of turns that were found in the text
        self._in_last: dict[str, bool] = {}  # for each field of thinking, whether it is written in a last answer

    def in_its_words(self, messages: Sequence[Any]) -> Messages:
        """The conversation as the template expects it: developer turns become system turns if it does not know the
        role, text before calls becomes a turn of its own if the two are not written together, and the arguments of
        calls become strings if it concatenates them."""
        made: Messages = list(messages)
        if any(turn["role"] == "developer" for turn in made) and not self._takes_developers:
            made = [{**turn, "role": "system"} if turn["role"] == "developer" else turn for turn in made]
        if any(turn.get("tool_calls") for turn in made):
            if not self._writes_before_calls:
                made = [part for turn in made for part in _parted(turn)]
            if self._joins_arguments:
                made = [with_texts_as_arguments(turn) for turn in made]
        return made

    def turns(self, messages: Messages) -> Messages:
        """The same with the system message, if there is one to add."""
        return with_system(self.in_its_words(messages), self._system)

    def check(self, row: Row, messages: Sequence[Turn]) -> None:
        """Check the messages that `turns` returned for a row.

        Raises:
            Problem: the template leaves out tools, tool calls, a turn, or its thinking.
            ConfigError: it leaves out the system message of --system, or refuses any.
        """
        tools = row.extra.get("tools")
        if unseen := self._template.leaves_out(messages, tools):
            raise Problem(
                f"it has {unseen}, which the chat template does not write; {_WITH}, or choose a format with "
                "--agent-template"
            )
        added = bool(self._system) and messages[0]["role"] == "system" and row.messages[0]["role"] not in SYSTEM
        for i, turn in enumerate(messages):
            if turn["role"] not in _LOOKED_FOR or self._finds(messages, i, tools):
                continue
            if added and i == 0:
                raise ConfigError(
                    "--system: this model's chat template writes no system message, so the model would not see it. "
                    f"Leave --system out, or {_WITH}."
                )
            raise Problem(
                f"the chat template does not write messages[{i - added}] ({turn['role']}), so the model would not see "
                f"it; {_WITH}, or remove that turn"
            )
        if lost := self._lost_thinking(messages, tools):
            i, field = lost
            what = f"{field!r}" if field == THINKING else "thinking (<think>...</think>) in the content"
            instead = ", or write it into the content as the model does (<think>...</think>)"
            raise Problem(
                f"the chat template does not write the {what} of messages[{i - added}]; "
                f"{_WITH}{instead if field == THINKING and self._thinks('content') else ''}"
            )

    def _finds(self, messages: Sequence[Turn], i: int, tools: Any) -> bool:
        turn = messages[i]
        kind = (turn["role"], i == 0, bool(tools))
        if kind in self._written or not _text(turn["content"]):
            return True
        found = self._writes(messages, i, _marked(turn), tools)
        if found:
            self._written.add(kind)
        if found is None and i == 0 and self._system == turn["content"]:
            return self.takes_system
        return found is not False  # if the template refuses it, the reason is reported when the row is rendered

    def _lost_thinking(self, messages: Sequence[Turn], tools: Any) -> tuple[int, str] | None:
        """The turn whose thinking is left out, unless that is intended, and the field that contains it."""
        last_question = max((i for i, turn in enumerate(messages) if turn["role"] == "user"), default=-1)
        for field in (THINKING, "content"):
            thinks = [i for i, turn in enumerate(messages) if _thinks_in(turn, field)]
            if not thinks or self._thinks(field):  # then it removes thinking on purpose, e.g. after a call
                continue
            if thinks[-1] < last_question:
                if field == THINKING and not self._takes_thinking_out:
                    return thinks[-1], field
                continue
            behind = (i for i in reversed(thinks) if i > last_question)
            if not any(self._finds_thinking(messages, i, field, tools) for i in behind):
                return thinks[-1], field
        return None

    def _finds_thinking(self, messages: Sequence[Turn], i: int, field: str, tools: Any) -> bool:
        kind = (field, bool(messages[i].get("tool_calls")), bool(tools))  # some write it only with tool calls
        if kind in self._written or self._writes(messages, i, _thinking_marked(messages[i], field), tools) is not False:
            self._written.add(kind)
            return True
        return False

    def _thinks(self, field: str) -> bool:
        """Whether it writes the thinking in this field of a last answer."""
        if field not in self._in_last:
            marked = _thinking_marked({**_PAIR[1], THINKING: "x"} if field == THINKING else _THOUGHT, field)
            self._in_last[field] = bool(self._writes([_PAIR[0], marked], 1, marked, None))
        return self._in_last[field]

    def _writes(self, messages: Sequence[Turn], i: int, marked: Turn, tools: Any) -> bool | None:
        """Whether the mark in a turn appears in the text; None if the template refuses the conversation."""
        try:
            return MARK in self._template.render([*messages[:i], marked, *messages[i + 1 :]], tools=tools)
        except Exception:  # Jinja and the template may raise anything
            return None

    @cached_property
    def takes_system(self) -> bool:
        """Whether it writes a system message before a question."""
        return self._takes("system")

    @cached_property
    def _takes_developers(self) -> bool:
        return self._takes("developer")

    @cached_property
    def _joins_arguments(self) -> bool:
        """Whether it takes the arguments of a call as a string rather than an object (like DeepSeek's)."""
        forms = (_calling("", arguments={"x": MARK}), with_texts_as_arguments(_calling("", arguments={"x": MARK})))
        as_object, as_text = (self._writes([_PAIR[0], form, _RESULT], 1, form, None) for form in forms)
        return not as_object and bool(as_text)

    @cached_property
    def _writes_before_calls(self) -> bool:
        """Whether it writes the text of an answer before its calls: some leave it out, or write it elsewhere."""
        turns = [_PAIR[0], _calling(MARK, arguments={}), _RESULT, _PAIR[1]]
        for form in (turns, [with_texts_as_arguments(turn) for turn in turns]):
            try:
                before, said, behind = self._template.render(form).partition(MARK)
            except Exception:  # Jinja and the template may raise anything
                continue
            return bool(said) and _NAME in behind and _NAME not in before
        return True

    def _takes(self, role: str) -> bool:
        turn = {"role": role, "content": MARK}
        return bool(self._writes([turn, *_PAIR], 0, turn, None))

    @cached_property
    def _takes_thinking_out(self) -> bool:
        """Whether it removes thinking from earlier answers."""
        thought = _thinking_marked(_THOUGHT, "content")
        return self._writes([_PAIR[0], thought, *_PAIR], 1, thought, None) is False


_PAIR = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
_THOUGHT = {"role": "assistant", "content": "<think>\nx\n</think>\n\nb"}
_NAME, _RESULT = "look_it_up", {"role": "tool", "content": "b"}
_THINKING = re.compile(r"(<think>\s*)(\S.*?)(\s*</think>)", re.DOTALL)


def _calling(said: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """An answer that calls a tool."""
    call = {"type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return {"role": "assistant", "content": said, "tool_calls": [call]}


def _parted(turn: dict[str, Any]) -> list[dict[str, Any]]:
    """A turn split into its text and its calls."""
    if not (turn.get("tool_calls") and _text(turn["content"])):
        return [turn]
    says = {name: value for name, value in turn.items() if name != "tool_calls"}
    calls = {name: value for name, value in turn.items() if name != THINKING}
    return [says, {**calls, "content": ""}]


def _thinks_in(turn: Turn, field: str) -> bool:
    thinking = turn.get(field)
    if turn["role"] != "assistant" or thinking is None:
        return False
    if field == THINKING:
        return isinstance(thinking, str) and bool(thinking.strip())
    return bool(_THINKING.search(_text(thinking)))


def _thinking_marked(turn: Turn, field: str) -> Turn:
    """A turn with its thinking replaced by the mark."""
    if field == THINKING:
        return {**turn, field: MARK}
    return {**turn, field: with_texts(turn[field], lambda text: _THINKING.sub(rf"\g<1>{MARK}\g<3>", text))}


def _text(content: str | Sequence[Turn]) -> str:
    """The text of a turn, without its files."""
    parts = [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]
    return "".join(parts).strip()


def _marked(turn: Turn) -> Turn:
    """A turn with its text replaced by the mark."""
    return {**turn, "content": with_texts(turn["content"], lambda text: MARK)}
