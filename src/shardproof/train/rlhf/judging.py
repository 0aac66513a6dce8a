"""The inputs of reward models in TRL's trainers.

TRL renders each conversation as text and has a tokenizer make a batch of these. For a multimodal model, the tokenizer
is replaced by an object that keeps conversations as they are, and makes the batch from them and the files of their
rows.
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
    """Makes the inputs of a multimodal reward model.

    Args:
        processor: the processor of the model.
        limits: the limits for files.

    Attributes:
        files: the files of each row in the next batch, by kind; `where` is the location of the first row.
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
    """A tokenizer for plain texts in TRL's trainers. It adds its special tokens (beginning of text, BERT's), as it does
    when a model learns to judge such texts; TRL would leave them out."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._begin = tokenizer, begin_of_text(tokenizer)
        self.pad_token_id = tokenizer.pad_token_id

    def __call__(self, text: Sequence[str], *, add_special_tokens: bool, **how: Any) -> Any:
        return self._tokenizer(text=[one.removeprefix(self._begin) for one in text], **how)
