"""The chat template of a tokenizer: which one it is, and which part of its text is the answer."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from datetime import date
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from shardproof.data.encoding.agents import goes_on, with_agent
from shardproof.data.encoding.dated import on_day
from shardproof.data.encoding.template_variables import with_defaults, with_prefix
from shardproof.errors import ConfigError
from shardproof.models.chatml import CHATML

OURS = "loss", "weight"  # keys of turns that are not passed to templates

Span = tuple[int, int]  # characters [start, end) of a rendered conversation
Message = Mapping[str, Any]

BUILT_IN = {"chatml": CHATML}

# Stands in for a text to find where the template puts it. Letters only, so that nothing escapes or trims it.
MARK = "zqShardproofTextzq"


def set_template(
    processing: Any,
    template: str | None,
    variables: Mapping[str, str] | None = None,
    agent: str | None = None,
    prefix: str = "",
) -> None:
    """Set the chat template of a tokenizer, or of a processor and its tokenizer. None keeps the existing one.

    Args:
        template: `chatml`, a file with Jinja in it, or the Jinja itself.
        variables: default values for the template's variables, such as `enable_thinking`; `true`, `false` and numbers
            are taken as such. They become part of the template, so that they stay with it.
        agent: the format of tools and calls, see `agents.py`, which becomes part of it, too.
        prefix: the text that it begins answers with.

    Raises:
        ConfigError: there is no such file and no built-in template of that name, it fails on a plain conversation, or
            it does not use one of the variables.
    """
    if template is None and not variables and agent is None and not prefix:
        return
    tokenizer = getattr(processing, "tokenizer", processing)
    text = tokenizer.chat_template if template is None else template_text(template)
    text = with_defaults(text, variables) if variables else text
    text = with_agent(text, agent) if agent else text
    tokenizer.chat_template = with_prefix(text, prefix) if prefix else text
    if processing is not tokenizer:
        processing.chat_template = tokenizer.chat_template  # a processor is saved with its own
    Template(tokenizer)


def template_text(template: str) -> str:
    """The Jinja source given by a name, a file or the text itself; raises ConfigError if there is none."""
    if template in BUILT_IN:
        return BUILT_IN[template]
    if is_template(template):
        return template
    try:
        text = Path(template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"--chat-template {template} cannot be read: {reason}.\n"
            f"Name a file with a Jinja template, give the template itself, or {' or '.join(BUILT_IN)}."
        ) from error
    if not is_template(text):
        raise ConfigError(f"--chat-template {template}: there is no Jinja ({{{{ ... }}}} or {{% ... %}}) in that file.")
    return text


def is_template(text: str) -> bool:
    """Whether this is Jinja rather than a file name."""
    return "{{" in text or "{%" in text


def stops(tokenizer: Any, known: int | Sequence[int] | None, turns: bool = True) -> list[int]:
    """The tokens at which an answer ends: those in a model's generation config, the tokenizer's end-of-text token, and,
    with `turns`, the token that ends an answer in its chat template. For a base model trained with a template, these
    differ."""
    end = None
    if turns:
        with contextlib.suppress(ConfigError):  # there is no template, or it does not support plain conversations
            end = Template(tokenizer).turn_end
    found = [*([known] if isinstance(known, int) else known or []), tokenizer.eos_token_id, end]
    return [token for token in dict.fromkeys(found) if token is not None]


class Template:
    """A tokenizer's chat template as a function from messages to text, and the way back to the answers in it.

    [Note: where an answer is] Labels are found in the text, not in the template, so any template will do. An answer
    begins where the template would hand over to the model: at the end of the text that it renders for the previous
    turns with a generation prompt. It ends where the text of the turns up to and including it ends. Both are only
    trusted if they are a prefix of the full text. Some templates change earlier turns once later ones follow (Qwen3
    removes their thinking, gpt-oss ends them differently): there the end is the first token that ends a turn, before
    the next turn's text.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        day: the date for templates that write it; None: the time of rendering.

    Raises:
        ConfigError: the tokenizer has no chat template, or it fails on one question and answer.
    """

    def __init__(self, tokenizer: Any, day: date | None = None) -> None:
        template = getattr(tokenizer, "chat_template", None)
        if not template:
            name = getattr(tokenizer, "name_or_path", "") or "the model"
            own = str(getattr(tokenizer, "vocab_file", "")).endswith("tekken.json")  # Mistral's format, without one
            raise ConfigError(
                f"The tokenizer of {name} has no chat template, which rows of messages need.\n"
                + ("Install mistral-common, which provides the template of Mistral's models.\n" if own else "")
                + "Give it one with --chat-template: 'chatml', a file with a Jinja template, or the template itself.\n"
                "Or use rows of plain 'prompt' and 'completion', which need none."
            )
        self._tokenizer = tokenizer
        dated = template if day is None else on_day(template, day)
        self._dated = {"chat_template": dated} if dated != template else {}
        self._in_parts, self._goes_on = False, goes_on(template)
        marks = isinstance(template, str) and bool(re.search(r"\{%-?\s*generation\s*-?%\}", template))
        self.has_markers = marks and not self._goes_on  # the marks would include the results within an answer
        self._probe()

    def _probe(self) -> None:
        """Check that a question and an answer are rendered, given as text or (for templates of some vision models) as
        parts."""
        errors = []
        for self._in_parts in (False, True):
            try:
                if self.render(_PAIR).count(MARK) == 2:
                    return
                errors.append("it leaves out the text of a message")
            except Exception as error:  # Jinja and the template may raise anything
                errors.append(" ".join(str(error).split()))
        raise ConfigError(f"The chat template fails on a question and its answer: {str(errors[0]).rstrip('.')}.")

    def render(self, messages: Sequence[Message], *, prompt: bool = False, **extra: Any) -> str:
        """The text of a conversation; `prompt` adds the opening of the next answer, unless the answer continues after a
        result."""
        if prompt and self._goes_on and messages[-1]["role"] == "tool":
            return self._before_text([*messages, _PAIR[1]], len(messages), extra)
        return self._tokenizer.apply_chat_template(
            self._prepared(messages),
            tokenize=False,
            add_generation_prompt=prompt,
            **{**self._dated, **extra},
        )

    def _prepared(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        bare = [{key: value for key, value in message.items() if key not in OURS} for message in messages]
        return [{**message, "content": self._content(message["content"])} for message in bare]

    def _content(self, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        """Content as templates expect it: a text, or parts. For a file, they only need its kind."""
        if isinstance(content, list):
            return [part if part["type"] == "text" else {"type": part["type"], part["type"]: ""} for part in content]
        return [{"type": "text", "text": content}] if self._in_parts else content

    def leaves_out(self, messages: Sequence[Message], tools: Any) -> str | None:
        """The part of a conversation that the model would not see, as text: tool calls, or the tools. None: nothing.

        A template without support for tools writes a call as an empty answer, which would be learned as such.
        """
        bare = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
        calls = any(message.get("tool_calls") for message in messages)
        if not (tools or calls):
            return None
        text = self.render(messages, tools=tools)
        if calls and self._renders(text, bare, tools):
            return "calls of tools"
        return "tools" if tools and self._renders(text, messages, None) else None

    def _renders(self, text: str, messages: Sequence[Message], tools: Any) -> bool:
        """Whether this conversation is rendered as that text, too."""
        try:
            return self.render(messages, tools=tools) == text
        except Exception:  # if the template refuses it, it counts as different
            return False

    def knows(self, kind: str, token: str) -> bool:
        """Whether it writes this token for a file of this kind in a question."""
        content = [{"type": kind}, {"type": "text", "text": MARK}]
        try:
            return token in self.render([{"role": "user", "content": content}])
        except Exception:  # Jinja and the template may raise anything
            return False

    def marks(self, kinds: Sequence[str]) -> list[str] | None:
        """The text that the template writes for files of these kinds, in order, in a question; None if it moves them or
        does not support them."""
        text = {"type": "text", "text": MARK}
        content = [text, *(part for kind in kinds for part in ({"type": kind}, text))]
        try:
            pieces = self.render([{"role": "user", "content": content}]).split(MARK)
        except Exception:  # Jinja and the template may raise anything
            return None
        return pieces[1:-1] if len(pieces) == len(kinds) + 2 else None

    def render_answers(self, messages: Sequence[Message], **extra: Any) -> tuple[str, list[Span]]:
        """The text of a conversation, and the spans of its learned answers, including the tokens that end them.

        A template's own marks (`{% generation %}`) are trusted, except for conversations with turns that are not
        learned, which marks cannot express. The end of an answer is learned even if the marks leave it out
        (LLaVA-OneVision). If a conversation ends with an answer but without a token that ends it, the tokenizer's
        end-of-text token is appended: otherwise no model would learn to stop.

        Raises:
            ValueError: the answer of a turn cannot be found in the text; the message says which.
        """
        marked = self.has_markers and all(
            m.get("loss", True) and "weight" not in m for m in messages if m["role"] == "assistant"
        )
        text, spans = self._render_marked(messages, extra) if marked else ("", [])
        if not spans:
            text = self.render(messages, **extra)
            spans = [
                self._answer(messages, i, text, extra)
                for i, message in enumerate(messages)
                if message["role"] == "assistant" and message.get("loss", True)
            ]
        for (_, end), (start, _) in pairwise(spans):
            if start < end:
                raise ValueError("the chat template mixes one answer with the next")
        if spans and spans[-1][1] == len(text) and not self._ends_special(text):
            text += self._tokenizer.eos_token or ""
            spans[-1] = spans[-1][0], len(text)
        return text, spans

    def _render_marked(self, messages: Sequence[Message], extra: Mapping[str, Any]) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = render_jinja_template(
            [self._prepared(messages)],
            return_assistant_tokens_mask=True,
            **{
                "chat_template": self._tokenizer.chat_template,
                **self._dated,
                **self._tokenizer.special_tokens_map,
                **extra,
            },
        )
        return texts[0], [(start, self._with_end(texts[0], end)) for start, end in spans[0]]

    def _with_end(self, text: str, at: int) -> int:
        """`at`, the end of a marked answer, or the end of the tokens that close it, if these follow."""
        if not text[at:].strip():
            return max(at, self._trimmed(text))
        return at + max((len(end) for end in self._turn_ends if text.startswith(end, at)), default=0)

    # --- [Note: where an answer is] --------------------------------------------------------------------

    def _answer(self, messages: Sequence[Message], i: int, text: str, extra: Mapping[str, Any]) -> Span:
        start = self._start(messages, i, text, extra)
        after = self._content_end(messages[i], i, text, start)
        if i == len(messages) - 1:
            return start, self._trimmed(text)
        closed = self.render(messages[: i + 1], **extra)
        if len(closed) >= after and text.startswith(closed):
            return start, self._trimmed(closed) if self._ends_special(closed.rstrip()) else self._next_token(
                text, len(closed)
            )
        before = self._before_text(messages, i + 1, extra)
        if len(before) >= after and text.startswith(before):
            ends = [at + len(end) for end in self._turn_ends if (at := before.find(end, after)) >= 0]
            if ends:
                return start, min(ends)
            if self._goes_on and messages[i + 1]["role"] == "tool":
                return start, len(before)
        raise ValueError(f"cannot tell where the answer in messages[{i}] ends in the output of the chat template")

    def _start(self, messages: Sequence[Message], i: int, text: str, extra: Mapping[str, Any]) -> int:
        try:
            opened = self.render(messages[:i], prompt=True, **extra)
        except Exception:  # a template may refuse a conversation that stops here
            opened = ""
        if opened and text.startswith(opened):
            return len(opened)
        # The opening may contain more (`<think>`) than this answer begins with: use the common part.
        before = self._before_text(messages, i, extra)
        within = self._goes_on and messages[i - 1]["role"] == "tool"  # then there is no opening
        start = _common((not within and _common(opened, before)) or before, text)
        if start and len(start) >= len(_common(self._before_turn(messages, i, extra), text)):
            return self._whole_token(text, len(start))
        raise ValueError(f"cannot tell where the answer in messages[{i}] begins in the output of the chat template")

    def _content_end(self, message: Message, i: int, text: str, start: int) -> int:
        """The end of the text that must be part of the answer. Templates may remove thinking, but not other text."""
        content = message["content"].strip()
        for part in (content, content.rpartition("</think>")[2].strip()):
            at = text.find(part, start)
            if at >= 0:
                return at + len(part)
        raise ValueError(f"the chat template leaves out the text of messages[{i}]")

    def _before_text(self, messages: Sequence[Message], i: int, extra: Mapping[str, Any]) -> str:
        """The text before the content of a message."""
        stand_in = [*messages[:i], {**messages[i], "content": MARK}, *messages[i + 1 :]]
        before, found, _ = self.render(stand_in, **extra).partition(MARK)
        return before if found else ""

    def _before_turn(self, messages: Sequence[Message], i: int, extra: Mapping[str, Any]) -> str:
        try:
            return self.render(messages[:i], **extra) if i else ""
        except Exception:  # a template may refuse a conversation that stops here
            return ""

    def _trimmed(self, text: str) -> int:
        """The end of the text, ignoring white space after the token that ends a turn."""
        stripped = text.rstrip()
        return len(stripped) if self._ends_special(stripped) else len(text)

    def _next_token(self, text: str, at: int) -> int:
        """The end of the special token at `at`: some models end a turn by opening the next (GLM)."""
        rest = text[at:].lstrip()
        token = max((t for t in self._special_tokens if rest.startswith(t)), key=len, default="")
        return len(text) - len(rest) + len(token) if token else at

    def _ends_special(self, text: str) -> bool:
        return text.endswith(self._special_tokens)

    def _whole_token(self, text: str, at: int) -> int:
        """`at`, or the beginning of the special token that `at` would split."""
        for token in self._special_tokens:
            for begin in range(max(0, at - len(token) + 1), at):
                if text.startswith(token, begin):
                    return begin
        return at

    @cached_property
    def _special_tokens(self) -> tuple[str, ...]:
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        return tuple(token for token in {*map(str, added), *self._tokenizer.all_special_tokens} if token.strip())

    @property
    def turn_end(self) -> int | None:
        """The token that ends an answer, if the template writes one: after the last answer of a conversation, or (GLM)
        the token that opens the next question."""
        last, followed = self._tails
        token = self._last_of_first(last)
        if not token and (token := self._last_of_first(followed)):
            token = token if token in self.render(_PAIR[:1]).partition(MARK)[0] else ""
        return int(self._tokenizer.convert_tokens_to_ids(token)) if token else None

    def _last_of_first(self, tail: str) -> str:
        """The first special token in a text, or the last one of an adjacent sequence there."""
        found = [(tail.find(token), -len(token), token) for token in self._special_tokens if token in tail]
        if not found:
            return ""
        at, _, token = min(found)
        while after := [t for t in self._special_tokens if tail.startswith(t, at + len(token))]:
            at, token = at + len(token), max(after, key=len)
        return token

    def said(self, text: str, start: int, end: int) -> int:
        """Where, in an answer at [start, end) of a text, the ending of the turn begins."""
        ends = (*self._turn_ends, *self._tokenizer.all_special_tokens)
        return end - max((len(one) for one in ends if one and text.endswith(one, start, end)), default=0)

    @cached_property
    def _tails(self) -> tuple[str, str]:
        """The text after the last answer of a conversation, and after one that is followed by a question."""
        last = self.render(_PAIR).rpartition(MARK)[2]
        try:
            return last, self.render([*_PAIR, *_PAIR]).split(MARK)[2]
        except Exception:  # the template supports a single turn only
            return last, ""

    @cached_property
    def _turn_ends(self) -> tuple[str, ...]:
        """The text that ends an answer, up to its first special token: in the last turn, and in one followed by a
        question."""
        ends = []
        for tail in self._tails:
            found = [at + len(token) for token in self._special_tokens if (at := tail.find(token)) >= 0]
            ends.append(tail[: min(found)] if found else tail.rstrip())
        return tuple(end for end in ends if end.strip())


_PAIR = ({"role": "user", "content": MARK}, {"role": "assistant", "content": MARK})


def _common(a: str, b: str) -> str:
    """The longest common prefix."""
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:n]
