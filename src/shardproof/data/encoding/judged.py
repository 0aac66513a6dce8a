"""From a query and candidate documents to prompts that a causal language model answers with one word.

[Note: pairs in templates] A template takes a pair as turns with the roles `query` and `document`, after a `system` turn
with the instruction: this is how sentence-transformers' CrossEncoder and vLLM call it. Any other chat template gets a
prefix that turns such turns into the prompt Qwen3-Reranker was trained on, a user's question to a model that does not
think; it renders conversations as before. The prefix is saved with the tokenizer, so that everything that loads it
renders the same.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from shardproof.data.encoding.embed import OF_TEXT, names_files
from shardproof.data.encoding.rank import Pair, PairEncoder
from shardproof.data.encoding.report import Truncation
from shardproof.data.encoding.seen import refusals
from shardproof.data.encoding.template import MARK
from shardproof.data.forms.formats import SYSTEM, with_system
from shardproof.data.forms.matches import NEGATIVE, POSITIVE
from shardproof.data.forms.parts import Problem
from shardproof.data.forms.texts import check_texts
from shardproof.data.rows import Row
from shardproof.errors import ConfigError

QUERY, DOCUMENT = "query", "document"
Write = Callable[[Any, str | None, str, str], str]  # same signature as `prompt`
# Qwen3-Reranker's wording.
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
TASK = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_BEGINNING = f"""\
{{%- if messages | selectattr("role", "equalto", "{DOCUMENT}") | list %}}
    {{%- set pair = namespace(system="{INSTRUCTION}") %}}
    {{%- for message in messages %}}
        {{%- if message["role"] == "system" %}}{{% set pair.system = message["content"] %}}{{% endif %}}
        {{%- if message["role"] == "{QUERY}" %}}{{% set pair.query = message["content"] %}}{{% endif %}}
        {{%- if message["role"] == "{DOCUMENT}" %}}{{% set pair.document = message["content"] %}}{{% endif %}}
    {{%- endfor %}}
    {{%- if pair.system is not string %}}
        {{%- set pair.system = pair.system | map(attribute="text") | join %}}
    {{%- endif %}}
    {{%- set before, between = "<Instruct>: " ~ pair.system ~ "\n<Query>: ", "\n<Document>: " %}}
    {{%- if pair.query is string and pair.document is string %}}
        {{%- set task, asked = '{TASK}', before ~ pair.query ~ between ~ pair.document %}}
    {{%- else %}}
        {{%- if pair.query is string %}}
            {{%- set pair.query = [{{"type": "text", "text": pair.query}}] %}}
        {{%- endif %}}
        {{%- if pair.document is string %}}
            {{%- set pair.document = [{{"type": "text", "text": pair.document}}] %}}
        {{%- endif %}}
        {{%- set task = [{{"type": "text", "text": '{TASK}'}}] %}}
        {{%- set asked = [{{"type": "text", "text": before}}] + pair.query
            + [{{"type": "text", "text": between}}] + pair.document %}}
    {{%- endif %}}
    {{%- set messages = [{{"role": "system", "content": task}}, {{"role": "user", "content": asked}}] %}}
    {{%- set add_generation_prompt = true %}}
    {{%- set enable_thinking = false %}}
{{%- endif %}}
"""


def check_variables(variables: Mapping[str, str]) -> None:
    """Raise ConfigError for a chat template variable that makes the model think before it answers."""
    if variables.get("enable_thinking", "false").lower() != "false":
        raise ConfigError(
            "--template-variables enable_thinking: a generative reranker answers yes or no without thinking. Leave "
            "it out."
        )


def take_pairs(tokenizer: Any, name: str, write: Write | None = None) -> None:
    """Make sure that the chat template of the tokenizer of model `name` takes pairs. `write`: renders them instead of
    `prompt`.

    Raises:
        ConfigError: it has no chat template, or one that fails on a pair.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str):
        raise ConfigError(
            f"The tokenizer of {name} has no chat template, or several, but a generative reranker needs one. Give it "
            "one with --chat-template: 'chatml', a file with a Jinja template, or the template itself."
        )
    if not all(re.search(rf"[\"']{role}[\"']", template) for role in (QUERY, DOCUMENT)):
        tokenizer.chat_template = _BEGINNING + template
    try:
        text = (write or prompt)(tokenizer, None, f"{MARK}q", f"{MARK}d")
    except Exception as error:  # Jinja and the template may raise anything
        why = " ".join(str(error).split()).rstrip(".")
    else:
        if all(text.count(f"{MARK}{letter}") == 1 for letter in "qd"):
            return
        why = "it leaves out a query or a document"
    raise ConfigError(
        f"The chat template of {name} fails on a query and a document: {why}. Give another with --chat-template."
    )


def prompt(tokenizer: Any, system: str | None, query: str, document: str) -> str:
    """The prompt for a pair; `system`: the instruction, if any."""
    turns = turns_of_pair(system, query, document)
    made: str = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return made


def turns_of_pair(system: Any, query: Any, document: Any) -> list[dict[str, Any]]:
    """The turns that a template that takes pairs is given; contents are texts or lists of parts."""
    return with_system([{"role": QUERY, "content": query}, {"role": DOCUMENT, "content": document}], system)


def word_token(tokenizer: Any, word: str, name: str, write: Write | None = None) -> int:
    """The token for this word as the answer to a pair; `write` as for `take_pairs`.

    Raises:
        ConfigError: the tokenizer of model `name` does not write the word as a single token.
    """
    asked = (write or prompt)(tokenizer, None, "a", "b")
    before, whole = (list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (asked, asked + word))
    more = whole[len(before) :]
    if whole[: len(before)] != before or len(more) != 1 or more[0] == tokenizer.unk_token_id:
        pieces = " ".join(map(repr, tokenizer.convert_ids_to_tokens(more)))
        raise ConfigError(
            f'The tokenizer of {name} does not write the answer "{word}" as one token, but as {pieces}: a generative'
            " reranker compares the tokens of two words. --task reranker needs no such tokens."
        )
    return int(more[0])


class JudgedEncoder(PairEncoder):
    """Rows to the token ids of a prompt for each pair of the query and one of its documents. The tokenizer must already
    take pairs. A prompt that is too long loses the end of its document, never the opening of the answer."""

    def __init__(self, tokenizer: Any, system: str | None = None) -> None:
        super().__init__(tokenizer, system)
        one, other = (ids[::-1] for ids in self._ids([prompt(tokenizer, None, "a", text) for text in "bc"]))
        self._opening, self._dividing, self.typed = [], [], False
        alike = takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False))
        self._closing = [token for token, _ in alike][::-1]

    def texts(self, rows: Iterable[Row]) -> Iterator[tuple[Row, list[Any] | str]]:
        for row in rows:
            if names_files(row):
                yield row, OF_TEXT
                continue
            try:
                with refusals():
                    prompts = list(self._prompts(row))
            except Problem as problem:
                yield row, str(problem)
                continue
            yield row, [self._pair(ids) for ids in self._ids(prompts)]

    def marked(self, pair: Any, most: int | None, truncation: Truncation = "right") -> list[int]:
        return super().marked(pair, most)

    def _prompts(self, row: Row) -> Iterator[str]:
        check_texts(row.messages)
        turns = with_system(row.messages, self._before_queries)
        system = turns[0]["content"] if turns[0]["role"] in SYSTEM else None
        query = "\n".join(turn["content"] for turn in turns if turn["role"] not in SYSTEM)
        for text in (*row.extra[POSITIVE], *row.extra[NEGATIVE]):
            yield prompt(self._tokenizer, system, query, text)

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(ids) for ids in self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]]

    def _pair(self, ids: list[int]) -> Pair:
        return [], array("i", ids[: len(ids) - len(self._closing)])
