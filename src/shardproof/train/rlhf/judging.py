"""What reward models are given by TRL's trainers that ask them.

TRL writes each conversation as a text and has a tokenizer make a batch of these. For a model that sees and hears, what
leaves the conversations as they are stands in its place, and makes the batch of them and of the files of their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from shardproof.data.encoding.encode import begin_of_text
from shardproof.data.forms.parts import Problem
from shardproof.data.media.batches import together_or_alone
from shardproof.data.media.encode import MediaEncoder
from shardproof.data.media.limits import Limits
from shardproof.errors import DataError


class Reads:
    """What a reward model is given.

    Args:
        processor: of the model.
        limits: of the files that are read.

    Attributes:
        files: of each row that is judged next, by kind; `where` the first of them stands.
    """

    def __init__(self, processor: Any, limits: Limits) -> None:
        self._encoder, self._tokenizer = MediaEncoder(processor, limits), processor.tokenizer
        self.files: Sequence[dict[str, list[Any]]] = []
        self.where = ""

    @property
    def pad_token_id(self) -> int:
        return int(self._tokenizer.pad_token_id)

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> list[dict[str, Any]]:
        """The conversation itself."""
        return messages

    def __call__(self, text: Sequence[list[dict[str, Any]]], **_: Any) -> dict[str, Any]:
        """The tensors of these conversations, padded on the right."""
        try:
            return together_or_alone(partial(self._encoder.asked, answered=True), text, self.files, self.pad_token_id)
        except Problem as problem:
            raise DataError(f"{self.where} and its neighbours in the batch: {problem}") from None


class ReadsTexts:
    """A tokenizer that TRL's trainers ask for plain texts. It puts its marks around them (begin of text, BERT's), as it
    does where a model learns to judge such texts; TRL has it leave them out."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._begin = tokenizer, begin_of_text(tokenizer)
        self.pad_token_id = tokenizer.pad_token_id

    def __call__(self, text: Sequence[str], *, add_special_tokens: bool, **how: Any) -> Any:
        return self._tokenizer(text=[one.removeprefix(self._begin) for one in text], **how)
