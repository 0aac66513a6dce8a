"""Texts at which answers end while a transformers model generates them.

[Note: only generated text] `stop_strings` in generate() look back into the question: "I think" ends an answer that
begins with " think" after "I". vLLM only looks at the generated text, and so does this module.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList


class Ends:
    """Texts at which answers end.

    Args:
        words: at least one text.
        tokenizer: the tokenizer of the model.
    """

    def __init__(self, words: Sequence[str], tokenizer: Any) -> None:
        self._words, self._tokenizer = words, tokenizer
        self._most = 4 * max(map(len, words)) + 4  # tokens of a word; a character may take four

    def _within(self, ids: Any) -> bool:
        text = self._tokenizer.decode(ids)
        return any(word in text for word in self._words)

    def tokens(self, ids: Sequence[int]) -> int | None:
        """The number of tokens of an answer up to the end of the first of these texts; None if it contains none."""
        if not self._within(ids):
            return None
        return bisect_left(range(len(ids)), True, key=lambda last: self._within(ids[: last + 1])) + 1

    def cut(self, ids: list[int]) -> list[int]:
        """An answer without the tokens after its end."""
        return ids[: self.tokens(ids)]

    def asked(self, generate: Any) -> Any:
        """A model's generate(), which then ends answers at these texts."""

        def generated(*args: Any, **given: Any) -> Any:
            asks = given["input_ids"].shape[1]
            return generate(*args, **given, stopping_criteria=StoppingCriteriaList([Stops(self, asks)]))

        return generated

    @contextlib.contextmanager
    def of(self, model: Any) -> Iterator[None]:
        """Inside the context, answers of this model end at these texts."""
        model.generate = self.asked(model.generate)
        try:
            yield
        finally:
            del model.generate


class Stops(StoppingCriteria):
    """Stopping criterion for these texts; `asks`: the number of tokens before the answers."""

    def __init__(self, ends: Ends, asks: int) -> None:
        self._ends, self._asks = ends, asks

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        last = max(self._asks, input_ids.shape[1] - self._ends._most)
        ended = [self._ends._within(row) for row in input_ids[:, last:].tolist()]
        return torch.tensor(ended, device=input_ids.device)
