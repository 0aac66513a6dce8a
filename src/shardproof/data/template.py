"""The chat template of a tokenizer: which one it is, and which part of its text is the answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardproof.errors import ConfigError
from shardproof.models.chatml import CHATML

Span = tuple[int, int]  # characters [start, end) of a rendered conversation

BUILT_IN = {"chatml": CHATML}

# Stands for an answer while we look where the template puts it. Letters only: nothing escapes or trims it.
_SENTINEL = "zqShardproofAnswerzq"


def set_template(tokenizer: Any, template: str | None) -> None:
    """Give the tokenizer a chat template: `chatml`, or a file with Jinja in it. None leaves it as it is.

    Raises:
        ConfigError: there is no such file and no built-in template of that name, or it is not valid Jinja.
    """
    if template is None:
        return
    text = BUILT_IN.get(template)
    if text is None:
        path = Path(template).expanduser()
        if not path.is_file():
            raise ConfigError(f"--chat-template {template}: there is no such file; built in is {', '.join(BUILT_IN)}.")
        text = path.read_text(encoding="utf-8")
    tokenizer.chat_template = text
    Template(tokenizer).probe()


class Template:
    """A tokenizer's chat template as a function from messages to text, and the way back to the answers in it.

    Args:
        tokenizer: of transformers, with a chat template.
        variables: what the template gets besides the messages, such as `enable_thinking`.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any] | None = None) -> None:
        template = getattr(tokenizer, "chat_template", None)
        if not template:
            name = getattr(tokenizer, "name_or_path", "") or "the model"
            raise ConfigError(
                f"The tokenizer of {name} has no chat template, which rows of messages need.\n"
                "Name one with --chat-template FILE (Jinja) or take the built-in one with --chat-template chatml;\n"
                "rows of plain 'prompt' and 'completion' need none."
            )
        self._tokenizer = tokenizer
        self._variables = dict(variables or {})
        self.has_markers = isinstance(template, str) and bool(re.search(r"\{%-?\s*generation\s*-?%\}", template))
        self._end: str | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool = False, **extra: Any) -> str:
        """The text of a conversation; `prompt` adds what opens the next answer."""
        bare = [{k: v for k, v in message.items() if k != "loss"} for message in messages]
        return self._tokenizer.apply_chat_template(
            bare, tokenize=False, add_generation_prompt=prompt, **{**self._variables, **extra}
        )

    def probe(self) -> None:
        """Render one conversation.

        Raises:
            ConfigError: the template fails on the simplest conversation there is.
        """
        try:
            self.turn_end()
        except Exception as error:  # whatever Jinja and the template raise
            raise ConfigError(f"The chat template fails on one question and answer: {error}") from error

    def turn_end(self) -> str:
        """What follows an answer up to the first special token, as in `<|im_end|>`; empty if the template has none."""
        if self._end is None:
            text = self.render([{"role": "user", "content": "question"}, {"role": "assistant", "content": _SENTINEL}])
            tail = text.rpartition(_SENTINEL)[2]
            found = [tail.find(t) + len(t) for t in self._special_tokens() if t in tail]
            self._end = tail[: min(found)] if found else tail.rstrip()
        return self._end

    def _special_tokens(self) -> list[str]:
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return [str(token) for token in added.values() if str(token)] + list(self._tokenizer.all_special_tokens)

    def answers(self, messages: Sequence[Mapping[str, Any]], text: str, **extra: Any) -> list[Span]:
        """Where the answers to be learnt stand in `text`, which is what `render(messages)` gave.

        An answer begins where the template would hand over to the model (what it renders for the turns before, opened
        for an answer) and ends with the token that ends the turn. Templates that change earlier turns once there are
        later ones are found out by comparing; there the answer is looked for by a stand-in for its content.

        Raises:
            ValueError: the answer of a turn cannot be found in the text; the message says of which.
        """
        spans: list[Span] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or not message.get("loss", True):
                continue
            start = self._start(messages, i, text, extra)
            if start is None:
                raise ValueError(f"cannot find the answer of messages[{i}] in what the chat template makes of it")
            content = message["content"].strip()
            at = text.find(content, start)
            # A template may leave out what was only thought; then there is no content to look behind.
            end = self._find_end(text, at + len(content) if at >= 0 else start)
            spans.append((max(start, spans[-1][1] if spans else 0), end))
        return spans

    def _start(self, messages: Sequence[Mapping[str, Any]], i: int, text: str, extra: Mapping[str, Any]) -> int | None:
        try:
            opened = self.render(messages[:i], prompt=True, **extra)
            if text.startswith(opened):
                return len(opened)
            # The opening may put more into the model's mouth than this answer begins with (`<think>`): up to there.
            closed = self.render(messages[:i], **extra)
            common = _common_prefix(opened, text)
            if closed and common > len(closed) and text.startswith(closed):
                return common
        except Exception:  # a template may refuse a conversation that stops here
            pass
        stand_in = [dict(m) for m in messages]
        stand_in[i]["content"] = _SENTINEL
        before, found, _ = self.render(stand_in, **extra).partition(_SENTINEL)
        return len(before) if found and text.startswith(before) else None

    def _find_end(self, text: str, after: int) -> int:
        end = self.turn_end()
        at = text.find(end, after) if end else -1
        return at + len(end) if at >= 0 else len(text)


def _common_prefix(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
